//! The records of schedules in the store, as JSON. New fields need a default.

use super::class::SnapshotClass;
use super::pattern::matches;
use super::planner::Retention;
use crate::label_text::{VolumeLabels, parse_label};
use crate::snapshots::SnapshotName;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;
use uuid::Uuid;

/// The health of a schedule: the age of the newest snapshot of its volumes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleHealth {
    /// Each newest snapshot is young enough.
    #[default]
    Ok,
    /// One is older than the schedule's warning age.
    Warning,
    /// One is older than the schedule's critical age.
    Critical,
}

/// The snapshot of a volume that was sent last to a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SentSnapshot {
    /// The identity of the volume.
    pub volume: Uuid,
    /// The snapshot.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
    /// Its epoch.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// Milliseconds since 1970 at which the target had it.
    pub sent_unix_ms: u64,
}

/// Another cluster that gets the snapshots of a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// Its name.
    pub name: SnapshotName,
    /// The address of its manager, as `http://HOST:PORT`.
    pub manager: String,
    /// The start of the names of its volumes; the name of the volume follows.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub volume_prefix: String,
    /// The snapshots that were sent last.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sent: BTreeMap<VolumeName, SentSnapshot>,
}

/// A schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleRecord {
    /// Its name.
    pub name: SnapshotName,
    /// The start of the names of its snapshots. No other schedule has it.
    pub prefix: String,
    /// Names of volumes and file systems, patterns of them, and labels as `KEY=VALUE`.
    pub volumes: Vec<String>,
    /// How many snapshots stay.
    pub retention: Retention,
    /// Minutes between two frequent snapshots.
    pub frequent_minutes: u32,
    /// The age in seconds of a newest snapshot from which on the health is `warning`.
    pub warn_after_s: u64,
    /// The age from which on it is `critical`.
    pub critical_after_s: u64,
    /// Whether the manager carries it out.
    pub enabled: bool,
    /// Whether it deletes snapshots.
    pub prune: bool,
    /// Whether the snapshots of its volumes show one moment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub group: bool,
    /// The clusters that get its snapshots.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<TargetRecord>,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// The actor that made it.
    pub made_by: String,
}

impl ScheduleRecord {
    /// Whether it is for the volume with this name and these labels.
    pub(crate) fn is_for(&self, volume: &VolumeName, labels: &VolumeLabels) -> bool {
        let name = volume.as_str();
        self.volumes.iter().any(|text| match parse_label(text) {
            Some((key, value)) => labels.get(key).is_some_and(|it| it == value),
            None => matches(text, name),
        })
    }

    /// Whether a target gets changes that begin at this snapshot.
    pub(crate) fn is_needed_by_target(
        &self,
        volume: &VolumeName,
        (id, epoch): (Uuid, EpochNumber),
    ) -> bool {
        let mut sent = self.targets.iter().filter_map(|it| it.sent.get(volume));
        sent.any(|sent| (sent.volume, sent.epoch) == (id, epoch))
    }

    /// The ages of health that follow from a retention: twice and four times the time between two snapshots.
    pub(crate) fn default_ages(retention: &Retention, frequent_minutes: u32) -> (u64, u64) {
        let finest = retention.finest().unwrap_or(SnapshotClass::Daily);
        let period_s = finest.longest_s(frequent_minutes);
        (2 * period_s, 4 * period_s)
    }

    /// The health of a volume by the age of its newest snapshot.
    pub(crate) fn health_of(&self, age_s: u64) -> ScheduleHealth {
        match age_s {
            age if age >= self.critical_after_s => ScheduleHealth::Critical,
            age if age >= self.warn_after_s => ScheduleHealth::Warning,
            _ => ScheduleHealth::Ok,
        }
    }
}
