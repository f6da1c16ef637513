//! Whether this process has withdrawn from the direct path, and why. `process::withdraw` does it.
//!
//! Invariants: a process that has withdrawn stays so. Afterwards this library makes no system call
//! of its own, except for the withdrawal itself.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

static IS_WITHDRAWN: AtomicBool = AtomicBool::new(false);

/// A filter of system calls is the reason, or another thread may get one.
static IS_FILTERED: AtomicBool = AtomicBool::new(false);

#[inline]
pub fn is_withdrawn() -> bool {
    IS_WITHDRAWN.load(Acquire)
}

/// Whether a filter of system calls forbids even a report.
pub fn is_filtered() -> bool {
    IS_FILTERED.load(Acquire)
}

pub fn set_withdrawn() {
    IS_WITHDRAWN.store(true, SeqCst);
}

pub fn set_filtered() {
    IS_FILTERED.store(true, SeqCst);
}
