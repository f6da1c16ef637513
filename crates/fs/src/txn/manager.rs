//! The transaction manager: the core under its lock, and how batches of changes go out.
//!
//! Rooms above get a [`TxManager`], a [`Core`] or a [`Tx`], and never the whole mount.

use crate::error::{FsError, Result};
use crate::format::inode::{Ino, Time};
use crate::io::channel::{IoChannel, Wait};
use crate::io::channel_pool::ChannelPool;
use crate::live::file_lock::FileLock;
use crate::txn::batch::Acknowledge;
use crate::txn::batch::BatchOutcome;
use crate::txn::core::Core;
use crate::txn::deferred_commit::CommitPolicy;
use crate::txn::flush_group::FlushGroup;
use crate::txn::tx::Tx;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison;
use pagemesh_base::space::{Reply, Request, Space, SpaceError};
use pagemesh_base::tier_hint::TierHint;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// First pause before a batch is sent again. The volume itself has retried for long by then.
const RESEND_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest such pause.
const RESEND_PAUSE_MAX: Duration = Duration::from_millis(500);

/// How often pages are written that must survive before a transaction relies on them.
const DURABLE_TRIES_MAX: usize = 8;

/// Reads the time of day, for the times of changed inodes.
pub type Clock = fn() -> Time;

/// The core under its lock, and the channels of the space.
pub(crate) struct TxManager {
    clock: Clock,
    core: Mutex<Core>,
    /// Signals that the batch in flight has ended.
    batch_done: Condvar,
    /// Sends batches and the requests of the reserve.
    commit_channel: Mutex<IoChannel>,
    /// Locked by the thread that fills the reserve, which may wait for a batch.
    pub(super) reserve_filler: Mutex<()>,
    /// Mapped pages of the reserve. Locked while they are written or discarded, and never while a thread waits for a batch: a
    /// thread that sends a batch takes this lock.
    pub(super) reserved_pages: Mutex<u64>,
    /// See [`Core::unstable_losses`].
    pub(super) unstable_losses: Arc<AtomicU64>,
    /// When calls may return before their changes are committed.
    pub(super) commit_policy: CommitPolicy,
    /// Batches are not sent again after an error.
    is_resend_stopped: AtomicBool,
    /// See [`crate::Fs::keep_write_times`].
    pub(crate) keeps_write_times: AtomicBool,
    /// Flushes of syncs.
    pub(crate) flushes: FlushGroup,
    /// The last field: the channels above are dropped first, because the space waits for them.
    pub(crate) channels: ChannelPool,
}

impl TxManager {
    pub(crate) fn new(
        space: Arc<dyn Space>,
        wait: Wait,
        clock: Clock,
        mut core: Core,
        reserved_pages: u64,
    ) -> Result<TxManager> {
        let commit_channel = IoChannel::open_ready(&*space, wait)?;
        core.reserved_pages = reserved_pages;
        let unstable_losses = Arc::clone(&core.unstable_losses);
        Ok(TxManager {
            clock,
            core: Mutex::new(core),
            batch_done: Condvar::new(),
            commit_channel: Mutex::new(commit_channel),
            reserve_filler: Mutex::default(),
            reserved_pages: Mutex::new(reserved_pages),
            unstable_losses,
            commit_policy: CommitPolicy::default(),
            is_resend_stopped: AtomicBool::new(false),
            keeps_write_times: AtomicBool::new(false),
            flushes: FlushGroup::default(),
            channels: ChannelPool::new(space, wait),
        })
    }
}

impl TxManager {
    pub(crate) fn now(&self) -> Time {
        (self.clock)()
    }

    pub(crate) fn lock_commit_channel(&self) -> MutexGuard<'_, IoChannel> {
        poison::lock(&self.commit_channel)
    }

    pub(crate) fn lock_core(&self) -> MutexGuard<'_, Core> {
        poison::lock(&self.core)
    }

    /// Runs a read-only operation. If it finds damage, the file system takes no more changes.
    pub(crate) fn inspect<T>(&self, run: impl FnOnce(&mut Core) -> Result<T>) -> Result<T> {
        let mut core = self.lock_core();
        let seen = run(&mut core);
        core.stop_if_damaged(&seen);
        seen
    }

    /// Runs an operation and waits until it is committed. `run` may run more than once, so its
    /// effects outside the transaction must be repeatable.
    pub(crate) fn change<T>(&self, run: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.change_from(self.lock_core(), Acknowledge::Committed, run)
    }

    /// As [`TxManager::change`]. An operation that changes nothing waits, too: until the changes of the pages that it has read are
    /// committed.
    pub(crate) fn change_or_read<T>(&self, run: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.change_from(self.lock_core(), Acknowledge::ReadCommitted, run)
    }

    /// As [`TxManager::change`], for a caller that already holds the core's lock.
    pub(crate) fn change_from<'a, T>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        when: Acknowledge,
        mut run: impl FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        loop {
            core.check_running()?;
            core.has_read_uncommitted = false;
            let mut tx = core.begin();
            let value = match run(&mut tx) {
                Ok(value) => value,
                Err(error) => {
                    drop(tx);
                    let failed = Err(error);
                    core.stop_if_damaged(&failed);
                    return failed;
                }
            };
            if tx.changed_pages() == 0 {
                drop(tx);
                if when == Acknowledge::ReadCommitted && core.has_read_uncommitted {
                    self.commit_pending(core)?;
                }
                return Ok(value);
            }
            if tx.fits() {
                let has_write_cache = self.channels.space().has_write_cache();
                if has_write_cache {
                    // Otherwise a later transaction might survive a power loss and this one not,
                    // and a span that this one freed would be cleared although an inode still names
                    // it.
                    tx.make_durable();
                }
                // Only a change that makes its batch durable may be acknowledged before.
                let may_return = has_write_cache && self.may_defer_commit(tx.core, when);
                if may_return {
                    tx.acknowledge(when, Instant::now());
                }
                tx.join_batch()?;
                match may_return {
                    true => self.request_commit(core)?,
                    false => self.commit(core)?,
                }
                return Ok(value);
            }
            drop(tx);
            if defect::is(Defect::FullBatchNotFlushed) {
                core.batch.durable = false;
            }
            core = self.advance_batch(core);
        }
    }

    /// Waits until the current batch is committed.
    pub(crate) fn commit<'a>(&'a self, core: MutexGuard<'a, Core>) -> Result<()> {
        let outcome = core.outcome();
        self.await_batch(core, &outcome)
    }

    /// Waits until all changes so far are committed.
    pub(crate) fn commit_pending<'a>(&'a self, core: MutexGuard<'a, Core>) -> Result<()> {
        match core.last_outcome() {
            Some(outcome) => self.await_batch(core, &outcome),
            None => Ok(()),
        }
    }

    /// Waits for a batch: the current one, or the one in flight.
    pub(crate) fn await_batch<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        outcome: &BatchOutcome,
    ) -> Result<()> {
        loop {
            if let Some(result) = outcome.get() {
                return result.clone().map_err(FsError::Space);
            }
            core = self.advance_batch(core);
        }
    }

    /// Sends the current batch, or waits for the batch in flight.
    pub(crate) fn advance_batch<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
    ) -> MutexGuard<'a, Core> {
        if core.has_batch_in_flight() {
            core.waiters += 1;
            let mut core = poison::recover(self.batch_done.wait(core));
            core.waiters -= 1;
            return core;
        }
        let (batch, request) = core.take_batch();
        let hint = batch.hint();
        drop(core);
        let (mut core, result) = self.send_acknowledged_batch(&request, hint);
        core.finish_batch(batch, result.map(drop));
        // Each notification is a system call.
        if core.waiters > 0 {
            self.batch_done.notify_all();
        }
        core
    }

    /// Sends a batch until its outcome is known. Sending it twice is safe: only this thread changes
    /// its pages.
    pub(crate) fn send_batch(
        &self,
        request: &Request,
        hint: TierHint,
    ) -> std::result::Result<Reply, SpaceError> {
        let mut channel = self.lock_commit_channel();
        let mut pause = RESEND_PAUSE_MIN;
        loop {
            let result = channel.call_hinted(request.clone(), hint);
            let Err(SpaceError::Unavailable(cause)) = &result else {
                return result;
            };
            if self.is_resend_stopped.load(Ordering::Acquire) {
                return result;
            }
            if pause == RESEND_PAUSE_MIN {
                tracing::warn!(%cause, "changes of files wait for the volume");
            }
            channel.wait_for(pause);
            pause = (pause * 2).min(RESEND_PAUSE_MAX);
        }
    }

    /// Changes pages outside of batches by `change`, and makes them durable on a space with a write cache, so that a transaction may
    /// rely on them. Repeats it if every copy was gone meanwhile: the transaction would be stored, and the pages not.
    ///
    /// # Errors
    /// Errors of the space and of `change`.
    pub(crate) fn change_pages_durably(
        &self,
        channel: &mut IoChannel,
        mut change: impl FnMut(&mut IoChannel) -> Result<()>,
    ) -> Result<()> {
        let space = self.channels.space();
        for _ in 0..DURABLE_TRIES_MAX {
            let losses = space.lost_writes();
            change(channel)?;
            if space.has_write_cache() {
                self.flushes.flush(|| channel.flush(space))?;
            }
            if space.lost_writes() == losses {
                return Ok(());
            }
        }
        Err(FsError::Space(SpaceError::Unavailable(
            "every copy was gone again and again; check the power of the machines with bricks"
                .into(),
        )))
    }

    pub(crate) fn file_lock(&self, ino: Ino) -> Result<Arc<FileLock>> {
        self.inspect(|core| {
            core.inode(ino)?;
            Ok(Arc::clone(&core.live_inode(ino).file_lock))
        })
    }

    /// Puts the inode on the list if `freed` is an error.
    pub(crate) fn defer_on_error<T>(&self, ino: Ino, freed: Result<T>) -> Result<T> {
        if let Err(cause) = &freed {
            self.lock_core().deferred_free.defer_retry(ino, cause);
        }
        freed
    }
}

impl TxManager {
    /// The core if no other operation has it.
    pub(crate) fn try_lock_core(&self) -> Option<MutexGuard<'_, Core>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(core)) => Some(core.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// See [`crate::Fs::stop_resending`].
    pub(crate) fn stop_resending(&self) {
        self.is_resend_stopped.store(true, Ordering::Release);
    }

    /// See [`crate::Fs::poll_idle_channels`].
    pub(crate) fn poll_idle_channels(
        &self,
        now: Instant,
        into: &mut Vec<RawFd>,
    ) -> Option<Instant> {
        // A locked channel is in use, and its user polls it.
        let core = self.core.try_lock().ok();
        let core = core.and_then(|mut core| core.poll_channel(into));
        let commits = self.commit_channel.try_lock().ok();
        let commits = commits.and_then(|mut commits| commits.poll(into));
        let idle = self.channels.poll_idle(now, into);
        [core, commits, idle].into_iter().flatten().min()
    }
}
