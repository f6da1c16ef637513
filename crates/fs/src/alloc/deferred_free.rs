//! The list of inodes with pages that are still to be freed. [`crate::file::deferred_free`] frees
//! them.

use crate::error::FsError;
use crate::format::inode::Ino;
use std::collections::BTreeSet;

/// Inodes with pages to be freed.
#[derive(Debug, Default)]
pub(crate) struct DeferredFree {
    ready: BTreeSet<Ino>,
    /// Inodes that failed; they are tried again after all others.
    retry: BTreeSet<Ino>,
    /// Whether a failure was logged.
    is_reported: bool,
}

impl DeferredFree {
    pub(crate) fn defer_retry(&mut self, ino: Ino, cause: &FsError) {
        if !std::mem::replace(&mut self.is_reported, true) {
            tracing::warn!(ino = ino.0, %cause, "the pages of a file are freed later");
        }
        self.retry.insert(ino);
    }

    /// Adds inodes to be freed by the next calls.
    pub(crate) fn defer(&mut self, inos: impl IntoIterator<Item = Ino>) {
        self.ready.extend(inos);
    }

    /// Takes the next inode. After all others, those that failed come again.
    pub(crate) fn take(&mut self) -> Option<Ino> {
        if self.ready.is_empty() {
            self.ready = std::mem::take(&mut self.retry);
        }
        self.is_reported &= !self.ready.is_empty();
        self.ready.pop_first()
    }

    /// Whether inodes wait that did not fail.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Number of inodes on the list.
    pub(crate) fn count(&self) -> usize {
        self.ready.union(&self.retry).count()
    }
}
