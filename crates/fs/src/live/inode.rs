//! The state of an inode that is in use.

use crate::format::inode::{Inode, TIME_GRANT_S, Time};
use crate::live::file_lock::FileLock;
use pagemesh_base::space::SpaceError;
use std::sync::{Arc, OnceLock};

/// Times of an inode that are not in it yet.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct PendingTimes {
    pub(crate) mtime: Option<Time>,
    /// The ctime alone, if the stored one is ahead ([`TimeGrant`]).
    pub(crate) ctime: Option<Time>,
    pub(crate) atime: Option<Time>,
}

impl PendingTimes {
    pub(crate) fn is_empty(self) -> bool {
        self == PendingTimes::default()
    }

    /// Takes from `older` the times that `self` lacks.
    pub(crate) fn fill_missing(&mut self, older: PendingTimes) {
        self.mtime = self.mtime.or(older.mtime);
        self.ctime = self.ctime.or(older.ctime);
        self.atime = self.atime.or(older.atime);
    }

    /// Puts these times into a stored inode.
    pub(crate) fn apply(self, inode: &mut Inode) {
        let ctime = self.ctime.unwrap_or(inode.ctime);
        inode.ctime = self.mtime.map_or(ctime, |time| time.max(ctime));
        inode.mtime = self.mtime.unwrap_or(inode.mtime);
        inode.atime = self.atime.unwrap_or(inode.atime);
    }
}

/// The stored mtime and ctime of an inode are ahead ([`crate::file::times`]): overwrites up to that time need not store theirs.
pub(crate) struct TimeGrant {
    pub(crate) until: Time,
    /// The result of the transaction that stores them.
    pub(crate) stored: Arc<OnceLock<Result<(), SpaceError>>>,
}

impl TimeGrant {
    /// The time that is stored with an overwrite at this time.
    pub(crate) fn until(time: Time) -> Time {
        Time {
            sec: time.sec.saturating_add(TIME_GRANT_S),
            ..time
        }
    }
}

/// State of an inode that exists only while the inode is in use.
#[derive(Default)]
pub(crate) struct LiveInode {
    pub(crate) opens: u64,
    pub(crate) lookups: u64,
    /// Pins of a stateless server. Unlike opens they stand for no program, and unlike lookups for
    /// nothing that the kernel knows.
    pub(crate) pins: u64,
    /// Value of `Core::creations` when the inode was created; 0: it existed before.
    pub(crate) creation: u64,
    /// In a box, because few inodes in use have some.
    pending_times: Option<Box<PendingTimes>>,
    /// Since the inode was stored last. It has a pending mtime then.
    pub(crate) time_grant: Option<Box<TimeGrant>>,
    pub(crate) file_lock: Arc<FileLock>,
}

impl LiveInode {
    /// A new inode with its first lookup.
    pub(crate) fn created(creation: u64, opens: u64) -> Self {
        Self {
            opens,
            lookups: 1,
            creation,
            ..Self::default()
        }
    }

    /// Whether the inode must not be freed, even without a name.
    pub(crate) fn is_used(&self) -> bool {
        self.opens > 0 || self.lookups > 0 || self.pins > 0
    }

    pub(crate) fn pending_times(&self) -> PendingTimes {
        self.pending_times.as_deref().copied().unwrap_or_default()
    }

    pub(crate) fn pending_times_mut(&mut self) -> &mut PendingTimes {
        self.pending_times.get_or_insert_default()
    }

    /// Whether a crash leaves times that are at least as late as this one.
    pub(crate) fn grants_time(&self, time: Time) -> bool {
        let grant = self.time_grant.as_ref();
        grant.is_some_and(|it| time <= it.until && matches!(it.stored.get(), Some(Ok(()))))
    }

    pub(crate) fn take_pending_times(&mut self) -> PendingTimes {
        self.pending_times
            .take()
            .map_or_else(PendingTimes::default, |times| *times)
    }
}
