//! A file on the direct path: its mount, its map, its writes, and the frame of each operation.
//!
//! Invariants: a file gets its map from the first successful request, and keeps it. An answer
//! relies on the map only as far as the map is not outdated. The slot of a thread is locked before
//! the row's operation begins, and until that has ended. A thread waits for a slot as long as an
//! operation or two take; then the kernel serves the call.
//!
//! # One write
//!
//! A thread overwrites 4 KiB of a file. It has a slot with a row and with a session of each leg, and
//! the file map covers the bytes.
//!
//! 1. `DirectFile::write` → `DirectFile::operate` locks the thread's slot (`JoinedMount::take_slot`).
//! 2. `IoSlot::begin` marks the row active (`ClientRow::begin_op`), and then checks that the layout
//!    lease is current and that neither the segment nor the file map is closed.
//! 3. `Operation::write` → `Operation::overwrite`: `SharedFileMap::extent` gives the place of the
//!    bytes.
//! 4. `Operation::write_record` → `volume::legs::mapped::overwrite_all` →
//!    `store::session::write::write_numbered`. The store continues there, and takes the number behind
//!    the lock words (`DirectSegment::next_op`).
//! 5. The row's operation ends (`ClientRow::end_op`), the slot is unlocked.

use super::backoff::{AtomicReason, Backoff, RETRY, now_ms};
use super::direct_client::DirectClient;
use super::io_slot::{Intent, LegResult, Operation, WriteOutcome};
use super::joined_mount::JoinedMount;
use super::mount_link::MountLink;
use super::slot_resources::SlotResources;
use super::thread::thread_number;
use crate::protocol::wire::{self, ClientRequest};
use crate::shared::op_counters::{self, IO_SLOTS, Why};
use crate::shared::shared_file_map::SharedFileMap;
use pagemesh_base::slice::{SLICE_IO_BYTES_MAX, SliceError};
use pagemesh_volume::MappedLeg;
use pagemesh_volume::direct_access::DirectSegment;
use rustix::fd::{AsFd, RawFd};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// Calls that the kernel serves after a file was opened, or its size or pages changed, before the
/// client asks the mount for the file map. A program that reads a small file once, or extends a
/// file all the time, would ask in vain.
const KERNEL_CALLS_PER_REQUEST: u32 = 4;

/// Attempts to lock a busy slot before the kernel serves the call: operations take a microsecond or
/// two.
const SPINS: u32 = 400;

/// A file on the direct path.
pub struct DirectFile {
    client: &'static DirectClient,
    device: u64,
    /// Set once this process has joined it.
    mount: OnceLock<Arc<JoinedMount>>,
    /// When the next attempt to join is due.
    join_backoff: Backoff,
    /// Set by the first successful request; the same as long as the file is open.
    pub(super) file_map: OnceLock<Arc<SharedFileMap>>,
    pub(super) ino: u64,
    /// The descriptor that the file was opened by. The program may have closed it since.
    descriptor: RawFd,
    /// Its index in the operation counters.
    pub(super) account_index: usize,
    /// Why the mount gives no current map of the file.
    file_map_reason: AtomicReason,
    misses: AtomicU32,
    /// A write reached beyond the append extent.
    pub(super) wants_append_space: AtomicBool,
}

impl DirectFile {
    /// A file of a mount that is not joined yet.
    pub(super) fn new(
        client: &'static DirectClient,
        (device, ino, descriptor): (u64, u64, RawFd),
    ) -> DirectFile {
        DirectFile {
            client,
            device,
            mount: OnceLock::new(),
            join_backoff: Backoff::new(Why::Joining),
            file_map: OnceLock::new(),
            ino,
            descriptor,
            account_index: op_counters::index_of(device, ino),
            file_map_reason: AtomicReason::new(Why::Asking),
            misses: AtomicU32::new(0),
            wants_append_space: AtomicBool::new(false),
        }
    }

    /// Counts an operation that the kernel serves, for a reason that the caller knows.
    #[cold]
    pub fn count_kernel(&self, why: Why) {
        op_counters::count_kernel(self.account_index, why);
        if let Some(counters) = self
            .joined_mount()
            .and_then(|mount| mount.counters.as_ref())
        {
            counters.count_kernel(self.account_index, why);
        }
    }

    #[inline]
    pub(super) fn or_count_kernel<T>(&self, done: Result<T, Why>) -> Option<T> {
        done.inspect_err(|&why| self.count_kernel(why)).ok()
    }

    /// The mount, if this process is a direct client of it, or becomes one.
    #[inline]
    pub(super) fn mount(&self) -> Result<&JoinedMount, Why> {
        self.joined_mount().map_or_else(|| self.join(), Ok)
    }

    /// The mount, if this process has joined it already.
    #[inline]
    pub(super) fn joined_mount(&self) -> Option<&JoinedMount> {
        self.mount.get().map(Arc::as_ref)
    }

    #[cold]
    pub(super) fn join(&self) -> Result<&JoinedMount, Why> {
        if self.client.consume_patience() {
            return Err(Why::Patience);
        }
        self.join_backoff.check(now_ms())?;
        self.try_join().map_err(|(_, why)| why)
    }

    /// Joins the mount; otherwise returns the delay until the next attempt, and the reason.
    pub(super) fn try_join(&self) -> Result<&JoinedMount, (Duration, Why)> {
        let joined = self.client.mount(self.device, self.descriptor);
        let joined = joined.inspect_err(|(wait, why)| {
            self.join_backoff.delay(now_ms(), *wait, *why);
        })?;
        if let Some(counters) = &joined.counters {
            counters.set_ino(self.account_index, self.ino);
        }
        Ok(self.mount.get_or_init(|| joined))
    }

    /// Bytes of the file, as long as direct access is allowed; none: ask the kernel. It begins no
    /// row operation. Each end in a file map was the file's end at some moment since the check,
    /// since the mount outdates the map before it changes more than the end.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        let file_map = self.file_map.get()?;
        let may = self.is_direct_allowed() && !file_map.is_closed() && !file_map.is_outdated();
        may.then(|| file_map.size())
    }

    /// Whether all writes to the file that have returned are durable without an fsync.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        // Direct access is allowed only where nothing is buffered. The kernel's path waits for
        // writes that an asynchronous replica lacks, and for stores into mappings: the mount closes
        // the map of a mapped file.
        let has_open_map =
            |file_map: &Arc<SharedFileMap>| !file_map.is_closed() && !file_map.is_outdated();
        self.is_direct_allowed()
            && !self.has_async_replica()
            && self.file_map.get().is_some_and(has_open_map)
    }

    /// Whether its mount allows direct access at the moment.
    #[must_use]
    pub fn is_direct_allowed(&self) -> bool {
        let is_allowed = |mount: &JoinedMount| mount.segment.generation() != 0 && !mount.is_gone();
        self.joined_mount().is_some_and(is_allowed)
    }

    /// Whether an asynchronous replica receives acknowledged writes later.
    #[must_use]
    pub fn has_async_replica(&self) -> bool {
        let has_replica = |mount: &JoinedMount| mount.segment.ring().has_replica();
        self.joined_mount().is_some_and(has_replica)
    }

    /// A count that changes whenever a descriptor of the file was closed, and whenever a process
    /// with direct clients opened a file of the mount without its preload library. Callers that
    /// know the file by a descriptor number check the number when the count has changed. 0 is never
    /// returned. None: the file is not on the direct path yet, so this client does no operation of
    /// it.
    #[inline]
    #[must_use]
    pub fn change_count(&self) -> Option<u64> {
        let (mount, file_map) = (self.joined_mount()?, self.file_map.get()?);
        Some(1 + file_map.close_count() + mount.segment.untracked_opens())
    }

    /// As [`DirectFile::change_count`], but only if a read or write needs no request to the mount
    /// first.
    #[inline]
    #[must_use]
    pub fn ready_change_count(&self) -> Option<u64> {
        self.change_count().filter(|_| self.has_current_map())
    }

    /// As [`DirectFile::change_count`], for a caller that wants to read or write. Now and then it
    /// joins the mount and asks for the file map.
    #[inline]
    #[must_use]
    pub fn prepare(&self) -> Option<u64> {
        let prepared = self.try_prepare();
        prepared.map_err(|why| self.count_kernel(why)).ok()
    }

    #[inline]
    fn try_prepare(&self) -> Result<u64, Why> {
        self.ready_mount()?;
        self.change_count().ok_or(Why::Asking)
    }

    /// The mount, once it and the file's map are ready for an operation.
    #[inline]
    pub(super) fn ready_mount(&self) -> Result<&JoinedMount, Why> {
        let mount = self.mount()?;
        if mount.is_gone.load(Ordering::Relaxed) {
            return Err(Why::MountGone);
        }
        if !self.has_current_map() {
            self.refresh_file_map()?;
        }
        Ok(mount)
    }

    #[inline]
    fn has_current_map(&self) -> bool {
        self.file_map
            .get()
            .is_some_and(|file_map| !file_map.is_outdated())
    }

    /// Asks for the current file map, on one call in [`KERNEL_CALLS_PER_REQUEST`]. An error: the
    /// operation goes to the kernel.
    #[cold]
    pub(super) fn refresh_file_map(&self) -> Result<(), Why> {
        if self.misses.fetch_add(1, Ordering::Relaxed) % KERNEL_CALLS_PER_REQUEST
            != KERNEL_CALLS_PER_REQUEST - 1
        {
            return Err(self.file_map_reason.get());
        }
        let grows = self.wants_append_space.load(Ordering::Relaxed);
        let mount = self.joined_mount().ok_or(Why::Joining)?;
        let found = mount.file_map(self.ino, grows);
        self.file_map_reason
            .set(found.as_ref().err().copied().unwrap_or(Why::Asking));
        let found = found?;
        let file_map = self.file_map.get_or_init(|| Arc::clone(&found));
        if Arc::ptr_eq(file_map, &found) && !file_map.is_outdated() {
            Ok(())
        } else {
            Err(Why::Asking)
        }
    }

    #[inline]
    pub(super) fn record_write_time(&self) {
        if let Some(file_map) = self.file_map.get() {
            let now = clock_gettime(ClockId::RealtimeCoarse);
            let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            file_map.record_write_time(now_ns);
        }
    }
}

impl DirectFile {
    /// Overwrites bytes of the file, or appends at its end; none: the kernel does all of it.
    /// Returns how many bytes were written, from the first on: the kernel does the rest. It must
    /// not repeat bytes that others may have seen. See [`DirectFile::read`].
    #[must_use]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        // The range must not overflow.
        offset.checked_add(data.len() as u64)?;
        let (_, written) = self.or_count_kernel(self.try_write(data, Some(offset)))?;
        Some(written)
    }

    /// Appends bytes at the current end of the file; none: the kernel does it. Returns the end
    /// behind them. See [`DirectFile::read`].
    #[must_use]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        let (end, _) = self.or_count_kernel(self.try_write(data, None))?;
        Some(end)
    }

    /// The end of the written bytes, and their number; only an overwrite may write fewer.
    fn try_write(&self, data: &[u8], offset: Option<u64>) -> Result<(u64, usize), Why> {
        for is_last in [false, true] {
            let end = || self.file_map.get().map_or(0, |file_map| file_map.size());
            let place = (offset.unwrap_or_else(end), data.len(), Intent::Write);
            let mut done = 0;
            let bytes_done = |outcome: &WriteOutcome| match outcome {
                WriteOutcome::Done(_) => Some(data.len()),
                _ => None,
            };
            let outcome = self.operate(place, bytes_done, |operation| {
                let outcome = operation.write(data, offset);
                done = match outcome {
                    Some(Ok(WriteOutcome::Done(_))) => data.len(),
                    _ => operation.bytes_done(),
                };
                if done > 0 {
                    self.record_write_time();
                }
                outcome
            });
            match (outcome, offset) {
                (Ok(WriteOutcome::Done(end)), _) => return Ok((end, data.len())),
                (_, Some(offset)) if done > 0 => return Ok((offset + done as u64, done)),
                (Err(why), _) => return Err(why),
                (Ok(WriteOutcome::LeftToKernel), _) => return Err(Why::Growth),
                (Ok(WriteOutcome::NoAppendSpace), _) if is_last => return Err(Why::Growth),
                (Ok(WriteOutcome::NoAppendSpace), _) => {}
            }
            // The row is free here: the mount waits for it before it grants append space.
            self.wants_append_space.store(true, Ordering::Relaxed);
            self.refresh_file_map()?;
        }
        Err(Why::Growth)
    }
}

impl DirectFile {
    /// Runs an operation if direct access is allowed and the operation can be done. `bytes_done`
    /// has the bytes of a result that counts as a direct operation.
    #[inline]
    pub(super) fn operate<T>(
        &self,
        (offset, len, intent): (u64, usize, Intent),
        bytes_done: impl Fn(&T) -> Option<usize>,
        work: impl FnOnce(&mut Operation<'_, MappedLeg>) -> LegResult<T>,
    ) -> Result<T, Why> {
        if len == 0 || len > SLICE_IO_BYTES_MAX as usize {
            return Err(Why::Long);
        }
        let mount = self.ready_mount()?;
        let file_map = self.file_map.get().ok_or(Why::Asking)?;
        let (number, mut slot) = mount.take_slot()?;
        let SlotResources {
            io_slot,
            link,
            sampler,
            ..
        } = &mut *slot;
        let started = sampler.is_due().then(Instant::now);
        let place = (offset, len as u64, intent);
        let begun = io_slot.begin(&mount.segment, file_map, self.ino, place);
        let mut operation = begun.ok_or_else(|| begin_failure_reason(mount, file_map))?;
        let worked = work(&mut operation);
        if operation.must_wake_replicator() {
            wake_replicator(link.as_ref(), &mount.segment);
        }
        drop(operation);
        match worked.ok_or(Why::Busy)? {
            Ok(done) => {
                if let Some(counters) = &mount.counters
                    && let Some(bytes) = bytes_done(&done)
                {
                    let place = (number, self.account_index);
                    let took = started.map(|started| started.elapsed());
                    let is_write = intent == Intent::Write;
                    counters.count_direct(place, is_write, bytes as u64, took);
                }
                Ok(done)
            }
            Err(error) => Err(mount.release_failed(slot, &error)),
        }
    }
}

impl JoinedMount {
    /// This thread's slot, with a row and legs.
    #[inline]
    fn take_slot(&self) -> Result<(usize, MutexGuard<'_, SlotResources>), Why> {
        let (number, mut slot) = self.lock_io_slot().ok_or(Why::Busy)?;
        slot.is_used = true;
        if !slot.io_slot.is_ready(&self.segment) {
            self.equip_slot(&mut slot)?;
        }
        Ok((number, slot))
    }

    /// This thread's slot, unless another thread keeps it locked.
    #[inline]
    fn lock_io_slot(&self) -> Option<(usize, MutexGuard<'_, SlotResources>)> {
        let number = thread_number() % IO_SLOTS;
        let slot = &self.io_slots[number];
        for _ in 0..SPINS {
            if let Ok(slot) = slot.try_lock() {
                return Some((number, slot));
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Releases a slot with a leg that failed: drops the legs if the session or its epoch is lost.
    #[cold]
    fn release_failed(&self, mut slot: MutexGuard<'_, SlotResources>, error: &SliceError) -> Why {
        if matches!(error, SliceError::Lost(_) | SliceError::StaleEpoch { .. }) {
            slot.drop_legs();
            self.equip_backoff.delay(now_ms(), RETRY, Why::Renewing);
            self.wake();
        }
        Why::Lost
    }
}

/// Why no direct operation may begin on a file at the moment.
#[cold]
fn begin_failure_reason(mount: &JoinedMount, file_map: &SharedFileMap) -> Why {
    if mount.segment.is_closed() || file_map.is_closed() {
        Why::Closed
    } else {
        Why::Asking
    }
}

/// Wakes the thread of the mount that sends the contents of the replication ring.
#[cold]
fn wake_replicator(link: Option<&MountLink>, segment: &DirectSegment) {
    let called = link.map(|link| {
        let request = ClientRequest::WakeReplicator.encode();
        wire::send(link.as_fd(), &request, None)
    });
    if !matches!(called, Some(Ok(()))) {
        segment.ring().rearm_wakeup();
    }
}
