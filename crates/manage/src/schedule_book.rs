//! Schedules: made, listed, changed and deleted; the snapshots that their targets have.

use crate::call::{RecordTag, etag_text};
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer};
use crate::label_text::parse_label;
use crate::manager::{Manager, ManagerState};
use crate::snapshot_lists::live_snapshot;
use crate::snapshots::schedules::{
    PATTERNS_MAX, PREFIX_BYTES_MAX, RETAINED_MAX, Retention, SCHEDULES_MAX, ScheduleHealth,
    ScheduleRecord, SentSnapshot, TARGETS_MAX, TargetRecord, is_pattern, scheduled_name,
};
use crate::snapshots::{SnapshotFault, SnapshotName};
use crate::store::StoreWrite;
use crate::wire::{
    CreateBookmark, CreateSchedule, ReportSent, ScheduleDetail, ScheduleInfo, SchedulePolicy,
    ScheduleTarget,
};
use std::collections::{BTreeMap, BTreeSet};

/// Minutes between two frequent snapshots, by default as in sanoid.
const FREQUENT_MINUTES: u32 = 15;
/// Bytes of the longest address of a manager.
const URL_BYTES_MAX: usize = 256;

impl Manager {
    /// Makes a schedule.
    ///
    /// # Errors
    /// When the policy is impossible, the name or the prefix is taken, or a limit is reached.
    pub fn create_schedule(&self, request: &CreateSchedule) -> Result<ScheduleInfo, Fault> {
        self.create_schedule_keyed(request)
            .map(|answer| answer.reply)
    }

    /// The same, with the entity tag of the schedule. A repetition of a call with an `Idempotency-Key` gets the first answer again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn create_schedule_keyed(
        &self,
        request: &CreateSchedule,
    ) -> Result<CreateAnswer<ScheduleInfo>, Fault> {
        let running = match self.begin_call(&("schedule", request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        check_short("the name of a schedule", request.name.as_str())?;
        let mut book = self.state();
        if book.schedules.get(&request.name).is_some() {
            return Err(SnapshotFault::ScheduleExists(request.name.clone()).into());
        }
        if book.schedules.records().count() >= SCHEDULES_MAX {
            return Err(Fault::TooMany {
                what: "schedules",
                most: SCHEDULES_MAX,
            });
        }
        let record = self.new_record(&book, &request.name, &request.policy, None)?;
        let reply = self.schedule_info(&book, &record);
        let etag = etag_text(RecordTag::new(&record), &reply);
        let kept = self.plan_answer(&book, running.as_ref(), &etag, &reply);
        let mut writes = vec![StoreWrite::PutSchedule(&record)];
        writes.extend(kept.writes());
        self.commit(&mut book, &writes, vec![])?;
        self.apply_key_change(&mut book, &kept);
        book.schedules.put(record);
        Ok(CreateAnswer { reply, etag })
    }

    /// All schedules, by name.
    #[must_use]
    pub fn schedules(&self) -> Vec<ScheduleInfo> {
        let book = self.state();
        let records = book.schedules.records();
        records.map(|it| self.schedule_info(&book, it)).collect()
    }

    /// A schedule with its volumes, and the tag of its record.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub fn show_schedule(&self, name: &SnapshotName) -> Result<(ScheduleDetail, RecordTag), Fault> {
        let book = self.state();
        let record = find(&book, name)?;
        let detail = ScheduleDetail {
            info: self.schedule_info(&book, record),
            volumes: self.schedule_volumes(&book, record).collect(),
        };
        Ok((detail, RecordTag::new(record)))
    }

    /// Replaces the policy of a schedule. Snapshots that a new prefix no longer names stay, and are for people to delete.
    ///
    /// # Errors
    /// When there is no such schedule, or the policy is impossible.
    pub fn update_schedule(
        &self,
        name: &SnapshotName,
        policy: &SchedulePolicy,
    ) -> Result<ScheduleInfo, Fault> {
        let mut book = self.state();
        let before = find(&book, name)?;
        self.check_schedule_unchanged(before)?;
        let record = self.new_record(&book, name, policy, Some(before))?;
        self.commit(&mut book, &[StoreWrite::PutSchedule(&record)], vec![])?;
        book.schedules.put(record.clone());
        Ok(self.schedule_info(&book, &record))
    }

    /// Deletes a schedule. Its snapshots and bookmarks stay.
    ///
    /// # Errors
    /// When there is no such schedule, or the store fails.
    pub fn delete_schedule(&self, name: &SnapshotName) -> Result<(), Fault> {
        let mut book = self.state();
        self.check_schedule_unchanged(find(&book, name)?)?;
        self.commit(
            &mut book,
            &[StoreWrite::RemoveSchedule(name.clone())],
            vec![],
        )?;
        book.schedules.remove(name);
        Ok(())
    }

    /// Notes that a target has a snapshot: the snapshot stays until the target has a later one, and a bookmark of it is made.
    ///
    /// # Errors
    /// When there is no such schedule, target or snapshot, the target has a later one, or a limit is reached.
    pub fn report_sent(&self, name: &SnapshotName, report: &ReportSent) -> Result<(), Fault> {
        let mut book = self.state();
        let mut record = find(&book, name)?.clone();
        let ReportSent {
            target,
            volume,
            snapshot,
        } = report;
        let found = record.targets.iter_mut().find(|it| it.name == *target);
        let found = found.ok_or_else(|| {
            Fault::invalid_field(
                format!("the schedule {name} has no target {target}"),
                "name one of: pagemesh schedule show NAME",
            )
        })?;
        let sent = live_snapshot(&book, volume, snapshot)?;
        let is_of = |it: &&SentSnapshot| it.volume == sent.volume;
        let last = found.sent.get(volume).filter(is_of);
        if last.is_some_and(|last| last.epoch >= sent.epoch) {
            // A repetition, or one that arrived late.
            return Ok(());
        }
        let request = CreateBookmark {
            snapshot: snapshot.clone(),
            name: Some(bookmark_name(name, target)?),
        };
        let bookmark = self.new_bookmark(&book, volume, &request, true)?;
        let entry = SentSnapshot {
            volume: sent.volume,
            snapshot: snapshot.clone(),
            epoch: sent.epoch,
            sent_unix_ms: self.clock.unix_ms(),
        };
        found
            .sent
            .retain(|volume, _| book.volumes.contains_key(volume));
        found.sent.insert(volume.clone(), entry);
        let writes = [
            StoreWrite::PutSchedule(&record),
            StoreWrite::PutBookmark(&bookmark),
        ];
        self.commit(&mut book, &writes, vec![])?;
        book.snapshots.put_bookmark(volume, bookmark);
        book.schedules.put(record);
        Ok(())
    }

    fn check_schedule_unchanged(&self, record: &ScheduleRecord) -> Result<(), Fault> {
        self.check_unchanged(
            || RecordTag::new(record),
            || format!("the schedule {}", record.name),
        )
    }

    /// The record of a policy, after a check of it.
    fn new_record(
        &self,
        book: &ManagerState,
        name: &SnapshotName,
        policy: &SchedulePolicy,
        before: Option<&ScheduleRecord>,
    ) -> Result<ScheduleRecord, Fault> {
        let frequent_minutes = policy.frequent_minutes.unwrap_or(FREQUENT_MINUTES);
        let retention = policy.retention;
        check_retention(&retention, frequent_minutes)?;
        let (warn_s, critical_s) = ScheduleRecord::default_ages(&retention, frequent_minutes);
        let warn_after_s = policy.warn_after_s.unwrap_or(warn_s);
        let critical_after_s = policy
            .critical_after_s
            .unwrap_or(critical_s.max(warn_after_s));
        check_ages(
            &retention,
            frequent_minutes,
            (warn_after_s, critical_after_s),
        )?;
        check_volumes(&policy.volumes)?;
        let prefix = policy.prefix.clone();
        let prefix = prefix.unwrap_or_else(|| name.to_string());
        check_prefix(book, name, &prefix)?;
        Ok(ScheduleRecord {
            name: name.clone(),
            prefix,
            volumes: policy.volumes.clone(),
            retention,
            frequent_minutes,
            warn_after_s,
            critical_after_s,
            enabled: policy.enabled,
            prune: policy.prune,
            group: policy.group,
            targets: target_records(&policy.targets, before)?,
            created_unix_s: before.map_or_else(|| self.clock.unix_s(), |it| it.created_unix_s),
            made_by: before.map_or_else(|| self.actor(), |it| it.made_by.clone()),
        })
    }

    /// A schedule in a list.
    fn schedule_info(&self, book: &ManagerState, record: &ScheduleRecord) -> ScheduleInfo {
        let (mut volumes, mut health) = (0, ScheduleHealth::Ok);
        for volume in self.schedule_volumes(book, record) {
            volumes += 1;
            health = health.max(volume.health);
        }
        let target = |target: &TargetRecord| ScheduleTarget {
            name: target.name.clone(),
            manager: target.manager.clone(),
            volume_prefix: target.volume_prefix.clone(),
        };
        ScheduleInfo {
            name: record.name.clone(),
            policy: SchedulePolicy {
                prefix: Some(record.prefix.clone()),
                volumes: record.volumes.clone(),
                retention: record.retention,
                frequent_minutes: Some(record.frequent_minutes),
                warn_after_s: Some(record.warn_after_s),
                critical_after_s: Some(record.critical_after_s),
                enabled: record.enabled,
                prune: record.prune,
                group: record.group,
                targets: record.targets.iter().map(target).collect(),
            },
            volumes,
            health,
            created_unix_s: record.created_unix_s,
            made_by: record.made_by.clone(),
        }
    }
}

/// A schedule of this name.
pub(crate) fn find<'b>(
    book: &'b ManagerState,
    name: &SnapshotName,
) -> Result<&'b ScheduleRecord, Fault> {
    let found = book.schedules.get(name);
    found.ok_or_else(|| SnapshotFault::NoSuchSchedule(name.clone()).into())
}

/// The name of the bookmark of the last snapshot that a target has.
fn bookmark_name(schedule: &SnapshotName, target: &SnapshotName) -> Result<SnapshotName, Fault> {
    let name = format!("{schedule}.{target}").parse();
    name.map_err(|cause| Fault::invalid_field(format!("{cause}"), "choose shorter names"))
}

fn check_short(what: &str, text: &str) -> Result<(), Fault> {
    match text.len() <= PREFIX_BYTES_MAX {
        true => Ok(()),
        false => Err(Fault::invalid_field(
            format!("{what} has more than {PREFIX_BYTES_MAX} bytes"),
            "choose a shorter one",
        )),
    }
}

/// Refuses a retention that keeps nothing, or more than a volume may have.
fn check_retention(retention: &Retention, frequent_minutes: u32) -> Result<(), Fault> {
    let total = retention.total();
    if total == 0 {
        return Err(Fault::invalid_field(
            "the retention keeps no snapshot of any class",
            "keep at least one, as in: --daily 7",
        ));
    }
    if total > u64::from(RETAINED_MAX) {
        return Err(Fault::invalid_field(
            format!(
                "the retention keeps {total} snapshots of a volume, and {RETAINED_MAX} are the most"
            ),
            "keep fewer, or make frequent ones less often",
        ));
    }
    if !(1..=30).contains(&frequent_minutes) || 60 % frequent_minutes != 0 {
        return Err(Fault::invalid_field(
            format!("{frequent_minutes} minutes between frequent snapshots do not divide an hour"),
            "choose one of 1, 2, 3, 4, 5, 6, 10, 12, 15, 20 and 30",
        ));
    }
    Ok(())
}

/// Refuses ages that a schedule on time would reach, and ages out of order.
fn check_ages(
    retention: &Retention,
    frequent_minutes: u32,
    (warn_s, critical_s): (u64, u64),
) -> Result<(), Fault> {
    let period_s = retention
        .finest()
        .map_or(1, |it| it.longest_s(frequent_minutes));
    if warn_s <= period_s || critical_s < warn_s {
        return Err(Fault::invalid_field(
            format!(
                "a warning after {warn_s} s and a critical state after {critical_s} s do not fit: two snapshots are up to {period_s} s apart"
            ),
            "choose a warning age above that time, and a critical age that is not below the warning age",
        ));
    }
    Ok(())
}

fn check_pattern(text: &str) -> Result<(), Fault> {
    match is_pattern(text) || parse_label(text).is_some() {
        true => Ok(()),
        false => Err(Fault::invalid_field(
            format!(
                "'{}' is no name of a volume, nor a pattern or a label",
                text.escape_debug()
            ),
            "write a name, one with * for any text as in db-*, or a label KEY=VALUE",
        )),
    }
}

fn check_volumes(volumes: &[String]) -> Result<(), Fault> {
    if !(1..=PATTERNS_MAX).contains(&volumes.len()) {
        return Err(Fault::invalid_field(
            format!("a schedule names 1 to {PATTERNS_MAX} volumes or patterns"),
            "name others in another schedule, or use a pattern as db-*",
        ));
    }
    volumes
        .iter()
        .try_for_each(|pattern| check_pattern(pattern))
}

/// Refuses a prefix that makes no names, or that another schedule has: it would delete the snapshots of that one.
fn check_prefix(book: &ManagerState, name: &SnapshotName, prefix: &str) -> Result<(), Fault> {
    check_short("the prefix of a schedule", prefix)?;
    let mut classes = crate::snapshots::schedules::ClassSet::default();
    classes.insert(crate::snapshots::schedules::SnapshotClass::Daily);
    if prefix.is_empty() || scheduled_name(prefix, 0, classes).is_none() {
        return Err(Fault::invalid_field(
            format!(
                "snapshots cannot have names that begin with '{}'",
                prefix.escape_debug()
            ),
            "choose a prefix of letters, digits, points and dashes that begins with a letter",
        ));
    }
    let others = book.schedules.records();
    let mut others = others.filter(|it| it.name != *name);
    match others.find(|it| it.prefix == prefix) {
        Some(other) => Err(Fault::invalid_field(
            format!(
                "the schedule {} has the prefix {prefix} already",
                other.name
            ),
            "choose another prefix",
        )),
        None => Ok(()),
    }
}

/// The records of targets. A target of the same name and manager keeps what it has.
fn target_records(
    targets: &[ScheduleTarget],
    before: Option<&ScheduleRecord>,
) -> Result<Vec<TargetRecord>, Fault> {
    let names: BTreeSet<&SnapshotName> = targets.iter().map(|it| &it.name).collect();
    if names.len() != targets.len() || names.len() > TARGETS_MAX {
        return Err(Fault::invalid_field(
            format!("a schedule has at most {TARGETS_MAX} targets, each of its own name"),
            "name others in another schedule",
        ));
    }
    let record = |target: &ScheduleTarget| {
        check_short("the name of a target", target.name.as_str())?;
        let is_url = target.manager.starts_with("http://");
        if !is_url
            || target.manager.len() > URL_BYTES_MAX
            || target.manager.contains(char::is_whitespace)
        {
            return Err(Fault::invalid_field(
                format!(
                    "'{}' is no address of a manager",
                    target.manager.escape_debug()
                ),
                "write it as http://HOST:7070",
            ));
        }
        if !target.volume_prefix.is_empty() {
            check_pattern(&target.volume_prefix)?;
        }
        let known = before.and_then(|it| it.targets.iter().find(|it| it.name == target.name));
        let known = known.filter(|it| {
            (&it.manager, &it.volume_prefix) == (&target.manager, &target.volume_prefix)
        });
        Ok(TargetRecord {
            name: target.name.clone(),
            manager: target.manager.clone(),
            volume_prefix: target.volume_prefix.clone(),
            sent: known.map_or_else(BTreeMap::new, |it| it.sent.clone()),
        })
    };
    targets.iter().map(record).collect()
}
