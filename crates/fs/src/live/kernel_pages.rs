//! State of the kernel's page cache for one file. [`crate::file::kernel_pages`] keeps it apart from
//! direct clients.

use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait for another thread that notifies the kernel of a size.
const NOTIFY_WAIT_MAX: Duration = Duration::from_secs(1);

/// State of the kernel's page cache for one file.
#[derive(Debug, Default)]
pub(crate) struct KernelPages {
    /// Opens that read and write through the page cache.
    pub(crate) cached_opens: AtomicU64,
    /// Counts events that may leave pages in the cache.
    cache_events: AtomicU64,
    /// The last event after which the kernel has dropped the pages.
    pub(crate) dropped_events: AtomicU64,
    /// Direct clients may have extended the file since the kernel was notified of its size.
    pub(crate) is_size_stale: AtomicBool,
    /// Held during a size notification. Opens and truncations wait for it: otherwise the kernel
    /// would get the size from before.
    notify_lock: Mutex<()>,
    /// Requests may have left pages in the cache since the kernel dropped them last.
    pub(crate) may_have_pages: AtomicBool,
}

impl KernelPages {
    /// Whether direct clients cannot have the file.
    pub(crate) fn blocks_direct_clients(&self) -> bool {
        self.has_cached_open() || self.undropped_event().is_some()
    }

    /// Whether an open reads and writes the file through the page cache.
    pub(crate) fn has_cached_open(&self) -> bool {
        self.cached_opens.load(Ordering::SeqCst) > 0
    }

    /// The last event that left pages which the kernel has not dropped.
    pub(crate) fn undropped_event(&self) -> Option<u64> {
        let cached = self.cache_events.load(Ordering::SeqCst);
        (cached != self.dropped_events.load(Ordering::SeqCst)).then_some(cached)
    }

    /// A request is about to leave pages in the cache.
    pub(crate) fn record_pages(&self) {
        self.may_have_pages.store(true, Ordering::SeqCst);
    }

    pub(crate) fn record_cache_event(&self) {
        self.cache_events.fetch_add(1, Ordering::SeqCst);
    }

    /// Locks out other size notifications. The caller holds no lock of the file. `None` after a
    /// time-out: the kernel may wait for a page that it writes back, and it delays such writes
    /// while it truncates the file.
    pub(crate) fn lock_notify(&self) -> Option<MutexGuard<'_, ()>> {
        self.notify_lock.try_lock_for(NOTIFY_WAIT_MAX)
    }

    /// Direct clients may extend the file from now on.
    pub(crate) fn mark_size_stale(&self) {
        self.is_size_stale.store(true, Ordering::SeqCst);
    }
}
