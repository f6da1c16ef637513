//! The devices of a disk with the memory in front of them: reads and changes of the data view.

use super::cache::{LoadEnd, PageCache};
use super::device_map::{ByteLocation, DeviceMap, DiskDevice};
use super::failure::DiskFailure;
use super::group_queue::WriterQueue;
use super::head::LoadPages;
use super::memory::Memory;
use super::watch::{LOOKS_BEFORE_FAILURE, OldRequest, RequestLimits, WatchedRequests};
use super::writer::{WriteFailure, Writer};
use crate::disk_figures::DiskFigures;
use crate::map_error::MapError;
use crate::media::{NewDevice, check_range};
use crate::unreadable::PATTERN;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub(super) struct DiskParts {
    pub(super) devices: DeviceMap,
    pub(super) watched: Arc<WatchedRequests>,
    pub(super) cache: PageCache,
    pub(super) queue: WriterQueue,
    pub(super) writer: Mutex<Writer>,
    #[cfg(feature = "test-api")]
    pub(super) stepped_flush: Mutex<Option<super::group_queue::SteppedFlush>>,
    unreadable: Mutex<BTreeSet<usize>>,
    has_unreadable: AtomicBool,
    pub(super) failure: DiskFailure,
    slow_requests: AtomicU64,
}

/// Aligned, as direct requests need.
#[repr(align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

impl DiskParts {
    pub(super) fn new(
        devices: DeviceMap,
        watched: Arc<WatchedRequests>,
        cache_bytes: usize,
    ) -> Result<DiskParts, MapError> {
        Ok(DiskParts {
            writer: Mutex::new(Writer::new(&watched, &devices)?),
            devices,
            watched,
            cache: PageCache::new(cache_bytes)?,
            queue: WriterQueue::default(),
            #[cfg(feature = "test-api")]
            stepped_flush: Mutex::default(),
            unreadable: Mutex::default(),
            has_unreadable: AtomicBool::new(false),
            failure: DiskFailure::default(),
            slow_requests: AtomicU64::new(0),
        })
    }

    /// Adds a device behind all others.
    pub(super) fn attach(&self, mut new: NewDevice) -> Result<(), MapError> {
        if self.devices.first().is_none() {
            // Behind memory there is no overlay: sessions read the checksums of pages here.
            new.frame_table = 0..0;
        }
        let device = super::device::Device::open(&new.file)?;
        let device = device.placed_at(new.bytes.start, &self.watched);
        let device = DiskDevice::new(device, new)?;
        // A device with the same bytes may have left.
        self.devices.add(device, |device| self.forget(device))
    }

    /// Takes a device out. Nobody uses a frame of it any more.
    pub(super) fn detach(&self, first_byte: usize) -> Result<(), MapError> {
        let no_group = self.lock_writer();
        let device = self.devices.joined_at(first_byte);
        if device.is_none() && self.devices.is_absent(first_byte) {
            return Ok(());
        }
        let device = device.ok_or(MapError::NoDeviceAt(first_byte))?;
        device.mark_left();
        self.forget(device);
        drop(no_group);
        device.close()
    }

    /// Drops the cached pages of a device, and what is known of them.
    fn forget(&self, device: &DiskDevice) {
        let pages = device.first_page()..device.end_page();
        self.cache.discard(&pages);
        lock(&self.unreadable).retain(|page| !pages.contains(page));
    }

    /// Reports requests that take too long, and fails the disk if one takes even longer.
    pub(super) fn look_at_requests(&self, limits: RequestLimits) {
        for old in self.watched.old_requests(limits.slow) {
            let OldRequest { offset, age, looks } = old;
            let Some(device) = self.devices.device_of(offset as usize) else {
                continue;
            };
            let (offset, name) = (device.byte_of(offset as usize), device.device.name());
            if looks == 1 {
                self.slow_requests.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("a request at byte {offset} of {name} takes {age:.1?} so far");
            }
            // A process that was stopped finds old requests that have long ended, and takes them up now.
            if age >= limits.fail && looks >= LOOKS_BEFORE_FAILURE {
                self.note_hung(device, offset, age);
            }
        }
    }

    /// Reads a page from its device, or lists it as unreadable. False: its device has left, and the bytes are not to be
    /// cached.
    pub(super) fn read_device(&self, page: usize, into: &mut [u8; PAGE_BYTES]) -> bool {
        let Some(device) = self.devices.device_of(page * PAGE_BYTES) else {
            fill_with_pattern(into);
            return false;
        };
        if let Err(cause) = DiskParts::try_read_page(device, page, into) {
            self.note_unreadable(page, &cause);
            fill_with_pattern(into);
        }
        !device.has_left()
    }

    /// Reads a page from its device.
    pub(super) fn try_read_device(
        &self,
        page: usize,
        into: &mut [u8; PAGE_BYTES],
    ) -> std::io::Result<()> {
        let device = self.devices.device_of(page * PAGE_BYTES);
        let device = device.ok_or(std::io::ErrorKind::NotFound)?;
        DiskParts::try_read_page(device, page, into)
    }

    /// Reads a page, by its number in the disk, from a device.
    pub(super) fn try_read_page(
        device: &DiskDevice,
        page: usize,
        into: &mut [u8; PAGE_BYTES],
    ) -> std::io::Result<()> {
        let mut bytes = AlignedPage([0; PAGE_BYTES]);
        let at = device.byte_of(page * PAGE_BYTES);
        device.device.read_at(&mut bytes.0, at)?;
        *into = bytes.0;
        Ok(())
    }

    /// Lists a page of a device as unreadable. Returns the number of listed pages of the device.
    pub(super) fn list_unreadable(&self, page: usize, device: &DiskDevice) -> usize {
        let mut unreadable = lock(&self.unreadable);
        unreadable.insert(page);
        self.has_unreadable.store(true, Ordering::Release);
        let pages = device.first_page()..device.end_page();
        unreadable.range(pages).count()
    }

    pub(super) fn unreadable_pages(&self) -> Vec<usize> {
        if !self.has_unreadable.load(Ordering::Acquire) {
            return Vec::new();
        }
        lock(&self.unreadable).iter().copied().collect()
    }

    pub(super) fn is_unreadable(&self, offset: usize) -> bool {
        let is_listed = self.has_unreadable.load(Ordering::Acquire)
            && lock(&self.unreadable).contains(&(offset / PAGE_BYTES));
        is_listed || self.devices.is_absent(offset)
    }

    pub(super) fn figures(&self) -> DiskFigures {
        DiskFigures {
            unreadable_pages: lock(&self.unreadable).len() as u64,
            slow_requests: self.slow_requests.load(Ordering::Relaxed),
            ..self.cache.figures()
        }
    }

    /// The head of a device with a range of it loaded; `at` is a byte of the device.
    #[inline]
    fn head<'d>(&self, device: &'d DiskDevice, at: usize, len: usize) -> &'d Memory {
        let parts = self;
        device.head.loaded(at, len, &HeadLoader { parts, device })
    }

    /// Calls `access` until it finds its page in the cache; loads the page in between. None: the page's device has left, or is absent.
    #[inline]
    fn with_cached<T>(
        &self,
        page: usize,
        mut access: impl FnMut(&PageCache) -> Option<T>,
    ) -> Option<T> {
        loop {
            if let Some(done) = access(&self.cache) {
                return Some(done);
            }
            self.cache.begin_load(page);
            let mut bytes = [0; PAGE_BYTES];
            if !self.read_device(page, &mut bytes) {
                self.cache.cancel_load(page);
                return None;
            }
            if self.cache.end_load(page, &bytes, false) == LoadEnd::Full {
                self.wait_for_room();
            }
        }
    }

    /// Loads a page of the frame table, with those around it, into the cache by one request. Nothing is reported: a page
    /// that is not in the cache afterwards is loaded alone.
    pub(super) fn load_table_run(&self, device: &DiskDevice, page: usize) {
        let Some(run) = device.table_run(page, self.cache.run_pages()) else {
            return;
        };
        let len = run.len() * PAGE_BYTES;
        if run.len() < 2 || self.cache.contains(page) || self.failure.cause().is_some() {
            return;
        }
        let Ok(memory) = Memory::new(len) else {
            return;
        };
        run.clone().for_each(|page| self.cache.begin_load(page));
        // SAFETY: in range, and nobody else has this memory.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address(0, len), len) };
        let at = device.byte_of(run.start * PAGE_BYTES);
        let is_read = device.device.read_at(bytes, at).is_ok() && !device.has_left();
        for (page, bytes) in run.zip(bytes.as_chunks::<PAGE_BYTES>().0) {
            match is_read {
                true => drop(self.cache.end_load(page, bytes, false)),
                false => self.cache.cancel_load(page),
            }
        }
    }

    fn wait_for_room(&self) {
        if !self.wait_for_cleaning() {
            // The pool ends at the next sync. Slots that are reserved for loads come back.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Calls `look` with the memory of a range within one page, and its byte there. None: its device has left.
    #[inline]
    pub(super) fn look<T>(
        &self,
        offset: usize,
        len: usize,
        mut look: impl FnMut(&Memory, usize) -> T,
    ) -> Option<T> {
        match self.devices.place(offset) {
            ByteLocation::Head(device, at) => Some(look(self.head(device, at, len), at)),
            ByteLocation::Cached(_) => {
                let (page, within) = (offset / PAGE_BYTES, offset % PAGE_BYTES);
                self.with_cached(page, |cache| {
                    cache.access(page, |memory, slot_at| look(memory, slot_at + within))
                })
            }
            ByteLocation::Left | ByteLocation::Absent => None,
        }
    }

    /// The same for a change.
    #[inline]
    pub(super) fn change<T>(
        &self,
        offset: usize,
        len: usize,
        mut change: impl FnMut(&Memory, usize) -> T,
    ) -> Option<T> {
        let changed = match self.devices.place(offset) {
            ByteLocation::Head(device, at) => {
                let changed = change(self.head(device, at, len), at);
                device.head.mark_dirty(at, len);
                Some(changed)
            }
            ByteLocation::Cached(_) => {
                let (page, within) = (offset / PAGE_BYTES, offset % PAGE_BYTES);
                self.with_cached(page, |cache| {
                    cache.change(page, |memory, slot_at| {
                        self.check_change(offset);
                        change(memory, slot_at + within)
                    })
                })
            }
            ByteLocation::Left => None,
            // The pool counts the page as damaged already.
            ByteLocation::Absent => return None,
        };
        if changed.is_none() {
            self.fail_change_of_left(offset);
        }
        changed
    }

    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        check_range(self.devices.len(), offset, into.len(), 1);
        let mut at = offset;
        for part in split_by_page(offset, into) {
            let len = part.len();
            let found = self.look(at, len, |memory, memory_at| memory.read(memory_at, part));
            if found.is_none() {
                for (byte, at) in part.iter_mut().zip(at..) {
                    *byte = PATTERN.to_le_bytes()[at % 8];
                }
            }
            at += len;
        }
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        check_range(self.devices.len(), offset, bytes.len(), 1);
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.len().min(PAGE_BYTES - at % PAGE_BYTES));
            self.change(at, part.len(), |memory, memory_at| {
                memory.write(memory_at, part);
            });
            at += part.len();
            rest = after;
        }
    }

    pub(super) fn replace_page(&self, offset: usize, page: &[u8; PAGE_BYTES]) -> PageChecksums {
        check_range(self.devices.len(), offset, PAGE_BYTES, PAGE_BYTES);
        if !matches!(self.devices.place(offset), ByteLocation::Cached(_)) {
            let stream = |memory: &Memory, at| memory.stream_page(at, page);
            let sums = self.change(offset, PAGE_BYTES, stream);
            return sums.unwrap_or_else(|| PageChecksums::of(page));
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
}

/// Reads pages of the head of a device.
struct HeadLoader<'d> {
    parts: &'d DiskParts,
    device: &'d DiskDevice,
}

impl LoadPages for HeadLoader<'_> {
    fn load(&self, page: usize, into: &mut [u8; PAGE_BYTES]) {
        let first = self.device.first_page();
        self.parts.read_device(first + page, into);
    }

    fn try_load_run(&self, first: usize, into: &mut [u8]) -> bool {
        // A failed device may take long for each request.
        let has_failed = self.parts.failure.cause().is_some();
        let at = (first * PAGE_BYTES) as u64;
        !has_failed && self.device.device.read_at(into, at).is_ok()
    }
}

/// The result of a step. A panic in it is a failure, so that nobody waits for its end for ever.
pub(super) fn or_panicked(
    step: impl FnOnce() -> Result<(), WriteFailure>,
) -> Result<(), WriteFailure> {
    // The disk fails, and uses nothing that the step may have left half changed.
    let ended = catch_unwind(AssertUnwindSafe(step));
    ended.unwrap_or_else(|_| Err(WriteFailure::of_panic()))
}

fn fill_with_pattern(page: &mut [u8; PAGE_BYTES]) {
    page.as_chunks_mut::<8>().0.fill(PATTERN.to_le_bytes());
}

/// Parts of `bytes` that lie in one page each; the first begins at `offset`.
fn split_by_page(offset: usize, bytes: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    let first = bytes.len().min(PAGE_BYTES - offset % PAGE_BYTES);
    let (first, rest) = bytes.split_at_mut(first);
    std::iter::once(first).chain(rest.chunks_mut(PAGE_BYTES))
}
