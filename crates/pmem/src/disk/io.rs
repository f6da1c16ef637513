//! A user's requests to the disk: loads on a ring of its own, and syncs by the writer.
//!
//! Invariants: neighbouring pages of a device are loaded by one request. A buffer belongs to a request until its
//! completion was reaped, also while the user ends.

use super::cache::{PageCache, ReservedSlot};
use super::device::RequestKind;
use super::group_queue::GroupNo;
use super::media::Disk;
use super::memory::Memory;
use super::requests::{DeviceRequest, RequestMemory, RequestRing};
use crate::async_io::AsyncIo;
use crate::map_error::MapError;
use crate::mapped_media::system;
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Requests in flight.
const REQUESTS_MAX: usize = 128;
/// Requests that are handed to the kernel by one system call, and ended by one poll: the device, this user and the receivers of
/// its answers work at the same time, each on a part of the requests in flight.
const BATCH_REQUESTS: usize = 8;
/// Pages of one request.
const REQUEST_PAGES_MAX: usize = 32;

/// See the module.
pub(super) struct DiskIo {
    disk: Arc<Disk>,
    ring: RequestRing,
    completed: Vec<(usize, i32)>,
    buffers: Memory,
    /// Slots of the cache in place of a buffer, and their addresses.
    slots: Vec<LoadSlots>,
    free: Vec<usize>,
    in_flight: Vec<Option<PageRun>>,
    /// Runs that wait for a buffer.
    waiting: VecDeque<PageRun>,
    /// Runs of each tag that have not ended.
    runs_left: HashMap<u64, usize>,
    ended: Vec<u64>,
    failed: Vec<u64>,
    /// Tags of writes, of writes with a flush, and of flushes that were not submitted yet.
    new_writes: Vec<u64>,
    new_durable_writes: Vec<u64>,
    new_flushes: Vec<u64>,
    groups: Vec<(u64, GroupNo)>,
    /// Tags that wait for room.
    rooms: Vec<u64>,
    /// Signaled by the writer.
    written: Arc<EventFd>,
}

#[derive(Clone, Copy)]
struct PageRun {
    tag: u64,
    first: usize,
    pages: usize,
    /// Whether cached pages without changes take the bytes.
    replaces_clean: bool,
}

/// The slots of the cache that a request reads into.
struct LoadSlots {
    reserved: Vec<ReservedSlot>,
    addresses: Vec<libc::iovec>,
}

// SAFETY: the addresses are of the cache, which every thread may use.
unsafe impl Send for LoadSlots {}

impl LoadSlots {
    fn new() -> LoadSlots {
        LoadSlots {
            reserved: Vec::new(),
            // Requests refer to it: it never grows.
            addresses: Vec::with_capacity(REQUEST_PAGES_MAX),
        }
    }

    /// Announces the loads of a run, and reserves slots for them. None: the run needs a buffer.
    fn begin(&mut self, cache: &PageCache, run: PageRun) -> Option<RequestMemory> {
        let pages = run.first..run.first + run.pages;
        if run.replaces_clean {
            pages.for_each(|page| cache.begin_load(page));
            return None;
        }
        let slots = pages.clone().map(|page| cache.begin_load_into_slot(page));
        let slots: Vec<Option<ReservedSlot>> = slots.collect();
        if slots.iter().any(Option::is_none) {
            for (page, slot) in pages.zip(slots) {
                if let Some(slot) = slot {
                    cache.release(page, slot);
                }
            }
            return None;
        }
        self.reserved.extend(slots.into_iter().flatten());
        self.addresses.clear();
        let parts = self.reserved.iter().map(|slot| libc::iovec {
            iov_base: cache.address_of(slot).cast(),
            iov_len: PAGE_BYTES,
        });
        self.addresses.extend(parts);
        Some(match self.addresses[..] {
            [only] => RequestMemory::Run(only.iov_base.cast()),
            _ => RequestMemory::Parts(self.addresses.as_ptr(), self.addresses.len()),
        })
    }
}

impl DiskIo {
    pub(super) fn new(disk: Arc<Disk>) -> Result<DiskIo, MapError> {
        let parts = disk.parts();
        let ring = RequestRing::new(&parts.watched, &parts.devices, REQUESTS_MAX)?;
        let written = EventFd::new().map_err(system("make an event descriptor"))?;
        Ok(DiskIo {
            disk,
            ring,
            completed: Vec::new(),
            buffers: Memory::new(REQUESTS_MAX * REQUEST_PAGES_MAX * PAGE_BYTES)?,
            slots: (0..REQUESTS_MAX).map(|_| LoadSlots::new()).collect(),
            free: (0..REQUESTS_MAX).rev().collect(),
            in_flight: vec![None; REQUESTS_MAX],
            waiting: VecDeque::new(),
            runs_left: HashMap::new(),
            ended: Vec::new(),
            failed: Vec::new(),
            groups: Vec::new(),
            new_writes: Vec::new(),
            new_durable_writes: Vec::new(),
            new_flushes: Vec::new(),
            rooms: Vec::new(),
            written: Arc::new(written),
        })
    }

    /// Puts waiting runs into the ring while there are buffers.
    fn push_loads(&mut self) {
        while let (Some(&run), Some(&buffer)) = (self.waiting.front(), self.free.last()) {
            self.waiting.pop_front();
            self.free.pop();
            let parts = self.disk.parts();
            let len = run.pages * PAGE_BYTES;
            let bytes_at = buffer * REQUEST_PAGES_MAX * PAGE_BYTES;
            let memory = self.slots[buffer].begin(&parts.cache, run);
            let memory =
                memory.unwrap_or_else(|| RequestMemory::Run(self.buffers.address(bytes_at, len)));
            // After the loads were announced: a device that leaves later makes them stale.
            let Some(device) = parts.devices.device_of(run.first * PAGE_BYTES) else {
                self.end_run(buffer, run, 0);
                self.free.push(buffer);
                continue;
            };
            let read = DeviceRequest {
                kind: RequestKind::Read,
                offset: device.byte_of(run.first * PAGE_BYTES),
                memory,
                len,
                buffer,
            };
            self.in_flight[buffer] = Some(run);
            // SAFETY: the buffer, or the slots, belong to this request until its completion is reaped; `drop` waits for
            // all, and the disk outlives `self`.
            unsafe { self.ring.push(&device.device, read) };
            if self.ring.unsubmitted() >= BATCH_REQUESTS {
                self.submit_loads();
            }
        }
    }

    /// Hands the requests in the ring to the kernel. If it takes too few, the next poll comes at once.
    fn submit_loads(&mut self) {
        if let Err(cause) = self.ring.submit() {
            tracing::warn!(%cause, "cannot submit reads of the disk; trying again");
        }
        if self.ring.unsubmitted() > 0 {
            self.written.signal();
        }
    }

    fn reap(&mut self) {
        let mut completed = std::mem::take(&mut self.completed);
        self.ring.take_ended_max(BATCH_REQUESTS, &mut completed);
        for (buffer, result) in completed.drain(..) {
            let Some(run) = self.in_flight[buffer].take() else {
                continue;
            };
            self.end_run(buffer, run, usize::try_from(result).unwrap_or(0));
            self.free.push(buffer);
        }
        self.completed = completed;
    }

    /// Puts the pages of a run into the cache. Pages that were not read are loaded one by one, which finds
    /// the bad one.
    fn end_run(&mut self, buffer: usize, run: PageRun, read: usize) {
        let parts = self.disk.parts();
        let mut slots = std::mem::take(&mut self.slots[buffer].reserved);
        let mut reserved = slots.drain(..);
        for number in 0..run.pages {
            let page = run.first + number;
            if let Some(slot) = reserved.next() {
                if (number + 1) * PAGE_BYTES <= read {
                    parts.cache.end_load_in_slot(page, slot);
                    continue;
                }
                parts.cache.release(page, slot);
                let mut bytes = [0; PAGE_BYTES];
                match parts.read_device(page, &mut bytes) {
                    true => drop(parts.cache.end_load(page, &bytes, false)),
                    false => parts.cache.cancel_load(page),
                }
                continue;
            }
            let mut bytes = [0; PAGE_BYTES];
            if (number + 1) * PAGE_BYTES <= read {
                let at = (buffer * REQUEST_PAGES_MAX + number) * PAGE_BYTES;
                self.buffers.read(at, &mut bytes);
            } else if parts.devices.device_of(page * PAGE_BYTES).is_none() {
                parts.cache.cancel_load(page);
                continue;
            } else if run.replaces_clean && parts.try_read_device(page, &mut bytes).is_err() {
                // The memory may have the last good copy: it is written again.
                let is_cached = parts.cache.mark_for_rewrite(page);
                if is_cached {
                    parts.queue.request_cleaning();
                    tracing::warn!(
                        page,
                        "a page of the disk cannot be read, and is written again from memory"
                    );
                }
                parts.cache.cancel_load(page);
                if !is_cached {
                    parts.read_device(page, &mut bytes);
                }
                continue;
            } else {
                parts.read_device(page, &mut bytes);
            }
            parts.cache.end_load(page, &bytes, run.replaces_clean);
        }
        drop(reserved);
        self.slots[buffer].reserved = slots;
        if let Some(left) = self.runs_left.get_mut(&run.tag) {
            *left -= 1;
            if *left == 0 {
                self.runs_left.remove(&run.tag);
                self.ended.push(run.tag);
            }
        }
    }
}

impl DiskIo {
    /// Loads pages, and returns when all loads have ended.
    pub(super) fn load_and_wait(&mut self, offsets: &[usize]) {
        self.start_runs(0, offsets, false);
        while !self.runs_left.is_empty() {
            if let Err(cause) = self.ring.wait() {
                tracing::warn!(%cause, "cannot wait for reads of the disk; pages are loaded one by one");
                return;
            }
            self.reap();
            self.push_loads();
        }
    }

    fn start_runs(&mut self, tag: u64, offsets: &[usize], replaces_clean: bool) {
        let mut pages: Vec<usize> = offsets.iter().map(|offset| offset / PAGE_BYTES).collect();
        pages.sort_unstable();
        pages.dedup();
        let mut runs = 0;
        let mut rest = &pages[..];
        while let Some(&first) = rest.first() {
            let device = self.disk.parts().devices.device_of(first * PAGE_BYTES);
            let Some(device) = device else {
                // The page is of no frame in use: nothing is loaded.
                rest = &rest[1..];
                continue;
            };
            let pages_max = REQUEST_PAGES_MAX.min(device.end_page() - first);
            let numbered = rest.iter().enumerate().take(pages_max);
            let count = numbered.take_while(|&(i, &page)| page == first + i).count();
            rest = &rest[count..];
            self.waiting.push_back(PageRun {
                tag,
                first,
                pages: count,
                replaces_clean,
            });
            runs += 1;
        }
        match runs {
            0 => self.ended.push(tag),
            _ => drop(self.runs_left.insert(tag, runs)),
        }
        self.push_loads();
    }
}

impl DiskIo {
    fn new_requests(&self) -> usize {
        self.new_writes.len() + self.new_durable_writes.len() + self.new_flushes.len()
    }

    /// Writes, flushes, or both on this thread, if it waits for nothing else.
    fn try_inline(&mut self) -> bool {
        let is_alone = self.new_requests() == 1
            && self.groups.is_empty()
            && self.runs_left.is_empty()
            && self.rooms.is_empty();
        if !is_alone {
            return false;
        }
        let parts = self.disk.parts();
        let is_write = self.new_flushes.is_empty();
        if is_write && !parts.try_write_inline() {
            return false;
        }
        // The written group is flushed by the flusher, if another FLUSH is running or FLUSHes are long.
        let is_flush = self.new_writes.is_empty();
        if is_flush && !parts.try_flush_inline() {
            self.new_flushes.append(&mut self.new_durable_writes);
            return false;
        }
        let tags = self.new_writes.drain(..).chain(self.new_flushes.drain(..));
        let tags = tags.chain(self.new_durable_writes.drain(..));
        match parts.queue.has_failed() {
            false => self.ended.extend(tags),
            true => self.failed.extend(tags),
        }
        true
    }
}

impl AsyncIo for DiskIo {
    fn load(&mut self, tag: u64, offsets: &[usize]) {
        self.start_runs(tag, offsets, false);
    }

    fn reload(&mut self, tag: u64, offsets: &[usize]) {
        self.start_runs(tag, offsets, true);
    }

    fn write(&mut self, tag: u64) {
        self.new_writes.push(tag);
    }

    fn write_and_sync(&mut self, tag: u64) {
        self.new_durable_writes.push(tag);
    }

    fn sync(&mut self, tag: u64) {
        self.new_flushes.push(tag);
    }

    fn submit(&mut self) {
        self.submit_loads();
        if self.new_requests() == 0 || self.try_inline() {
            return;
        }
        let queue = &self.disk.parts().queue;
        if !self.new_durable_writes.is_empty() {
            let group = queue.request_durable_write(&self.written);
            let tags = self.new_durable_writes.drain(..);
            self.groups.extend(tags.map(|tag| (tag, group)));
        }
        if !self.new_writes.is_empty() {
            let group = queue.request_write(&self.written);
            let tags = self.new_writes.drain(..);
            self.groups.extend(tags.map(|tag| (tag, group)));
        }
        if !self.new_flushes.is_empty() {
            // A flush covers this user's earlier writes, too.
            let earlier = self.groups.iter().map(|&(_, group)| group).max();
            let group = queue.request_flush_of_written(earlier, &self.written);
            let tags = self.new_flushes.drain(..);
            self.groups.extend(tags.map(|tag| (tag, group)));
        }
    }

    fn wait_for_room(&mut self, tag: u64) {
        self.rooms.push(tag);
        self.disk.parts().queue.request_room(&self.written);
    }

    fn poll(&mut self, ended: &mut Vec<(u64, Result<(), MapError>)>) {
        loop {
            self.reap();
            self.push_loads();
            self.submit_loads();
            // No descriptor reports them.
            if !self.ring.has_ended_outside() {
                break;
            }
        }
        ended.extend(self.ended.drain(..).map(|tag| (tag, Ok(()))));
        let failed = self.failed.drain(..);
        ended.extend(failed.map(|tag| (tag, Err(MapError::SyncFailed))));
        if self.groups.is_empty() && self.rooms.is_empty() && self.ring.unsubmitted() == 0 {
            return;
        }
        self.written.drain();
        if self.ring.unsubmitted() > 0 {
            self.written.signal();
        }
        let parts = self.disk.parts();
        let queue = &parts.queue;
        if !self.rooms.is_empty() {
            if queue.has_failed() {
                let failed = self.rooms.drain(..);
                ended.extend(failed.map(|tag| (tag, Err(MapError::SyncFailed))));
            } else if parts.cache.has_room() {
                ended.extend(self.rooms.drain(..).map(|tag| (tag, Ok(()))));
            } else {
                queue.request_room(&self.written);
            }
        }
        queue.take_ended(&mut self.groups, ended);
    }

    fn has_ended_at_once(&self) -> bool {
        !self.ended.is_empty() || !self.failed.is_empty() || self.ring.has_ended_outside()
    }

    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        if !self.runs_left.is_empty() {
            fds.extend(self.ring.poll_fd());
        }
        if !self.groups.is_empty() || !self.rooms.is_empty() || self.ring.unsubmitted() > 0 {
            fds.push(self.written.as_fd());
        }
    }
}

impl Drop for DiskIo {
    fn drop(&mut self) {
        self.waiting.clear();
        while self.in_flight.iter().any(Option::is_some) {
            if let Err(cause) = self.ring.wait() {
                // The kernel may still write to the buffers: they must stay.
                tracing::error!(%cause, "cannot wait for reads of the disk");
                std::process::abort();
            }
            self.reap();
        }
    }
}
