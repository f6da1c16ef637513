//! The channel of one thread into a volume.
//!
//! The thread of a channel may not poll it for a long time. So the controller can also make the
//! channel process its messages, between two calls of the thread.
//!
//! Invariants: a channel never blocks, except in a mapped leg that waits for its owner to grant
//! frames, within the store's limits.

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
