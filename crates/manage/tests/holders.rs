//! The client that has attached a volume: its signs of life, and attaches that may replace it alone.

use crate::cluster;
use cluster::{Cluster, MIB, assert_refused, create_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::wire::{AttachVolume, ErrorCode, HolderSign, ReportHolder};
use pagemesh_manage::{LayoutKind, ManagerError, SILENCE_LIMIT};
use std::time::Duration;

fn attach(client: &str, replaces: Option<u32>) -> AttachVolume {
    AttachVolume {
        client: client.into(),
        unreachable: false,
        process: Some(format!("boot pid:[1] {client} 5")),
        replaces: replaces.map(EpochNumber),
        receive: false,
    }
}

/// The report of the holder of an attachment.
fn alive(attachment: EpochNumber, ending: bool) -> ReportHolder {
    ReportHolder { attachment, ending }
}

#[test]
fn signs_of_life_belong_to_one_attachment() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let (client, volume) = (&served.client, name("v"));
    let request = create_request("v", LayoutKind::Mirror, MIB);
    client.create(&request).expect("made");
    cluster.clock.advance(SILENCE_LIMIT);
    let free = client.holder(&volume).expect("shown");
    assert_eq!((free.attached, free.sign), (None, None));

    let made = client.attach_as(&volume, &attach("a", None));
    let first = made.expect("attached").layout.epoch;
    let status = client.holder(&volume).expect("shown");
    let attached = status.attached.expect("attached");
    assert_eq!((attached.epoch, attached.client.as_str()), (first, "a"));
    assert_eq!(attached.process.as_deref(), Some("boot pid:[1] a 5"));
    // The attach itself is a sign, and does not count.
    assert_eq!(status.silent_us, 0);
    let sign = |count, ending| Some(HolderSign { count, ending });
    assert_eq!(status.sign, sign(0, false));

    client
        .report_holder(&volume, alive(first, false))
        .expect("taken");
    cluster.clock.advance(Duration::from_secs(3));
    client
        .report_holder(&volume, alive(first, true))
        .expect("taken");
    cluster.clock.advance(Duration::from_secs(2));
    let status = client.holder(&volume).expect("shown");
    assert_eq!((status.sign, status.silent_us), (sign(2, true), 2_000_000));

    let second = client.attach_as(&volume, &attach("b", Some(first.0)));
    let second = second.expect("attached").layout.epoch;
    let late = client.report_holder(&volume, alive(first, false));
    assert!(matches!(late, Err(ManagerError::Fenced { .. })), "{late:?}");
    let status = client.holder(&volume).expect("shown");
    assert_eq!((status.sign, status.silent_us), (sign(0, false), 0));
    client.detach(&volume, Some(second)).expect("detached");
    let status = client.holder(&volume).expect("shown");
    assert_eq!((status.attached, status.sign), (None, None));
}

#[test]
fn attach_replaces_only_the_named_attachment() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let (client, volume) = (&served.client, name("v"));
    let request = create_request("v", LayoutKind::Mirror, MIB);
    client.create(&request).expect("made");
    let attach_to = |who, replaces| client.attach_as(&volume, &attach(who, replaces));
    // Two clients found no holder; the first one wins.
    let first = attach_to("a", Some(0)).expect("attached").layout.epoch;
    let refused = attach_to("b", Some(0));
    assert_refused(refused, ErrorCode::InUse, &["attached to a"]);
    // The answer was lost, and the client asks again.
    let again = attach_to("a", Some(0)).expect("attached").layout.epoch;
    assert!(again > first);
    let refused = attach_to("b", Some(first.0));
    assert_refused(refused, ErrorCode::InUse, &["attached to a"]);
    attach_to("b", Some(again.0)).expect("attached");
    // A client that names none ends any attachment.
    let last = attach_to("c", None).expect("attached").layout.epoch;
    client.detach(&volume, Some(last)).expect("detached");
    attach_to("d", Some(first.0)).expect("no client had it");
}

#[test]
fn restarted_manager_counts_silence_from_its_start() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let request = create_request("v", LayoutKind::Mirror, MIB);
    manager.create(&request).expect("made");
    let made = manager.attach(&name("v"), &attach("a", None));
    let epoch = made.expect("attached").layout.epoch;
    manager
        .report_holder(&name("v"), alive(epoch, false))
        .expect("taken");
    cluster.clock.advance(SILENCE_LIMIT);
    drop(manager);
    let manager = cluster.manager();
    cluster.clock.advance(Duration::from_secs(1));
    let status = manager.holder(&name("v")).expect("shown");
    assert_eq!((status.sign, status.silent_us), (None, 1_000_000));
    let attached = status.attached.expect("attached");
    assert_eq!(attached.process.as_deref(), Some("boot pid:[1] a 5"));
}
