//! A file on the direct path: its mount, its map, and the answers that need no operation.
//!
//! Invariants: a file gets its map from the first successful request, and keeps it. An answer
//! relies on the map only as far as the map is not outdated.

use super::backoff::{AtomicReason, Backoff, now_ms};
use super::direct_client::DirectClient;
use super::joined_mount::JoinedMount;
use crate::shared::op_counters::{self, Why};
use crate::shared::shared_file_map::SharedFileMap;
use rustix::fd::RawFd;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Calls that the kernel serves after a file was opened, or its size or pages changed, before the
/// client asks the mount for the file map. A program that reads a small file once, or extends a
/// file all the time, would ask in vain.
const KERNEL_CALLS_PER_REQUEST: u32 = 4;

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
