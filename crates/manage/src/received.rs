//! Volumes that receive snapshots of another volume: nobody else attaches them until they are promoted.
//!
//! Invariant: the content of such a volume is that of its newest snapshot, or a receiver has it attached, or a receive was
//! interrupted. The next receive then goes back to the newest snapshot first.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::Manager;
use crate::records::VolumeRecord;
use crate::snapshots::SnapshotFault;
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
        let newest = of.and_then(|of| of.live().map(|it| it.epoch).max());
        if newest.is_none_or(|newest| newest < last_receive) {
            return Err(SnapshotFault::Unfinished(name.clone()).into());
        }
        record.received = None;
        let promoted = EventDraft::volume_promoted(name, &self.actor());
        self.commit_volume(&mut book, &record, vec![promoted])?;
        Ok(self.volume_detail(&book, &record))
    }
}
