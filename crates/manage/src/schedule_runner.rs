//! Carrying schedules out: snapshots that are due are made, those that no class keeps are deleted, and late ones are reported.
//!
//! A volume that cannot be cut is tried again after a pause that doubles with each failure.

use crate::call::CallContext;
use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::rollback_checks::check_not_needed;
use crate::schedule_book::find;
use crate::snapshot_drops::is_kept;
use crate::snapshots::schedules::{
    ClassSet, Plan, RunKey, ScheduleHealth, ScheduleRecord, ScheduledSnapshot, SnapshotClass,
    parse_name, plan, scheduled_name,
};
use crate::snapshots::{SnapshotName, SnapshotRecord, SnapshotState};
use crate::wire::{
    CreateSnapshot, CreateSnapshots, RunSchedule, SchedulePlan, ScheduleVolume, SnapshotInfo,
};
use pagemesh_base::layout::VolumeName;
use std::collections::BTreeMap;
use std::time::Duration;

/// Interval between two looks at all schedules: a snapshot is this much late at most.
pub const SCHEDULE_INTERVAL: Duration = Duration::from_secs(10);
/// The pause after the first failure for a volume.
const RETRY_FIRST: Duration = Duration::from_secs(60);
/// The longest pause.
const RETRY_MAX: Duration = Duration::from_secs(3600);
/// The pause after a snapshot could not be deleted.
const PRUNE_PAUSE: Duration = Duration::from_secs(600);
/// Snapshots of one volume that one look deletes; the next look goes on.
const PRUNED_MAX: usize = 32;

impl Manager {
    /// Carries out all schedules once, and reports volumes that became late or are on time again.
    pub fn run_schedules(&self) {
        if self.store.has_failed() {
            return;
        }
        let keys = self.schedule_keys();
        for of_schedule in keys.chunk_by(|one, other| one.0 == other.0) {
            match self.makes_groups(&of_schedule[0].0) {
                true => self.run_group_schedule(of_schedule),
                false => of_schedule
                    .iter()
                    .for_each(|key| self.run_schedule_for(key)),
            }
        }
        keys.iter().for_each(|key| self.report_health(key));
        let mut book = self.state();
        let enabled = book.schedules.records().filter(|it| it.enabled);
        let latest = enabled.map(|it| (it.name.clone(), self.latest_volume(&book, it)));
        book.schedules.latest = latest.collect();
    }

    /// The time of the newest snapshot of the volume that is the latest, or from which on it is late without one.
    fn latest_volume(&self, book: &ManagerState, record: &ScheduleRecord) -> Option<u64> {
        let volumes = self.schedule_volumes(book, record);
        let age_s = volumes.map(|it| it.age_s).max()?;
        Some(self.clock.unix_s().saturating_sub(age_s))
    }

    /// The ages of the newest snapshots of enabled schedules, each of its latest volume, as the last look found them.
    pub(crate) fn schedule_ages<'b>(
        &self,
        book: &'b ManagerState,
    ) -> impl Iterator<Item = (&'b ScheduleRecord, u64)> {
        let now = self.clock.unix_s();
        let table = &book.schedules;
        let latest = table.latest.iter();
        latest.filter_map(move |(name, since)| {
            let record = table.records.get(name).filter(|it| it.enabled)?;
            Some((record, now.saturating_sub((*since)?)))
        })
    }

    /// The schedules that are enabled, with their volumes. Forgets the state of others.
    fn schedule_keys(&self) -> Vec<RunKey> {
        let mut book = self.state();
        let enabled = book.schedules.records().filter(|it| it.enabled);
        let keys: Vec<RunKey> = enabled
            .flat_map(|record| {
                let names = volumes_of(&book, record);
                names.map(|name| (record.name.clone(), name.clone()))
            })
            .collect();
        let known: std::collections::BTreeSet<&RunKey> = keys.iter().collect();
        book.schedules.runs.retain(|key, _| known.contains(key));
        keys
    }

    fn makes_groups(&self, schedule: &SnapshotName) -> bool {
        let book = self.state();
        let record = book.schedules.get(schedule);
        record.is_some_and(|record| record.group)
    }

    /// The plan for a volume now, without deletions if the schedule makes none. None: the volume waits after a failure.
    fn due_plan(&self, key: &RunKey) -> Option<Plan> {
        let (schedule, volume) = key;
        let book = self.state();
        let record = book.schedules.get(schedule)?;
        let run = book.schedules.runs.get(key);
        if run.is_some_and(|run| self.clock.elapsed() < run.retry_at) {
            return None;
        }
        let mut plan = self.plan_for(&book, record, volume);
        if !record.prune || run.is_some_and(|run| self.clock.elapsed() < run.prune_at) {
            plan.prune.clear();
        }
        Some(plan)
    }

    fn run_schedule_for(&self, key: &RunKey) {
        let Some(plan) = self.due_plan(key) else {
            return;
        };
        let actor = self.acting_for_schedule(&key.0);
        // Deletions may make the room that the next snapshot needs.
        actor.prune(key, &plan);
        if !plan.create.is_empty() {
            let created = actor.create_scheduled(&key.0, &key.1, plan.create);
            self.note_created(key, created.map(drop).map_err(|it| it.to_string()));
        }
    }

    /// Carries out a schedule of snapshots that show one moment. The volumes that get snapshots of the same classes are a group.
    fn run_group_schedule(&self, keys: &[RunKey]) {
        let actor = self.acting_for_schedule(&keys[0].0);
        let mut groups: BTreeMap<Vec<SnapshotClass>, (ClassSet, Vec<&RunKey>)> = BTreeMap::new();
        // All wait after a failure of one, so that no group lacks a volume.
        let plans: Option<Vec<Plan>> = keys.iter().map(|key| self.due_plan(key)).collect();
        for (key, plan) in keys.iter().zip(plans.unwrap_or_default()) {
            actor.prune(key, &plan);
            if !plan.create.is_empty() {
                let group = groups.entry(plan.create.iter().collect());
                let (_, members) = group.or_insert((plan.create, Vec::new()));
                members.push(key);
            }
        }
        for (classes, members) in groups.into_values() {
            let volumes = members.iter().map(|key| key.1.clone()).collect();
            let created = actor.create_scheduled_group(&keys[0].0, volumes, classes);
            let created = created.map_err(|it| it.to_string());
            for key in members {
                self.note_created(key, created.clone());
            }
        }
    }

    /// Notes the end of a cut: after a failure, the volume waits.
    fn note_created(&self, key: &RunKey, created: Result<(), String>) {
        let (schedule, volume) = key;
        let mut book = self.state();
        let run = book.schedules.runs.entry(key.clone()).or_default();
        match created {
            Ok(()) => (run.failures, run.retry_at, run.error) = (0, Duration::ZERO, None),
            Err(fault) => {
                tracing::warn!(%schedule, %volume, error = %fault, "a schedule cannot make a snapshot now; trying again later");
                let pause = RETRY_FIRST * 2u32.saturating_pow(run.failures.min(6));
                run.failures += 1;
                run.retry_at = self.clock.elapsed() + pause.min(RETRY_MAX);
                run.error = Some(fault);
            }
        }
    }

    fn acting_for_schedule(&self, schedule: &SnapshotName) -> Manager {
        self.acting_for(CallContext {
            actor: format!("schedule {schedule}").into(),
            ..CallContext::default()
        })
    }

    /// Deletes snapshots that no class keeps. After a failure, deletions wait, and new snapshots do not.
    fn prune(&self, key: &RunKey, plan: &Plan) {
        let (schedule, volume) = key;
        let mut pruned = Ok(());
        for name in plan.prune.iter().take(PRUNED_MAX) {
            pruned = pruned.and(self.delete_snapshot(volume, name).map(drop));
        }
        let mut book = self.state();
        let now = self.clock.elapsed();
        let run = book.schedules.runs.entry(key.clone()).or_default();
        if now < run.prune_at {
            return;
        }
        run.prune_error = pruned.err().map(|fault| fault.to_string());
        if let Some(name) = &plan.far_ahead {
            run.prune_error = Some(format!(
                "{volume}@{name} is far ahead of the clock, so no snapshot is deleted: set the clock, or delete those with names of the future"
            ));
        }
        if let Some(fault) = &run.prune_error {
            tracing::warn!(%schedule, %volume, error = %fault, "a schedule cannot delete a snapshot now; trying again later");
            run.prune_at = now + PRUNE_PAUSE;
        }
    }

    /// The name of a snapshot that a schedule makes now, and its labels.
    fn new_scheduled(
        &self,
        schedule: &SnapshotName,
        classes: ClassSet,
    ) -> Result<CreateSnapshot, Fault> {
        let prefix = find(&self.state(), schedule)?.prefix.clone();
        let name = scheduled_name(&prefix, self.clock.unix_s(), classes);
        let name = name.ok_or_else(|| Fault::invalid_field("no name", "change the prefix"))?;
        let labels = vec![format!("schedule={schedule}")];
        Ok(CreateSnapshot { name, labels })
    }

    fn create_scheduled(
        &self,
        schedule: &SnapshotName,
        volume: &VolumeName,
        classes: ClassSet,
    ) -> Result<SnapshotInfo, Fault> {
        self.create_snapshot(volume, &self.new_scheduled(schedule, classes)?)
    }

    fn create_scheduled_group(
        &self,
        schedule: &SnapshotName,
        volumes: Vec<VolumeName>,
        classes: ClassSet,
    ) -> Result<(), Fault> {
        let CreateSnapshot { name, labels } = self.new_scheduled(schedule, classes)?;
        let request = CreateSnapshots {
            volumes,
            name,
            labels,
        };
        self.create_snapshots_keyed(&request).map(drop)
    }

    /// Makes a snapshot of a volume out of turn: of the classes that are due, or else of the finest.
    ///
    /// # Errors
    /// When there is no such schedule, the volume is none of it, or it cannot be cut.
    pub fn run_schedule(
        &self,
        name: &SnapshotName,
        request: &RunSchedule,
    ) -> Result<SnapshotInfo, Fault> {
        let volume = &request.volume;
        let classes = {
            let book = self.state();
            let record = find(&book, name)?;
            let labels = &book.volume(volume)?.labels;
            if !record.is_for(volume, labels) {
                return Err(Fault::invalid_field(
                    format!("the schedule {name} is not for the volume {volume}"),
                    "see its volumes with: pagemesh schedule show NAME",
                ));
            }
            let mut classes = self.plan_for(&book, record, volume).create;
            if classes.is_empty()
                && let Some(finest) = record.retention.finest()
            {
                classes.insert(finest);
            }
            classes
        };
        let made = self.create_scheduled(name, volume, classes)?;
        let key = (name.clone(), volume.clone());
        if let Some(run) = self.state().schedules.runs.get_mut(&key) {
            (run.failures, run.retry_at, run.error) = (0, Duration::ZERO, None);
        }
        Ok(made)
    }

    /// The changes that a schedule would make now, by volume.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub fn plan_schedule(&self, name: &SnapshotName) -> Result<Vec<SchedulePlan>, Fault> {
        let book = self.state();
        let record = find(&book, name)?;
        let plans = volumes_of(&book, record).map(|volume| {
            let plan = self.plan_for(&book, record, volume);
            SchedulePlan {
                volume: volume.clone(),
                create: plan.create.iter().collect(),
                prune: if record.prune { plan.prune } else { vec![] },
                needed: plan.needed,
            }
        });
        Ok(plans.collect())
    }

    /// The plan for a volume. A volume that receives snapshots gets none of its own.
    fn plan_for(&self, book: &ManagerState, record: &ScheduleRecord, volume: &VolumeName) -> Plan {
        let snapshots: Vec<_> = scheduled(book, record, volume).collect();
        let (retention, minutes) = (&record.retention, record.frequent_minutes);
        let mut plan = plan(retention, minutes, &snapshots, self.clock.unix_s());
        let volume = book.volumes.get(volume);
        if volume.is_none_or(|volume| volume.received.is_some()) {
            plan.create = ClassSet::default();
        }
        plan
    }

    /// The volumes of a schedule with their health, by name.
    pub(crate) fn schedule_volumes<'b>(
        &'b self,
        book: &'b ManagerState,
        record: &'b ScheduleRecord,
    ) -> impl Iterator<Item = ScheduleVolume> + 'b {
        volumes_of(book, record).map(|name| self.schedule_volume(book, record, name))
    }

    fn schedule_volume(
        &self,
        book: &ManagerState,
        record: &ScheduleRecord,
        name: &VolumeName,
    ) -> ScheduleVolume {
        let (mut count, mut newest) = (0, None::<ScheduledSnapshot>);
        for snapshot in scheduled(book, record, name) {
            count += 1;
            if newest.as_ref().is_none_or(|it| it.epoch < snapshot.epoch) {
                newest = Some(snapshot);
            }
        }
        let volume = book.volumes.get(name);
        let created = volume.map_or(0, |it| it.created_unix_s);
        let since = match &newest {
            Some(newest) => newest.unix_s,
            None => created.max(record.created_unix_s),
        };
        // After a step of the clock back, a schedule makes no snapshot until the clock has passed the newest one. That is late, too.
        let age_s = self.clock.unix_s().abs_diff(since);
        let run = book
            .schedules
            .runs
            .get(&(record.name.clone(), name.clone()));
        let sent = record.targets.iter().filter_map(|target| {
            let sent = target.sent.get(name)?.clone();
            Some((target.name.to_string(), sent))
        });
        ScheduleVolume {
            volume: name.clone(),
            snapshots: count,
            newest: newest.map(|it| it.name),
            age_s,
            health: match record.enabled {
                true => record.health_of(age_s),
                false => ScheduleHealth::Ok,
            },
            received: volume.is_some_and(|it| it.received.is_some()),
            error: run.and_then(|run| run.error.as_ref().or(run.prune_error.as_ref()).cloned()),
            sent: sent.collect(),
        }
    }

    /// Commits an event if a volume became late, or is on time again.
    fn report_health(&self, key: &RunKey) {
        let (schedule, name) = key;
        let mut book = self.state();
        let Some(record) = book.schedules.get(schedule) else {
            return;
        };
        if !book.volumes.contains_key(name) {
            return;
        }
        let state = self.schedule_volume(&book, record, name);
        let reported = book.schedules.runs.get(key);
        let reported = reported.map_or(ScheduleHealth::Ok, |run| run.reported);
        if state.health == reported {
            return;
        }
        let draft = EventDraft::schedule_health(schedule, &state);
        if let Err(error) = self.commit(&mut book, &[], vec![draft]) {
            tracing::error!(%error, "cannot write down that the snapshots of a schedule are late");
            return;
        }
        let run = book.schedules.runs.entry(key.clone()).or_default();
        run.reported = state.health;
    }

    /// The number of schedules by health: on time, warning, critical, and those that are not enabled.
    pub(crate) fn count_schedules(&self, book: &ManagerState) -> ScheduleCounts {
        let enabled = book.schedules.records().filter(|it| it.enabled).count();
        let mut counts = ScheduleCounts {
            disabled: book.schedules.records.len() - enabled,
            ..ScheduleCounts::default()
        };
        for (record, age_s) in self.schedule_ages(book) {
            match record.health_of(age_s) {
                ScheduleHealth::Ok => {}
                ScheduleHealth::Warning => counts.warning += 1,
                ScheduleHealth::Critical => counts.critical += 1,
            }
        }
        counts.ok = enabled - counts.warning - counts.critical;
        counts
    }
}

/// The names of the volumes of a schedule.
fn volumes_of<'b>(
    book: &'b ManagerState,
    record: &'b ScheduleRecord,
) -> impl Iterator<Item = &'b VolumeName> {
    let entries = book.volumes.entries().iter();
    let own = entries.filter(|(name, entry)| record.is_for(name, &entry.record.labels));
    own.map(|(name, _)| name)
}

/// Schedules by health.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScheduleCounts {
    pub ok: usize,
    pub warning: usize,
    pub critical: usize,
    pub disabled: usize,
}

/// The snapshots of a volume that a schedule has made, or that another cluster's schedule with its prefix has.
fn scheduled<'b>(
    book: &'b ManagerState,
    record: &'b ScheduleRecord,
    volume: &'b VolumeName,
) -> impl Iterator<Item = ScheduledSnapshot> + 'b {
    let of = book.snapshots.of(volume).into_iter();
    let live = of.flat_map(|of| of.live());
    let is_whole = |it: &&SnapshotRecord| it.state == SnapshotState::Committed;
    let newest = book.snapshots.of(volume).and_then(|of| of.live().last());
    let newest = newest.map(|it| it.epoch);
    let target = book.volumes.get(volume);
    let is_received = target.is_some_and(|it| it.received.is_some());
    let is_attached = target.is_some_and(|it| it.attachment.is_some());
    live.filter(is_whole).filter_map(move |it| {
        let (unix_s, classes) = parse_name(&record.prefix, &it.name)?;
        let mut schedules = book.schedules.records();
        let identity = (it.volume, it.epoch);
        // The next stream of changes begins at the newest snapshot of a volume that receives. During a receive, the snapshot
        // before is compared with it.
        let is_start = is_received && (is_attached || newest == Some(it.epoch));
        Some(ScheduledSnapshot {
            name: it.name.clone(),
            epoch: it.epoch.0,
            unix_s,
            classes,
            is_needed: is_start
                || is_kept(book, volume, it)
                || target.is_some_and(|target| check_not_needed(target, &it.name).is_err())
                || schedules.any(|other| other.is_needed_by_target(volume, identity)),
        })
    })
}
