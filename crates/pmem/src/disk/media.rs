//! The disk's two views as [`Media`].

use super::cache::{LoadEnd, PageCache};
use super::device::Device;
use super::failure::DiskFailure;
use super::head::{Head, LoadedPages};
use super::io::DiskIo;
use super::memory::Memory;
use super::watch::{LOOKS_BEFORE_FAILURE, OldRequest, RequestLimits};
use super::writer::{GroupEnd, Writer, WriterQueue, WriterTarget};
use crate::async_io::AsyncIo;
use crate::disk_figures::{DiskFigures, ResidentCheck};
use crate::map_error::MapError;
use crate::mapped_media::system;
use crate::media::{FenceProof, Media, UnfencedStores, check_range};
use crate::unreadable::PATTERN;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::poison::lock;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::collections::BTreeSet;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// The size of a disk's parts, and its limits.
#[derive(Clone, Copy, Debug)]
pub struct DiskOptions {
    /// Bytes of the pool.
    pub len: usize,
    /// Bytes before the frames, which stay in memory.
    pub head_len: usize,
    /// Bytes of the cache of frames.
    pub cache_bytes: usize,
    /// The limits of a request's age.
    pub limits: RequestLimits,
}

/// A device with the memory in front of it.
pub struct Disk {
    parts: Arc<DiskParts>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Holds the lock of the pool as long as requests are possible.
    _locked: File,
}

pub(super) struct DiskParts {
    len: usize,
    pub(super) device: Device,
    pub(super) head: Head,
    pub(super) cache: PageCache,
    pub(super) queue: WriterQueue,
    pub(super) writer: Mutex<Writer>,
    unreadable: Mutex<BTreeSet<usize>>,
    has_unreadable: AtomicBool,
    pub(super) failure: DiskFailure,
    slow_requests: AtomicU64,
}

impl Disk {
    /// Starts the writer of a device. `locked` stays open as long as the disk.
    ///
    /// # Errors
    /// When the device is shorter, or the system refuses.
    pub fn start(device: Device, options: DiskOptions, locked: File) -> Result<Disk, MapError> {
        let DiskOptions {
            len,
            head_len,
            cache_bytes,
            limits,
        } = options;
        if len == 0 || !len.is_multiple_of(PAGE_BYTES) || !head_len.is_multiple_of(PAGE_BYTES) {
            return Err(MapError::BadLength(len));
        }
        let found = device.facts().len;
        if found < len as u64 {
            let wanted = len as u64;
            return Err(MapError::TooShort { wanted, found });
        }
        let parts = Arc::new(DiskParts {
            len,
            writer: Mutex::new(Writer::new(&device)?),
            device,
            head: Head::new(head_len.min(len))?,
            cache: PageCache::new(cache_bytes)?,
            queue: WriterQueue::default(),
            unreadable: Mutex::default(),
            has_unreadable: AtomicBool::new(false),
            failure: DiskFailure::default(),
            slow_requests: AtomicU64::new(0),
        });
        let disk = Disk {
            parts,
            threads: Mutex::default(),
            _locked: locked,
        };
        disk.spawn("disk", |parts| {
            while let Some(end) = parts.queue.next() {
                parts.run_group(end);
            }
        })?;
        disk.spawn("disk-watch", move |parts| {
            while parts.device.watched().wait_for_look(limits) {
                parts.look_at_requests(limits);
            }
        })?;
        Ok(disk)
    }

    fn spawn(
        &self,
        name: &str,
        run: impl FnOnce(&DiskParts) + Send + 'static,
    ) -> Result<(), MapError> {
        let parts = self.parts.clone();
        let thread = std::thread::Builder::new().name(name.into());
        let spawned = thread.spawn(move || run(&parts));
        lock(&self.threads).push(spawned.map_err(system("start a thread of the disk"))?);
        Ok(())
    }

    /// Calls `hook` with the cause when the disk fails, or now if it has failed. The pool must then be recovered.
    pub fn on_failure(&self, hook: impl Fn(&str) + Send + Sync + 'static) {
        self.parts.failure.set_hook(Box::new(hook));
    }

    /// The cause, if the disk has failed.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.parts.failure.cause().map(str::to_owned)
    }

    pub(super) fn parts(&self) -> &DiskParts {
        &self.parts
    }

    /// The view of what the disk holds after the next sync.
    #[must_use]
    pub fn data(self: &Arc<Disk>) -> DiskMedia {
        DiskMedia {
            disk: self.clone(),
            overlay: None,
        }
    }

    /// A view with stores of its own.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn overlay(self: &Arc<Disk>) -> Result<DiskMedia, MapError> {
        Ok(DiskMedia {
            disk: self.clone(),
            overlay: Some(LoadedPages::new(self.parts.len)?),
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.parts.queue.stop();
        self.parts.device.watched().stop();
        let this = std::thread::current().id();
        for thread in lock(&self.threads).drain(..) {
            // The listener of a failure may have dropped the last user, on one of these threads.
            if thread.thread().id() == this {
                continue;
            }
            if thread.join().is_err() {
                tracing::error!("a thread of the disk panicked");
            }
        }
    }
}

/// Aligned, as direct requests need.
#[repr(align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

impl DiskParts {
    /// Writes a group that was begun.
    fn run_group(&self, end: GroupEnd) {
        let target = WriterTarget {
            device: &self.device,
            head: &self.head,
            cache: &self.cache,
            queue: &self.queue,
        };
        let result = lock(&self.writer).run_group(target, end);
        if let Err(cause) = &result {
            self.note_unwritten(cause);
        }
        self.queue.end_group(&result);
    }

    /// Reports requests that take too long, and fails the disk if one takes even longer.
    fn look_at_requests(&self, limits: RequestLimits) {
        for old in self.device.watched().old_requests(limits.slow) {
            let OldRequest { offset, age, looks } = old;
            let name = self.device.name();
            if looks == 1 {
                self.slow_requests.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("a request at byte {offset} of {name} takes {age:.1?} so far");
            }
            // A process that was stopped finds old requests that have long ended, and takes them up now.
            if age >= limits.fail && looks >= LOOKS_BEFORE_FAILURE {
                self.fail(format!(
                    "a request at byte {offset} of {name} has not ended for {age:.0?}; check the disk and the kernel's \
                     log; the pool stays locked until the request has ended"
                ));
            }
        }
    }

    /// Writes all dirty pages on this thread, if no group is running.
    pub(super) fn try_write_inline(&self, end: GroupEnd) -> bool {
        let begun = self.queue.try_begin(end);
        if let Some(end) = begun {
            self.run_group(end);
        }
        begun.is_some()
    }

    /// Reads a page from the device, or lists it as unreadable.
    pub(super) fn read_device(&self, page: usize, into: &mut [u8; PAGE_BYTES]) {
        if let Err(cause) = self.try_read_device(page, into) {
            self.note_unreadable(page, &cause);
            into.as_chunks_mut::<8>().0.fill(PATTERN.to_le_bytes());
        }
    }

    /// Reads a page from the device.
    pub(super) fn try_read_device(
        &self,
        page: usize,
        into: &mut [u8; PAGE_BYTES],
    ) -> std::io::Result<()> {
        let mut bytes = AlignedPage([0; PAGE_BYTES]);
        let at = (page * PAGE_BYTES) as u64;
        self.device.read_at(&mut bytes.0, at)?;
        *into = bytes.0;
        Ok(())
    }

    /// Lists a page as unreadable. Returns the number of listed pages.
    pub(super) fn list_unreadable(&self, page: usize) -> usize {
        let mut unreadable = lock(&self.unreadable);
        unreadable.insert(page);
        self.has_unreadable.store(true, Ordering::Release);
        unreadable.len()
    }

    fn figures(&self) -> DiskFigures {
        DiskFigures {
            unreadable_pages: lock(&self.unreadable).len() as u64,
            slow_requests: self.slow_requests.load(Ordering::Relaxed),
            ..self.cache.figures()
        }
    }

    /// The head with a range of it loaded.
    #[inline]
    fn head(&self, offset: usize, len: usize) -> &Memory {
        let load = |page, into: &mut [u8; PAGE_BYTES]| self.read_device(page, into);
        self.head.loaded(offset, len, load)
    }

    pub(super) fn is_in_head(&self, offset: usize) -> bool {
        offset < self.head.len()
    }

    /// Calls `access` until it finds its page in the cache; loads the page in between.
    fn with_cached<T>(&self, page: usize, mut access: impl FnMut(&PageCache) -> Option<T>) -> T {
        loop {
            if let Some(done) = access(&self.cache) {
                return done;
            }
            self.cache.begin_load(page);
            let mut bytes = [0; PAGE_BYTES];
            self.read_device(page, &mut bytes);
            if self.cache.end_load(page, &bytes, false) == LoadEnd::Full {
                self.wait_for_room();
            }
        }
    }

    fn wait_for_room(&self) {
        if !self.queue.wait_for_cleaning() {
            // The pool ends at the next sync. Slots that are reserved for loads come back.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        check_range(self.len, offset, into.len(), 1);
        let mut at = offset;
        for part in split_by_page(offset, into) {
            let len = part.len();
            if self.is_in_head(at) {
                self.head(at, len).read(at, part);
            } else {
                let (page, within) = (at / PAGE_BYTES, at % PAGE_BYTES);
                self.with_cached(page, |cache| {
                    cache.access(page, |memory, slot_at| {
                        memory.read(slot_at + within, part);
                    })
                });
            }
            at += len;
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        check_range(self.len, offset, bytes.len(), 1);
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.len().min(PAGE_BYTES - at % PAGE_BYTES));
            if self.is_in_head(at) {
                self.head(at, part.len()).write(at, part);
                self.head.mark_dirty(at, part.len());
            } else {
                let (page, within) = (at / PAGE_BYTES, at % PAGE_BYTES);
                self.with_cached(page, |cache| {
                    cache.change(page, |memory, slot_at| {
                        self.check_change(at);
                        memory.write(slot_at + within, part);
                    })
                });
            }
            at += part.len();
            rest = after;
        }
    }

    fn replace_page(&self, offset: usize, page: &[u8; PAGE_BYTES]) -> PageChecksums {
        check_range(self.len, offset, PAGE_BYTES, PAGE_BYTES);
        if self.is_in_head(offset) {
            let sums = self.head(offset, PAGE_BYTES).stream_page(offset, page);
            self.head.mark_dirty(offset, PAGE_BYTES);
            return sums;
        }
        loop {
            match self.cache.replace(offset / PAGE_BYTES, page) {
                Ok(sums) => {
                    if self.cache.is_filling() {
                        self.queue.request_cleaning();
                    }
                    return sums;
                }
                Err(_) => self.wait_for_room(),
            }
        }
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        check_range(self.len, offset, 8, 8);
        let swap = |memory: &Memory, at| {
            let swapped =
                memory
                    .word(at)
                    .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
            swapped.map(drop)
        };
        if self.is_in_head(offset) {
            let swapped = swap(self.head(offset, 8), offset);
            self.head.mark_dirty(offset, 8);
            return swapped;
        }
        let (page, within) = (offset / PAGE_BYTES, offset % PAGE_BYTES);
        self.with_cached(page, |cache| {
            cache.change(page, |memory, slot_at| {
                self.check_change(offset);
                swap(memory, slot_at + within)
            })
        })
    }

    pub(super) fn is_unreadable(&self, offset: usize) -> bool {
        self.has_unreadable.load(Ordering::Acquire)
            && lock(&self.unreadable).contains(&(offset / PAGE_BYTES))
    }
}

/// Parts of `bytes` that lie in one page each; the first begins at `offset`.
fn split_by_page(offset: usize, bytes: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    let first = bytes.len().min(PAGE_BYTES - offset % PAGE_BYTES);
    let (first, rest) = bytes.split_at_mut(first);
    std::iter::once(first).chain(rest.chunks_mut(PAGE_BYTES))
}

/// A view of a disk.
pub struct DiskMedia {
    disk: Arc<Disk>,
    /// Words of this process over the pages of the data view: a page is copied at its first access and stays in memory, so
    /// it never shows a later change of the data view. None: the data view.
    overlay: Option<LoadedPages>,
}

impl DiskMedia {
    /// The disk below.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    fn parts(&self) -> &DiskParts {
        &self.disk.parts
    }

    /// The memory of the overlay with a range of it loaded, if this view is one.
    #[inline]
    fn overlay(&self, offset: usize, len: usize) -> Option<&Memory> {
        let overlay = self.overlay.as_ref()?;
        check_range(self.parts().len, offset, len, 1);
        let load = |page: usize, into: &mut [u8; PAGE_BYTES]| {
            self.parts().read(page * PAGE_BYTES, into);
        };
        Some(overlay.loaded(offset, len, load))
    }
}

impl Media for DiskMedia {
    fn len_bytes(&self) -> usize {
        self.parts().len
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        match self.overlay(offset, into.len()) {
            Some(memory) => memory.read(offset, into),
            None => self.parts().read(offset, into),
        }
    }

    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        if let Some(memory) = self.overlay(offset, PAGE_BYTES) {
            return memory.read_page(offset, into);
        }
        let parts = self.parts();
        if parts.is_in_head(offset) || !offset.is_multiple_of(PAGE_BYTES) {
            parts.read(offset, into);
            return pagemesh_base::checksum::crc32c(into);
        }
        let page = offset / PAGE_BYTES;
        parts.with_cached(page, |cache| {
            cache.access(page, |memory, slot_at| memory.read_page(slot_at, into))
        })
    }

    fn load(&self, offset: usize) -> u64 {
        if let Some(memory) = self.overlay(offset, 8) {
            return memory.word(offset).load(Ordering::Acquire);
        }
        let parts = self.parts();
        if parts.is_in_head(offset) {
            return parts.head(offset, 8).word(offset).load(Ordering::Acquire);
        }
        let (page, within) = (offset / PAGE_BYTES, offset % PAGE_BYTES);
        parts.with_cached(page, |cache| {
            cache.access(page, |memory, slot_at| {
                memory.word(slot_at + within).load(Ordering::Acquire)
            })
        })
    }

    fn store(&self, offset: usize, word: u64) {
        if let Some(memory) = self.overlay(offset, 8) {
            memory.word(offset).store(word, Ordering::Release);
            return;
        }
        let parts = self.parts();
        if parts.is_in_head(offset) {
            let memory = parts.head(offset, 8);
            memory.word(offset).store(word, Ordering::Release);
            parts.head.mark_dirty(offset, 8);
            return;
        }
        let (page, within) = (offset / PAGE_BYTES, offset % PAGE_BYTES);
        parts.with_cached(page, |cache| {
            cache.change(page, |memory, slot_at| {
                parts.check_change(offset);
                memory.word(slot_at + within).store(word, Ordering::Release);
            })
        });
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        match self.overlay(offset, bytes.len()) {
            Some(memory) => memory.write(offset, bytes),
            None => self.parts().write(offset, bytes),
        }
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        let Some(memory) = self.overlay(offset, 8) else {
            return self.parts().compare_exchange(offset, old, new);
        };
        let word = memory.word(offset);
        let swapped = word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        swapped.map(drop)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        check_range(self.parts().len, offset, LINE_BYTES, LINE_BYTES);
        self.write(offset, line);
        UnfencedStores(())
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        // The bytes of the source may change: all targets get one copy of them.
        let copy = *page;
        let mut sums = None;
        for (media, offset) in targets {
            sums = Some(match media.overlay(*offset, PAGE_BYTES) {
                Some(memory) => memory.stream_page(*offset, &copy),
                None => media.parts().replace_page(*offset, &copy),
            });
        }
        (sums.expect("a target"), UnfencedStores(()))
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        check_range(self.parts().len, offset, len, 1);
        UnfencedStores(())
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        let UnfencedStores(()) = stores;
        std::sync::atomic::fence(Ordering::SeqCst);
        FenceProof(())
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        self.parts().is_unreadable(offset)
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        if !self.parts().has_unreadable.load(Ordering::Acquire) {
            return Vec::new();
        }
        let pages = lock(&self.parts().unreadable);
        pages.iter().map(|page| page * PAGE_BYTES).collect()
    }

    fn is_cached(&self, offset: usize) -> bool {
        let parts = self.parts();
        self.overlay.is_some()
            || parts.is_in_head(offset)
            || parts.cache.contains(offset / PAGE_BYTES)
    }

    fn disk_figures(&self) -> Option<DiskFigures> {
        Some(self.parts().figures())
    }

    fn compare_resident(&self, first: usize) -> ResidentCheck {
        self.parts().compare_resident(first)
    }

    fn has_room(&self) -> bool {
        self.overlay.is_some() || self.parts().cache.has_room()
    }

    fn async_io(&self) -> Result<Option<Box<dyn AsyncIo>>, MapError> {
        Ok(Some(Box::new(DiskIo::new(self.disk.clone())?)))
    }

    fn sync(&self) -> Result<(), MapError> {
        if self.overlay.is_some() {
            return Ok(());
        }
        let queue = &self.parts().queue;
        queue.wait(queue.request_flush())
    }
}
