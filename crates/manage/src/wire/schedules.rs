//! Bodies about schedules.

use crate::snapshots::SnapshotName;
use crate::snapshots::schedules::{Retention, ScheduleHealth, SentSnapshot, SnapshotClass};
use pagemesh_base::layout::VolumeName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

fn yes() -> bool {
    true
}

/// A target of replication.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleTarget {
    /// Its name, of at most 24 bytes.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// The address of its manager, as `http://HOST:PORT`.
    pub manager: String,
    /// The start of the names of its volumes; the name of the volume follows.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub volume_prefix: String,
}

/// The policy of a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SchedulePolicy {
    /// The start of the names of its snapshots, at most 24 bytes; the name of the schedule if missing. No other schedule has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Names of volumes and file systems, patterns of them with `*`, or labels as `KEY=VALUE`: 1 to 64.
    #[schema(min_items = 1, max_items = 64)]
    pub volumes: Vec<String>,
    /// How many snapshots of each class stay. At least one class has some; 5000 in all at most.
    pub retention: Retention,
    /// Minutes between two frequent snapshots: a divisor of 60 below it; 15 if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 30)]
    pub frequent_minutes: Option<u32>,
    /// The age in seconds of a newest snapshot from which on the health is `warning`; twice the time between two snapshots if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub warn_after_s: Option<u64>,
    /// The age from which on it is `critical`; four times that time if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub critical_after_s: Option<u64>,
    /// `false`: the manager does not carry it out.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// `false`: it deletes no snapshots.
    #[serde(default = "yes")]
    pub prune: bool,
    /// `true`: the snapshots of its volumes show one moment, at most 16 volumes. Without one of them none is made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub group: bool,
    /// The clusters that `pagemesh schedule replicate` sends its snapshots to: at most 4.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 4)]
    pub targets: Vec<ScheduleTarget>,
}

/// Labels of a volume to set and to remove. Others stay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetLabels {
    /// Keys with values, each of 1 to 32 letters, digits, `.`, `-` and `_`. A volume has 16 at most.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set: BTreeMap<String, String>,
    /// Keys to remove, whether or not they are there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove: Vec<String>,
}

/// A schedule to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSchedule {
    /// Its name, of at most 24 bytes.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// Its policy.
    pub policy: SchedulePolicy,
}

/// A schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduleInfo {
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub name: SnapshotName,
    /// Its policy, with the values of missing fields.
    pub policy: SchedulePolicy,
    /// Volumes that it is for.
    pub volumes: usize,
    /// The worst health of them; `ok` while it is not enabled.
    pub health: ScheduleHealth,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// Its maker: the name of a token, or `cluster key`.
    pub made_by: String,
}

/// A volume of a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduleVolume {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// Its snapshots of this schedule.
    pub snapshots: usize,
    /// The newest of them.
    #[schema(value_type = Option<crate::api::document::Name>)]
    pub newest: Option<SnapshotName>,
    /// Its age in seconds, or that of the volume or the schedule without one.
    pub age_s: u64,
    /// The health that follows.
    pub health: ScheduleHealth,
    /// Whether the volume receives snapshots, so that the schedule only deletes them.
    pub received: bool,
    /// The last error, until a snapshot is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The snapshots that were sent last, by target.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sent: BTreeMap<String, SentSnapshot>,
}

/// A schedule with its volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduleDetail {
    /// The same as in the list.
    pub info: ScheduleInfo,
    /// By name.
    pub volumes: Vec<ScheduleVolume>,
}

/// The changes that a schedule would make to a volume now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchedulePlan {
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// The classes of the snapshot that it would make; none if empty.
    pub create: Vec<SnapshotClass>,
    /// The snapshots that it would delete.
    #[schema(value_type = Vec<crate::api::document::Name>)]
    pub prune: Vec<SnapshotName>,
    /// The snapshots that it would delete, but that a hold or a target keeps.
    #[schema(value_type = Vec<crate::api::document::Name>)]
    pub needed: Vec<SnapshotName>,
}

/// A snapshot to make out of turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunSchedule {
    /// The volume, one of the schedule.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
}

/// The report of a snapshot that a target has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportSent {
    /// The target.
    #[schema(value_type = crate::api::document::Name)]
    pub target: SnapshotName,
    /// The volume.
    #[schema(value_type = crate::api::document::Name)]
    pub volume: VolumeName,
    /// The snapshot. A bookmark `SCHEDULE.TARGET` of it takes the place of the one before.
    #[schema(value_type = crate::api::document::Name)]
    pub snapshot: SnapshotName,
}
