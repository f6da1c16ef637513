//! Bytes written to media: of bricks, of the cluster, and for each byte of users. Reports that arrive twice or late.

use crate::cluster;
use cluster::{Cluster, MIB, brick_id, create_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::wire::{
    AttachVolume, ClusterMediaFigures, FigureSpan, ReportBrickFigures, ReportDelivery,
    ReportFigures,
};
use pagemesh_manage::{LayoutKind, Manager};
use pagemesh_telemetry::{ChannelMeter, MediaBytes, OpKind, Report, Totals};
use std::time::Duration;

fn attach(manager: &Manager, volume: &str) -> EpochNumber {
    let request = create_request(volume, LayoutKind::Mirror, MIB);
    manager.create(&request).expect("made");
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

/// A client reports one write of this many bytes.
fn report_user_bytes(manager: &Manager, volume: &str, attachment: EpochNumber, bytes: u64) {
    let meter = ChannelMeter::default();
    meter.count(OpKind::Write, bytes);
    meter.count(OpKind::Read, 5 * bytes);
    let report = meter.totals().since(&Totals::default());
    let report = ReportFigures {
        attachment,
        report,
        delivery: None,
    };
    let taken = manager.report_volume_figures(&name(volume), &report);
    taken.expect("taken");
}

fn report_media(manager: &Manager, number: usize, media: Option<MediaBytes>) {
    let report = Report {
        media,
        ..Report::default()
    };
    let report = ReportBrickFigures {
        report,
        delivery: None,
    };
    let taken = manager.report_brick_figures(&brick_id(number).into(), &report);
    taken.expect("taken");
}

/// The bytes that one leg of a mirror writes for this many bytes of a user.
fn leg(user_bytes: u64) -> MediaBytes {
    MediaBytes {
        data: user_bytes,
        journal: user_bytes / 64,
        tables: user_bytes / 128,
    }
}

fn media(manager: &Manager) -> Option<ClusterMediaFigures> {
    manager.recent_figures().media
}

#[track_caller]
fn assert_no_ratio(manager: &Manager) {
    let media = media(manager).expect("bytes");
    let ratios = (media.per_user_byte, media.metadata_per_user_byte);
    assert_eq!(ratios, (None, None));
}

#[test]
fn mirror_writes_each_user_byte_twice() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    assert_eq!(media(&manager), None);
    let attachment = attach(&manager, "a");
    report_user_bytes(&manager, "a", attachment, 1 << 20);
    assert_eq!(media(&manager), None, "no brick has reported");
    // Each brick in two reports.
    for number in [0, 1, 0, 1] {
        report_media(&manager, number, Some(leg(1 << 19)));
    }
    let found = media(&manager).expect("bytes");
    assert_eq!(found.written, leg(2 << 20).into());
    assert_eq!(found.per_user_byte, Some(2.0 + 2.0 / 64.0 + 2.0 / 128.0));
    assert_eq!(found.metadata_per_user_byte, Some(2.0 / 64.0 + 2.0 / 128.0));
    for brick in manager.recent_figures().bricks {
        assert_eq!(brick.media, Some(leg(1 << 20).into()), "{}", brick.name);
    }
    assert_eq!(manager.recent_figures().volumes[0].media, None);
    // A brick without requests over tcp has no step in its history.
    let history = manager.brick_figures(&brick_id(0).into(), FigureSpan::Hour);
    assert_eq!(history.expect("a brick").time_unix_s, [0; 0]);

    cluster.clock.advance(Duration::from_secs(120));
    assert_eq!(media(&manager), None, "the minute is over");
}

#[test]
fn ratio_is_absent_without_every_report() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let first = attach(&manager, "a");
    report_media(&manager, 0, Some(leg(1 << 20)));
    report_media(&manager, 1, Some(MediaBytes::default()));
    report_user_bytes(&manager, "a", first, 0);
    assert_no_ratio(&manager);
    report_user_bytes(&manager, "a", first, 1 << 20);
    assert!(media(&manager).is_some_and(|media| media.per_user_byte.is_some()));

    // A client that has not reported yet.
    let second = attach(&manager, "b");
    assert_no_ratio(&manager);
    report_user_bytes(&manager, "b", second, 1 << 20);
    assert!(media(&manager).is_some_and(|media| media.per_user_byte.is_some()));

    // An earlier brick reports no bytes.
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let first = attach(&manager, "a");
    report_user_bytes(&manager, "a", first, 1 << 20);
    report_media(&manager, 0, Some(leg(1 << 20)));
    report_media(&manager, 1, None);
    assert_no_ratio(&manager);
    assert_eq!(manager.recent_figures().bricks[1].media, None);
    let text = manager.metrics().text().expect("a text");
    let series = "pagemesh_brick_media_written_bytes_total{";
    let series: Vec<&str> = text.lines().filter(|it| it.starts_with(series)).collect();
    assert_eq!(series.len(), 3, "{series:?}");
    assert!(series[0].ends_with("kind=\"data\"} 1048576"), "{series:?}");
}

#[test]
fn client_that_died_attached_ends_the_ratio_briefly() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let (lost, alive) = (attach(&manager, "lost"), attach(&manager, "alive"));
    report_user_bytes(&manager, "lost", lost, 1 << 20);
    let mut has_ratio = Vec::new();
    for _ in 0..70 {
        cluster.send_heartbeats(&manager);
        (0..2).for_each(|number| report_media(&manager, number, Some(leg(1 << 20))));
        report_user_bytes(&manager, "alive", alive, 1 << 20);
        has_ratio.push(media(&manager).is_some_and(|media| media.per_user_byte.is_some()));
        cluster.clock.advance(Duration::from_secs(10));
    }
    let is_absent = |seconds: &usize| !has_ratio[seconds / 10];
    let absent: Vec<usize> = (0..700).step_by(10).filter(is_absent).collect();
    assert_eq!((absent[0], absent[absent.len() - 1]), (60, 590));
    assert_eq!(absent.len(), 54);
}

/// Operations of the cluster in the metrics, and in the last minute.
fn reads_of_cluster(manager: &Manager) -> (String, u64) {
    let text = manager.metrics().text().expect("a text");
    let series = "pagemesh_operations_total{kind=\"read\"} ";
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    let recent = manager
        .recent_figures()
        .cluster
        .map(|it| it.kinds[0].operations);
    (line.unwrap_or("0").to_owned(), recent.unwrap_or(0))
}

#[test]
fn report_counts_once_and_only_in_its_step() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let attachment = attach(&manager, "a");
    let (first, second) = (uuid::Uuid::from_u128(1), uuid::Uuid::from_u128(2));
    let send = |reporter, number, covers_ms| {
        let meter = ChannelMeter::default();
        meter.count(OpKind::Read, 4096);
        let figures = ReportFigures {
            attachment,
            report: meter.totals().since(&Totals::default()),
            delivery: Some(ReportDelivery {
                reporter,
                number,
                covers_ms,
            }),
        };
        let taken = manager.report_volume_figures(&name("a"), &figures);
        taken.expect("taken");
    };
    send(first, 1, 10_000);
    send(first, 1, 12_000);
    assert_eq!(
        reads_of_cluster(&manager),
        ("1".into(), 1),
        "one report, twice"
    );
    send(first, 2, 20_000);
    send(second, 1, 10_000);
    assert_eq!(
        reads_of_cluster(&manager),
        ("3".into(), 3),
        "another sender"
    );
    send(second, 2, 600_000);
    assert_eq!(
        reads_of_cluster(&manager),
        ("4".into(), 3),
        "most of it is older than a minute"
    );
    send(second, 1, 10_000);
    send(second, 2, 10_000);
    assert_eq!(
        reads_of_cluster(&manager),
        ("4".into(), 3),
        "a late duplicate, and the report after it again"
    );
}
