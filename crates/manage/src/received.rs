//! Volumes that receive snapshots of another volume: nobody else attaches them until they are promoted.
//!
//! Invariant: the content of such a volume is that of its newest snapshot, or a receiver has it attached, or a receive was
//! interrupted. The next receive then goes back to the newest snapshot first.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::Manager;
use crate::records::VolumeRecord;
use crate::snapshots::{SnapshotFault, SnapshotRecord, SnapshotState};
use crate::wire::{AttachVolume, VolumeDetail};
use pagemesh_base::layout::VolumeName;

/// Refuses clients of a volume that receives snapshots, and receivers of one that does not.
pub(crate) fn check_receiver(record: &VolumeRecord, request: &AttachVolume) -> Result<(), Fault> {
    let name = || record.layout_state.layout.name.clone();
    match (record.received.is_some(), request.receive) {
        (true, false) => Err(SnapshotFault::Received(name()).into()),
        (false, true) => Err(SnapshotFault::NotReceived(name()).into()),
        _ => Ok(()),
    }
}

/// The label of a snapshot that was received as a whole begins so.
const RECEIVED_LABEL: &str = "received=";
/// The label of a snapshot that a receiver makes to take a volume back.
const RESET_LABEL: &str = "receive-reset";

/// Refuses a snapshot that is not a receiver's.
pub(crate) fn check_receiver_snapshot(
    record: &VolumeRecord,
    labels: &[String],
) -> Result<(), Fault> {
    let is_own = |label: &String| label.starts_with(RECEIVED_LABEL) || label == RESET_LABEL;
    match record.received.is_none() || (record.attachment.is_some() && labels.iter().any(is_own)) {
        true => Ok(()),
        // The next stream begins at the newest snapshot.
        false => Err(SnapshotFault::Received(record.layout_state.layout.name.clone()).into()),
    }
}

impl Manager {
    /// Ends the receiving of snapshots, so that clients may attach the volume. Its snapshots stay. Does nothing to a
    /// volume that was promoted already.
    ///
    /// # Errors
    /// When there is no such volume, a receiver has attached it, or it has no snapshot yet.
    pub fn promote_volume(&self, name: &VolumeName) -> Result<VolumeDetail, Fault> {
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        self.check_volume_unchanged(&record)?;
        let Some(last_receive) = record.received else {
            return Ok(self.volume_detail(&book, &record));
        };
        if let Some(attachment) = &record.attachment {
            return Err(Fault::Attached {
                name: name.clone(),
                client: attachment.client.clone(),
            });
        }
        let of = book.snapshots.of(name);
        // Others on the way of a receive do not have all of a snapshot of the origin.
        let is_whole = |it: &&SnapshotRecord| {
            let mut labels = it.labels.iter();
            it.state == SnapshotState::Committed && labels.any(|it| it.starts_with(RECEIVED_LABEL))
        };
        let newest = of.and_then(|of| of.live().filter(is_whole).map(|it| it.epoch).max());
        if newest.is_none_or(|newest| newest < last_receive) {
            return Err(SnapshotFault::Unfinished(name.clone()).into());
        }
        record.received = None;
        let promoted = EventDraft::volume_promoted(name, &self.actor());
        self.commit_volume(&mut book, &record, vec![promoted])?;
        Ok(self.volume_detail(&book, &record))
    }
}
