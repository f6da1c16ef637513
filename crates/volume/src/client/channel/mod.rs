//! The channel of one thread into a volume.
//!
//! The thread of a channel may not poll it for a long time. So the controller can also make the
//! channel process its messages, between two calls of the thread.
//!
//! Invariants: a channel never blocks, except in a mapped leg that waits for its owner to grant
//! frames, within the store's limits.
//!
//! # One write
//!
//! The volume is mirrored over bricks on this machine, their pools are of class `process` or `pmem`,
//! every leg is in-sync. The thread that calls does all of the following.
//!
//! 1. `VolumeChannel::submit` → `ChannelCore::submit` → `Engine::submit` → `Engine::write_sync`.
//!    `Engine::single_extent` checks that the write is one piece (`LayoutSnapshot::atomic_extent`: one
//!    column, one `REGION_BYTES`). `Engine::sync_legs` checks that nothing is ahead of the write and
//!    that no leg buffers. `EngineIo::can_change_sync` checks that every leg is a `MappedLeg`, and
//!    prefetches the slot. Any other write is made of pieces, as over `tcp`.
//! 2. `RangeLocks::try_acquire`: the range lock, among the channels of this process. If another
//!    operation holds it, the write becomes a piece that waits for it.
//! 3. The operation gets its number under the lock (`VolumeShared::next_op`). The stamp also says how
//!    far back the oldest incomplete operation of this channel is.
//! 4. `EngineIo::write_sync` → `MappedLeg::write_all`: one call for all pools. The store continues in
//!    `session::write::write`.
//! 5. All legs have the write. One load checks that no new layout snapshot excludes one of them, so no
//!    excluded leg can serve an old page. `EngineIo::release` → `RangeLocks::release` passes the lock on,
//!    and `EngineIo::complete` queues the completion. If a leg failed or the snapshot changed,
//!    the change goes on as a piece that was sent, under the same lock and number.
//! 6. `VolumeChannel::reap` → `ChannelCore::reap` returns the completion.

mod core;
mod engine_io;

use crate::controller::{ControllerEvent, Mailbox};
use crate::limits::CHANNELS_MAX;
use crate::shared::{Member, VolumeShared};
use crate::steps;
use pagemesh_base::poison;
use pagemesh_base::space::{Channel, Completion, Request, SpaceError, Token};
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

pub use self::core::ChannelCore;

/// A channel as its user has it.
pub struct VolumeChannel {
    /// Holds the channel core until this is dropped.
    member: Arc<Member>,
    mailbox: Arc<Mailbox>,
}

impl VolumeChannel {
    /// The lock is almost always free. Besides this channel's thread only the controller takes
    /// it, to end connections.
    fn core(&self) -> MutexGuard<'_, Option<Box<ChannelCore>>> {
        steps::lock("core", &self.member.core);
        poison::lock(&self.member.core)
    }
}

impl Channel for VolumeChannel {
    fn ready(&mut self) -> Result<bool, SpaceError> {
        match &mut *self.core() {
            Some(core) => core.ready(),
            None => Ok(true),
        }
    }

    fn submit(&mut self, token: Token, request: Request) {
        if let Some(core) = &mut *self.core() {
            core.submit(token, request);
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        if let Some(core) = &mut *self.core() {
            core.reap(into);
        }
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        if let Some(core) = &*self.core() {
            core.wait_on(into);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.core().as_ref().and_then(|core| core.deadline())
    }
}

/// Opens a channel. The controller connects it, and requests wait until then. They fail with
/// [`SpaceError::Busy`] if a brick has no session for the channel.
pub fn open(hub: &Arc<VolumeShared>, mailbox: &Arc<Mailbox>) -> Result<VolumeChannel, SpaceError> {
    if hub.snapshot().1.fenced {
        return Err(SpaceError::Fenced);
    }
    let member = Member::new()
        .map_err(|error| SpaceError::Unavailable(format!("no channel could be opened: {error}")))?;
    let member = Arc::new(member);
    let number = hub.join(&member).ok_or_else(|| {
        SpaceError::Busy(format!(
            "the volume has {CHANNELS_MAX} channels already; close some"
        ))
    })?;
    let core = ChannelCore::new(
        Arc::clone(hub),
        Arc::clone(mailbox),
        Arc::clone(&member),
        number,
    );
    *poison::lock(&member.core) = Some(Box::new(core));
    mailbox.post(ControllerEvent::ChannelOpened);
    Ok(VolumeChannel {
        member,
        mailbox: Arc::clone(mailbox),
    })
}

impl Drop for VolumeChannel {
    /// Changes in flight must reach all legs. The controller completes them, and releases the
    /// range locks.
    fn drop(&mut self) {
        let core = self.core().take();
        if let Some(core) = core {
            self.mailbox.post(ControllerEvent::ChannelDropped(core));
        }
    }
}
