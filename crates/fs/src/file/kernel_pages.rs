//! The kernel's page cache and direct clients (RFD 023).
//!
//! The kernel's cached pages do not change when a direct client writes, and the kernel's size of a
//! file does not change when a direct client extends it. So either the kernel caches a file or
//! direct clients have it, never both:
//!
//! - An open that reads and writes through the page cache takes the file from direct clients, until
//!   it is released. The size that they gave it is published first, and the kernel is notified of
//!   it.
//! - Before the file is published to direct clients again, the kernel drops its pages.
//! - An open that bypasses the cache may cache pages by a single request, such as a page fault.
//!   That takes the file from direct clients until the kernel has dropped the pages.

use crate::Fs;
use crate::direct::shared_file_map::FileLock;
use crate::error::Result;
use crate::file::write::PAGE;
use crate::format::inode::Ino;
use crate::tree::page_map as map;
use crate::txn::core::Core;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait for another thread that notifies the kernel of a size.
const NOTIFY_WAIT_MAX: Duration = Duration::from_secs(1);

/// Drops the pages of a file with some bytes, or all of them, from the kernel's page cache, and its
/// attributes. Returns whether the kernel did so. Called without a lock of the file: the kernel
/// waits for requests that read or write such pages.
pub type DropPages = Box<dyn Fn(Ino, Option<Range<u64>>) -> bool + Send + Sync>;

/// Notifies the kernel that a file has at least this size, and of its last byte.
pub type NotifySize = Box<dyn Fn(Ino, u64, u8) + Send + Sync>;

/// The calls into the kernel.
pub(crate) struct KernelCallbacks {
    drop_pages: DropPages,
    notify_size: NotifySize,
}

/// State of the kernel's page cache for one file.
#[derive(Debug, Default)]
pub(crate) struct KernelPages {
    /// Opens that read and write through the page cache.
    cached_opens: AtomicU64,
    /// Counts events that may leave pages in the cache.
    cache_events: AtomicU64,
    /// The last event after which the kernel has dropped the pages.
    dropped_events: AtomicU64,
    /// Direct clients may have extended the file since the kernel was notified of its size.
    is_size_stale: AtomicBool,
    /// Held during a size notification. Opens and truncations wait for it: otherwise the kernel
    /// would get the size from before.
    notify_lock: Mutex<()>,
    /// Requests may have left pages in the cache since the kernel dropped them last.
    may_have_pages: AtomicBool,
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
    fn undropped_event(&self) -> Option<u64> {
        let cached = self.cache_events.load(Ordering::SeqCst);
        (cached != self.dropped_events.load(Ordering::SeqCst)).then_some(cached)
    }

    /// A request is about to leave pages in the cache.
    fn record_pages(&self) {
        self.may_have_pages.store(true, Ordering::SeqCst);
    }

    fn record_cache_event(&self) {
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

impl Fs {
    /// Sets the calls into the kernel. Only the first call has an effect.
    pub fn set_kernel_callbacks(&self, drop_pages: DropPages, tell_size: NotifySize) {
        let kernel = KernelCallbacks {
            drop_pages,
            notify_size: tell_size,
        };
        // The first ones stay.
        let _ = self.kernel_callbacks.set(kernel);
    }

    /// A file is opened for reads and writes through the kernel's page cache. When this returns,
    /// direct clients have left the file, it has all that they wrote, and the kernel knows its
    /// size. The caller has the file open, and calls [`Fs::end_caching`] before it closes it.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn begin_caching(&self, ino: Ino) -> Result<()> {
        let data = self.file_lock(ino)?;
        let pages = &data.kernel_pages;
        pages.cached_opens.fetch_add(1, Ordering::SeqCst);
        let taken = self.revoke_direct_clients(ino, &data);
        let told = taken.and_then(|()| self.notify_stale_size(ino, &data));
        if told.is_err() {
            pages.cached_opens.fetch_sub(1, Ordering::SeqCst);
        }
        told
    }

    /// Takes back one [`Fs::begin_caching`]: all requests of that open have been answered.
    pub fn end_caching(&self, ino: Ino) {
        // An error is impossible: the file is open.
        let Ok(data) = self.file_lock(ino) else {
            return;
        };
        data.kernel_pages.record_cache_event();
        data.kernel_pages
            .cached_opens
            .fetch_sub(1, Ordering::SeqCst);
    }

    /// A request fills the page cache, though its open bypasses the cache. Direct clients have left
    /// the file before the request is answered. They return when the kernel has dropped the pages.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn record_cached_request(&self, ino: Ino) -> Result<()> {
        let data = self.file_lock(ino)?;
        let shared = data.lock.read();
        data.kernel_pages.record_cache_event();
        data.kernel_pages.record_pages();
        drop(shared);
        self.revoke_direct_clients(ino, &data)
    }

    /// A cached write went to another offset than the kernel assumed. The kernel drops its pages
    /// within a second ([`Fs::collect_direct_writes`]), and the next open gets the size.
    pub fn record_misplaced_write(&self, ino: Ino) {
        self.lock_core().record_unseen_write(ino);
        self.with_kernel_pages(ino, KernelPages::mark_size_stale);
    }

    /// `None` if the kernel does not use the file.
    fn with_kernel_pages<T>(&self, ino: Ino, run: impl FnOnce(&KernelPages) -> T) -> Option<T> {
        let core = self.lock_core();
        let live = core.live_inodes.get(&ino);
        live.map(|live| run(&live.file_lock.kernel_pages))
    }

    /// A request of a cached open is about to leave pages in the cache.
    pub fn record_kernel_pages(&self, ino: Ino) {
        self.with_kernel_pages(ino, KernelPages::record_pages);
    }

    /// Whether an open goes through the cache: pages may come at any time.
    #[must_use]
    pub fn has_cached_open(&self, ino: Ino) -> bool {
        let is_open = self.with_kernel_pages(ino, KernelPages::has_cached_open);
        is_open.unwrap_or(false)
    }

    /// Drops pages of bytes that were written past the cache, before the write is answered: pages
    /// that were read before the write must not stay. (The kernel drops pages before such a write.
    /// It does not drop them after an asynchronous write, or if the file is open for direct I/O.)
    pub fn drop_written_pages(&self, ino: Ino, bytes: Range<u64>) {
        let may_be_there =
            self.with_kernel_pages(ino, |pages| pages.may_have_pages.load(Ordering::SeqCst));
        if may_be_there == Some(true) {
            self.drop_pages_now(ino, Some(bytes));
        }
    }

    /// Returns whether the kernel dropped them.
    fn drop_pages_now(&self, ino: Ino, bytes: Option<Range<u64>>) -> bool {
        let kernel = self.kernel_callbacks.get();
        kernel.is_some_and(|kernel| (kernel.drop_pages)(ino, bytes))
    }

    /// Makes direct clients leave a file, and publishes its size.
    fn revoke_direct_clients(&self, ino: Ino, data: &FileLock) -> Result<()> {
        let shared = data.lock.read();
        let is_shown = data.has_current_map()
            || self
                .inspect(|core| core.inode(ino))?
                .append_extent
                .is_some();
        drop(shared);
        if !is_shown {
            return Ok(());
        }
        let _alone = data.write();
        self.with_reserve_fallback(|| self.publish_size(ino))
    }

    /// Notifies the kernel of the size of a file, before a write past the page cache is answered.
    /// The write did not find the end where the kernel assumed it.
    pub fn notify_size(&self, ino: Ino) {
        let told = self.file_lock(ino).and_then(|data| {
            let telling = data.kernel_pages.lock_notify();
            self.notify_kernel_size(ino, &data, telling)
        });
        if let Err(cause) = told {
            tracing::debug!(%cause, ino = ino.0, "the kernel was not told the size of a file");
        }
    }

    /// Notifies the kernel of the size of a file that a program maps, after its direct clients have
    /// left.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn notify_mmapped_size(&self, ino: Ino) -> Result<()> {
        self.notify_stale_size(ino, &*self.file_lock(ino)?)
    }

    fn notify_stale_size(&self, ino: Ino, data: &FileLock) -> Result<()> {
        let is_stale = &data.kernel_pages.is_size_stale;
        if is_stale.load(Ordering::SeqCst) {
            // Otherwise the notification would overwrite data stored into a mapping of the last
            // page.
            self.drop_pages_now(ino, None);
        }
        // Changed under this lock: a thread that finds the flag clear has waited for the
        // notification.
        let telling = data.kernel_pages.lock_notify();
        if !is_stale.swap(false, Ordering::SeqCst) {
            return Ok(());
        }
        let told = self.notify_kernel_size(ino, data, telling);
        if told.is_err() {
            is_stale.store(true, Ordering::SeqCst);
        }
        told
    }

    fn notify_kernel_size(
        &self,
        ino: Ino,
        data: &FileLock,
        telling: Option<MutexGuard<'_, ()>>,
    ) -> Result<()> {
        let mut end = 0;
        if let Some(kernel) = self.kernel_callbacks.get() {
            let (size, last) = self.inspect(|core| core.last_byte(ino))?;
            if size > 0 {
                let mut byte = [last];
                data.overlay_mmap_dirty(size - 1, &mut byte);
                (kernel.notify_size)(ino, size, byte[0]);
                end = size;
            }
        }
        drop(telling);
        // The kernel keeps the last page as read, but its byte may have been overwritten meanwhile.
        if end > 0 {
            self.drop_pages_now(ino, Some(end - 1..end));
        }
        Ok(())
    }

    /// Makes the kernel drop the pages that it may have of a file without cached opens. The caller
    /// holds no lock of the file: the kernel waits for requests that read or write pages.
    pub(crate) fn drop_kernel_pages(&self, ino: Ino) {
        // The caller notices a file that is gone itself.
        let Ok(data) = self.file_lock(ino) else {
            return;
        };
        let pages = &data.kernel_pages;
        if pages.has_cached_open() {
            return;
        }
        if let Some(left) = pages.undropped_event() {
            let may_have_pages = &pages.may_have_pages;
            may_have_pages.store(false, Ordering::SeqCst);
            match self.drop_pages_now(ino, None) {
                true => drop(pages.dropped_events.fetch_max(left, Ordering::SeqCst)),
                false => may_have_pages.store(true, Ordering::SeqCst),
            }
        }
    }

    /// Makes the kernel drop all pages of a file that was changed past the kernel, with or without
    /// cached opens.
    ///
    /// # Errors
    /// `EIO`: the kernel may return old data.
    pub(crate) fn drop_changed_pages(&self, ino: Ino) -> Result<()> {
        let data = self.file_lock(ino)?;
        let may_be_cached = data.kernel_pages.blocks_direct_clients();
        match may_be_cached && !self.drop_pages_now(ino, None) {
            true => Err(Errno::IO.into()),
            false => Ok(()),
        }
    }

    /// Whether direct clients cannot have a file because of the kernel's page cache: a cached open,
    /// or pages that the kernel has not dropped.
    #[must_use]
    pub fn is_cached(&self, ino: Ino) -> bool {
        let data = self.file_lock(ino);
        data.is_ok_and(|data| data.kernel_pages.blocks_direct_clients())
    }
}

impl Core {
    /// The size of a file and its last byte, without mmap-dirty pages.
    fn last_byte(&mut self, ino: Ino) -> Result<(u64, u8)> {
        let inode = self.regular_file(ino)?;
        let Some(last) = inode.size.checked_sub(1) else {
            return Ok((0, 0));
        };
        let run = map::find(&inode.map, last / PAGE, &mut |page| self.page(page))?;
        let byte = match run {
            Some(run) => self.data_page(run.page)?[(last % PAGE) as usize],
            None => 0,
        };
        Ok((inode.size, byte))
    }
}
