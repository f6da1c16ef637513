//! Deferred commits: calls that change names, attributes or sizes return before their batch is committed.
//!
//! The default is that each other call waits for its batch. With a commit interval ([`TxManager::set_commit_interval`]) the
//! changes wait in the current batch instead, in the memory of this process, as in the running transaction of a journaling
//! file system. The batch is sent when it is half full, after the interval, and before a sync returns. Batches are atomic and
//! durable, and the next one is sent only after the one before was committed. So a crash leaves the state after some
//! prefix of the batches, and each batch is a prefix of the changes since the one before.
//!
//! An UNSTABLE write of NFS that extends a file waits in the same way, also without a commit interval: a COMMIT, or any call that waits for its
//! batch, sends it.
//!
//! Invariants:
//! - a thread that reads, writes or discards pages of a file in the space, outside of a batch, has committed the acknowledged
//!   changes of the file before ([`TxManager::settle`]), with the file locked, or takes the pages of the batch in place of those that it read.
//!   So no page is read that a batch changes, and no page is discarded while a crash may undo its removal;
//! - a call returns early only if the reserve can hold this batch and the next one, and only if the space has a write cache: without one, waiting
//!   costs little;
//! - if acknowledged changes cannot be stored, the file system takes no more changes, and each sync fails;
//! - unstable writes alone are lost without that, if the pool is full. The failed batch and the next one, which builds on it, leave no
//!   trace in memory. The loss is counted ([`TxManager::lost_writes`]), so that clients of NFS get another write verifier and send
//!   their data again. A sync of one of the files fails if the loss happens during it;
//! - a change that was planned before such a loss is planned again, or fails ([`Tx::check_no_loss_since`]): the loss takes back
//!   sizes and pages without the locks of their files.

use crate::error::{FsError, Result};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, NEEDS_TRIM, Time};
use crate::hash::NumberSet;
use crate::live::file_lock::{ExclusiveFileGuard, FileLock, SharedFileGuard};
use crate::live::tail_pages::TailPages;
use crate::txn::batch::{Acknowledge, BatchOutcome};
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use crate::txn::reserve::reserve_discard;
use crate::txn::tx::Tx;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::space::{Reply, Request, SpaceError, TRANSACTION_PAGES_MAX};
use pagemesh_base::tier_hint::TierHint;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// Pages of a batch from which on it is sent without waiting for the interval. The next batch fills meanwhile.
const SEND_PAGES_MIN: usize = TRANSACTION_PAGES_MAX as usize / 2;
/// Pages that the reserve must have, so that a batch and the next one can be stored on a full pool: their pages, and as many
/// pages of the volume's own tables.
const RESERVE_PAGES_MIN: u64 = 4 * TRANSACTION_PAGES_MAX;
/// How long unstable changes may wait without a commit interval: as the pages of files wait for the kernel's writeback.
const UNSTABLE_AGE_MAX: Duration = Duration::from_secs(5);

/// Acknowledged changes of a batch that fails, and of the next one.
pub(super) enum ChangesToLose {
    Nothing,
    /// Unstable writes alone, for lack of room: their files, and a time after these writes.
    Unstable(Vec<(FileId, Time)>),
    /// Changes that later ones must not survive.
    Fatal,
}

/// Called when a batch should be sent soon. It must not wait.
pub type CommitHook = Box<dyn Fn() + Send + Sync>;

/// When calls may return before their changes are committed. Each part is set once.
#[derive(Default)]
pub(crate) struct CommitPolicy {
    interval: OnceLock<Duration>,
    hook: OnceLock<CommitHook>,
    /// Whether a call has ever returned early. Without one, no sync looks for acknowledged changes.
    has_deferred: AtomicBool,
}

/// Acknowledged changes that are not committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UncommittedChanges {
    /// Pages that they change.
    pub pages: usize,
    /// The time of the first one.
    pub since: Option<Instant>,
}

impl Core {
    /// Whether acknowledged changes of any inode are not committed.
    pub(crate) fn has_acknowledged(&self) -> bool {
        let in_flight = self.in_flight.as_ref();
        !self.batch.acknowledged.is_empty()
            || in_flight.is_some_and(|sent| !sent.acknowledged.is_empty())
    }

    /// Whether an acknowledged change of an inode is not committed.
    pub(crate) fn has_uncommitted(&self, ino: Ino) -> bool {
        let in_flight = self.in_flight.as_ref();
        let is_listed = self.batch.acknowledged.inos.contains(&ino)
            || in_flight.is_some_and(|sent| sent.acknowledged.inos.contains(&ino));
        is_listed && !defect::is(Defect::UncommittedPagesRead)
    }

    /// Whether an inode has lost its last name by a change that may still fail.
    pub(crate) fn has_unsettled_removal(&mut self, ino: Ino) -> bool {
        self.has_read_uncommitted = false;
        let is_orphan = self.is_orphan(ino).unwrap_or(false);
        let cannot_fail = self.has_uncommitted(ino) && !self.has_unstable(ino);
        is_orphan && self.has_read_uncommitted && !cannot_fail
    }

    /// When the batch is to be sent, if it has acknowledged changes.
    fn commit_deadline(&self, interval: Duration, now: Instant) -> Option<Instant> {
        let since = self.batch.acknowledged.since?;
        let is_half_full = self.batch.changes.len() >= SEND_PAGES_MIN;
        Some(if is_half_full { now } else { since + interval })
    }

    /// Whether an inode may have unstable changes that are not committed.
    pub(crate) fn has_unstable(&self, ino: Ino) -> bool {
        let in_flight = self.in_flight.as_ref().map(|sent| &sent.acknowledged);
        let of_both = in_flight.into_iter().chain([&self.batch.acknowledged]);
        let mut unstable = of_both.filter(|changes| changes.has_unstable);
        unstable.any(|changes| changes.inos.contains(&ino))
    }

    /// See [`Core::unstable_losses`].
    pub(crate) fn unstable_losses(&self) -> u64 {
        self.unstable_losses.load(Ordering::Acquire)
    }

    /// The acknowledged changes that a failure of the batch in flight takes back.
    pub(super) fn changes_to_lose(&mut self, cause: &SpaceError) -> ChangesToLose {
        if !self.has_acknowledged() {
            return ChangesToLose::Nothing;
        }
        let in_flight = self.in_flight.as_ref().map(|sent| &sent.acknowledged);
        let of_both = || in_flight.into_iter().chain([&self.batch.acknowledged]);
        let is_full = matches!(cause, SpaceError::NoSpace(_));
        if !is_full || of_both().any(|changes| changes.has_deferrable) {
            return ChangesToLose::Fatal;
        }
        let inos: NumberSet<Ino> = of_both().flat_map(|it| &it.inos).copied().collect();
        let file = |ino: Ino| {
            let inode = self.inode(ino).ok()?;
            Some((FileId::of(ino, &inode), inode.change_time(inode.ctime)))
        };
        ChangesToLose::Unstable(inos.into_iter().filter_map(file).collect())
    }

    /// A batch and the next one have failed, with these changes.
    pub(super) fn lose_acknowledged(&mut self, lost: ChangesToLose, cause: &SpaceError) {
        match lost {
            ChangesToLose::Nothing => {}
            ChangesToLose::Unstable(files) => {
                tracing::warn!(
                    %cause,
                    files = files.len(),
                    "unstable writes cannot be stored; their NFS clients must write again"
                );
                self.lose_unstable(files);
            }
            ChangesToLose::Fatal => {
                tracing::error!(
                    %cause,
                    "DATA LOSS: acknowledged changes cannot be stored; the file system takes no more changes"
                );
                self.stop_after_loss(cause);
            }
        }
    }

    /// The files are as they were before their unstable writes, with later times: readers have seen these writes.
    fn lose_unstable(&mut self, files: Vec<(FileId, Time)>) {
        self.unstable_losses.fetch_add(1, Ordering::AcqRel);
        self.tail_pages = TailPages::default();
        for (id, changed) in files {
            // It may be gone, or have been made by the failed batch.
            let Ok(inode) = self.inode_of(id) else {
                continue;
            };
            self.record_write_time(id.ino, changed);
            if self.live_inode(id.ino).lookups > 0 {
                // The kernel may have pages of these writes.
                self.record_unseen_write(id.ino);
            }
            if inode.flags & NEEDS_TRIM != 0 {
                // The size of a long append is lost, and its pages are not.
                self.defer_rest(id.ino);
            }
        }
    }

    /// The last batch with acknowledged changes.
    fn last_acknowledged(&self) -> Option<BatchOutcome> {
        if !self.batch.acknowledged.is_empty() {
            return Some(self.batch.outcome.clone());
        }
        let in_flight = self.in_flight.as_ref()?;
        (!in_flight.acknowledged.is_empty()).then(|| in_flight.outcome.clone())
    }
}

impl TxManager {
    /// See [`crate::Fs::set_commit_interval`].
    pub(crate) fn set_commit_interval(&self, interval: Duration, hook: CommitHook) {
        // Only the first call has an effect.
        let _ = self.commit_policy.hook.set(hook);
        let _ = self.commit_policy.interval.set(interval);
    }

    /// As [`TxManager::change`], and may return before the change is committed.
    pub(crate) fn change_deferrable<T>(
        &self,
        run: impl FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        self.change_from(self.lock_core(), Acknowledge::Deferrable, run)
    }

    /// Whether a call may return before its change is committed, on a space with a write cache.
    pub(super) fn may_defer_commit(&self, core: &Core, when: Acknowledge) -> bool {
        let is_allowed = match when {
            Acknowledge::Committed | Acknowledge::ReadCommitted => false,
            Acknowledge::Deferrable => self.commit_policy.interval.get().is_some(),
            Acknowledge::Unstable => true,
        };
        let may_return = is_allowed && core.reserved_pages >= RESERVE_PAGES_MIN;
        if may_return {
            // The file's lock or the core's lock orders this with each look at it.
            self.commit_policy
                .has_deferred
                .store(true, Ordering::Release);
        }
        may_return
    }

    /// Has the batch sent if it is half full: by the thread with the hook, or else by the caller.
    pub(super) fn request_commit(&self, core: MutexGuard<'_, Core>) -> Result<()> {
        if core.batch.changes.len() < SEND_PAGES_MIN || core.has_batch_in_flight() {
            return Ok(());
        }
        let Some(hook) = self.commit_policy.hook.get() else {
            return self.commit(core);
        };
        drop(core);
        hook();
        Ok(())
    }

    /// Whether there may be acknowledged changes.
    fn may_have_acknowledged(&self) -> bool {
        self.commit_policy.has_deferred.load(Ordering::Acquire)
    }

    /// Commits the acknowledged changes of an inode, or loses them if they are unstable. The caller has the file locked, so no more
    /// follow that change its pages.
    pub(crate) fn settle(&self, ino: Ino) -> Result<()> {
        self.settle_if(|core| core.has_uncommitted(ino))
    }

    /// As [`TxManager::settle`], if the inode has unstable changes: a loss would take pages back that the caller is about to free.
    pub(crate) fn settle_unstable(&self, ino: Ino) -> Result<()> {
        self.settle_if(|core| core.has_unstable(ino))
    }

    fn settle_if(&self, is_uncommitted: impl FnOnce(&Core) -> bool) -> Result<()> {
        if !self.may_have_acknowledged() {
            return Ok(());
        }
        let core = self.lock_core();
        match is_uncommitted(&core) {
            true => self.accept_unstable_loss(self.commit_acknowledged_from(core)),
            false => Ok(()),
        }
    }

    /// Locks a file for reads and overwrites of its pages in the space.
    pub(crate) fn lock_shared<'l>(
        &self,
        ino: Ino,
        lock: &'l FileLock,
    ) -> Result<SharedFileGuard<'l>> {
        let guard = lock.read();
        self.settle(ino)?;
        Ok(guard)
    }

    /// Locks a file for any access to its pages in the space.
    pub(crate) fn lock_exclusive<'l>(
        &self,
        ino: Ino,
        lock: &'l FileLock,
    ) -> Result<ExclusiveFileGuard<'l>> {
        let guard = lock.write();
        self.settle(ino)?;
        Ok(guard)
    }

    /// Commits all changes that were acknowledged before the call.
    ///
    /// # Errors
    /// If one of them is lost, also at an earlier time; but a loss of unstable writes is only counted.
    pub(crate) fn commit_acknowledged(&self) -> Result<()> {
        match self.may_have_acknowledged() && !defect::is(Defect::SyncSkipsAcknowledged) {
            true => self.accept_unstable_loss(self.commit_acknowledged_from(self.lock_core())),
            false => Ok(()),
        }
    }

    /// The losses before a sync of a file, or of all, if the sync has unstable writes to commit.
    pub(crate) fn losses_before_sync(&self, of: Option<Ino>) -> Option<u64> {
        if !self.may_have_acknowledged() {
            return None;
        }
        let core = self.lock_core();
        let has_unstable = match of {
            Some(ino) => core.has_unstable(ino),
            None => core.has_acknowledged(),
        };
        has_unstable.then(|| core.unstable_losses())
    }

    /// The end of a sync.
    ///
    /// # Errors
    /// `ENOSPC` if unstable writes were lost during the sync that had some to commit.
    pub(crate) fn check_losses_of_sync(&self, before: Option<u64>) -> Result<()> {
        match before.is_none_or(|losses| losses == self.unstable_losses.load(Ordering::Acquire)) {
            true => Ok(()),
            false => Err(Errno::NOSPC.into()),
        }
    }

    /// A wait for acknowledged changes, without the error of a loss of unstable ones alone.
    fn accept_unstable_loss(&self, committed: Result<()>) -> Result<()> {
        match committed {
            Err(FsError::Space(SpaceError::NoSpace(_))) => self.lock_core().check_running(),
            committed => committed,
        }
    }

    /// Losses of writes that no sync followed: of the space, and of unstable writes that found no room.
    pub(crate) fn lost_writes(&self) -> u64 {
        let unstable = self.unstable_losses.load(Ordering::Acquire);
        unstable.wrapping_add(self.channels.space().lost_writes())
    }

    fn commit_acknowledged_from(&self, core: MutexGuard<'_, Core>) -> Result<()> {
        if let Some(outcome) = core.last_acknowledged() {
            return self.await_batch(core, &outcome);
        }
        match &core.lost_changes {
            Some(cause) => Err(FsError::Space(SpaceError::Unavailable(format!(
                "acknowledged changes are lost: {cause}"
            )))),
            None => Ok(()),
        }
    }

    /// See [`crate::Fs::commit_due`].
    pub(crate) fn commit_due(&self, now: Instant) -> Result<Option<Instant>> {
        if !self.may_have_acknowledged() {
            return Ok(None);
        }
        let interval = self.commit_policy.interval.get();
        let interval = interval.copied().unwrap_or(UNSTABLE_AGE_MAX);
        let core = self.lock_core();
        let due = core.commit_deadline(interval, now);
        if due.is_none_or(|due| due > now) {
            return Ok(due);
        }
        self.accept_unstable_loss(self.commit_acknowledged_from(core))?;
        Ok(self.lock_core().commit_deadline(interval, now))
    }

    /// See [`crate::Fs::uncommitted_changes`].
    pub(crate) fn uncommitted_changes(&self) -> UncommittedChanges {
        let core = self.lock_core();
        let in_flight = core.in_flight.as_ref();
        let in_flight = in_flight.filter(|sent| !sent.acknowledged.is_empty());
        let batch = Some(&core.batch).filter(|batch| !batch.acknowledged.is_empty());
        let pages = in_flight.map_or(0, |sent| sent.changes.len())
            + batch.map_or(0, |batch| batch.changes.len());
        let first = in_flight.and_then(|sent| sent.acknowledged.since);
        UncommittedChanges {
            pages,
            since: first.or_else(|| batch?.acknowledged.since),
        }
    }

    /// Sends a batch. If it has no room and acknowledged changes depend on it, releases the reserve and sends it once more.
    pub(super) fn send_acknowledged_batch(
        &self,
        request: &Request,
        hint: TierHint,
    ) -> (MutexGuard<'_, Core>, std::result::Result<Reply, SpaceError>) {
        let result = self.send_batch(request, hint);
        let core = self.lock_core();
        if !matches!(result, Err(SpaceError::NoSpace(_))) || !core.has_acknowledged() {
            return (core, result);
        }
        drop(core);
        self.release_reserve_for_batch();
        // Another thread may have released the reserve before: the batch has room then, too.
        let result = self.send_batch(request, hint);
        (self.lock_core(), result)
    }

    /// Releases the reserve, also if another thread is just filling it. That thread does not wait for this batch while it has the
    /// lock.
    fn release_reserve_for_batch(&self) {
        let mut held = self.lock_reserve();
        let span = self.lock_core().head.reserve;
        let Some(span) = span.filter(|_| *held > 0) else {
            return;
        };
        // Sent again until the volume is reachable, as the batch itself.
        let released = self.send_batch(&reserve_discard(span), TierHint::None);
        if released.is_ok() {
            self.record_released_reserve(&mut held);
        }
    }
}
