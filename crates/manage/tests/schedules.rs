//! Schedules at a manager with fake bricks: policies, runs over time, health, targets, and restarts.

use crate::cluster;
use crate::snapshot_support;
use cluster::{Cluster, MIB, create_request, name};
use pagemesh_manage::schedules::{Retention, ScheduleHealth};
use pagemesh_manage::wire::{
    CreateSchedule, CreateVolume, ErrorCode, EventKind, ReportSent, RunSchedule, SchedulePolicy,
    ScheduleTarget, SetLabels,
};
use pagemesh_manage::{LayoutKind, Manager};
use snapshot_support::{
    assert_fault, event_kinds, list, manager_with_volume, names, serve_with_volume, snap,
};

use std::collections::BTreeMap;

const HOUR: u64 = 3600;

fn policy(hourly: u32, daily: u32) -> SchedulePolicy {
    SchedulePolicy {
        prefix: None,
        volumes: vec!["v".into()],
        retention: Retention {
            hourly,
            daily,
            ..Retention::default()
        },
        frequent_minutes: None,
        warn_after_s: None,
        critical_after_s: None,
        enabled: true,
        prune: true,
        group: false,
        targets: vec![],
    }
}

fn request(text: &str, policy: SchedulePolicy) -> CreateSchedule {
    CreateSchedule {
        name: snap(text),
        policy,
    }
}

/// A manager with a volume `v` and a schedule `auto` of two hourly snapshots and one daily.
fn scheduled(cluster: &Cluster) -> Manager {
    let manager = manager_with_volume(cluster);
    let made = manager.create_schedule(&request("auto", policy(2, 1)));
    assert_eq!(made.expect("made").volumes, 1);
    manager
}

fn suffixes(manager: &Manager) -> Vec<String> {
    let found = list(manager, false);
    let suffix = |name: &str| name.rsplit('-').next().unwrap_or_default().to_owned();
    names(&found).into_iter().map(suffix).collect()
}

/// An hour passes, and the manager looks at its schedules.
fn pass_hour(cluster: &Cluster, manager: &Manager) {
    cluster.clock.advance(std::time::Duration::from_secs(HOUR));
    cluster.send_heartbeats(manager);
    manager.run_schedules();
}

#[test]
fn impossible_policies_are_refused() {
    let cluster = Cluster::new(2);
    let manager = scheduled(&cluster);
    let refused = |change: &dyn Fn(&mut SchedulePolicy), word: &str| {
        let mut policy = policy(1, 0);
        change(&mut policy);
        let made = manager.create_schedule(&request("bad", policy));
        assert_fault(made, ErrorCode::BadRequest, &[word]);
    };
    refused(
        &|it| it.retention = Retention::default(),
        "keeps no snapshot",
    );
    refused(&|it| it.retention.daily = 5000, "5001 snapshots");
    refused(&|it| it.retention.daily = u32::MAX, "snapshots");
    for minutes in [0, 7, 31, 60] {
        refused(&|it| it.frequent_minutes = Some(minutes), "minutes");
    }
    refused(&|it| it.warn_after_s = Some(HOUR), "apart");
    refused(
        &|it| (it.warn_after_s, it.critical_after_s) = (Some(9 * HOUR), Some(8 * HOUR)),
        "critical",
    );
    refused(&|it| it.volumes = vec![], "volumes");
    refused(&|it| it.volumes = vec!["a@b".into()], "pattern");
    refused(&|it| it.prefix = Some("auto".into()), "prefix auto already");
    for bad in ["", "-x", "a b", "a@", &"x".repeat(25)] {
        refused(&|it| it.prefix = Some(bad.into()), "");
    }
    let target = |name: &str, manager: &str| ScheduleTarget {
        name: snap(name),
        manager: manager.into(),
        volume_prefix: String::new(),
    };
    refused(&|it| it.targets = vec![target("b", "host:7070")], "address");
    refused(
        &|it| it.targets = vec![target("b", "http://h"); 2],
        "targets",
    );
    let taken = manager.create_schedule(&request("auto", policy(1, 1)));
    assert_fault(taken, ErrorCode::Exists, &["auto"]);
    let long = manager.create_schedule(&request(&"x".repeat(25), policy(1, 1)));
    assert_fault(long, ErrorCode::BadRequest, &["24 bytes"]);
    assert_fault(
        manager.show_schedule(&snap("no")),
        ErrorCode::NotFound,
        &["no"],
    );
    assert_eq!(manager.schedules().len(), 1);
}

#[test]
fn snapshots_are_made_and_pruned_over_restarts() {
    let cluster = Cluster::new(2);
    let manager = scheduled(&cluster);
    manager.run_schedules();
    assert_eq!(suffixes(&manager), ["hd"]);
    manager.run_schedules();
    assert_eq!(suffixes(&manager), ["hd"], "nothing is due");
    let made = &list(&manager, false)[0];
    assert_eq!(
        (made.made_by.as_str(), made.labels[0].as_str()),
        ("schedule auto", "schedule=auto")
    );
    for _ in 0..3 {
        pass_hour(&cluster, &manager);
    }
    drop(manager);
    let manager = cluster.manager_with_bricks_alive();
    pass_hour(&cluster, &manager);
    // The look that makes one deletes none that the new one replaces.
    manager.run_schedules();
    let found = suffixes(&manager);
    assert_eq!(
        found.iter().filter(|it| it.contains('h')).count(),
        3,
        "{found:?}"
    );
    assert_eq!(
        found.last().map(String::as_str),
        Some("hd"),
        "the daily one stays"
    );
    let mut changed = policy(1, 0);
    changed.prefix = Some("auto".into());
    manager
        .update_schedule(&snap("auto"), &changed)
        .expect("changed");
    manager.run_schedules();
    assert_eq!(suffixes(&manager).len(), 1);
    manager.delete_schedule(&snap("auto")).expect("deleted");
    assert!(cluster.crash_copy().schedules().is_empty());
    pass_hour(&cluster, &manager);
    assert_eq!(suffixes(&manager).len(), 1);
}

/// A manager with a volume `v` on two bricks, and `w` on two others.
fn two_volumes(cluster: &Cluster) -> Manager {
    let manager = manager_with_volume(cluster);
    let other = create_request("w", LayoutKind::Mirror, MIB);
    manager.create(&other).expect("room");
    manager
}

#[test]
fn group_schedule_makes_all_snapshots_or_none() {
    let cluster = Cluster::new(4);
    let manager = two_volumes(&cluster);
    let mut all = policy(2, 0);
    (all.volumes, all.group) = (vec!["*".into()], true);
    let made = manager
        .create_schedule(&request("auto", all))
        .expect("made");
    assert!(made.policy.group);
    manager.run_schedules();
    let found = list(&manager, false);
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].name, found[1].name, "one moment");
    // A brick of `w` is dead, so `v` gets none either.
    let (of_w, _) = manager
        .show_snapshot(&name("w"), &found[0].name)
        .expect("shown");
    let brick = of_w.layout.segments[0].columns[0].legs[0].brick;
    let fake = cluster.fakes.iter().find(|fake| fake.id == brick);
    let fake = fake.expect("a brick");
    fake.set(cluster::BrickBehavior::Unreachable);
    pass_hour(&cluster, &manager);
    assert_eq!(list(&manager, false).len(), 2);
    let (detail, _) = manager.show_schedule(&snap("auto")).expect("shown");
    assert!(
        detail.volumes.iter().all(|it| it.error.is_some()),
        "{detail:?}"
    );
    fake.set(cluster::BrickBehavior::Healthy);
    pass_hour(&cluster, &manager);
    let found = list(&manager, false);
    let of = |volume: &str| -> Vec<String> {
        let own = found.iter().filter(|it| it.volume == name(volume));
        own.map(|it| it.name.to_string()).collect()
    };
    assert_eq!((of("v").len(), of("v")), (2, of("w")));
}

#[test]
fn labels_select_volumes_of_schedules() {
    let cluster = Cluster::new(4);
    let manager = two_volumes(&cluster);
    let labels = |text: &str| SetLabels {
        set: BTreeMap::from([("env".to_owned(), text.to_owned())]),
        remove: vec!["old".into()],
    };
    let changed = manager.set_labels(&name("w"), &labels("prod"));
    assert_eq!(changed.expect("changed").labels["env"], "prod");
    let mut labelled = policy(2, 0);
    labelled.volumes = vec!["env=prod".into()];
    let made = manager.create_schedule(&request("auto", labelled));
    assert_eq!(made.expect("made").volumes, 1);
    manager.run_schedules();
    let volumes = |manager: &Manager| -> Vec<String> {
        let found = list(manager, false);
        found.iter().map(|it| it.volume.to_string()).collect()
    };
    assert_eq!(volumes(&manager), ["w"]);
    drop(manager);
    let manager = cluster.manager_with_bricks_alive();
    manager
        .set_labels(&name("v"), &labels("prod"))
        .expect("changed");
    manager
        .set_labels(&name("w"), &labels("test"))
        .expect("changed");
    manager.run_schedules();
    let mut found = volumes(&manager);
    found.sort();
    assert_eq!(found, ["v", "w"], "each got one while it had the label");
    assert!(event_kinds(&manager).contains(&EventKind::VolumeLabelsChanged));
    for (key, value) in [("", "x"), ("a b", "x"), ("a", ""), ("a", "x=y")] {
        let bad = SetLabels {
            set: BTreeMap::from([(key.to_owned(), value.to_owned())]),
            remove: vec![],
        };
        assert_fault(
            manager.set_labels(&name("v"), &bad),
            ErrorCode::BadRequest,
            &["label"],
        );
    }
    let many = SetLabels {
        set: (0..17).map(|it| (it.to_string(), "x".into())).collect(),
        remove: vec![],
    };
    let refused = manager.set_labels(&name("v"), &many);
    assert!(refused.is_err(), "{refused:?}");
    let removed = SetLabels {
        set: BTreeMap::new(),
        remove: vec!["env".into()],
    };
    let changed = manager.set_labels(&name("v"), &removed);
    assert!(changed.expect("changed").labels.is_empty());
}

#[test]
fn held_snapshot_is_not_pruned() {
    let cluster = Cluster::new(2);
    let manager = scheduled(&cluster);
    let mut one = policy(1, 0);
    one.prefix = Some("auto".into());
    manager
        .update_schedule(&snap("auto"), &one)
        .expect("changed");
    manager.run_schedules();
    let first = list(&manager, false)[0].name.clone();
    let tag = "keep".parse().expect("a tag");
    manager
        .hold_snapshot(&name("v"), &first, &tag)
        .expect("held");
    for _ in 0..3 {
        pass_hour(&cluster, &manager);
    }
    manager.run_schedules();
    let found = list(&manager, false);
    assert_eq!(found.len(), 2);
    assert_eq!(found[1].name, first);
    let plan = manager.plan_schedule(&snap("auto")).expect("planned");
    assert_eq!(
        (plan[0].needed.clone(), plan[0].prune.len()),
        (vec![first], 0)
    );
}

#[test]
fn dry_run_and_disabled_schedules_change_nothing() {
    let cluster = Cluster::new(2);
    let manager = scheduled(&cluster);
    let plan = manager.plan_schedule(&snap("auto")).expect("planned");
    assert_eq!((plan.len(), plan[0].create.len()), (1, 2));
    assert!(list(&manager, false).is_empty());
    let mut disabled = policy(2, 1);
    disabled.enabled = false;
    manager
        .update_schedule(&snap("auto"), &disabled)
        .expect("changed");
    manager.run_schedules();
    assert!(list(&manager, false).is_empty());
    let run = RunSchedule { volume: name("v") };
    for _ in 0..2 {
        manager.run_schedule(&snap("auto"), &run).expect("made");
    }
    assert_eq!(
        suffixes(&manager),
        ["h", "hd"],
        "nothing was due the second time"
    );
    let other = RunSchedule { volume: name("w") };
    assert_fault(
        manager.run_schedule(&snap("auto"), &other),
        ErrorCode::NotFound,
        &["w"],
    );
}

#[test]
fn late_snapshots_are_reported_once() {
    let cluster = Cluster::new(2);
    let manager = scheduled(&cluster);
    manager.run_schedules();
    for fake in &cluster.fakes {
        fake.set(cluster::BrickBehavior::Unreachable);
    }
    let health = |manager: &Manager| {
        let (detail, _) = manager.show_schedule(&snap("auto")).expect("shown");
        (detail.info.health, detail.volumes[0].error.is_some())
    };
    let counts = |manager: &Manager| {
        let status = manager.status();
        (
            status.schedules,
            status.schedules_warning,
            status.schedules_critical,
        )
    };
    assert_eq!(health(&manager), (ScheduleHealth::Ok, false));
    assert_eq!(counts(&manager), (1, 0, 0));
    pass_hour(&cluster, &manager);
    assert_eq!(health(&manager), (ScheduleHealth::Ok, true));
    pass_hour(&cluster, &manager);
    assert_eq!(counts(&manager), (1, 1, 0));
    pass_hour(&cluster, &manager);
    pass_hour(&cluster, &manager);
    assert_eq!(health(&manager), (ScheduleHealth::Critical, true));
    assert_eq!(counts(&manager), (1, 0, 1));
    manager.run_schedules();
    cluster.reset_bricks();
    // The pause after failures is an hour at most.
    pass_hour(&cluster, &manager);
    pass_hour(&cluster, &manager);
    assert_eq!(health(&manager), (ScheduleHealth::Ok, false));
    assert_eq!(counts(&manager), (1, 0, 0));
    let kinds = event_kinds(&manager);
    let count = |kind| kinds.iter().filter(|it| **it == kind).count();
    assert_eq!(count(EventKind::ScheduleLate), 2);
    assert_eq!(count(EventKind::ScheduleOnTime), 1);
}

#[test]
fn snapshot_that_a_target_has_last_is_kept_and_bookmarked() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let mut replicated = policy(1, 0);
    replicated.targets = vec![ScheduleTarget {
        name: snap("backup"),
        manager: "http://10.0.0.1:7070".into(),
        volume_prefix: String::new(),
    }];
    manager
        .create_schedule(&request("auto", replicated))
        .expect("made");
    let auto = snap("auto");
    manager.run_schedules();
    let first = list(&manager, false)[0].clone();
    let report = |target: &str, snapshot: &str| {
        let report = ReportSent {
            target: snap(target),
            volume: name("v"),
            snapshot: snap(snapshot),
        };
        manager.report_sent(&auto, &report)
    };
    assert_fault(
        report("other", first.name.as_str()),
        ErrorCode::BadRequest,
        &["no target other"],
    );
    assert_fault(report("backup", "none"), ErrorCode::NotFound, &["v@none"]);
    report("backup", first.name.as_str()).expect("noted");
    report("backup", first.name.as_str()).expect("a repetition");
    for _ in 0..3 {
        pass_hour(&cluster, &manager);
    }
    manager.run_schedules();
    let found = list(&manager, false);
    assert_eq!((found.len(), &found[1].name), (2, &first.name));
    let bookmarks = manager.bookmarks(&name("v")).expect("listed");
    assert_eq!(bookmarks[0].name.as_str(), "auto.backup");
    assert_eq!(bookmarks[0].epoch, first.epoch);
    report("backup", found[0].name.as_str()).expect("noted");
    // A late report of an earlier one changes nothing.
    report("backup", first.name.as_str()).expect("late");
    manager.run_schedules();
    assert_eq!(list(&manager, false).len(), 1);
    let manager = cluster.crash_copy();
    let (detail, _) = manager.show_schedule(&auto).expect("shown");
    assert_eq!(detail.volumes[0].sent["backup"].snapshot, found[0].name);
    let bookmarks = manager.bookmarks(&name("v")).expect("listed");
    assert_eq!((bookmarks.len(), bookmarks[0].epoch), (1, found[0].epoch));
}

#[test]
fn patterns_choose_volumes_and_received_ones_get_none() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let received = CreateVolume {
        received: true,
        ..create_request("db-copy", LayoutKind::Mirror, MIB)
    };
    manager.create(&received).expect("room");
    let own = create_request("db-1", LayoutKind::Mirror, MIB);
    manager.create(&own).expect("room");
    let mut all = policy(1, 0);
    all.volumes = vec!["db-*".into(), "db-1".into()];
    manager.create_schedule(&request("db", all)).expect("made");
    manager.run_schedules();
    let found = list(&manager, false);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].volume, name("db-1"));
    let (detail, _) = manager.show_schedule(&snap("db")).expect("shown");
    let shown: Vec<_> = detail
        .volumes
        .iter()
        .map(|it| (it.volume.as_str(), it.received))
        .collect();
    assert_eq!(shown, [("db-1", false), ("db-copy", true)]);
}

#[test]
fn schedules_are_served_over_rest() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, Default::default());
    let client = &served.client;
    let made = client
        .create_schedule(&request("auto", policy(2, 1)))
        .expect("made");
    assert_eq!(made.policy.warn_after_s, Some(2 * HOUR));
    assert_eq!(client.schedules().expect("listed"), [made]);
    let run = RunSchedule { volume: name("v") };
    client.run_schedule(&snap("auto"), &run).expect("made");
    let detail = client.schedule(&snap("auto")).expect("shown");
    assert_eq!((detail.volumes.len(), detail.volumes[0].snapshots), (1, 1));
    assert_eq!(
        client.plan_schedule(&snap("auto")).expect("planned")[0].create,
        []
    );
    let changed = client
        .update_schedule(&snap("auto"), &policy(5, 0))
        .expect("changed");
    assert_eq!(changed.policy.retention.hourly, 5);
    client.delete_schedule(&snap("auto")).expect("deleted");
    client.delete_schedule(&snap("auto")).expect_err("gone");
}
