//! A volume `v` on fake bricks, its snapshots, and a client that cuts it on order.

#![allow(dead_code)]

use crate::cluster::{Cluster, MIB, TestServer, create_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::snapshots::{CutTimes, SnapshotName};
use pagemesh_manage::wire::{
    AnswerCut, CreateSnapshot, CutResult, DetachVolume, ErrorCode, EventFilter, EventKind,
    ListSnapshots, SnapshotInfo,
};
use pagemesh_manage::{LayoutKind, Manager, ManagerClient, ManagerSettings};
use std::time::Duration;

/// Short times of cuts for tests in which a client stays away.
pub const SHORT: CutTimes = CutTimes {
    poll: Duration::from_secs(60),
    fetch: Duration::from_millis(20),
    call: Duration::from_millis(200),
};
pub const ALL: usize = usize::MAX;

pub fn snap(text: &str) -> SnapshotName {
    text.parse().expect("a name")
}

pub fn request(text: &str) -> CreateSnapshot {
    CreateSnapshot {
        name: snap(text),
        labels: vec![],
    }
}

/// A manager with living bricks and a mirror `v`.
pub fn manager_with_volume(cluster: &Cluster) -> Manager {
    let manager = cluster.manager_with_bricks_alive();
    let mirror = create_request("v", LayoutKind::Mirror, MIB);
    manager.create(&mirror).expect("room");
    manager
}

pub fn serve_with_volume(cluster: &Cluster, cut: CutTimes) -> TestServer {
    let served = cluster.serve_with(ManagerSettings {
        cut,
        ..ManagerSettings::default()
    });
    cluster.send_heartbeats(served.handle.manager());
    let mirror = create_request("v", LayoutKind::Mirror, MIB);
    served.client.create(&mirror).expect("room");
    served
}

pub fn create(manager: &Manager, text: &str) -> Result<SnapshotInfo, Fault> {
    manager.create_snapshot(&name("v"), &request(text))
}

pub fn list(manager: &Manager, deleting: bool) -> Vec<SnapshotInfo> {
    let asked = ListSnapshots {
        deleting,
        ..ListSnapshots::default()
    };
    let (found, has_more) = manager.list_all_snapshots(&asked, ALL);
    assert!(!has_more);
    found
}

pub fn names(found: &[SnapshotInfo]) -> Vec<&str> {
    found.iter().map(|it| it.name.as_str()).collect()
}

pub fn epochs(cluster: &Cluster) -> Vec<Vec<u32>> {
    cluster
        .fakes
        .iter()
        .map(|fake| fake.snapshot_epochs())
        .collect()
}

/// Sweeps until no request of a given up cut can be left.
pub fn sweep_to_the_end(cluster: &Cluster, manager: &Manager) {
    cluster.sweep_until_certain(manager);
    manager.sweep();
    assert_eq!(list(manager, true), [], "all are dropped");
}

#[track_caller]
pub fn assert_fault<T: std::fmt::Debug>(result: Result<T, Fault>, code: ErrorCode, words: &[&str]) {
    let fault = result.expect_err("refused");
    let body = fault.to_body();
    assert_eq!(body.code, code, "{fault}");
    for word in words {
        assert!(body.error.contains(word), "{:?} lacks {word:?}", body.error);
    }
    assert!(!body.hint.is_empty());
}

pub fn event_kinds(manager: &Manager) -> Vec<EventKind> {
    let filter = EventFilter {
        subject: Some("volume:v".into()),
        ..EventFilter::default()
    };
    let (events, _) = manager.list_events(&filter, 1000);
    events.iter().map(|event| event.kind).collect()
}

pub fn detach(manager: &Manager) {
    let any = DetachVolume { attachment: None };
    manager.detach(&name("v"), any).expect("detached");
}

/// A client that answers orders by this function until the attachment ends, and returns the number of orders.
pub fn spawn_client(
    client: &ManagerClient,
    attachment: EpochNumber,
    answer: impl Fn(u32) -> CutResult + Send + 'static,
) -> std::thread::JoinHandle<usize> {
    let client = client.clone();
    std::thread::spawn(move || {
        let mut orders = 0;
        while let Ok(order) = client.poll_cut(&name("v"), attachment) {
            let Some(order) = order else { continue };
            orders += 1;
            let answer = AnswerCut {
                attachment,
                epoch: order.epoch,
                step: order.step,
                result: answer(order.epoch.0),
            };
            // A refusal means that the attachment has ended.
            let _ = client.answer_cut(&name("v"), &answer);
        }
        orders
    })
}
