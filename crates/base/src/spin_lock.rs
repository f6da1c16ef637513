//! A lock for short critical sections that a child of `fork` can free: a mutex held by a thread of
//! the parent stays locked there.

use std::sync::atomic::{AtomicBool, Ordering};

/// The lock.
#[derive(Debug, Default)]
pub struct SpinLock(AtomicBool);

/// Held until it is dropped.
#[must_use]
pub struct SpinLockGuard<'a>(&'a SpinLock);

impl SpinLock {
    /// An unlocked lock.
    #[must_use]
    pub const fn new() -> SpinLock {
        SpinLock(AtomicBool::new(false))
    }

    /// Waits until the lock is free, and takes it.
    pub fn lock(&self) -> SpinLockGuard<'_> {
        while self.0.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        SpinLockGuard(self)
    }

    /// Frees the lock in a child of `fork`, which does not have the thread that held it.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Drop for SpinLockGuard<'_> {
    fn drop(&mut self) {
        self.0.reset();
    }
}
