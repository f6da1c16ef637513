//! All schedules in memory, with their state that matters while the manager runs.

use super::record::{ScheduleHealth, ScheduleRecord};
use crate::snapshots::SnapshotName;
use pagemesh_base::layout::VolumeName;
use std::collections::BTreeMap;
use std::time::Duration;

/// A schedule and one of its volumes.
pub(crate) type RunKey = (SnapshotName, VolumeName);

/// The state of a schedule for one volume that matters while the manager runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunState {
    pub failures: u32,
    pub retry_at: Duration,
    pub error: Option<String>,
    /// Deletions wait until then.
    pub prune_at: Duration,
    pub prune_error: Option<String>,
    pub reported: ScheduleHealth,
}

/// All schedules.
#[derive(Debug, Default)]
pub(crate) struct ScheduleTable {
    pub records: BTreeMap<SnapshotName, ScheduleRecord>,
    pub runs: BTreeMap<RunKey, RunState>,
    /// By enabled schedule, as the last look found it: the time of the newest snapshot of that volume that is the latest. None without volumes.
    pub latest: BTreeMap<SnapshotName, Option<u64>>,
}

impl ScheduleTable {
    pub(crate) fn new(records: Vec<ScheduleRecord>) -> ScheduleTable {
        let named = records.into_iter().map(|it| (it.name.clone(), it));
        ScheduleTable {
            records: named.collect(),
            runs: BTreeMap::new(),
            latest: BTreeMap::new(),
        }
    }

    pub(crate) fn get(&self, name: &SnapshotName) -> Option<&ScheduleRecord> {
        self.records.get(name)
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = &ScheduleRecord> {
        self.records.values()
    }

    pub(crate) fn put(&mut self, record: ScheduleRecord) {
        self.records.insert(record.name.clone(), record);
    }

    pub(crate) fn remove(&mut self, name: &SnapshotName) {
        self.records.remove(name);
        self.latest.remove(name);
        self.runs.retain(|(schedule, _), _| schedule != name);
    }
}
