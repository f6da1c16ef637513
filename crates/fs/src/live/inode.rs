//! The state of an inode that is in use.

use crate::format::inode::Time;
use crate::live::file_lock::FileLock;
use std::sync::Arc;

/// Times of an inode that are not in it yet.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct PendingTimes {
    pub(crate) mtime: Option<Time>,
    pub(crate) atime: Option<Time>,
}

impl PendingTimes {
    pub(crate) fn is_empty(self) -> bool {
        self == PendingTimes::default()
    }

    /// Takes from `older` the times that `self` lacks.
    pub(crate) fn fill_missing(&mut self, older: PendingTimes) {
        self.mtime = self.mtime.or(older.mtime);
        self.atime = self.atime.or(older.atime);
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

    pub(crate) fn take_pending_times(&mut self) -> PendingTimes {
        self.pending_times
            .take()
            .map_or_else(PendingTimes::default, |times| *times)
    }
}
