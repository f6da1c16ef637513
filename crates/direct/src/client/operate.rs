//! Runs one operation of a file in a slot. It is the only place that takes a slot and releases it:
//! lock the slot, get it a row and legs, begin the row's operation, work, end the operation, count
//! or drop lost legs, unlock the slot.
//!
//! Invariants: the slot is locked before the row's operation begins, and until that has ended. A
//! thread waits for a slot as long as an operation or two take; then the kernel serves the call.

use super::backoff::{RETRY, now_ms};
use super::file::DirectFile;
use super::io_slot::{Intent, LegResult, Operation};
use super::joined_mount::JoinedMount;
use super::mount_link::MountLink;
use super::slot_resources::SlotResources;
use super::thread::thread_number;
use crate::protocol::wire::{self, ClientRequest};
use crate::shared::op_counters::{IO_SLOTS, Why};
use crate::shared::shared_file_map::SharedFileMap;
use pagemesh_base::slice::{SLICE_IO_BYTES_MAX, SliceError};
use pagemesh_volume::MappedLeg;
use pagemesh_volume::direct_access::DirectSegment;
use rustix::fd::AsFd;
use std::sync::MutexGuard;

/// Attempts to lock a busy slot before the kernel serves the call: operations take a microsecond or
/// two.
const SPINS: u32 = 400;

impl DirectFile {
    /// Runs an operation if direct access is allowed and the operation can be done. `is_done`
    /// decides whether its result counts as a direct operation.
    #[inline]
    pub(super) fn operate<T>(
        &self,
        (offset, len, intent): (u64, usize, Intent),
        is_done: impl Fn(&T) -> bool,
        work: impl FnOnce(&mut Operation<'_, MappedLeg>) -> LegResult<T>,
    ) -> Result<T, Why> {
        if len == 0 || len > SLICE_IO_BYTES_MAX as usize {
            return Err(Why::Long);
        }
        let mount = self.ready_mount()?;
        let file_map = self.file_map.get().ok_or(Why::Asking)?;
        let (number, mut slot) = mount.take_slot()?;
        let SlotResources { io_slot, link, .. } = &mut *slot;
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
                    && is_done(&done)
                {
                    counters.count_direct(number, self.account_index);
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
