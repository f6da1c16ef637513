//! State of the kernel's page cache for one file. [`crate::file::kernel_pages`] keeps it apart from
//! direct clients.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait for another thread that notifies the kernel of a size.
const NOTIFY_WAIT_MAX: Duration = Duration::from_secs(1);

/// The way of a write through the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WritePath {
    /// The kernel's pages have the bytes, or the kernel has no pages.
    ThroughCache,
    /// The kernel's pages may lack the bytes. The kernel has dropped them before the request, and may have read them
    /// again.
    PastCache,
    /// The kernel's pages lack the bytes, because it did not send them; it drops the pages after the change.
    Copy,
}

impl WritePath {
    /// Whether the change must be recorded ([`KernelPages::record_change`]). The caller holds the file's lock.
    pub(crate) fn leaves_old_pages(self, pages: Option<&KernelPages>) -> bool {
        pages.is_some_and(|pages| match self {
            WritePath::ThroughCache => false,
            WritePath::PastCache => pages.has_read_pages(),
            WritePath::Copy => pages.has_pages(),
        })
    }
}

/// No request has read pages into the cache.
const UNREAD: u8 = 0;
/// Requests may have read pages. Changes in progress may not have seen it.
const READ: u8 = 1;
/// The same, and a reader has waited for the changes that have not seen it.
const READ_AFTER_WAIT: u8 = 2;

/// State of the kernel's page cache for one file.
#[derive(Debug, Default)]
pub(crate) struct KernelPages {
    /// Opens that read and write through the page cache.
    pub(crate) cached_opens: AtomicU64,
    /// Opens by which programs may write, also into mappings. The kernel writes the dirty pages of a mapping back before
    /// it releases the open.
    pub(crate) writable_opens: AtomicU64,
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
    /// Whether requests may have read pages into the cache since then, as page faults do: one of [`UNREAD`],
    /// [`READ`] and [`READ_AFTER_WAIT`]. One atomic, because [`KernelPages::forget_pages`] takes no lock.
    read_state: AtomicU8,
    /// Bytes that were changed past the cache, and whose pages the kernel has not dropped since.
    changed: Mutex<ChangedRanges>,
}

/// Ranges of changed bytes, by number. Each belongs to a call in progress.
#[derive(Debug, Default)]
struct ChangedRanges {
    next: u64,
    ranges: BTreeMap<u64, Range<u64>>,
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

    /// A request is about to read pages into the cache. Returns whether no such request has waited yet: then the
    /// caller takes the file's lock exclusively and calls [`KernelPages::record_waited_read`]. It so waits for changes
    /// in progress, which have not seen that there are pages.
    pub(crate) fn record_read_pages(&self) -> bool {
        self.record_pages();
        self.read_state.fetch_max(READ, Ordering::SeqCst) != READ_AFTER_WAIT
    }

    /// A reader has waited for the changes in progress, and still holds the file's lock exclusively.
    pub(crate) fn record_waited_read(&self) {
        // It fails after `forget_pages`. Then the next reader waits again.
        let _ = self.read_state.compare_exchange(
            READ,
            READ_AFTER_WAIT,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
    }

    /// Whether the cache may have pages.
    pub(crate) fn has_pages(&self) -> bool {
        self.may_have_pages.load(Ordering::SeqCst) || self.has_read_pages()
    }

    /// Whether the cache may have pages with the content of an earlier read.
    pub(crate) fn has_read_pages(&self) -> bool {
        self.read_state.load(Ordering::SeqCst) != UNREAD
    }

    /// The kernel is about to drop all pages. Returns the state before, for [`KernelPages::restore_pages`].
    pub(crate) fn forget_pages(&self) -> bool {
        self.may_have_pages.store(false, Ordering::SeqCst);
        self.read_state.swap(UNREAD, Ordering::SeqCst) != UNREAD
    }

    /// The kernel has dropped no pages.
    pub(crate) fn restore_pages(&self, had_read_pages: bool) {
        self.may_have_pages.store(true, Ordering::SeqCst);
        if had_read_pages {
            self.read_state.fetch_max(READ, Ordering::SeqCst);
        }
    }

    /// The kernel has ended its use of the file system. All its requests have been answered.
    pub(crate) fn forget_kernel(&self) {
        self.forget_pages();
        self.cached_opens.store(0, Ordering::SeqCst);
        self.writable_opens.store(0, Ordering::SeqCst);
        self.is_size_stale.store(false, Ordering::SeqCst);
        let cached = self.cache_events.load(Ordering::SeqCst);
        self.dropped_events.store(cached, Ordering::SeqCst);
    }

    /// Bytes of the file were changed past the cache, which may have their pages from before. The caller holds the
    /// file exclusively.
    pub(crate) fn record_change(&self, bytes: Range<u64>) {
        if self.has_pages() {
            let mut changed = self.changed.lock();
            let number = changed.next;
            changed.next += 1;
            changed.ranges.insert(number, bytes);
        }
    }

    /// The numbers of the changes within these bytes.
    pub(crate) fn changes_within(&self, bytes: &Range<u64>) -> Vec<u64> {
        let changed = self.changed.lock();
        let is_within = |range: &Range<u64>| bytes.start <= range.start && range.end <= bytes.end;
        let within = changed.ranges.iter().filter(|(_, range)| is_within(range));
        within.map(|(&number, _)| number).collect()
    }

    /// The kernel has dropped the pages of these changes.
    pub(crate) fn forget_changes(&self, numbers: &[u64]) {
        let mut changed = self.changed.lock();
        for number in numbers {
            changed.ranges.remove(number);
        }
    }

    /// The changed parts of these bytes that a page from before the change may lack.
    pub(crate) fn changed_parts(&self, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let changed = self.changed.lock();
        let parts = changed.ranges.values().map(|range| {
            let start = range.start.max(bytes.start);
            start..range.end.min(bytes.end)
        });
        parts.filter(|part| part.start < part.end).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_wait_until_one_of_them_has_waited() {
        let pages = KernelPages::default();
        assert!(pages.record_read_pages());
        assert!(pages.record_read_pages(), "the first one waits still");
        pages.record_waited_read();
        assert!(!pages.record_read_pages());
        // The kernel drops the pages while a reader waits.
        assert!(pages.forget_pages());
        pages.record_waited_read();
        assert!(!pages.has_read_pages());
        assert!(pages.record_read_pages());
        // The kernel has dropped none.
        pages.record_waited_read();
        let had_read_pages = pages.forget_pages();
        pages.restore_pages(had_read_pages);
        assert!(pages.has_read_pages());
        assert!(pages.record_read_pages());
    }
}
