//! Schedules: policies that make and delete snapshots of volumes. The operations are in modules of the root:
//!
//! ```text
//!  schedule_book ── create, list, update, delete ── store
//!  schedule_runner ── planner (pure) ── snapshot_cut, snapshot_drops
//! ```
//!
//! Invariants: a plan looks at names, epochs and the time alone, so a restarted manager plans as the one before. A snapshot that a schedule
//! makes or deletes takes the way of one that a person makes or deletes. No snapshot is made under the lock.

pub(crate) mod calendar;
mod class;
mod name;
mod pattern;
mod planner;
mod record;
mod table;

pub use class::{CLASSES, ClassSet, SnapshotClass};
pub use name::PREFIX_BYTES_MAX;
pub use pattern::{is_pattern as is_volume_pattern, matches as pattern_matches};
pub use planner::{Plan, RETAINED_MAX, Retention, ScheduledSnapshot, plan};
pub use record::{ScheduleHealth, ScheduleRecord, SentSnapshot, TargetRecord};

pub(crate) use name::{parse_name, scheduled_name};
pub(crate) use pattern::is_pattern;
pub(crate) use table::{RunKey, ScheduleTable};

/// Maximum of schedules: each looks at all of its volumes every few seconds.
pub const SCHEDULES_MAX: usize = 256;
/// Maximum of names and patterns of one schedule.
pub const PATTERNS_MAX: usize = 64;
/// Maximum of targets of replication of one schedule: its record has the last snapshot of each volume that was sent to each.
pub const TARGETS_MAX: usize = 4;
