//! Locks that go on after a panic. A panic is a defect, and ends the process in release builds;
//! tests and the simulation unwind, and then shutdown still has to take these locks. The data
//! under such a lock is valid between any two statements of its holders.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks, whether or not an earlier holder panicked.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    recover(mutex.lock())
}

/// The guard of a lock or of a wait on a condition variable, whether or not an earlier holder
/// panicked.
#[inline]
pub fn recover<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_of_panicked_holder_is_taken() {
        let mutex = Mutex::new(1);
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _guard = mutex.lock();
                std::panic::resume_unwind(Box::new("expected"));
            });
            assert!(holder.join().is_err());
        });
        assert!(mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 1);
    }
}
