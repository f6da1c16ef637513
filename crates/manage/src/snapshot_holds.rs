//! Holds: tags that keep a snapshot from being deleted, as `zfs hold` sets them.

use crate::fault::Fault;
use crate::manager::Manager;
use crate::rollbacks::rollback_tag;
use crate::snapshot_lists::{live_snapshot, snapshot_info};
use crate::snapshots::{HOLDS_MAX, HoldTag, SnapshotFault, SnapshotName, SnapshotRecord};
use crate::store::StoreWrite;
use crate::wire::SnapshotInfo;
use pagemesh_base::layout::VolumeName;

impl Manager {
    /// Holds a snapshot by a tag. A second hold by the same tag changes nothing.
    ///
    /// # Errors
    /// When there is no such snapshot, the tag belongs to rollbacks, the snapshot has the maximum of holds, or the store fails.
    pub fn hold_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
        tag: &HoldTag,
    ) -> Result<SnapshotInfo, Fault> {
        if *tag == rollback_tag()? {
            return Err(Fault::invalid_field(
                format!("the tag {tag} belongs to rollbacks, which release it at their end"),
                "choose another tag",
            ));
        }
        self.change_holds(volume, name, |record| {
            if record.holds.contains(tag) {
                return Ok(());
            }
            if record.holds.len() >= HOLDS_MAX {
                return Err(Fault::TooMany {
                    what: "holds of the snapshot",
                    most: HOLDS_MAX,
                });
            }
            record.holds.push(tag.clone());
            Ok(())
        })
    }

    /// Releases a hold.
    ///
    /// # Errors
    /// When there is no such snapshot or hold, or the store fails.
    pub fn release_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
        tag: &HoldTag,
    ) -> Result<SnapshotInfo, Fault> {
        self.change_holds(volume, name, |record| {
            let Some(at) = record.holds.iter().position(|hold| hold == tag) else {
                let fault = SnapshotFault::NoSuchHold {
                    volume: volume.clone(),
                    name: name.clone(),
                    tag: tag.clone(),
                };
                return Err(fault.into());
            };
            record.holds.remove(at);
            Ok(())
        })
    }

    fn change_holds(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
        change: impl FnOnce(&mut SnapshotRecord) -> Result<(), Fault>,
    ) -> Result<SnapshotInfo, Fault> {
        let mut book = self.state();
        let before = live_snapshot(&book, volume, name)?;
        self.check_snapshot_unchanged(volume, before)?;
        let mut record = before.clone();
        change(&mut record)?;
        if record != *before {
            self.commit(&mut book, &[StoreWrite::PutSnapshot(&record)], vec![])?;
            let now = self.clock.elapsed();
            book.snapshots.put(volume, record.clone(), now);
        }
        let of = book.snapshots.of(volume);
        let info = of.map(|of| snapshot_info(&book, (volume, of), &record));
        info.ok_or_else(|| Fault::NoSuchVolume(volume.clone()))
    }
}
