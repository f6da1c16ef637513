//! The points at which threads of a volume interact outside their mutexes. Tests explore the
//! interleavings at these points (`tests/models`). In other builds they do nothing.

#[cfg(feature = "test-api")]
pub(crate) use explored::{lock, step};

/// Marks an access to data that other threads access.
#[cfg(not(feature = "test-api"))]
#[inline(always)]
pub(crate) const fn step(_what: &'static str) {}

/// Marks a mutex that is about to be locked.
#[cfg(not(feature = "test-api"))]
#[inline(always)]
pub(crate) const fn lock<T>(_what: &'static str, _mutex: &std::sync::Mutex<T>) {}

#[cfg(feature = "test-api")]
pub(crate) mod explored {
    use std::sync::{Mutex, OnceLock, TryLockError};

    /// The calls of a model that runs the threads.
    #[derive(Clone, Copy)]
    pub struct Explorer {
        /// Comes before an access to data that other threads access.
        pub step: fn(&'static str),
        /// Lets other threads run instead of waiting for them; false outside of a model.
        pub pause: fn() -> bool,
    }

    static EXPLORER: OnceLock<Explorer> = OnceLock::new();

    /// Explores the interleavings of this process from now on. The first call counts.
    pub fn set_explorer(explorer: Explorer) {
        let _ = EXPLORER.set(explorer);
    }

    /// Marks an access to data that other threads access.
    pub(crate) fn step(what: &'static str) {
        if let Some(explorer) = EXPLORER.get() {
            (explorer.step)(what);
        }
    }

    /// Marks a mutex that is about to be locked.
    pub(crate) fn lock<T>(what: &'static str, mutex: &Mutex<T>) {
        let Some(explorer) = EXPLORER.get() else {
            return;
        };
        step(what);
        let is_locked = || matches!(mutex.try_lock(), Err(TryLockError::WouldBlock));
        while is_locked() && (explorer.pause)() {}
    }
}
