//! The writes of a group of dirty pages.
//!
//! A group contains each page that is dirty when it begins. Its requests are in flight together, in any
//! order. If somebody waits for durability, a FLUSH of each device that was written follows.

#[cfg(feature = "test-api")]
pub(super) mod stepwise;

use super::cache::PageCache;
use super::device::RequestKind;
use super::device_map::{DeviceMap, DiskDevice};
use super::group_queue::WriterQueue;
use super::memory::Memory;
use super::requests::{DeviceRequest, RequestMemory, RequestRing};
use super::watch::WatchedRequests;
use crate::map_error::MapError;
use crate::mapped_media::system;
use pagemesh_base::units::PAGE_BYTES;
use std::io;
use std::thread::{Scope, ScopedJoinHandle};

/// Requests in flight.
const REQUESTS_MAX: usize = 64;
/// Requests that are handed to the kernel by one system call.
const SUBMIT_RUNS: usize = 8;
/// Pages of one request.
const REQUEST_PAGES_MAX: usize = 32;

/// A run of neighbouring pages, written by one request.
#[derive(Clone, Copy)]
struct DirtyRun {
    first: usize,
    pages: usize,
}

/// The writer's ring and buffers.
pub(super) struct Writer {
    ring: RequestRing,
    completed: Vec<(usize, i32)>,
    /// A buffer for each request in flight: the pages are copied, because others may store to them.
    buffers: Memory,
    free: Vec<usize>,
    in_flight: Vec<Option<DirtyRun>>,
    pages: Vec<usize>,
    /// Requests so far.
    pushed: usize,
    /// The group that is written in steps, with its first error.
    #[cfg(feature = "test-api")]
    stepped: Option<stepwise::SteppedGroup>,
}

/// The parts of a disk that a group works on.
#[derive(Clone, Copy)]
pub(super) struct WriterTarget<'d> {
    pub(super) devices: &'d DeviceMap,
    pub(super) cache: &'d PageCache,
    pub(super) queue: &'d WriterQueue,
}

impl Writer {
    pub(super) fn new(watched: &WatchedRequests, devices: &DeviceMap) -> Result<Writer, MapError> {
        Ok(Writer {
            ring: RequestRing::new(watched, devices, REQUESTS_MAX)?,
            completed: Vec::new(),
            buffers: Memory::new(REQUESTS_MAX * REQUEST_PAGES_MAX * PAGE_BYTES)?,
            free: (0..REQUESTS_MAX).collect(),
            in_flight: vec![None; REQUESTS_MAX],
            pages: Vec::new(),
            pushed: 0,
            #[cfg(feature = "test-api")]
            stepped: None,
        })
    }

    /// Writes the group that was begun.
    ///
    /// # Errors
    /// When a device fails, or the disk has failed.
    pub(super) fn write_group(&mut self, target: WriterTarget<'_>) -> Result<(), WriteFailure> {
        // After a panic in a group its buffers never become free: do not wait for them.
        check_is_sound(target)?;
        let mut result = self.start_group(target);
        // Also after an error: the kernel reads the buffers until its requests have ended.
        while self.free.len() < REQUESTS_MAX {
            let reaped = self.reap(target);
            result = result.and(reaped);
        }
        result
    }

    /// Submits the writes of all pages that are dirty now.
    fn start_group(&mut self, target: WriterTarget<'_>) -> Result<(), WriteFailure> {
        check_is_sound(target)?;
        let mut pages = std::mem::take(&mut self.pages);
        for device in target.devices.iter() {
            device.head.take_dirty(device.first_page(), &mut pages);
        }
        target.cache.take_dirty(&mut pages);
        pages.sort_unstable();
        let mut result = Ok(());
        let mut rest = &pages[..];
        while let Some(&first) = rest.first() {
            let Some(device) = target.devices.device_of(first * PAGE_BYTES) else {
                rest = &rest[1..];
                continue;
            };
            let pages_max = REQUEST_PAGES_MAX.min(device.end_page() - first);
            let is_next = |&(i, &page): &(usize, &usize)| page == first + i;
            let run = rest.iter().enumerate().take(pages_max);
            let count = run.take_while(is_next).count();
            rest = &rest[count..];
            let run = DirtyRun {
                first,
                pages: count,
            };
            if let Err(cause) = self.submit(target, device, run) {
                result = Err(cause);
                break;
            }
            if target.cache.has_room() {
                target.queue.signal_room();
            }
        }
        pages.clear();
        self.pages = pages;
        result
    }

    /// Copies the dirty pages of a run and submits their writes. Pages that are no longer dirty split the run.
    fn submit(
        &mut self,
        target: WriterTarget<'_>,
        device: &DiskDevice,
        run: DirtyRun,
    ) -> Result<(), WriteFailure> {
        let mut copied = DirtyRun {
            first: run.first,
            pages: 0,
        };
        let mut buffer = self.take_buffer(target)?;
        for page in run.first..run.first + run.pages {
            let at = (buffer * REQUEST_PAGES_MAX + copied.pages) * PAGE_BYTES;
            let is_dirty = match device.is_page_resident(page) {
                true => {
                    let own_page = page - device.first_page();
                    device.head.copy_page(own_page, &self.buffers, at);
                    true
                }
                false => target.cache.begin_write(page, &self.buffers, at),
            };
            if is_dirty {
                copied.pages += 1;
                continue;
            }
            if copied.pages > 0 {
                self.push(target, device, buffer, copied)?;
                buffer = self.take_buffer(target)?;
            }
            copied = DirtyRun {
                first: page + 1,
                pages: 0,
            };
        }
        match copied.pages {
            0 => self.free.push(buffer),
            _ => self.push(target, device, buffer, copied)?,
        }
        Ok(())
    }

    fn take_buffer(&mut self, target: WriterTarget<'_>) -> Result<usize, WriteFailure> {
        loop {
            if let Some(buffer) = self.free.pop() {
                return Ok(buffer);
            }
            self.reap(target)?;
        }
    }

    fn push(
        &mut self,
        target: WriterTarget<'_>,
        device: &DiskDevice,
        buffer: usize,
        run: DirtyRun,
    ) -> Result<(), WriteFailure> {
        let len = run.pages * PAGE_BYTES;
        let at = buffer * REQUEST_PAGES_MAX * PAGE_BYTES;
        let offset = device.byte_of(run.first * PAGE_BYTES);
        let write = DeviceRequest {
            kind: RequestKind::Write,
            offset,
            memory: RequestMemory::Run(self.buffers.address(at, len)),
            len,
            buffer,
        };
        device.begin_change();
        // After the count: a hand-over of the device waits for this write, or forbids it.
        if let Err(failed) = check_is_sound(target) {
            device.end_change();
            self.free.push(buffer);
            return Err(failed);
        }
        self.in_flight[buffer] = Some(run);
        #[cfg(feature = "test-api")]
        device.device.note_write(offset, || {
            let mut bytes = vec![0; len];
            self.buffers.read(at, &mut bytes);
            bytes
        });
        // SAFETY: the buffer belongs to this request until its completion is reaped, and the ring is empty before
        // `self` is dropped.
        unsafe { self.ring.push(&device.device, write) };
        self.pushed += 1;
        // The device begins while further pages are copied. The wait at the end submits the rest.
        if self.pushed.is_multiple_of(SUBMIT_RUNS) {
            let submitted = self.ring.submit().map_err(system("write to the medium"));
            submitted.map_err(WriteFailure::of_disk)?;
        }
        Ok(())
    }

    /// Waits for completions, and frees their buffers.
    fn reap(&mut self, target: WriterTarget<'_>) -> Result<(), WriteFailure> {
        let waited = self.ring.wait().map_err(system("wait for the medium"));
        waited.map_err(WriteFailure::of_disk)?;
        let mut result = Ok(());
        let mut completed = std::mem::take(&mut self.completed);
        self.ring.take_ended(&mut completed);
        for (buffer, written) in completed.drain(..) {
            let Some(run) = self.in_flight[buffer].take() else {
                continue;
            };
            self.free.push(buffer);
            let device = target.devices.device_of(run.first * PAGE_BYTES);
            let device = device.expect("no device leaves during a group");
            #[cfg(feature = "test-api")]
            device.device.note_write_end(
                device.byte_of(run.first * PAGE_BYTES),
                run.pages * PAGE_BYTES,
            );
            // Not before: a FLUSH may be running, and does not cover this write.
            device.mark_unflushed();
            let written = check_written(written, run.pages * PAGE_BYTES);
            if written.is_err() {
                device.mark_failed();
            }
            // After the mark: a hand-over waits for the end, and then looks for marks.
            device.end_change();
            if let Err(cause) = written {
                let cause = system("write to the medium")(cause);
                result = Err(WriteFailure::of(device, cause));
                // The pages stay in memory: the device may have old bytes.
                continue;
            }
            for page in run.first..run.first + run.pages {
                if !device.is_page_resident(page) {
                    target.cache.end_write(page);
                }
            }
        }
        self.completed = completed;
        result
    }
}

/// Why a group failed.
pub(super) struct WriteFailure {
    /// The first byte of the device. None: it is of no device alone.
    pub(super) first_byte: Option<usize>,
    pub(super) cause: MapError,
}

impl WriteFailure {
    pub(super) fn of(device: &DiskDevice, cause: MapError) -> WriteFailure {
        WriteFailure {
            first_byte: Some(device.bytes.start),
            cause,
        }
    }

    fn of_disk(cause: MapError) -> WriteFailure {
        WriteFailure {
            first_byte: None,
            cause,
        }
    }

    /// A thread that worked on the devices has panicked.
    pub(super) fn of_panic() -> WriteFailure {
        let cause = io::Error::other("a thread of the disk panicked");
        WriteFailure::of_disk(system("write to the medium")(cause))
    }
}

/// Flushes each device that was written since its last FLUSH, and always the first. One thread at a time.
pub(super) fn flush_devices(devices: &DeviceMap) -> Result<(), WriteFailure> {
    let flush = |device: &DiskDevice| {
        device.begin_change();
        let flushed = device.device.flush();
        let result = match flushed {
            Err(cause) if !device.has_left() => {
                device.mark_failed();
                Err(WriteFailure::of(device, cause))
            }
            _ => Ok(()),
        };
        device.end_change();
        result
    };
    let unflushed = devices.take_unflushed();
    let Some((&last, others)) = unflushed.split_last() else {
        return Ok(());
    };
    if others.is_empty() {
        return flush(last);
    }
    std::thread::scope(|scope| {
        let mut here = vec![last];
        let mut threads = Vec::new();
        for &device in others {
            match spawn_flush(scope, device, flush) {
                Ok(thread) => threads.push(thread),
                Err(cause) => {
                    let name = device.device.name();
                    tracing::warn!(%cause, %name, "the system refuses a thread, so devices are flushed one by one");
                    here.push(device);
                }
            }
        }
        let mut result = Ok(());
        for device in here {
            let flushed = flush(device);
            result = result.and(flushed);
        }
        for thread in threads {
            let flushed = thread
                .join()
                .unwrap_or_else(|_| Err(WriteFailure::of_panic()));
            result = result.and(flushed);
        }
        result
    })
}

/// Flushes a device on a thread of its own.
fn spawn_flush<'s, 'd: 's>(
    scope: &'s Scope<'s, '_>,
    device: &'d DiskDevice,
    flush: impl Fn(&DiskDevice) -> Result<(), WriteFailure> + Send + 's,
) -> io::Result<ScopedJoinHandle<'s, Result<(), WriteFailure>>> {
    #[cfg(feature = "test-api")]
    if device.device.refuses_threads() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let thread = std::thread::Builder::new().name("disk-flush".into());
    thread.spawn_scoped(scope, move || flush(device))
}

/// Refuses a group of a disk that has failed: what the devices hold is unknown, and nothing may be added.
fn check_is_sound(target: WriterTarget<'_>) -> Result<(), WriteFailure> {
    match target.queue.has_failed() {
        false => Ok(()),
        true => Err(WriteFailure::of_disk(MapError::SyncFailed)),
    }
}

fn check_written(result: i32, len: usize) -> io::Result<()> {
    match usize::try_from(result) {
        Ok(written) if written == len => Ok(()),
        // The kernel writes less when the device has failed behind these bytes, or is full.
        Ok(written) => Err(io::Error::other(format!(
            "{written} of {len} bytes were written"
        ))),
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
    }
}
