//! The record of the signs of life of a client, and the attachments that an attach may end.

use crate::fault::Fault;
use crate::records::{Attachment, VolumeRecord};
use crate::wire::{AttachVolume, HolderSign};
use pagemesh_base::layout::EpochNumber;
use std::time::Duration;

/// The signs of life of one attachment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackedHolder {
    pub attachment: EpochNumber,
    pub received_at: Duration,
    pub sign: HolderSign,
}

impl TrackedHolder {
    /// The holder of a new attachment: the attach is a sign of life, and counts as none.
    pub(crate) fn new(attachment: EpochNumber, now: Duration) -> TrackedHolder {
        TrackedHolder {
            attachment,
            received_at: now,
            sign: HolderSign {
                count: 0,
                ending: false,
            },
        }
    }
}

/// Refuses an attach that would end another attachment than the one that the client wants to replace.
pub(crate) fn check_replaced(record: &VolumeRecord, request: &AttachVolume) -> Result<(), Fault> {
    let (Some(expected), Some(present)) = (request.replaces, &record.attachment) else {
        return Ok(());
    };
    // A client repeats an attach whose answer was lost.
    let is_own = |present: &Attachment| {
        present.client == request.client && present.process == request.process
    };
    if present.epoch == expected || is_own(present) {
        return Ok(());
    }
    Err(Fault::Attached {
        name: record.layout_state.layout.name.clone(),
        client: present.client.clone(),
    })
}
