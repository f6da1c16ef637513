//! The writer: one thread that writes dirty pages in groups.
//!
//! A group contains each page that is dirty when it begins. Its requests are in flight together, in any
//! order. If somebody waits for durability, a FLUSH of each device that was written ends the group.
//!
//! Invariants: groups do not overlap, so a page has at most one request. A failed request or FLUSH fails this group
//! and each later one.

use super::cache::PageCache;
use super::device_map::{DeviceMap, DiskDevice};
use super::memory::Memory;
use super::requests::{DeviceRequest, RequestKind, RequestMemory, RequestRing};
use super::watch::WatchedRequests;
use crate::map_error::MapError;
use crate::mapped_media::system;
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::poison::{lock, recover};
use pagemesh_base::units::PAGE_BYTES;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Requests in flight.
const REQUESTS_MAX: usize = 64;
/// Requests that are handed to the kernel by one system call.
const SUBMIT_RUNS: usize = 8;
/// A FLUSH of a device that takes longer is left to the writer: the caller has other requests to serve.
const INLINE_FLUSH_MAX: Duration = Duration::from_micros(500);
/// Pages of one request.
const REQUEST_PAGES_MAX: usize = 32;

/// A group's number. Groups end in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GroupNo(u64);

/// The end of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupEnd {
    /// Its pages are on the device.
    Written,
    /// A FLUSH has followed.
    Flush,
}

/// What the writer is asked for, and what it has done.
#[derive(Default)]
pub(super) struct WriterQueue {
    state: Mutex<WriterState>,
    /// The writer waits here.
    work: Condvar,
    /// Callers wait here.
    ended: Condvar,
}

#[derive(Default)]
struct WriterState {
    started: u64,
    ended: u64,
    /// The last group that somebody waits for.
    wanted: u64,
    /// The last group that must end with a FLUSH.
    flush_wanted: u64,
    /// Whether a group without FLUSH is wanted, because the cache fills up.
    is_cleaning_wanted: bool,
    is_stopping: bool,
    has_failed: bool,
    /// The time of recent groups with a FLUSH.
    flush_took: Duration,
    /// Callers that wait for the end of a group. Without any, a wake-up would be a system call for nobody.
    waiting_callers: u32,
    signals: Vec<(GroupNo, Arc<EventFd>)>,
    /// Signaled when pages were written.
    room_signals: Vec<Arc<EventFd>>,
}

impl WriterQueue {
    /// Asks for a group that begins after this call and ends with a FLUSH.
    pub(super) fn request_flush(&self) -> GroupNo {
        let mut state = lock(&self.state);
        let group = state.started + 1;
        state.wanted = state.wanted.max(group);
        state.flush_wanted = state.flush_wanted.max(group);
        self.work.notify_one();
        GroupNo(group)
    }

    /// Asks for a group that begins after this call, and signals `ended` at its end.
    pub(super) fn request(&self, ends_with: GroupEnd, ended: &Arc<EventFd>) -> GroupNo {
        let mut state = lock(&self.state);
        let group = state.started + 1;
        state.wanted = state.wanted.max(group);
        if ends_with == GroupEnd::Flush {
            state.flush_wanted = state.flush_wanted.max(group);
        }
        if state.has_failed {
            ended.signal();
        } else {
            state.signals.push((GroupNo(group), ended.clone()));
        }
        self.work.notify_one();
        GroupNo(group)
    }

    /// The result of a group that [`WriterQueue::request_flush`] returned, once it has ended.
    pub(super) fn result(&self, group: GroupNo) -> Option<Result<(), MapError>> {
        let state = lock(&self.state);
        result_of(&state, group)
    }

    /// Waits for the end of a group.
    pub(super) fn wait(&self, group: GroupNo) -> Result<(), MapError> {
        let mut state = lock(&self.state);
        loop {
            if let Some(result) = result_of(&state, group) {
                return result;
            }
            state = self.wait_for_end(state);
        }
    }

    fn wait_for_end<'s>(
        &self,
        mut state: MutexGuard<'s, WriterState>,
    ) -> MutexGuard<'s, WriterState> {
        state.waiting_callers += 1;
        let mut state = recover(self.ended.wait(state));
        state.waiting_callers -= 1;
        state
    }

    /// Asks for a group without FLUSH.
    pub(super) fn request_cleaning(&self) {
        let mut state = lock(&self.state);
        if !state.is_cleaning_wanted {
            state.is_cleaning_wanted = true;
            self.work.notify_one();
        }
    }

    /// Asks for a group without FLUSH, and signals `written` when some pages were written.
    pub(super) fn request_room(&self, written: &Arc<EventFd>) {
        let mut state = lock(&self.state);
        if state.has_failed {
            written.signal();
            return;
        }
        state.room_signals.push(written.clone());
        state.is_cleaning_wanted = true;
        self.work.notify_one();
    }

    /// Signals those who wait for room.
    fn signal_room(&self) {
        let signals = std::mem::take(&mut lock(&self.state).room_signals);
        signals.iter().for_each(|signal| signal.signal());
    }

    /// Asks for a group, and waits until one has ended. False: the writer has failed.
    pub(super) fn wait_for_cleaning(&self) -> bool {
        let mut state = lock(&self.state);
        let seen = state.ended;
        state.is_cleaning_wanted = true;
        self.work.notify_one();
        while state.ended == seen && !state.has_failed {
            state = self.wait_for_end(state);
        }
        !state.has_failed
    }

    /// Whether every later sync fails.
    pub(super) fn has_failed(&self) -> bool {
        lock(&self.state).has_failed
    }

    /// Fails all waits, now and later.
    pub(super) fn fail(&self) {
        let mut state = lock(&self.state);
        state.has_failed = true;
        let room = std::mem::take(&mut state.room_signals);
        let waiting = std::mem::take(&mut state.signals);
        if state.waiting_callers > 0 {
            self.ended.notify_all();
        }
        drop(state);
        room.iter().for_each(|signal| signal.signal());
        waiting.iter().for_each(|(_, signal)| signal.signal());
    }

    /// Ends the writer after its current group.
    pub(super) fn stop(&self) {
        lock(&self.state).is_stopping = true;
        self.work.notify_one();
    }

    /// Waits for work, and begins a group. None: the writer ends.
    pub(super) fn next(&self) -> Option<GroupEnd> {
        let mut state = lock(&self.state);
        loop {
            let is_idle = state.started == state.ended;
            if is_idle && (state.wanted > state.ended || state.is_cleaning_wanted) {
                return Some(state.begin());
            }
            if is_idle && state.is_stopping {
                return None;
            }
            state = recover(self.work.wait(state));
        }
    }

    /// Begins a group for the caller to write, if none is running. It saves the hand-over to the writer and back.
    pub(super) fn try_begin(&self, end: GroupEnd) -> Option<GroupEnd> {
        let mut state = lock(&self.state);
        if state.started != state.ended || state.has_failed || state.is_stopping {
            return None;
        }
        if end == GroupEnd::Flush {
            if state.flush_took > INLINE_FLUSH_MAX {
                return None;
            }
            state.flush_wanted = state.started + 1;
        }
        Some(state.begin())
    }

    fn record_flush(&self, took: Duration) {
        let mut state = lock(&self.state);
        state.flush_took = (state.flush_took * 7 + took) / 8;
    }

    pub(super) fn end_group(&self, is_done: bool) {
        let mut state = lock(&self.state);
        state.ended = state.started;
        state.has_failed |= !is_done;
        if state.wanted > state.ended || state.is_cleaning_wanted || state.is_stopping {
            self.work.notify_one();
        }
        let ended = GroupNo(state.ended);
        let waiting = |(group, _): &mut (GroupNo, Arc<EventFd>)| *group > ended && is_done;
        let signals = &mut state.signals;
        let over: Vec<_> = signals.extract_if(.., |signal| !waiting(signal)).collect();
        let room = std::mem::take(&mut state.room_signals);
        if state.waiting_callers > 0 {
            self.ended.notify_all();
        }
        drop(state);
        room.iter().for_each(|signal| signal.signal());
        over.iter().for_each(|(_, signal)| signal.signal());
    }
}

impl WriterState {
    /// Begins the next group.
    fn begin(&mut self) -> GroupEnd {
        let wants_flush = self.flush_wanted > self.ended;
        self.started += 1;
        self.is_cleaning_wanted = false;
        match wants_flush {
            true => GroupEnd::Flush,
            false => GroupEnd::Written,
        }
    }
}

fn result_of(state: &WriterState, group: GroupNo) -> Option<Result<(), MapError>> {
    if state.has_failed {
        return Some(Err(MapError::SyncFailed));
    }
    (state.ended >= group.0).then_some(Ok(()))
}

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
        })
    }

    /// Writes the group that was begun.
    ///
    /// # Errors
    /// When a device fails, or the disk has failed.
    pub(super) fn run_group(
        &mut self,
        target: WriterTarget<'_>,
        end: GroupEnd,
    ) -> Result<(), WriteFailure> {
        let began = Instant::now();
        let written = self.write_group(target);
        let result = written.and_then(|()| match end {
            GroupEnd::Flush => flush_devices(target.devices),
            GroupEnd::Written => Ok(()),
        });
        if end == GroupEnd::Flush {
            target.queue.record_flush(began.elapsed());
        }
        result
    }

    fn write_group(&mut self, target: WriterTarget<'_>) -> Result<(), WriteFailure> {
        // What the devices hold is unknown: nothing may be added.
        if target.queue.has_failed() {
            return Err(WriteFailure::of_disk(MapError::SyncFailed));
        }
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
        // Also after an error: the kernel reads the buffers until its requests have ended.
        while self.free.len() < REQUESTS_MAX {
            let reaped = self.reap(target);
            result = result.and(reaped);
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
            let mut bytes = [0; PAGE_BYTES];
            let is_dirty = match device.is_in_head(page) {
                true => {
                    let own_page = page - device.first_page();
                    device.head.copy_page(own_page, &mut bytes);
                    true
                }
                false => target.cache.begin_write(page, &mut bytes),
            };
            if is_dirty {
                self.buffers.write(at, &bytes);
                copied.pages += 1;
                continue;
            }
            if copied.pages > 0 {
                self.push(device, buffer, copied)?;
                buffer = self.take_buffer(target)?;
            }
            copied = DirtyRun {
                first: page + 1,
                pages: 0,
            };
        }
        match copied.pages {
            0 => self.free.push(buffer),
            _ => self.push(device, buffer, copied)?,
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
        self.in_flight[buffer] = Some(run);
        device.mark_unflushed();
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
            submitted.map_err(|cause| WriteFailure::of(device, cause))?;
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
            if let Err(cause) = check_written(written, run.pages * PAGE_BYTES) {
                let cause = system("write to the medium")(cause);
                result = Err(WriteFailure::of(device, cause));
                // The pages stay in memory: the device may have old bytes.
                continue;
            }
            for page in run.first..run.first + run.pages {
                if !device.is_in_head(page) {
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
    fn of(device: &DiskDevice, cause: MapError) -> WriteFailure {
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
}

/// Flushes each device that was written since its last FLUSH, and always the first. No write is in flight.
fn flush_devices(devices: &DeviceMap) -> Result<(), WriteFailure> {
    let flush = |device: &DiskDevice| {
        let flushed = device.device.flush();
        flushed.map_err(|cause| WriteFailure::of(device, cause))
    };
    let unflushed = devices.take_unflushed();
    let Some((&last, others)) = unflushed.split_last() else {
        return Ok(());
    };
    if others.is_empty() {
        return flush(last);
    }
    std::thread::scope(|scope| {
        let flushes: Vec<_> = others
            .iter()
            .map(|&device| scope.spawn(move || flush(device)))
            .collect();
        let mut result = flush(last);
        for each in flushes {
            let flushed = each.join().unwrap_or_else(|_| {
                let panicked = io::Error::other("a thread of the disk panicked");
                Err(WriteFailure::of_disk(system("flush the medium")(panicked)))
            });
            result = result.and(flushed);
        }
        result
    })
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
