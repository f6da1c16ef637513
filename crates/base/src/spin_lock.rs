//! A lock that is held for a moment, and that a child of `fork` can free: a mutex whose holder
//! is a thread of the parent stays locked there.

use std::sync::atomic::{AtomicBool, Ordering};

/// The lock.
#[derive(Debug, Default)]
pub struct SpinLock(AtomicBool);

/// Held until it is dropped.
#[must_use]
pub struct SpinLockGuard<'a>(&'a SpinLock);

impl SpinLock {
    /// One that nobody holds.
    #[must_use]
    pub const fn new() -> SpinLock {
        SpinLock(AtomicBool::new(false))
    }

    /// Waits until nobody else holds it.
    pub fn lock(&self) -> SpinLockGuard<'_> {
        while self.0.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        SpinLockGuard(self)
    }

    /// In a child, where the thread that held it is not there.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Drop for SpinLockGuard<'_> {
    fn drop(&mut self) {
        self.0.reset();
    }
}
