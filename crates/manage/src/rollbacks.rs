//! Rollbacks of volumes to snapshots: the requests of a client, and their changes of the store.
//!
//! The client copies the pages; the manager keeps the phase ([`crate::rollback`]), and refuses other uses of the volume.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::rollback::{self, ROLLBACK_HOLD, Rollback, RollbackPhase, RollbackRefusal};
use crate::rollback_checks::check_no_rollback;
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::{HOLDS_MAX, HoldTag, SnapshotFault, SnapshotName, SnapshotRecord};
use crate::store::StoreWrite;
use crate::volumes::{check_attachment, check_not_busy};
use crate::wire::{AttachReply, AttachVolume, BeginRollback, EndedRollback, FinishRollback};
use pagemesh_base::layout::{EpochNumber, VolumeName};

/// Bytes of the longest name of a snapshot.
const NAME_BYTES_MAX: usize = 64;
/// Bytes for the number of a snapshot of before.
const NUMBER_BYTES: usize = 6;

impl Manager {
    /// Begins a rollback of a volume to a snapshot, or takes it up.
    ///
    /// # Errors
    /// When there is no such snapshot, another rollback runs, or a client has attached the volume and `force` is not set.
    pub fn begin_rollback(
        &self,
        volume: &VolumeName,
        request: &BeginRollback,
    ) -> Result<Rollback, Fault> {
        let mut book = self.state();
        check_not_busy(&book, volume)?;
        let mut record = book.volume(volume)?.clone();
        if record.received.is_some() {
            return Err(SnapshotFault::Received(volume.clone()).into());
        }
        let to = live_snapshot(&book, volume, &request.snapshot)?.clone();
        let new = || Rollback {
            to: to.name.clone(),
            to_epoch: to.epoch,
            undo: undo_name(&book, volume, &to.name),
            phase: RollbackPhase::Requested,
            since_unix_s: self.clock.unix_s(),
        };
        let next = rollback::begin(record.rollback.as_ref(), new, &to.name);
        let next = next.map_err(|refusal| fault(volume, refusal))?;
        if record.rollback.as_ref() == Some(&next) {
            return Ok(next);
        }
        if let Some(attachment) = record.attachment.as_ref().filter(|_| !request.force) {
            return Err(Fault::Attached {
                name: volume.clone(),
                client: attachment.client.clone(),
            });
        }
        record.rollback = Some(next.clone());
        let begun = EventDraft::rollback_begun(volume, &next, &self.actor());
        self.commit_volume(&mut book, &record, vec![begun])?;
        Ok(next)
    }

    /// The rollback of a volume that has not ended.
    ///
    /// # Errors
    /// When there is no such volume, or none runs.
    pub fn show_rollback(&self, volume: &VolumeName) -> Result<Rollback, Fault> {
        let book = self.state();
        let found = book.volume(volume)?.rollback.clone();
        found.ok_or_else(|| fault(volume, RollbackRefusal::NoRollback))
    }

    /// Attaches a volume for its rollback; the new epoch fences each other client.
    ///
    /// # Errors
    /// As for another attach; also when no rollback runs.
    pub fn attach_for_rollback(
        &self,
        volume: &VolumeName,
        request: &AttachVolume,
    ) -> Result<AttachReply, Fault> {
        self.attach_if(volume, request, |record| {
            let next = rollback::attach(record.rollback.as_ref());
            record.rollback = Some(next.map_err(|refusal| fault(volume, refusal))?);
            Ok(())
        })
    }

    /// Notes that the snapshot of before exists, and holds it: the client may change pages from now on.
    ///
    /// # Errors
    /// When that snapshot does not exist, or the attachment is over.
    pub fn start_rollback_copy(
        &self,
        volume: &VolumeName,
        attachment: EpochNumber,
    ) -> Result<Rollback, Fault> {
        let mut book = self.state();
        let mut record = book.volume(volume)?.clone();
        check_attachment(volume, &record, Some(attachment))?;
        let next = rollback::copying(record.rollback.as_ref());
        let next = next.map_err(|refusal| fault(volume, refusal))?;
        let mut undo = live_snapshot(&book, volume, &next.undo)?.clone();
        let tag = rollback_tag()?;
        if !undo.holds.contains(&tag) {
            if undo.holds.len() >= HOLDS_MAX {
                return Err(Fault::TooMany {
                    what: "holds of the snapshot",
                    most: HOLDS_MAX,
                });
            }
            undo.holds.push(tag);
        }
        record.rollback = Some(next.clone());
        // Before any page changes, and again after each interruption.
        record.content_returns += 1;
        self.commit_rollback(&mut book, record, Some(undo), vec![])?;
        Ok(next)
    }

    /// Turns back. If nothing was changed, the rollback ends at once; otherwise the client copies from the snapshot of
    /// before.
    ///
    /// # Errors
    /// When no rollback runs.
    pub fn undo_rollback(&self, volume: &VolumeName) -> Result<EndedRollback, Fault> {
        let mut book = self.state();
        let mut record = book.volume(volume)?.clone();
        let before = record.rollback.clone();
        let next = rollback::undo(before.as_ref());
        let next = next.map_err(|refusal| fault(volume, refusal))?;
        if record.rollback != next {
            let drafts = match (&before, &next) {
                (Some(before), None) => {
                    vec![EventDraft::rollback_ended(
                        volume,
                        &before.to,
                        true,
                        &self.actor(),
                    )]
                }
                _ => vec![],
            };
            record.rollback.clone_from(&next);
            self.commit_rollback(&mut book, record, None, drafts)?;
        }
        Ok(EndedRollback {
            rollback: before.filter(|_| next.is_none()).or_else(|| next.clone()),
            ended: next.is_none(),
        })
    }

    /// Ends a rollback after all pages are copied. The hold of the snapshot with its present content ends.
    ///
    /// # Errors
    /// When the attachment is over, or the rollback is in another phase.
    pub fn finish_rollback(
        &self,
        volume: &VolumeName,
        request: FinishRollback,
    ) -> Result<EndedRollback, Fault> {
        let mut book = self.state();
        let mut record = book.volume(volume)?.clone();
        check_attachment(volume, &record, Some(request.attachment))?;
        let end = rollback::finish(record.rollback.as_ref(), request.phase);
        let end = end.map_err(|refusal| fault(volume, refusal))?;
        let tag = rollback_tag()?;
        let content = live_snapshot(&book, volume, &end.content).ok().cloned();
        let released = content
            .filter(|it| it.holds.contains(&tag))
            .map(|mut content| {
                content.holds.retain(|hold| *hold != tag);
                content
            });
        let ended = record.rollback.take();
        let to = ended.as_ref().map_or(&end.content, |it| &it.to);
        let draft = EventDraft::rollback_ended(volume, to, end.is_undone, &self.actor());
        self.commit_rollback(&mut book, record, released, vec![draft])?;
        Ok(EndedRollback {
            rollback: ended,
            ended: true,
        })
    }

    /// Stores a volume, and a snapshot of it, in one transaction.
    fn commit_rollback(
        &self,
        book: &mut ManagerState,
        record: VolumeRecord,
        snapshot: Option<SnapshotRecord>,
        drafts: Vec<EventDraft>,
    ) -> Result<(), Fault> {
        let mut writes = vec![StoreWrite::PutVolume(&record)];
        writes.extend(snapshot.as_ref().map(StoreWrite::PutSnapshot));
        self.commit(book, &writes, drafts)?;
        if let Some(snapshot) = snapshot {
            let volume = &record.layout_state.layout.name;
            book.snapshots.put(volume, snapshot, self.clock.elapsed());
        }
        self.put_volume(book, record);
        Ok(())
    }
}

/// Refuses a snapshot of a state between two snapshots. The client of a rollback makes the one of before.
pub(crate) fn check_snapshot_allowed(
    record: &VolumeRecord,
    name: &SnapshotName,
) -> Result<(), Fault> {
    match &record.rollback {
        Some(it) if it.phase == RollbackPhase::Preparing && it.undo == *name => Ok(()),
        _ => check_no_rollback(record),
    }
}

fn fault(volume: &VolumeName, refusal: RollbackRefusal) -> Fault {
    let volume = volume.clone();
    match refusal {
        RollbackRefusal::NoRollback => SnapshotFault::NoRollback(volume).into(),
        RollbackRefusal::Other(it) => SnapshotFault::RollingBack {
            volume,
            to: it.to,
            is_undone: it.phase == RollbackPhase::Undoing,
        }
        .into(),
    }
}

pub(crate) fn rollback_tag() -> Result<HoldTag, Fault> {
    let tag = ROLLBACK_HOLD.parse();
    tag.map_err(|_| Fault::invalid_field("the tag of a hold is invalid", "report this"))
}

/// A free name for the snapshot of before.
fn undo_name(book: &ManagerState, volume: &VolumeName, to: &SnapshotName) -> SnapshotName {
    let base = format!("before-rollback-{to}");
    let base = &base[..base.floor_char_boundary(NAME_BYTES_MAX - NUMBER_BYTES)];
    let of = book.snapshots.of(volume);
    let is_free = |name: &SnapshotName| of.is_none_or(|of| of.find(name).is_none());
    let numbered = (2u32..).map(|number| format!("{base}-{number}"));
    let mut names = std::iter::once(base.to_owned()).chain(numbered);
    // A volume has fewer snapshots than there are numbers.
    let found = names.find_map(|text| text.parse().ok().filter(is_free));
    found.unwrap_or_else(|| to.clone())
}
