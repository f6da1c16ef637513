//! A limit to the threads of a process that poll.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Connections of this process that poll now.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// The right to poll. At most half of the processors poll at once, so that clients and other connections can run.
pub struct SpinPermit(());

impl SpinPermit {
    /// None: enough others poll.
    #[must_use]
    pub fn take() -> Option<SpinPermit> {
        static SPINNING_MAX: OnceLock<usize> = OnceLock::new();
        let max = SPINNING_MAX.get_or_init(|| {
            let processors = std::thread::available_parallelism();
            processors.map_or(1, |count| (count.get() / 2).max(1))
        });
        let permit = SpinPermit(());
        // A refused permit is returned by its drop.
        (SPINNING.fetch_add(1, Ordering::Relaxed) < *max).then_some(permit)
    }
}

impl Drop for SpinPermit {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_end_at_half_of_the_processors() {
        let mut taken: Vec<SpinPermit> = std::iter::from_fn(SpinPermit::take).collect();
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        assert_eq!(taken.len(), (processors / 2).max(1));
        taken.pop();
        let again = SpinPermit::take();
        assert!(again.is_some());
        assert!(SpinPermit::take().is_none());
    }
}
