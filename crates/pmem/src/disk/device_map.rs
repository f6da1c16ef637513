//! The devices of a disk: ranges of its bytes, each with a head in memory and frames behind it.
//!
//! Invariants:
//! - a device is never dropped while the disk is open, because a reader may still look at a page of one that has left;
//!   its memory and its descriptor are given back when it leaves;
//! - of two devices with the same bytes the later one counts, and the earlier one has left.

use super::device::Device;
use super::head::{Head, LoadedPages};
use crate::map_error::MapError;
use crate::mapped_media::system;
use crate::media::NewDevice;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Further devices that join while a disk is open, with those that leave.
const JOINS_MAX: usize = 64;
/// Pages of a further device with a copy of its header each.
const HEADER_PAGES: usize = 2;

/// A device and its range.
pub(super) struct DiskDevice {
    /// Its bytes in the disk.
    pub(super) bytes: Range<usize>,
    pub(super) device: Device,
    /// Its first bytes, in memory as a whole.
    pub(super) head: Head,
    /// Its bytes of the head that are in the cache: the frame table. Only checkpoints store there, and sessions have the overlay.
    cached_table: Range<usize>,
    /// Its pages in the overlay.
    pub(super) overlay: LoadedPages,
    /// Written since its last FLUSH, or never flushed by this process.
    is_unflushed: AtomicBool,
    has_left: AtomicBool,
    has_failed: AtomicBool,
    /// A request of it has not ended in time.
    is_hung: AtomicBool,
    /// Writes and FLUSHes that have begun and not ended.
    changes_in_flight: AtomicUsize,
    /// Holds the lock of the file as long as requests are possible.
    locked: Mutex<Option<File>>,
}

/// The place of a byte of a disk.
pub(super) enum ByteLocation<'d> {
    /// In the head of a device, at this byte of the device.
    Head(&'d DiskDevice, usize),
    /// In the frames of a device, or in a part of its head that the cache has.
    Cached(&'d DiskDevice),
    /// On a device that has left.
    Left,
    /// On a device that has failed before the disk was opened, and is not there.
    Absent,
}

impl DiskDevice {
    pub(super) fn new(device: Device, place: NewDevice) -> Result<DiskDevice, MapError> {
        let NewDevice {
            file,
            bytes,
            head_len,
            frame_table,
        } = place;
        let len = bytes.len();
        let is_whole = |bytes: usize| bytes.is_multiple_of(PAGE_BYTES);
        if bytes.is_empty() || !is_whole(bytes.start) || !is_whole(len) || !is_whole(head_len) {
            let Range { start, end } = bytes;
            return Err(MapError::BadDevicePlace {
                start,
                end,
                head_len,
            });
        }
        let found = device.facts().len;
        if found < len as u64 {
            let wanted = len as u64;
            return Err(MapError::TooShort { wanted, found });
        }
        Ok(DiskDevice {
            bytes,
            device,
            head: Head::new(head_len.min(len))?,
            cached_table: frame_table.start / PAGE_BYTES * PAGE_BYTES
                ..frame_table.end.next_multiple_of(PAGE_BYTES).min(head_len),
            overlay: LoadedPages::new(len, 1)?,
            is_unflushed: AtomicBool::new(true),
            has_left: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            is_hung: AtomicBool::new(false),
            changes_in_flight: AtomicUsize::new(0),
            locked: Mutex::new(Some(file)),
        })
    }

    #[inline]
    fn place(&self, offset: usize) -> ByteLocation<'_> {
        let at = offset - self.bytes.start;
        match self.is_resident(at) {
            true => ByteLocation::Head(self, at),
            false => ByteLocation::Cached(self),
        }
    }

    /// Whether one of its bytes stays in memory.
    #[inline]
    fn is_resident(&self, at: usize) -> bool {
        at < self.head.len() && !self.cached_table.contains(&at)
    }

    /// The same of a page, by its number in the disk.
    #[inline]
    pub(super) fn is_page_resident(&self, page: usize) -> bool {
        self.is_resident(page * PAGE_BYTES - self.bytes.start)
    }

    /// The pages of the frame table that are loaded together with one of them, all by their numbers in the disk. None of
    /// another page.
    pub(super) fn table_run(&self, page: usize, pages_max: usize) -> Option<Range<usize>> {
        let table = self.cached_table.start / PAGE_BYTES..self.cached_table.end / PAGE_BYTES;
        let first = self.first_page();
        let own_page = page - first;
        if !table.contains(&own_page) {
            return None;
        }
        let start = own_page - (own_page - table.start) % pages_max;
        Some(first + start..first + table.end.min(start + pages_max))
    }

    /// The number of its first page.
    pub(super) fn first_page(&self) -> usize {
        self.bytes.start / PAGE_BYTES
    }

    /// The number behind its last page.
    pub(super) fn end_page(&self) -> usize {
        self.bytes.end / PAGE_BYTES
    }

    /// Whether a page of it, by its number in the disk, is in its head.
    #[inline]
    pub(super) fn is_in_head(&self, page: usize) -> bool {
        page * PAGE_BYTES - self.bytes.start < self.head.len()
    }

    /// Whether a page of it, by its number in the disk, is one of the two copies of a further device's header. The other
    /// copy is enough.
    pub(super) fn is_page_of_header(&self, page: usize) -> bool {
        self.bytes.start > 0 && page - self.first_page() < HEADER_PAGES
    }

    /// Its byte of a byte of the disk.
    pub(super) fn byte_of(&self, offset: usize) -> u64 {
        (offset - self.bytes.start) as u64
    }

    /// Whether it is no longer of the disk.
    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::SeqCst)
    }

    pub(super) fn mark_left(&self) {
        self.has_left.store(true, Ordering::SeqCst);
    }

    /// Gives back the memory and the file, after the device has left. Requests in flight keep the file open until they end;
    /// later ones find an empty file.
    pub(super) fn close(&self) -> Result<(), MapError> {
        self.head.discard();
        self.overlay.discard();
        let nothing = File::open("/dev/null").map_err(system("open /dev/null"))?;
        // SAFETY: both descriptors are open. Users of the number find another file from now on, and no other number changes.
        let replaced = unsafe {
            libc::dup3(
                nothing.as_raw_fd(),
                self.device.file().as_raw_fd(),
                libc::O_CLOEXEC,
            )
        };
        if replaced < 0 {
            return Err(system("close the device")(io::Error::last_os_error()));
        }
        lock(&self.locked).take();
        Ok(())
    }

    /// Whether a request has shown that the device has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    pub(super) fn mark_failed(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// Whether it has failed by a request that did not end.
    pub(super) fn is_hung(&self) -> bool {
        self.is_hung.load(Ordering::SeqCst)
    }

    pub(super) fn mark_hung(&self) {
        self.is_hung.store(true, Ordering::SeqCst);
    }

    /// A write or a FLUSH begins.
    pub(super) fn begin_change(&self) {
        self.changes_in_flight.fetch_add(1, Ordering::SeqCst);
    }

    /// It has ended.
    pub(super) fn end_change(&self) {
        self.changes_in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a write or a FLUSH of it is in flight.
    pub(super) fn is_changing(&self) -> bool {
        self.changes_in_flight.load(Ordering::SeqCst) > 0
    }

    /// Another handle of its open file, with its lock. None after it has left.
    pub(super) fn share_file(&self) -> io::Result<Option<File>> {
        lock(&self.locked).as_ref().map(File::try_clone).transpose()
    }

    /// A write of it has ended.
    pub(super) fn mark_unflushed(&self) {
        self.is_unflushed.store(true, Ordering::SeqCst);
    }

    /// Whether writes that have ended may be lost with its power, until a FLUSH that begins now.
    fn take_unflushed(&self) -> bool {
        self.is_unflushed.swap(false, Ordering::SeqCst)
    }
}

/// The devices of a disk.
pub(super) struct DeviceMap {
    /// The device at byte 0. None for the disks behind memory.
    first: Option<DiskDevice>,
    /// The byte behind it.
    first_end: usize,
    others: [OnceLock<Box<DiskDevice>>; JOINS_MAX],
    count: AtomicUsize,
    /// The byte behind the last device that ever was.
    len: AtomicUsize,
    joining: Mutex<()>,
    /// Ranges of failed devices.
    absent: Mutex<Vec<Range<usize>>>,
    has_absent: AtomicBool,
}

impl DeviceMap {
    pub(super) fn new(first: Option<DiskDevice>) -> DeviceMap {
        let first_end = first.as_ref().map_or(0, |device| device.bytes.end);
        DeviceMap {
            first,
            first_end,
            others: [const { OnceLock::new() }; JOINS_MAX],
            count: AtomicUsize::new(0),
            len: AtomicUsize::new(first_end),
            joining: Mutex::new(()),
            absent: Mutex::default(),
            has_absent: AtomicBool::new(false),
        }
    }

    /// The byte behind the last device.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// The device at byte 0.
    pub(super) fn first(&self) -> Option<&DiskDevice> {
        self.first.as_ref()
    }

    /// Whether a simulation plays the first device, and so the disk has no threads.
    pub(super) fn is_simulated(&self) -> bool {
        let first = self.first.as_ref();
        first.is_some_and(|first| first.device.is_simulated())
    }

    /// Whether a caller may write its group itself now.
    #[cfg(feature = "test-api")]
    pub(super) fn allows_inline(&self) -> bool {
        let first = self.first.as_ref();
        first.is_none_or(|first| first.device.allows_inline())
    }

    /// The devices that have not left.
    pub(super) fn iter(&self) -> impl Iterator<Item = &DiskDevice> {
        let joined = self.joined().filter(|device| !device.has_left());
        self.first.iter().chain(joined)
    }

    /// The further devices, the first that joined first, with those that have left.
    fn joined(&self) -> impl DoubleEndedIterator<Item = &DiskDevice> {
        let others = &self.others[..self.count.load(Ordering::Acquire)];
        others
            .iter()
            .filter_map(|device| device.get().map(|it| &**it))
    }

    /// The place of a byte.
    ///
    /// # Panics
    /// When no device has the byte, or ever had it.
    #[inline]
    #[track_caller]
    pub(super) fn place(&self, offset: usize) -> ByteLocation<'_> {
        match &self.first {
            Some(first) if offset < self.first_end => first.place(offset),
            _ => self.place_on_other(offset),
        }
    }

    #[inline(never)]
    #[track_caller]
    fn place_on_other(&self, offset: usize) -> ByteLocation<'_> {
        let mut newest_first = self.joined().rev();
        let found = newest_first.find(|device| device.bytes.contains(&offset));
        match found {
            Some(device) if device.has_left() => ByteLocation::Left,
            Some(device) => device.place(offset),
            None => {
                assert!(self.is_in_absent(offset), "a device has the byte {offset}");
                ByteLocation::Absent
            }
        }
    }

    /// Adds the range of a failed device.
    pub(super) fn add_absent(&self, bytes: Range<usize>) {
        let mut absent = lock(&self.absent);
        self.len.fetch_max(bytes.end, Ordering::AcqRel);
        if !absent.contains(&bytes) {
            absent.push(bytes);
        }
        self.has_absent.store(true, Ordering::Release);
    }

    fn is_in_absent(&self, offset: usize) -> bool {
        lock(&self.absent)
            .iter()
            .any(|bytes| bytes.contains(&offset))
    }

    /// Whether a byte is of a device that has failed.
    pub(super) fn is_absent(&self, offset: usize) -> bool {
        self.has_absent.load(Ordering::Acquire)
            && self.is_in_absent(offset)
            && matches!(self.place(offset), ByteLocation::Absent)
    }

    /// The device with a byte. None if it has left, or is absent.
    #[track_caller]
    pub(super) fn device_of(&self, offset: usize) -> Option<&DiskDevice> {
        match self.place(offset) {
            ByteLocation::Head(device, _) | ByteLocation::Cached(device) => Some(device),
            ByteLocation::Left | ByteLocation::Absent => None,
        }
    }

    /// The further device that begins at a byte.
    pub(super) fn joined_at(&self, first_byte: usize) -> Option<&DiskDevice> {
        let mut joined = self.joined();
        joined.find(|device| device.bytes.start == first_byte && !device.has_left())
    }

    /// Adds a device. `prepare` is called before anything finds it.
    pub(super) fn add(
        &self,
        device: DiskDevice,
        prepare: impl FnOnce(&DiskDevice),
    ) -> Result<(), MapError> {
        let _one_at_a_time = lock(&self.joining);
        let Range { start, end } = device.bytes;
        if self.iter().any(|other| other.bytes.end > start) {
            let head_len = device.head.len();
            return Err(MapError::BadDevicePlace {
                start,
                end,
                head_len,
            });
        }
        prepare(&device);
        let number = self.count.load(Ordering::Relaxed);
        let entry = self.others.get(number).ok_or(MapError::TooManyJoins)?;
        entry.get_or_init(|| Box::new(device));
        self.count.store(number + 1, Ordering::Release);
        self.len.fetch_max(end, Ordering::AcqRel);
        Ok(())
    }

    /// The devices that a FLUSH must reach: those that were written since their last one, and always the first.
    pub(super) fn take_unflushed(&self) -> Vec<&DiskDevice> {
        let is_first = |device: &DiskDevice| device.bytes.start == 0;
        let mut devices: Vec<_> = self.iter().collect();
        devices.retain(|device| device.take_unflushed() || is_first(device));
        devices
    }
}
