//! NFS exports of volumes: the reports of the processes that serve them, and the state that operators see.

use crate::cluster;
use cluster::{Cluster, MIB, attach_request, create_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::wire::{
    ErrorCode, NFS_LIST_MAX, NFS_TEXT_BYTES_MAX, NfsClient, NfsExportState, NfsPath, ReportNfs,
};
use pagemesh_manage::{LayoutKind, Manager};
use std::time::Duration;

/// Creates a volume and attaches it.
fn attach(manager: &Manager, volume: &str) -> EpochNumber {
    let request = create_request(volume, LayoutKind::Mirror, MIB);
    manager.create(&request).expect("made");
    attach_again(manager, volume)
}

fn attach_again(manager: &Manager, volume: &str) -> EpochNumber {
    let attached = manager.attach(&name(volume), &attach_request("server"));
    attached.expect("attached").layout.epoch
}

fn state_with_clients(count: usize) -> NfsExportState {
    let client = |number| NfsClient {
        address: format!("10.0.0.{number}"),
        ..NfsClient::default()
    };
    NfsExportState {
        clients: (0..count).map(client).collect(),
        clients_total: count as u64,
        ..NfsExportState::default()
    }
}

fn report(
    manager: &Manager,
    volume: &str,
    attachment: EpochNumber,
    export: Option<NfsExportState>,
) -> Result<(), Fault> {
    manager.report_nfs(&name(volume), ReportNfs { attachment, export })
}

fn assert_refused<T: std::fmt::Debug>(answer: Result<T, Fault>, wanted: ErrorCode) {
    assert_eq!(answer.expect_err("refused").code(), wanted);
}

fn listed(manager: &Manager) -> Vec<String> {
    let exports = manager.nfs_exports().into_iter();
    exports.map(|it| it.volume.to_string()).collect()
}

#[test]
fn report_is_shown_with_its_age() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let attachment = attach(&manager, "files");
    assert_eq!(listed(&manager), [""; 0]);
    assert_refused(manager.nfs_export(&name("files")), ErrorCode::NotFound);
    let state = state_with_clients(3);
    report(&manager, "files", attachment, Some(state.clone())).expect("taken");
    cluster.clock.advance(Duration::from_secs(4));
    let shown = manager.nfs_export(&name("files")).expect("served");
    assert_eq!((shown.reported_ms_ago, &shown.export), (4_000, &state));
    assert_eq!(manager.nfs_exports(), [shown]);
    report(&manager, "files", attachment, None).expect("taken");
    assert_eq!(listed(&manager), [""; 0]);
}

#[test]
fn export_of_earlier_attachment_is_not_shown() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let earlier = attach(&manager, "files");
    report(&manager, "files", earlier, Some(state_with_clients(1))).expect("taken");
    let present = attach_again(&manager, "files");
    assert_eq!(listed(&manager), [""; 0]);
    let late = report(&manager, "files", earlier, Some(state_with_clients(1)));
    assert_refused(late, ErrorCode::Fenced);
    report(&manager, "files", present, Some(state_with_clients(2))).expect("taken");
    let shown = manager.nfs_export(&name("files")).expect("served");
    assert_eq!(shown.export.clients_total, 2);
}

#[test]
fn export_ends_with_its_volume() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let attachment = attach(&manager, "files");
    report(&manager, "files", attachment, Some(state_with_clients(1))).expect("taken");
    manager.delete(&name("files"), true).expect("deleted");
    assert_eq!(listed(&manager), [""; 0]);
    let late = report(&manager, "files", attachment, Some(state_with_clients(1)));
    assert_refused(late, ErrorCode::NotFound);
}

#[test]
fn too_long_reports_are_refused() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let attachment = attach(&manager, "files");
    let refused = |state| {
        let answer = report(&manager, "files", attachment, Some(state));
        assert_refused(answer, ErrorCode::BadRequest);
    };
    refused(state_with_clients(NFS_LIST_MAX + 1));
    let path = NfsPath {
        path: "x".repeat(NFS_TEXT_BYTES_MAX + 1),
        rules: Vec::new(),
    };
    refused(NfsExportState {
        paths: vec![path],
        ..NfsExportState::default()
    });
    let path = NfsPath {
        path: "/files".into(),
        rules: vec!["*(rw)".into(); NFS_LIST_MAX + 1],
    };
    refused(NfsExportState {
        paths: vec![path],
        ..NfsExportState::default()
    });
    assert_eq!(listed(&manager), [""; 0]);
    let longest = state_with_clients(NFS_LIST_MAX);
    report(&manager, "files", attachment, Some(longest)).expect("taken");
}
