//! The plan of a schedule for one volume. It is pure: the policy, the snapshots and the time in, changes out.
//!
//! Rules:
//! - A class is due if no snapshot of it is in the present period, or in a later one. One snapshot serves all classes that are due. So
//!   after a downtime one is made, and after a short step of the clock back none, until the clock has passed the newest.
//! - A snapshot more than [`FUTURE_MAX_S`] ahead of the clock serves no period: the clock was wrong, or is wrong. While there is one, nothing
//!   is deleted.
//! - A class keeps its newest snapshots, as many as its retention, and all of that many last periods. So neither a downtime nor a
//!   wrong clock empties it. A snapshot goes once no class keeps it.
//! - A hold, a clone, or a target of replication keeps a snapshot in any case.
//!
//! Snapshots are ordered by epoch, which no clock changes.

use super::class::{CLASSES, ClassSet, SnapshotClass};
use crate::snapshots::{SnapshotName, VOLUME_SNAPSHOTS_MAX};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Snapshots of one volume that schedules may keep: the rest is for people and replication.
pub const RETAINED_MAX: u32 = VOLUME_SNAPSHOTS_MAX as u32 / 2;

/// Seconds that a step of the clock back may last.
pub const FUTURE_MAX_S: u64 = 7 * 24 * 3600;

/// How many snapshots of each class stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Retention {
    /// Several times an hour.
    pub frequent: u32,
    /// Each hour.
    pub hourly: u32,
    /// Each day.
    pub daily: u32,
    /// Each week.
    pub weekly: u32,
    /// Each month.
    pub monthly: u32,
    /// Each year.
    pub yearly: u32,
}

impl Retention {
    /// How many of a class stay.
    #[must_use]
    pub fn of(&self, class: SnapshotClass) -> u32 {
        match class {
            SnapshotClass::Frequent => self.frequent,
            SnapshotClass::Hourly => self.hourly,
            SnapshotClass::Daily => self.daily,
            SnapshotClass::Weekly => self.weekly,
            SnapshotClass::Monthly => self.monthly,
            SnapshotClass::Yearly => self.yearly,
        }
    }

    /// How many stay in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        CLASSES.iter().map(|class| u64::from(self.of(*class))).sum()
    }

    /// The finest class that is kept.
    pub(crate) fn finest(&self) -> Option<SnapshotClass> {
        CLASSES.into_iter().find(|class| self.of(*class) > 0)
    }
}

/// A snapshot of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledSnapshot {
    /// Its name.
    pub name: SnapshotName,
    /// Its epoch: a later snapshot has a higher one.
    pub epoch: u32,
    /// The time in its name, in seconds since 1970.
    pub unix_s: u64,
    /// Its classes.
    pub classes: ClassSet,
    /// Whether a hold, a clone or a target of replication keeps it.
    pub is_needed: bool,
}

/// The changes of a schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The classes of the snapshot to make; empty: none.
    pub create: ClassSet,
    /// The snapshots to delete, the oldest first.
    pub prune: Vec<SnapshotName>,
    /// Snapshots that would be deleted, but are needed.
    pub needed: Vec<SnapshotName>,
    /// A snapshot far ahead of the clock, for which nothing is deleted.
    pub far_ahead: Option<SnapshotName>,
}

/// The plan for a volume at this time.
#[must_use]
pub fn plan(
    retention: &Retention,
    frequent_minutes: u32,
    snapshots: &[ScheduledSnapshot],
    now_unix_s: u64,
) -> Plan {
    let mut newest_first: Vec<&ScheduledSnapshot> = snapshots.iter().collect();
    newest_first.sort_unstable_by_key(|it| std::cmp::Reverse(it.epoch));
    let mut plan = Plan::default();
    let mut is_kept = vec![false; newest_first.len()];
    for class in CLASSES {
        let count = u64::from(retention.of(class));
        let now = class.period(now_unix_s, frequent_minutes);
        let (mut before, mut is_due) = (0, count > 0);
        for (at, snapshot) in newest_first.iter().enumerate() {
            if !snapshot.classes.has(class) {
                continue;
            }
            let period = class.period(snapshot.unix_s, frequent_minutes);
            let is_of_wrong_clock = snapshot.unix_s > now_unix_s.saturating_add(FUTURE_MAX_S);
            is_due &= period < now || is_of_wrong_clock;
            is_kept[at] |= before < count || period + count > now;
            before += 1;
        }
        if is_due {
            plan.create.insert(class);
        }
    }
    for (snapshot, is_kept) in newest_first.iter().zip(is_kept).rev() {
        match (is_kept, snapshot.is_needed) {
            (true, _) => {}
            (false, true) => plan.needed.push(snapshot.name.clone()),
            (false, false) => plan.prune.push(snapshot.name.clone()),
        }
    }
    let latest = now_unix_s.saturating_add(FUTURE_MAX_S);
    let far_ahead = newest_first.iter().find(|it| it.unix_s > latest);
    if let Some(far_ahead) = far_ahead {
        plan.prune.clear();
        plan.far_ahead = Some(far_ahead.name.clone());
    }
    plan
}
