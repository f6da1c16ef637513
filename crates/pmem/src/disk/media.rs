//! The disk's two views as [`Media`].

use super::device::{Device, DeviceFacts};
use super::device_map::{ByteLocation, DeviceMap, DiskDevice};
use super::io::DiskIo;
use super::memory::Memory;
use super::parts::DiskParts;
use super::watch::{RequestLimits, WatchedRequests};
use crate::async_io::AsyncIo;
use crate::disk_figures::{DiskFigures, ResidentCheck};
use crate::map_error::MapError;
use crate::mapped_media::system;
use crate::media::{FenceProof, Media, NewDevice, UnfencedStores, check_range};
use crate::unreadable::PATTERN;
use pagemesh_base::checksum::{PageChecksums, crc32c};
use pagemesh_base::poison::lock;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// The size of a disk's parts, and its limits.
#[derive(Clone, Copy, Debug)]
pub struct DiskOptions {
    /// Bytes of the cache of frames.
    pub cache_bytes: usize,
    /// The limits of a request's age.
    pub limits: RequestLimits,
}

/// Devices with the memory in front of them.
pub struct Disk {
    parts: Arc<DiskParts>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Disk {
    /// Starts the writer of a disk with its first device, which begins at byte 0. Without one, the first device that joins
    /// may begin anywhere.
    ///
    /// # Errors
    /// When the device is shorter, or the system refuses.
    pub fn start(first: Option<NewDevice>, options: DiskOptions) -> Result<Disk, MapError> {
        let limits = options.limits;
        let watched = Arc::new(WatchedRequests::new());
        let first = first.map(|first| {
            let device = Device::open(&first.file)?.placed_at(0, &watched);
            DiskDevice::new(device, first)
        });
        let disk = Disk::without_threads(first.transpose()?, watched, options)?;
        disk.spawn("disk", |parts| {
            while parts.queue.next() {
                parts.run_group();
            }
        })?;
        disk.spawn("disk-flush", |parts| {
            while let Some(number) = parts.queue.next_flush() {
                parts.flush(number);
            }
        })?;
        disk.spawn("disk-watch", move |parts| {
            while parts.watched.wait_for_look(limits) {
                parts.look_at_requests(limits);
            }
        })?;
        Ok(disk)
    }

    pub(super) fn without_threads(
        first: Option<DiskDevice>,
        watched: Arc<WatchedRequests>,
        options: DiskOptions,
    ) -> Result<Disk, MapError> {
        let devices = DeviceMap::new(first);
        let parts = DiskParts::new(devices, watched, options.cache_bytes)?;
        Ok(Disk {
            parts: Arc::new(parts),
            threads: Mutex::default(),
        })
    }

    fn spawn(
        &self,
        name: &str,
        run: impl FnOnce(&DiskParts) + Send + 'static,
    ) -> Result<(), MapError> {
        let parts = self.parts.clone();
        let thread = std::thread::Builder::new().name(name.into());
        let spawned = thread.spawn(move || {
            // A request that waits for this thread fails with the disk.
            if catch_unwind(AssertUnwindSafe(|| run(&parts))).is_err() {
                parts.fail(
                    "a thread of the disk panicked; this is a defect of pagemesh: please report it"
                        .into(),
                );
            }
        });
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

    /// What its first device says of itself.
    #[must_use]
    pub fn facts(&self) -> Option<DeviceFacts> {
        self.parts.devices.first().map(|first| first.device.facts())
    }

    /// The view of what the disk holds after the next sync.
    #[must_use]
    pub fn data(self: &Arc<Disk>) -> DiskMedia {
        DiskMedia {
            disk: self.clone(),
            is_overlay: false,
        }
    }

    /// The view with stores of this process over those of the data view: a page is copied at its first access and stays in
    /// memory, so it never shows a later change of the data view. All such views of a disk are the same.
    #[must_use]
    pub fn overlay(self: &Arc<Disk>) -> DiskMedia {
        DiskMedia {
            disk: self.clone(),
            is_overlay: true,
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.parts.queue.stop();
        self.parts.watched.stop();
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

/// A view of a disk.
pub struct DiskMedia {
    disk: Arc<Disk>,
    is_overlay: bool,
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

    /// Whether the disk can still make stores durable.
    pub(crate) fn check_sound(&self) -> Result<(), MapError> {
        match self.parts().queue.has_failed() {
            true => Err(MapError::SyncFailed),
            false => Ok(()),
        }
    }

    /// Calls `look` with the memory of a range within one page, and its byte there.
    #[inline]
    fn look<T>(
        &self,
        offset: usize,
        len: usize,
        mut look: impl FnMut(&Memory, usize) -> T,
    ) -> Option<T> {
        let parts = self.parts();
        if !self.is_overlay {
            return parts.look(offset, len, look);
        }
        let device = parts.devices.device_of(offset)?;
        let at = device.byte_of(offset) as usize;
        let load = |page: usize, into: &mut [u8; PAGE_BYTES]| {
            let page = device.first_page() + page;
            parts.load_table_run(device, page);
            parts.read(page * PAGE_BYTES, into);
        };
        Some(look(device.overlay.loaded(at, len, &load), at))
    }

    /// The same for a change.
    #[inline]
    fn change<T>(
        &self,
        offset: usize,
        len: usize,
        change: impl FnMut(&Memory, usize) -> T,
    ) -> Option<T> {
        match self.is_overlay {
            true => self.look(offset, len, change),
            false => self.parts().change(offset, len, change),
        }
    }
}

impl Media for DiskMedia {
    fn len_bytes(&self) -> usize {
        self.parts().devices.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        if !self.is_overlay {
            return self.parts().read(offset, into);
        }
        check_range(self.len_bytes(), offset, into.len(), 1);
        let copied = self.look(offset, into.len(), |memory, at| memory.read(at, into));
        if copied.is_none() {
            self.parts().read(offset, into);
        }
    }

    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        if offset.is_multiple_of(PAGE_BYTES) {
            let copied = self.look(offset, PAGE_BYTES, |memory, at| memory.read_page(at, into));
            if let Some(sum) = copied {
                return sum;
            }
        }
        self.read(offset, into);
        crc32c(into)
    }

    fn load(&self, offset: usize) -> u64 {
        let load = |memory: &Memory, at| memory.word(at).load(Ordering::Acquire);
        self.look(offset, 8, load).unwrap_or(PATTERN)
    }

    fn store(&self, offset: usize, word: u64) {
        self.change(offset, 8, |memory, at| {
            memory.word(at).store(word, Ordering::Release);
        });
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        if !self.is_overlay {
            return self.parts().write(offset, bytes);
        }
        check_range(self.len_bytes(), offset, bytes.len(), 1);
        self.look(offset, bytes.len(), |memory, at| memory.write(at, bytes));
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        let swap = |memory: &Memory, at| {
            let word = memory.word(at);
            word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        };
        let swapped = self.change(offset, 8, swap);
        swapped.unwrap_or(Err(PATTERN)).map(drop)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        check_range(self.len_bytes(), offset, LINE_BYTES, LINE_BYTES);
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
            let stream = |memory: &Memory, at| memory.stream_page(at, &copy);
            sums = match media.is_overlay {
                true => media.look(*offset, PAGE_BYTES, stream),
                false => Some(media.parts().replace_page(*offset, &copy)),
            };
        }
        let sums = sums.unwrap_or_else(|| PageChecksums::of(&copy));
        (sums, UnfencedStores(()))
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        check_range(self.len_bytes(), offset, len, 1);
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
        let pages = self.parts().unreadable_pages();
        pages.iter().map(|page| page * PAGE_BYTES).collect()
    }

    fn is_cached(&self, offset: usize) -> bool {
        let parts = self.parts();
        self.is_overlay
            || match parts.devices.place(offset) {
                ByteLocation::Cached(_) => parts.cache.contains(offset / PAGE_BYTES),
                ByteLocation::Head(..) | ByteLocation::Left | ByteLocation::Absent => true,
            }
    }

    fn load_ahead(&self, offsets: &[usize]) {
        let parts = self.parts();
        let is_missing = |offset: &usize| match parts.devices.place(*offset) {
            ByteLocation::Cached(_) => !parts.cache.contains(offset / PAGE_BYTES),
            ByteLocation::Head(..) | ByteLocation::Left | ByteLocation::Absent => false,
        };
        let missing: Vec<usize> = offsets.iter().copied().filter(is_missing).collect();
        // A simulated device takes its time only from requests that the simulation drives.
        if missing.len() < 2 || parts.devices.is_simulated() {
            return;
        }
        match DiskIo::new(self.disk.clone()) {
            Ok(mut io) => io.load_and_wait(&missing),
            Err(cause) => tracing::debug!(%cause, "pages are loaded one by one"),
        }
    }

    fn is_on_disk(&self, _offset: usize) -> bool {
        true
    }

    fn disk_figures(&self) -> Option<DiskFigures> {
        Some(self.parts().figures())
    }

    fn compare_resident(&self, first: usize) -> ResidentCheck {
        self.parts().compare_resident(first)
    }

    fn has_room(&self) -> bool {
        self.is_overlay || self.parts().cache.has_room()
    }

    fn async_io(&self) -> Result<Option<Box<dyn AsyncIo>>, MapError> {
        Ok(Some(Box::new(DiskIo::new(self.disk.clone())?)))
    }

    fn attach_device(&self, device: NewDevice) -> Result<(), MapError> {
        self.parts().attach(device)
    }

    fn detach_device(&self, first_byte: usize) -> Result<(), MapError> {
        self.parts().detach(first_byte)
    }

    fn attach_absent(&self, bytes: Range<usize>) -> Result<(), MapError> {
        self.parts().devices.add_absent(bytes);
        Ok(())
    }

    fn sync(&self) -> Result<(), MapError> {
        if self.is_overlay {
            return Ok(());
        }
        let parts = self.parts();
        parts.wait_for_group(parts.queue.request_flush())
    }
}
