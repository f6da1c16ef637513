//! The resources of a slot, from the mount and the bricks: a row, and a session of each leg.
//!
//! Invariants: the caller has the slot locked. A slot has the legs of one layout lease, all of them
//! or none. Descriptors of legs are listed ([`internal_fds`]) as long as they are open.

use super::backoff::{FULL_RETRY, RETRY, now_ms};
use super::internal_fds;
use super::io_slot::IoSlot;
use super::joined_mount::JoinedMount;
use super::mount_link::{ConnectMethod, MountLink};
use super::thread::run_on_helper_stack;
use crate::protocol::wire::{self, ClientRequest, MountReply};
use crate::shared::op_counters::Why;
use crate::shared::shared_file_map::memory_id;
use arrayvec::ArrayVec;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::SliceError;
use pagemesh_telemetry::Sampler;
use pagemesh_volume::MappedLeg;
use pagemesh_volume::direct_access::LayoutLease;
use rustix::fd::{AsFd, AsRawFd, RawFd};
use std::io;
use std::path::Path;

/// Sessions of a pool that direct clients leave to others (channels of mounts, a leg that resyncs,
/// another client): at least so many, and of a large pool this part.
const SESSIONS_RESERVED_MIN: u32 = 8;
const SESSIONS_RESERVED_PART: u32 = 8;
/// If fewer sessions are left than this part of a pool's, an idle slot gives its sessions back.
/// Otherwise it keeps them, since mapping the pool again costs milliseconds.
const SESSIONS_SCARCE_PART: u32 = 2;

/// An I/O slot of this process, and the resources that the mount and the bricks gave it.
#[derive(Default)]
pub(super) struct SlotResources {
    pub(super) io_slot: IoSlot<MappedLeg>,
    pub(super) link: Option<MountLink>,
    /// Chooses the operations that are timed.
    pub(super) sampler: Sampler,
    /// Whether a thread used it since the last idle check.
    pub(super) is_used: bool,
    /// The listed descriptors of its legs: a leg that has ended may report none.
    pub(super) listed_fds: Vec<RawFd>,
}

/// Why a slot has no legs.
enum EquipError {
    /// No row or session is left for it.
    NoCapacity,
    /// The layout changes, or a brick or the mount has ended.
    LayoutUnavailable,
}

impl From<io::Error> for EquipError {
    fn from(error: io::Error) -> EquipError {
        match error.kind() {
            // The mount serves no further connection.
            io::ErrorKind::UnexpectedEof => EquipError::NoCapacity,
            _ => EquipError::LayoutUnavailable,
        }
    }
}

impl From<SliceError> for EquipError {
    fn from(error: SliceError) -> EquipError {
        match error {
            SliceError::NoSession(_) => EquipError::NoCapacity,
            _ => EquipError::LayoutUnavailable,
        }
    }
}

impl SlotResources {
    fn set_legs(&mut self, lease: LayoutLease, legs: ArrayVec<MappedLeg, LEGS_MAX>) {
        self.listed_fds = legs.iter().flat_map(leg_descriptors).collect();
        self.listed_fds.iter().copied().for_each(internal_fds::add);
        self.io_slot.set_legs(lease, legs);
    }

    pub(super) fn drop_legs(&mut self) {
        if !self.listed_fds.is_empty() {
            self.release_legs(&internal_fds::FdCreation::begin_regardless());
        }
    }

    /// Drops the legs. No child may inherit a descriptor that is off the list and not closed yet.
    fn release_legs(&mut self, _making: &internal_fds::FdCreation) {
        self.listed_fds.drain(..).for_each(internal_fds::remove);
        self.io_slot.release_legs();
    }

    /// Whether a pool has too few sessions left for other users.
    fn exceeds_session_share(&self) -> bool {
        let legs = self.io_slot.legs().iter();
        legs.map(MappedLeg::sessions)
            .any(|(spare, all)| spare < SESSIONS_RESERVED_MIN.max(all / SESSIONS_RESERVED_PART))
    }

    /// Gives legs and row back if no thread has used the slot since the last check, unless sessions
    /// are plentiful.
    pub(super) fn release_if_idle(&mut self) {
        let is_used = std::mem::take(&mut self.is_used);
        let is_few = |(spare, all)| spare < all / SESSIONS_SCARCE_PART;
        let mut sessions = self.io_slot.legs().iter().map(MappedLeg::sessions);
        if !is_used && (self.io_slot.legs().is_empty() || sessions.any(is_few)) {
            self.drop_legs();
            self.release_row();
        }
    }

    /// Gives the row back.
    fn release_row(&mut self) {
        if let Some(link) = self.link.take() {
            // A mount that is gone has no rows.
            let _ = wire::send(link.as_fd(), &ClientRequest::ReleaseRow.encode(), None);
        }
    }
}

fn leg_descriptors(leg: &MappedLeg) -> Vec<RawFd> {
    let mut all = Vec::new();
    leg.descriptors(&mut all);
    leg.pool_descriptors(&mut all);
    all
}

impl Drop for SlotResources {
    fn drop(&mut self) {
        self.drop_legs();
        self.release_row();
    }
}

impl JoinedMount {
    /// Gets a slot its row and legs, unless an attempt failed shortly before.
    #[cold]
    pub(super) fn equip_slot(&self, slot: &mut SlotResources) -> Result<(), Why> {
        let now = now_ms();
        if self.segment.generation() == 0 {
            return Err(self.disabled_reason());
        }
        self.equip_backoff.check(now)?;
        let creation = internal_fds::FdCreation::begin().ok_or(Why::Joining)?;
        let equipped =
            run_on_helper_stack(self.run_masked, || self.try_equip_slot(slot, &creation));
        let error = match equipped.unwrap_or(Err(EquipError::NoCapacity)) {
            Ok(()) => None,
            Err(EquipError::LayoutUnavailable) => Some((RETRY, Why::Renewing)),
            Err(EquipError::NoCapacity) => {
                // Other processes cannot use a session without a row, nor a session of one leg
                // only.
                slot.release_row();
                Some((FULL_RETRY, Why::NoSession))
            }
        };
        if let Some((wait, why)) = error {
            slot.release_legs(&creation);
            self.equip_backoff.delay(now, wait, why);
        }
        self.wake();
        error.map_or(Ok(()), |(_, why)| Err(why))
    }

    fn try_equip_slot(
        &self,
        slot: &mut SlotResources,
        creation: &internal_fds::FdCreation,
    ) -> Result<(), EquipError> {
        // An unused session of this slot may be the one that the brick lacks.
        slot.release_legs(creation);
        let request = match slot.link {
            None => ClientRequest::Join,
            Some(_) => ClientRequest::GetLayout,
        };
        let link = match slot.link.take() {
            None => self.connect_again()?,
            Some(link) => link,
        };
        let reply = link.ask(request);
        slot.link = Some(link);
        if let Ok((_, Some(memory))) = &reply
            && memory_id(memory) != self.segment_id
        {
            // This is the next mount, which has got the same device number.
            self.mark_gone();
            return Err(EquipError::NoCapacity);
        }
        let reply = reply.map(|(reply, _)| reply);
        let Ok(MountReply::Joined(row, lease)) = reply else {
            // A late row is given back with the link.
            slot.release_row();
            reply?;
            return Err(EquipError::NoCapacity);
        };
        slot.io_slot.set_row(row as usize);
        let lease = lease.ok_or(EquipError::LayoutUnavailable)?;
        let mut legs = ArrayVec::new();
        for leg in 0..lease.legs.len() {
            let link = slot.link.as_ref().ok_or(EquipError::LayoutUnavailable)?;
            let leg = self.map_leg(link, &lease, leg)?;
            legs.try_push(leg)
                .map_err(|_| EquipError::LayoutUnavailable)?;
        }
        slot.set_legs(lease, legs);
        if slot.exceeds_session_share() {
            return Err(EquipError::NoCapacity);
        }
        Ok(())
    }

    /// Another connection. The caller holds an [`FdCreation`](internal_fds::FdCreation).
    fn connect_again(&self) -> Result<MountLink, EquipError> {
        match self.connect_method {
            ConnectMethod::SocketName => Ok(MountLink::connect_by_name(&self.device)?),
            // Its lock may be held by a thread that waits for an answer; the next attempt comes
            // soon.
            ConnectMethod::OpenFile => {
                let control_link = self
                    .control_link
                    .try_lock()
                    .map_err(|_| EquipError::LayoutUnavailable)?;
                Ok(control_link.connect_again()?)
            }
        }
    }

    /// A session of a leg, by the path of its brick's socket, or by the socket that the mount
    /// gives.
    fn map_leg(
        &self,
        link: &MountLink,
        lease: &LayoutLease,
        leg: usize,
    ) -> Result<MappedLeg, EquipError> {
        let lease_leg = &lease.legs[leg];
        let map = |path: &Path| {
            let (brick, slice) = (lease_leg.brick, lease_leg.slice);
            self.transports.map(brick, path, slice, lease.epoch)
        };
        match self.connect_method {
            ConnectMethod::SocketName => Ok(map(&lease_leg.socket)?),
            ConnectMethod::OpenFile => {
                let reply = link.ask(ClientRequest::GetBrickSocket(leg as u64))?;
                let (MountReply::Success, Some(socket)) = reply else {
                    return Err(EquipError::LayoutUnavailable);
                };
                let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
                Ok(map(path.as_ref())?)
            }
        }
    }
}
