//! Refusals of other uses of a volume during its rollback.

use crate::fault::Fault;
use crate::records::VolumeRecord;
use crate::rollback::RollbackPhase;
use crate::snapshots::{SnapshotFault, SnapshotName};

/// Refuses the use of a volume during its rollback.
pub(crate) fn check_no_rollback(record: &VolumeRecord) -> Result<(), Fault> {
    match &record.rollback {
        None => Ok(()),
        Some(it) => {
            let volume = &record.layout_state.layout.name;
            Err(SnapshotFault::RollingBack {
                volume: volume.clone(),
                to: it.to.clone(),
                is_undone: it.phase == RollbackPhase::Undoing,
            }
            .into())
        }
    }
}

/// Refuses to delete a snapshot that a rollback needs.
pub(crate) fn check_not_needed(record: &VolumeRecord, name: &SnapshotName) -> Result<(), Fault> {
    match &record.rollback {
        Some(it) if [&it.to, &it.undo].contains(&name) => check_no_rollback(record),
        _ => Ok(()),
    }
}
