//! Memory in front of disks, as one medium: the first device is mapped, and the further devices are disks.
//!
//! There is one view. Stores below the end of the memory are durable after a fence, as on the mapping alone. Stores to a
//! disk are durable after a sync.

use crate::async_io::AsyncIo;
use crate::disk::DiskMedia;
use crate::disk_figures::{DiskFigures, ResidentCheck};
use crate::map_error::MapError;
use crate::mapped_media::MappedMedia;
use crate::media::{FenceProof, Media, NewDevice, UnfencedStores};
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most targets of one streamed page.
const TARGETS_MAX: usize = 8;

/// A mapped first device with disks behind it.
pub struct TieredMedia {
    memory: MappedMedia,
    memory_len: usize,
    disk: DiskMedia,
    /// Stores to the disk so far, each counted after it was made.
    disk_stores: AtomicU64,
    /// Of these, the ones that a sync has made durable.
    synced_stores: AtomicU64,
}

impl TieredMedia {
    /// Joins a mapping with the data view of a disk that has no device below the mapping's end.
    #[must_use]
    pub fn new(memory: MappedMedia, disk: DiskMedia) -> TieredMedia {
        TieredMedia {
            memory_len: memory.len_bytes(),
            memory,
            disk,
            // An earlier process may have left stores: the first sync is a real one.
            disk_stores: AtomicU64::new(1),
            synced_stores: AtomicU64::new(0),
        }
    }

    /// The first device.
    #[must_use]
    pub fn memory(&self) -> &MappedMedia {
        &self.memory
    }

    /// The view of the further devices.
    #[must_use]
    pub fn disk(&self) -> &DiskMedia {
        &self.disk
    }

    #[inline]
    fn is_in_memory(&self, offset: usize) -> bool {
        offset < self.memory_len
    }
}

/// Counts a store to the disk as a change, when it is dropped after it.
struct DiskStore<'m>(&'m AtomicU64);

impl Drop for DiskStore<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Calls a method that stores, as `route` does.
macro_rules! route_store {
    ($self:ident, $offset:expr, $method:ident($($arg:expr),*)) => {
        match $self.is_in_memory($offset) {
            true => $self.memory.$method($($arg),*),
            false => {
                let _counted = DiskStore(&$self.disk_stores);
                $self.disk.$method($($arg),*)
            }
        }
    };
}

/// Calls a method of the mapping or of the disk, by the offset.
macro_rules! route {
    ($self:ident, $offset:expr, $method:ident($($arg:expr),*)) => {
        match $self.is_in_memory($offset) {
            true => $self.memory.$method($($arg),*),
            false => $self.disk.$method($($arg),*),
        }
    };
}

impl Media for TieredMedia {
    fn len_bytes(&self) -> usize {
        self.disk.len_bytes().max(self.memory_len)
    }

    #[inline]
    fn read(&self, offset: usize, into: &mut [u8]) {
        route!(self, offset, read(offset, into));
    }

    #[inline]
    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        route!(self, offset, read_page(offset, into))
    }

    #[inline]
    fn load(&self, offset: usize) -> u64 {
        route!(self, offset, load(offset))
    }

    #[inline]
    fn store(&self, offset: usize, word: u64) {
        route_store!(self, offset, store(offset, word));
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        route_store!(self, offset, write(offset, bytes));
    }

    #[inline]
    fn prefetch(&self, offset: usize) {
        route!(self, offset, prefetch(offset));
    }

    #[inline]
    fn prefetch_all(&self, offset: usize, len: usize) {
        route!(self, offset, prefetch_all(offset, len));
    }

    fn prepare_stores(&self, offset: usize, len: usize) {
        route!(self, offset, prepare_stores(offset, len));
    }

    #[inline]
    fn prefetch_load(&self, offset: usize) {
        route!(self, offset, prefetch_load(offset));
    }

    #[inline]
    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        route_store!(self, offset, compare_exchange(offset, old, new))
    }

    #[inline]
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        route_store!(self, offset, stream_line(offset, line))
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        assert!(targets.len() <= TARGETS_MAX, "{} targets", targets.len());
        let (first, _) = targets[0];
        let mut in_memory = [(&first.memory, 0); TARGETS_MAX];
        let mut count = 0;
        for (media, offset) in targets {
            if media.is_in_memory(*offset) {
                in_memory[count] = (&media.memory, *offset);
                count += 1;
            }
        }
        if count == targets.len() {
            return MappedMedia::stream_page(&in_memory[..count], page);
        }
        // The bytes of the source may change: all targets get one copy of them.
        let copy = *page;
        let on_disk = targets.iter().filter(|(it, at)| !it.is_in_memory(*at));
        let on_disk: Vec<_> = on_disk.map(|(it, at)| (&it.disk, *at)).collect();
        let counted = targets.iter().filter(|(it, at)| !it.is_in_memory(*at));
        let counted: Vec<_> = counted.map(|(it, _)| DiskStore(&it.disk_stores)).collect();
        let (sums, stores) = DiskMedia::stream_page(&on_disk, &copy);
        drop(counted);
        match count {
            0 => (sums, stores),
            _ => {
                let (_, streamed) = MappedMedia::stream_page(&in_memory[..count], &copy);
                (sums, streamed.and(stores))
            }
        }
    }

    #[inline]
    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        route!(self, offset, flush(offset, len))
    }

    #[inline]
    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        self.memory.fence(stores)
    }

    fn fence_each(media: &[&Self], stores: UnfencedStores) -> FenceProof {
        // One instruction fences the memory of all.
        media[0].memory.fence(stores)
    }

    fn tolerate_unreadable(&self, from: usize) {
        self.memory.tolerate_unreadable(from);
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        route!(self, offset, is_unreadable(offset))
    }

    fn can_read(&self, offset: usize) -> bool {
        route!(self, offset, can_read(offset))
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        let mut pages = self.memory.unreadable_pages();
        pages.extend(self.disk.unreadable_pages());
        pages
    }

    fn is_cached(&self, offset: usize) -> bool {
        self.is_in_memory(offset) || self.disk.is_cached(offset)
    }

    fn is_on_disk(&self, offset: usize) -> bool {
        !self.is_in_memory(offset)
    }

    fn disk_figures(&self) -> Option<DiskFigures> {
        self.disk.disk_figures()
    }

    fn compare_resident(&self, from: usize) -> ResidentCheck {
        self.disk.compare_resident(from)
    }

    fn async_io(&self) -> Result<Option<Box<dyn AsyncIo>>, MapError> {
        self.disk.async_io()
    }

    fn attach_device(&self, device: NewDevice) -> Result<(), MapError> {
        if device.bytes.start < self.memory_len {
            return Err(MapError::BadDevicePlace {
                start: device.bytes.start,
                end: device.bytes.end,
                head_len: device.head_len,
            });
        }
        self.disk.attach_device(device)
    }

    fn detach_device(&self, first_byte: usize) -> Result<(), MapError> {
        self.disk.detach_device(first_byte)
    }

    fn attach_absent(&self, bytes: Range<usize>) -> Result<(), MapError> {
        self.disk.attach_absent(bytes)
    }

    fn buffers_from(&self) -> Option<usize> {
        Some(self.memory_len)
    }

    fn sync(&self) -> Result<(), MapError> {
        self.memory.sync()?;
        let stores = self.disk_stores.load(Ordering::Acquire);
        // A checkpoint of memory alone waits for no disk.
        if stores == self.synced_stores.load(Ordering::Acquire) {
            return self.disk.check_sound();
        }
        self.disk.sync()?;
        self.synced_stores.fetch_max(stores, Ordering::AcqRel);
        Ok(())
    }
}
