//! The public interface of a mounted file system: each call takes its locks and delegates to its
//! module. No other module knows [`Fs`].

mod files;
mod kernel;
mod names;
pub(crate) mod stateless;

use crate::error::{FsError, Result};
use crate::file::sync::LostWriteCursor;
use crate::io::channel::{IoChannel, Wait};
use crate::io::channel_pool::PooledChannel;
use crate::io::overlay::OverlaySpace;
use crate::live::kernel_hooks::KernelHooks;
use crate::live::read_times::ReadTimes;
use crate::recovery::mount;
use crate::txn::deferred_commit::{CommitHook, UncommittedChanges};
use crate::txn::manager::{Clock, TxManager};
use pagemesh_base::space::Space;
use pagemesh_base::units::PAGE_BYTES;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A mounted file system.
pub struct Fs {
    hooks: KernelHooks,
    /// Write losses of the volume that were already reported to a sync.
    reported_losses: LostWriteCursor,
    txs: TxManager,
}

/// Space usage of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Limit in bytes; 0: only its pools limit it.
    pub limit_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
}

impl Fs {
    /// Mounts the file system of a space. Pages of interrupted operations count as in use until
    /// [`Fs::free_deferred_piece`] frees them. If inodes or their pages are damaged, the file
    /// system takes no changes ([`Fs::damage`]), and its undamaged parts can be read.
    ///
    /// # Errors
    /// If there is no file system, its version is another, or its head or root is damaged.
    pub fn mount(space: Arc<dyn Space>, wait: Wait, clock: Clock) -> Result<Fs> {
        Ok(Fs {
            hooks: KernelHooks::default(),
            reported_losses: LostWriteCursor::default(),
            txs: mount::mount(space, wait, clock)?,
        })
    }

    /// A key that follows from a label and the secret of this file system. It stays the same for ever.
    #[must_use]
    pub fn derived_key(&self, label: &[u8]) -> [u8; 16] {
        let [one, other] = self.txs.lock_core().head.hash_key;
        let half = |number: u8| {
            let mut hasher = SipHasher24::new_with_keys(one, other);
            // A name in a directory is hashed without a separator, and has no NUL.
            hasher.write(label);
            hasher.write(&[0, number]);
            hasher.finish().to_le_bytes()
        };
        let mut key = [0; 16];
        key[..8].copy_from_slice(&half(0));
        key[8..].copy_from_slice(&half(1));
        key
    }

    /// Mounts the file system of a snapshot: a read-only space with the state of one moment, as after a power loss. The
    /// changes of the recovery stay in memory. The file system takes no changes afterwards.
    ///
    /// # Errors
    /// As [`Fs::mount`].
    pub fn mount_snapshot(space: Arc<dyn Space>, wait: Wait, clock: Clock) -> Result<Fs> {
        let fs = Fs::mount(Arc::new(OverlaySpace::new(space)), wait, clock)?;
        fs.txs.lock_core().stop_for_snapshot();
        Ok(fs)
    }

    /// The file system's identity.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.txs.lock_core().head.uuid
    }

    /// Why the file system takes no changes, if a part of it is damaged.
    #[must_use]
    pub fn damage(&self) -> Option<FsError> {
        let stopped = self.txs.lock_core().check_running().err();
        stopped.filter(|error| matches!(error, FsError::ReadOnly(_)))
    }

    /// Space usage.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let core = self.txs.lock_core();
        Usage {
            limit_bytes: core.head.limit_bytes,
            used_bytes: core.used_pages.saturating_mul(PAGE_BYTES as u64),
            inodes: core.inodes_in_use(),
        }
    }

    /// Raises the limit to `limit_bytes` if it is lower now. A crash leaves the old limit or the
    /// new one. Returns whether the limit changed.
    ///
    /// # Errors
    /// Errors of the volume.
    pub fn raise_limit(&self, limit_bytes: u64) -> Result<bool> {
        self.txs.change(|tx| {
            let now = tx.core.head.limit_bytes;
            if now == 0 || limit_bytes <= now {
                return Ok(false);
            }
            tx.set_limit(limit_bytes)?;
            Ok(true)
        })
    }

    /// Lets calls that change names, attributes or sizes return before their changes are committed, for at most about `interval`.
    /// The caller calls [`Fs::commit_due`] at the times that it returns, and soon after `hook` was called. Only the
    /// first call has an effect.
    ///
    /// **Data loss:** the changes since the last sync or commit are lost if this process ends. What is left is the
    /// state after some of them, in their order.
    pub fn set_commit_interval(&self, interval: Duration, hook: CommitHook) {
        self.txs.set_commit_interval(interval, hook);
    }

    /// Commits the changes that have waited for long enough. Returns when to call it next, at the latest, if changes wait.
    ///
    /// # Errors
    /// Errors of the volume.
    pub fn commit_due(&self, now: Instant) -> Result<Option<Instant>> {
        self.txs.commit_due(now)
    }

    /// The acknowledged changes that are not committed.
    #[must_use]
    pub fn uncommitted_changes(&self) -> UncommittedChanges {
        self.txs.uncommitted_changes()
    }

    /// Sets which reads record an access time from now on. Before the first call: [`ReadTimes::Relative`].
    pub fn set_read_times(&self, read_times: ReadTimes) {
        self.txs.lock_core().read_times = read_times;
    }

    /// Stops resending. Changes that wait for an unreachable volume fail now, and so do later ones.
    pub fn stop_resending(&self) {
        self.txs.stop_resending();
    }

    /// Opens a channel for one thread. It serves one call at a time.
    ///
    /// # Errors
    /// If the volume opens no further channel. The error may come only with the first call.
    pub fn open_channel(&self) -> Result<IoChannel> {
        self.txs.channels.open()
    }

    /// Borrows an idle channel, or opens a new one. If no new one can be opened, it waits until one
    /// is returned. The caller must not hold a channel.
    ///
    /// # Errors
    /// Errors of the volume. The error that it has no further channel comes only after 30 s.
    pub fn borrow_channel(&self) -> Result<PooledChannel<'_>> {
        self.txs.channels.borrow()
    }

    /// Lets idle channels take part in the work of the volume, such as the return of a copy, and
    /// closes those that have been idle for too long. Does not wait. Call it when one of the
    /// descriptors that it adds to `into` is readable, at the time that it returns, and
    /// periodically.
    pub fn poll_idle_channels(&self, now: Instant, into: &mut Vec<RawFd>) -> Option<Instant> {
        self.txs.poll_idle_channels(now, into)
    }
}
