//! The shares of an export, and of polling threads that run calls.

use crate::limits::{CALL_BYTES_MAX, EXPORT_BYTES_MIN, EXPORT_WORKERS_MAX, WORKERS_MAX};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The hard shares of an export.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    pub(super) workers_max: usize,
    /// The workers are always as many as the share.
    pub(super) are_workers_fixed: bool,
    pub(super) bytes_max: usize,
    /// Calls that polling threads run at once.
    pub(super) inline_max: usize,
}

impl Shares {
    /// Equal shares of so many exports, with so many polling threads.
    pub(crate) fn of(exports: usize, pollers: usize) -> Self {
        let exports = exports.max(1);
        let most_inline = pollers.saturating_sub(1).max(1);
        Self {
            workers_max: (WORKERS_MAX / exports).clamp(1, EXPORT_WORKERS_MAX),
            are_workers_fixed: false,
            bytes_max: (CALL_BYTES_MAX / exports).max(EXPORT_BYTES_MIN),
            inline_max: match exports {
                1 => most_inline,
                _ => most_inline.div_ceil(2),
            },
        }
    }

    /// The shares with a fixed number of workers, at most as many as before; none: by the load.
    pub(crate) fn with_workers(mut self, fixed: Option<usize>) -> Self {
        if let Some(workers) = fixed {
            self.workers_max = workers.clamp(1, self.workers_max);
            self.are_workers_fixed = true;
        }
        self
    }
}

/// The polling threads that may still run a call.
pub(crate) struct InlineBudget(AtomicUsize);

impl InlineBudget {
    /// One of the polling threads never runs calls.
    pub(crate) fn new(pollers: usize) -> Self {
        Self(AtomicUsize::new(pollers.saturating_sub(1)))
    }

    pub(super) fn take(&self) -> bool {
        let taken = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| {
                left.checked_sub(1)
            });
        taken.is_ok()
    }

    pub(super) fn give_back(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}
