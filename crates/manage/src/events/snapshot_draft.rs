//! The events of snapshots, clones, rollbacks and schedules.

use super::draft::EventDraft;
use super::record::{EventKind, Severity};
use crate::label_text::VolumeLabels;
use crate::records::CloneOrigin;
use crate::rollback::Rollback;
use crate::snapshots::SnapshotName;
use crate::snapshots::schedules::ScheduleHealth;
use crate::wire::{ErrorBody, ScheduleVolume};
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::layout::VolumeName;

/// Names in the event of lost snapshots: an event has room for some.
const LOST_NAMES_SHOWN: usize = 8;

impl EventDraft {
    pub(crate) fn volume_cloned(
        volume: &VolumeName,
        actor: &str,
        (origin, snapshot): (&VolumeName, &SnapshotName),
        bytes: u64,
    ) -> EventDraft {
        let text = format!(
            "The volume {volume} of {bytes} bytes was cloned from the snapshot {origin}@{snapshot}."
        );
        let kind = EventKind::VolumeCloned;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn clone_promoted(
        volume: &VolumeName,
        actor: &str,
        origin: &CloneOrigin,
    ) -> EventDraft {
        let CloneOrigin {
            volume: of,
            snapshot,
            ..
        } = origin;
        let text =
            format!("The volume {volume} does not share pages with {of}@{snapshot} any more.");
        let kind = EventKind::ClonePromoted;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn volume_promoted(volume: &VolumeName, actor: &str) -> EventDraft {
        let text = format!(
            "The volume {volume} was promoted: it receives no more snapshots, and clients may write to it."
        );
        let kind = EventKind::VolumePromoted;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn snapshot_created(
        volume: &VolumeName,
        name: &SnapshotName,
        actor: &str,
    ) -> EventDraft {
        let text = format!("The snapshot {volume}@{name} was made.");
        let kind = EventKind::SnapshotCreated;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn snapshot_deleted(
        volume: &VolumeName,
        name: &SnapshotName,
        actor: &str,
    ) -> EventDraft {
        let text = format!("The snapshot {volume}@{name} was deleted.");
        let kind = EventKind::SnapshotDeleted;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn volume_labels_changed(
        volume: &VolumeName,
        actor: &str,
        labels: &VolumeLabels,
    ) -> EventDraft {
        let labels: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let text = match labels.is_empty() {
            true => format!("The volume {volume} has no labels now."),
            false => format!(
                "The labels of the volume {volume} are {} now.",
                labels.join(", ")
            ),
        };
        let kind = EventKind::VolumeLabelsChanged;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn snapshots_lost(
        volume: &VolumeName,
        actor: &str,
        copy: usize,
        names: &[SnapshotName],
    ) -> EventDraft {
        let shown: Vec<String> = names
            .iter()
            .take(LOST_NAMES_SHOWN)
            .map(ToString::to_string)
            .collect();
        let more = match names.len() - shown.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let text = format!(
            "The promotion of copy {copy} of the volume {volume} deleted {} snapshots that this copy does not have as a whole: \
             {}{more}. Take new ones.",
            names.len(),
            shown.join(", ")
        );
        let kind = EventKind::SnapshotDeleted;
        EventDraft::of_volume(kind, Severity::Warning, volume, actor, text)
    }

    pub(crate) fn snapshots_copied(
        volume: &VolumeName,
        count: usize,
        brick: &BrickLabel,
    ) -> EventDraft {
        let text = format!(
            "The copy of the volume {volume} on the brick {brick} got {count} snapshots that it lacked."
        );
        let kind = EventKind::SnapshotsCopied;
        EventDraft::of_volume(kind, Severity::Info, volume, "manager", text)
    }

    pub(crate) fn snapshot_failed(
        volume: &VolumeName,
        name: &SnapshotName,
        actor: &str,
        cause: &ErrorBody,
    ) -> EventDraft {
        let ErrorBody { error, hint, .. } = cause;
        let text = format!("The snapshot {volume}@{name} was not made: {error}; {hint}.");
        let kind = EventKind::SnapshotFailed;
        EventDraft::of_volume(kind, Severity::Warning, volume, actor, text)
    }

    pub(crate) fn schedule_health(schedule: &SnapshotName, state: &ScheduleVolume) -> EventDraft {
        let ScheduleVolume {
            volume,
            newest,
            age_s,
            health,
            error,
            ..
        } = state;
        let minutes = age_s / 60;
        let (kind, severity) = match health {
            ScheduleHealth::Ok => (EventKind::ScheduleOnTime, Severity::Info),
            ScheduleHealth::Warning => (EventKind::ScheduleLate, Severity::Warning),
            ScheduleHealth::Critical => (EventKind::ScheduleLate, Severity::Critical),
        };
        let cause = match error {
            Some(error) => format!("the last attempt failed: {error}"),
            None => "see its plan".to_owned(),
        };
        let text = match (health, newest) {
            (ScheduleHealth::Ok, _) => {
                format!(
                    "The snapshots of the volume {volume} by the schedule {schedule} are on time again."
                )
            }
            (_, Some(newest)) => format!(
                "The newest snapshot of the volume {volume} by the schedule {schedule}, {newest}, is {minutes} minutes old; \
                 {cause}; look with: pagemesh schedule show {schedule}."
            ),
            (_, None) => format!(
                "The volume {volume} has no snapshot of the schedule {schedule} since {minutes} minutes; {cause}; look with: \
                 pagemesh schedule show {schedule}."
            ),
        };
        EventDraft::of_volume(kind, severity, volume, "manager", text)
    }

    pub(crate) fn rollback_begun(
        volume: &VolumeName,
        rollback: &Rollback,
        actor: &str,
    ) -> EventDraft {
        let to = &rollback.to;
        let text = format!(
            "The volume {volume} is being rolled back to {volume}@{to}. It takes no other use until that has ended; \
             an interrupted rollback goes on with: pagemesh snapshot rollback {volume}@{to}"
        );
        let kind = EventKind::RollbackBegun;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }

    pub(crate) fn rollback_ended(
        volume: &VolumeName,
        to: &SnapshotName,
        is_undone: bool,
        actor: &str,
    ) -> EventDraft {
        let text = match is_undone {
            false => format!("The volume {volume} was rolled back to {volume}@{to}."),
            true => format!("The rollback of the volume {volume} to {volume}@{to} was undone."),
        };
        let kind = EventKind::RollbackEnded;
        EventDraft::of_volume(kind, Severity::Info, volume, actor, text)
    }
}
