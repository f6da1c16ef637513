//! The manager's metrics: equal to the figures of REST, documented, and bounded in number.

use crate::cluster;
use cluster::{Cluster, MIB, brick_id, create_request, name, registration};
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::store::Store;
use pagemesh_manage::token::token;
use pagemesh_manage::wire::{
    AttachReplica, AttachVolume, BrickDevice, BrickDevices, BrickRegistration, BrickScrub,
    ChangeLegs, CreateSnapshot, DeviceState, DrainProgress, LegChange, ReplicaLag,
    ReportBrickFigures, ReportFigures, ReportReplication, ResyncProgress, ScrubReport, ScrubState,
};
use pagemesh_manage::{LayoutKind, Manager, ManagerSettings};
use pagemesh_metrics::catalogue;
use pagemesh_telemetry::{ChannelMeter, MediaBytes, OpKind, Report, StageTimes, Totals};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use uuid::Uuid;

/// The samples of a page: name and labels, with the value.
struct Page {
    text: String,
    samples: BTreeMap<String, f64>,
}

impl Page {
    fn of(manager: &Manager) -> Page {
        Page::parse(manager.metrics().text().expect("a text"))
    }

    fn parse(text: String) -> Page {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            (name.to_owned(), value.parse().expect("a number"))
        };
        let all: Vec<(String, f64)> = lines.map(sample).collect();
        let samples: BTreeMap<_, _> = all.iter().cloned().collect();
        assert_eq!(samples.len(), all.len(), "a series is there twice");
        Page { text, samples }
    }

    #[track_caller]
    fn value(&self, sample: &str) -> f64 {
        let value = self.samples.get(sample);
        *value.unwrap_or_else(|| panic!("no {sample} in\n{}", self.text))
    }

    /// The series of a metric.
    fn series(&self, metric: &str) -> Vec<&str> {
        let start = format!("{metric}{{");
        let names = self.samples.keys().map(String::as_str);
        names
            .filter(|it| it.starts_with(&start) || *it == metric)
            .collect()
    }

    /// The names in lines of HELP.
    fn names(&self) -> BTreeSet<&str> {
        let help = self
            .text
            .lines()
            .filter_map(|it| it.strip_prefix("# HELP "));
        help.map(|it| it.split(' ').next().expect("a name"))
            .collect()
    }
}

/// The report of this many writes of 4 KiB and of 1 µs.
fn writes(count: u64) -> Report {
    let meter = ChannelMeter::default();
    for _ in 0..count {
        meter.count(OpKind::Write, 4096);
        meter.record(OpKind::Write, &StageTimes([0, 0, 0, 0, 1_000, 0]));
    }
    meter.totals().since(&Totals::default())
}

fn attach(manager: &Manager, volume: &str) -> EpochNumber {
    let request = AttachVolume {
        client: "test".into(),
        unreachable: false,
        process: None,
        replaces: None,
        receive: false,
    };
    let attached = manager.attach(&name(volume), &request).expect("attached");
    attached.layout.epoch
}

fn report(manager: &Manager, volume: &str, attachment: EpochNumber, count: u64) {
    let report = ReportFigures {
        attachment,
        report: writes(count),
        delivery: None,
    };
    manager
        .report_volume_figures(&name(volume), &report)
        .expect("taken");
}

fn report_of_brick(manager: &Manager, number: usize, count: u64) {
    let media = MediaBytes {
        data: count * 4096,
        journal: count * 64,
        tables: 4096,
    };
    let report = ReportBrickFigures {
        report: Report {
            media: Some(media),
            ..writes(count)
        },
        delivery: None,
    };
    let brick = brick_id(number).into();
    manager
        .report_brick_figures(&brick, &report)
        .expect("taken");
}

fn create(manager: &Manager, volume: &str) {
    let request = create_request(volume, LayoutKind::Mirror, MIB);
    manager.create(&request).expect("made");
}

fn manager_with_labels(cluster: &Cluster, metric_volumes: usize) -> Manager {
    let settings = ManagerSettings {
        metric_volumes,
        ..ManagerSettings::default()
    };
    let store = Store::open(&cluster.store()).expect("a store");
    let (bricks, clock) = (cluster.bricks.clone(), cluster.clock.clone());
    let manager = Manager::new(store, bricks, clock, settings).expect("a manager");
    cluster.send_heartbeats(&manager);
    manager
}

/// A heartbeat of a brick with a running scrub that found damage, and with a device that is drained.
fn registration_with_damage(number: usize) -> BrickRegistration {
    BrickRegistration {
        used_bytes: 5 * MIB,
        sessions: 3,
        scrub: Some(BrickScrub {
            state: ScrubState::Running,
            passes: 2,
            progress_percent: Some(50),
            next_in_ms: None,
            pass: Some(ScrubReport {
                damaged: 4,
                ..ScrubReport::default()
            }),
            last: None,
            ended_ms_ago: Some(1_000),
            corrected: 7,
            fulfilled: None,
        }),
        devices: Some(BrickDevices {
            list: vec![BrickDevice {
                device: Uuid::from_u128(77),
                path: Some("/second".to_owned()),
                is_first: false,
                size_bytes: 1 << 30,
                used_bytes: 1 << 20,
                state: DeviceState::Draining,
                errors: 2,
                last_error_s: Some(3),
                drain: Some(DrainProgress::default()),
            }],
            results: vec![],
        }),
        ..registration(number)
    }
}

#[test]
fn values_equal_those_of_rest() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    manager
        .heartbeat(registration_with_damage(0))
        .expect("welcome");
    for volume in ["a", "b", "c"] {
        create(&manager, volume);
    }
    let attachment = attach(&manager, "a");
    report(&manager, "a", attachment, 10);
    report(&manager, "a", attachment, 5);
    report_of_brick(&manager, 1, 30);
    cluster.clock.advance(Duration::from_secs(3));
    let (page, status) = (Page::of(&manager), manager.status());
    for brick in manager.bricks() {
        let label = format!("{{brick=\"{}\"}}", brick.brick);
        let value = |metric: &str| page.value(&format!("pagemesh_brick_{metric}{label}"));
        assert_eq!(value("capacity_bytes"), brick.capacity_bytes as f64);
        assert_eq!(value("used_bytes"), brick.used_bytes as f64);
        assert_eq!(value("provisioned_bytes"), brick.provisioned_bytes as f64);
        assert_eq!(value("sessions"), f64::from(brick.sessions));
        assert_eq!(value("slices"), brick.slices as f64);
        assert_eq!(value("heartbeat_age_seconds"), 3.0);
    }
    let damaged = format!("pagemesh_brick_scrub_damaged{{brick=\"{}\"}}", brick_id(0));
    assert_eq!(page.value(&damaged), status.scrubs_damaged as f64);
    assert_eq!(page.series("pagemesh_brick_scrub_damaged").len(), 1);
    let errors = page.series("pagemesh_brick_device_errors_total");
    let errors = errors.iter().map(|series| page.value(series));
    assert_eq!(errors.collect::<Vec<_>>(), [2.0]);
    let up = page.series("pagemesh_brick_up");
    let alive: f64 = up.iter().map(|series| page.value(series)).sum();
    assert_eq!(alive, status.bricks_alive as f64);
    assert_eq!(page.value("pagemesh_volumes_attached"), 1.0);
    assert_eq!(page.value("pagemesh_volumes{health=\"in-sync\"}"), 3.0);
    assert_eq!(page.value("pagemesh_volumes{health=\"degraded\"}"), 0.0);
    assert_eq!(page.value("pagemesh_figures_age_seconds"), 3.0);
    assert_eq!(page.value("pagemesh_volumes_without_reachable_copy"), 0.0);
    check_operations(&page, &manager);
    for (kind, bytes) in [("data", 30 * 4096), ("journal", 30 * 64), ("tables", 4096)] {
        let labels = format!("{{brick=\"{}\",kind=\"{kind}\"}}", brick_id(1));
        let value = page.value(&format!("pagemesh_brick_media_written_bytes_total{labels}"));
        assert_eq!(value, f64::from(bytes));
    }
}

/// The operations of the last minute are all operations, because the manager has just started.
#[track_caller]
fn check_operations(page: &Page, manager: &Manager) {
    let figures = manager.recent_figures();
    let subjects = [
        (figures.cluster.iter().collect::<Vec<_>>(), "", ""),
        (figures.volumes.iter().collect(), "volume_", "volume"),
        (figures.bricks.iter().collect(), "brick_", "brick"),
    ];
    for (subjects, prefix, label) in subjects {
        assert_eq!(subjects.len(), 1, "one subject has reported");
        for kind in &subjects[0].kinds {
            let mut labels = format!("kind=\"{}\"", kind.kind);
            if !label.is_empty() {
                // The figures have the short id of a brick without a name.
                let brick = brick_id(1).to_string();
                let name = if label == "brick" {
                    &brick
                } else {
                    &subjects[0].name
                };
                labels = format!("{label}=\"{name}\",{labels}");
            }
            let value =
                |metric: &str| page.value(&format!("pagemesh_{prefix}{metric}{{{labels}}}"));
            assert_eq!(value("operations_total"), kind.operations as f64);
            assert_eq!(value("operation_bytes_total"), kind.bytes as f64);
            if label != "brick" {
                let count = value("operation_latency_seconds_count");
                assert_eq!(count, kind.operations as f64, "all are timed");
                let sum = value("operation_latency_seconds_sum");
                assert!((sum - count * 1e-6).abs() < 1e-12, "{sum}");
            }
        }
    }
}

#[test]
fn volumes_without_a_label_share_one_series() {
    let cluster = Cluster::new(2);
    let check = |labels: usize, expected: &[(&str, f64)]| {
        let manager = manager_with_labels(&cluster, labels);
        for (at, volume) in ["a", "b", "c", "other"].into_iter().enumerate() {
            if manager.show(&name(volume)).is_err() {
                create(&manager, volume);
            }
            let attachment = attach(&manager, volume);
            report(&manager, volume, attachment, at as u64 + 1);
        }
        let page = Page::of(&manager);
        let series = page.series("pagemesh_volume_operations_total");
        assert_eq!(series.len(), expected.len() * 3, "{series:?}");
        for (volume, count) in expected {
            let labels = format!("{{volume=\"{volume}\",kind=\"write\"}}");
            let series = format!("pagemesh_volume_operations_total{labels}");
            assert_eq!(page.value(&series), *count);
        }
        let all = page.value("pagemesh_operations_total{kind=\"write\"}");
        assert_eq!(all, 10.0);
    };
    check(2, &[("a", 1.0), ("b", 2.0), ("(other)", 7.0)]);
    check(0, &[]);
    check(
        4,
        &[
            ("a", 1.0),
            ("b", 2.0),
            ("c", 3.0),
            ("other", 4.0),
            ("(other)", 0.0),
        ],
    );
}

#[test]
fn deleted_volume_and_forgotten_brick_end_their_series() {
    let cluster = Cluster::new(3);
    let manager = cluster.manager_with_bricks_alive();
    create(&manager, "v");
    let attachment = attach(&manager, "v");
    report(&manager, "v", attachment, 1);
    report_of_brick(&manager, 2, 1);
    assert!(Page::of(&manager).text.contains("volume=\"v\""));
    manager.delete(&name("v"), true).expect("deleted");
    cluster.sweep_until_certain(&manager);
    cluster.clock.advance(Duration::from_secs(60));
    manager.forget(brick_id(2), false).expect("forgotten");
    let page = Page::of(&manager);
    assert!(!page.text.contains("volume=\"v\""), "{}", page.text);
    assert!(!page.text.contains(&brick_id(2).to_string()));
    assert_eq!(page.value("pagemesh_operations_total{kind=\"write\"}"), 1.0);
}

/// A manager with every state that a metric shows.
fn page_with_all_metrics(cluster: &Cluster) -> Page {
    let manager = cluster.manager_with_bricks_alive();
    manager
        .heartbeat(registration_with_damage(0))
        .expect("welcome");
    create(&manager, "v");
    let snapshot = CreateSnapshot {
        name: "s".parse().expect("a name"),
        labels: vec![],
    };
    manager
        .create_snapshot(&name("v"), &snapshot)
        .expect("the volume is not attached");
    let schedule =
        serde_json::json!({"name": "c", "policy": {"volumes": ["v"], "retention": {"daily": 7}}});
    let schedule = serde_json::from_value(schedule).expect("a schedule");
    manager.create_schedule(&schedule).expect("made");
    manager.run_schedules();
    let request = AttachReplica {
        asynchronous: true,
        ..AttachReplica::default()
    };
    manager
        .attach_replica(&name("v"), request)
        .expect("attached");
    let attachment = attach(&manager, "v");
    let mut expected = manager.show(&name("v")).expect("there").layout.epoch;
    for (leg, to) in [(2, LegState::AsyncReplica), (1, LegState::Stale)] {
        let change = LegChange {
            segment: 0,
            column: 0,
            leg,
            to,
            note: None,
        };
        let changes = ChangeLegs {
            expected,
            attachment: Some(attachment),
            changes: vec![change],
        };
        expected = manager
            .change_legs(&name("v"), &changes)
            .expect("changed")
            .epoch;
    }
    let replication = ReportReplication {
        attachment,
        lag: Some(ReplicaLag {
            changes: 1,
            bytes: 4096,
            age_us: 2_000_000,
        }),
        resyncs: vec![ResyncProgress {
            copy: 1,
            bytes_todo: 100,
            bytes_done: 40,
            elapsed_ms: 5,
        }],
        replica_snapshots: vec![],
    };
    manager
        .report_replication(&name("v"), replication)
        .expect("taken");
    report(&manager, "v", attachment, 1);
    report_of_brick(&manager, 0, 1);
    Page::of(&manager)
}

#[test]
fn page_and_catalogue_have_the_same_metrics() {
    let page = page_with_all_metrics(&Cluster::new(3));
    let catalogue = catalogue::manager::ALL;
    let documented: BTreeSet<&str> = catalogue.iter().map(|metric| metric.name).collect();
    assert_eq!(page.names(), documented);
    for (sample, value) in [
        ("pagemesh_volume_degraded{volume=\"v\"}", 1.0),
        ("pagemesh_volume_resync_todo_bytes{volume=\"v\"}", 100.0),
        ("pagemesh_volume_resync_done_bytes{volume=\"v\"}", 40.0),
        ("pagemesh_volume_replica_lag_bytes{volume=\"v\"}", 4096.0),
        ("pagemesh_volume_replica_lag_seconds{volume=\"v\"}", 2.0),
    ] {
        assert_eq!(page.value(sample), value);
    }
    // A sample without a HELP line would have no documentation.
    for sample in page.samples.keys() {
        let name = sample.split('{').next().expect("a name");
        let suffixes = ["", "_bucket", "_sum", "_count"];
        let mut families = suffixes.iter().filter_map(|it| name.strip_suffix(it));
        assert!(families.any(|it| documented.contains(it)), "{sample}");
    }
}

/// A volume is usable while each column has an in-sync leg on a living brick.
#[test]
fn volumes_without_reachable_copy_are_counted() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    create(&manager, "v");
    let request = create_request("w", LayoutKind::Concat, MIB);
    let placed = manager.create(&request).map(|_| manager.show(&name("w")));
    let brick = cluster::legs(&placed.expect("made").expect("there").layout)
        .next()
        .expect("a leg")
        .brick;
    let other = usize::from(brick == brick_id(0));
    let count = || Page::of(&manager).value("pagemesh_volumes_without_reachable_copy");
    assert_eq!(count(), 0.0);
    cluster.clock.advance(Duration::from_secs(8));
    manager.heartbeat(registration(other)).expect("welcome");
    assert_eq!(count(), 1.0, "the mirror has its other copy");
    cluster.clock.advance(Duration::from_secs(8));
    assert_eq!(count(), 2.0);
    cluster.send_heartbeats(&manager);
    assert_eq!(count(), 0.0);
    // A stale leg on a living brick is no copy.
    let attachment = attach(&manager, "v");
    let changes = ChangeLegs {
        expected: attachment,
        attachment: Some(attachment),
        changes: vec![LegChange {
            segment: 0,
            column: 0,
            leg: 0,
            to: LegState::Stale,
            note: None,
        }],
    };
    let layout = manager.change_legs(&name("v"), &changes).expect("changed");
    let stale = cluster::legs(&layout).next().expect("a leg").brick;
    cluster.clock.advance(Duration::from_secs(8));
    let living = usize::from(stale != brick_id(0));
    manager.heartbeat(registration(living)).expect("welcome");
    assert!(count() >= 1.0, "only the stale copy of the mirror is there");
}

#[test]
fn metrics_need_a_token() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let get = |authorization: &str| {
        let mut stream = TcpStream::connect(served.handle.address()).expect("connected");
        let head =
            format!("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{authorization}\r\n");
        stream.write_all(head.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let refused = get("");
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    assert!(!refused.contains("pagemesh_brick_up"));
    let answer = get(&format!(
        "Authorization: Bearer {}\r\n",
        token(&cluster.key)
    ));
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(
        head.contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    let page = Page::parse(body.to_owned());
    assert_eq!(page.series("pagemesh_brick_up").len(), 2);
    let _stream = served.client.watch(None).expect("a stream");
    served.client.status().expect("a status");
    let page = Page::of(served.handle.manager());
    let requests = |class| {
        page.value(&format!(
            "pagemesh_manager_requests_total{{class=\"{class}\"}}"
        ))
    };
    assert_eq!(
        (requests("2xx"), requests("4xx"), requests("5xx")),
        (3.0, 1.0, 0.0)
    );
    assert_eq!(page.value("pagemesh_manager_watch_streams"), 1.0);
    served.handle.stop();
}
