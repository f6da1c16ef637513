//! NFS exports of volumes: the reports of the processes that serve them, and the state that operators see.

use crate::cluster;
use cluster::{Cluster, MIB, attach_request, create_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::store::Store;
use pagemesh_manage::wire::{
    ErrorCode, EventFilter, EventKind, LostNfsState, NFS_LIST_MAX, NFS_ORDERS_MAX,
    NFS_TEXT_BYTES_MAX, Nfs4Client, Nfs4ClientId, Nfs4Lease, NfsClient, NfsExpiry, NfsExpiryResult,
    NfsExportState, NfsPath, ReportNfs,
};
use pagemesh_manage::{LayoutKind, Manager, ManagerSettings};
use std::time::{Duration, Instant};

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
    let answers = Vec::new();
    exchange(manager, volume, attachment, (export, answers)).map(drop)
}

/// Reports with answers to orders, and returns the open orders.
fn exchange(
    manager: &Manager,
    volume: &str,
    attachment: EpochNumber,
    (export, expiries): (Option<NfsExportState>, Vec<NfsExpiry>),
) -> Result<Vec<Nfs4ClientId>, Fault> {
    let report = ReportNfs {
        attachment,
        export,
        expiries,
    };
    let orders = manager.report_nfs(&name(volume), report);
    orders.map(|orders| orders.expire)
}

const HOLDER: Nfs4ClientId = Nfs4ClientId(0x1f00_ba5e_0000_0001);

/// The state of a server with one client of NFSv4.1.
fn state_with_holder() -> NfsExportState {
    let holder = Nfs4Client {
        client: HOLDER,
        address: "10.0.0.5:702".into(),
        name: "Linux NFSv4.1 db".into(),
        minor_version: 1,
        lease: Nfs4Lease::Active,
        renewed_s: 3,
        is_reclaiming: false,
        sessions: 1,
        running: 0,
        opens: 2,
        locks: 3,
        file_systems: vec!["files".into()],
    };
    NfsExportState {
        nfs4_clients: vec![holder],
        nfs4_clients_total: 1,
        ..NfsExportState::default()
    }
}

/// Reports until there is an order.
fn await_order(manager: &Manager, attachment: EpochNumber) {
    let until = Instant::now() + Duration::from_secs(60);
    let report = || {
        let state = (Some(state_with_holder()), Vec::new());
        exchange(manager, "files", attachment, state).expect("taken")
    };
    while report() != [HOLDER] {
        assert!(Instant::now() < until, "no order");
        std::thread::yield_now();
    }
}

/// The end of an order to expire the holder that its server answers so.
fn expire_with(
    manager: &Manager,
    attachment: EpochNumber,
    result: NfsExpiryResult,
) -> Result<LostNfsState, Fault> {
    let state = Some(state_with_holder());
    report(manager, "files", attachment, state).expect("taken");
    std::thread::scope(|scope| {
        let call = scope.spawn(|| manager.expire_nfs_client(HOLDER));
        await_order(manager, attachment);
        // The order is given until its answer, and no other call has the client meanwhile.
        await_order(manager, attachment);
        let busy = manager.expire_nfs_client(HOLDER);
        assert_refused(busy, ErrorCode::InUse);
        let client = HOLDER;
        let answers = vec![NfsExpiry { client, result }];
        let state = (Some(state_with_holder()), answers);
        let orders = exchange(manager, "files", attachment, state);
        assert_eq!(orders.expect("taken"), []);
        call.join().expect("no panic")
    })
}

fn assert_refused<T: std::fmt::Debug>(answer: Result<T, Fault>, wanted: ErrorCode) {
    assert_eq!(answer.expect_err("refused").code(), wanted);
}

fn listed(manager: &Manager) -> Vec<String> {
    let exports = manager.nfs_exports().into_iter();
    exports.map(|it| it.volume.to_string()).collect()
}

/// The texts of the events about expired clients.
fn expiry_events(manager: &Manager) -> Vec<String> {
    let (events, _) = manager.list_events(&EventFilter::default(), 1000);
    let expiries = events
        .into_iter()
        .filter(|it| it.kind == EventKind::NfsClientExpired);
    expiries.map(|it| it.text.clone()).collect()
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

#[test]
fn server_expires_a_client_by_order() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let attachment = attach(&manager, "files");
    let lost = LostNfsState { opens: 2, locks: 3 };
    let expire = |result| expire_with(&manager, attachment, result);
    assert_eq!(expire(NfsExpiryResult::Expired(lost)).expect("done"), lost);
    let refused = |result, wanted| assert_refused(expire(result), wanted);
    refused(NfsExpiryResult::Unknown, ErrorCode::NotFound);
    refused(NfsExpiryResult::Running(4), ErrorCode::InUse);
    refused(NfsExpiryResult::Unwritten, ErrorCode::InUse);
    let texts = expiry_events(&manager);
    assert_eq!(texts.len(), 3, "{texts:?}");
    let named = "1f00ba5e00000001";
    assert!(texts.iter().all(|it| it.contains(named)), "{texts:?}");
    let lost = "lost 2 opens and 3 locked ranges";
    assert!(texts.iter().any(|it| it.contains(lost)), "{texts:?}");
}

/// The state of a server with more clients than its report has.
fn state_without_holder() -> NfsExportState {
    NfsExportState {
        nfs4_clients: Vec::new(),
        ..state_with_holder()
    }
}

#[test]
fn unreported_client_is_expired_by_its_server() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let lost = LostNfsState { opens: 2, locks: 3 };
    let servers = [
        ("files", NfsExpiryResult::Expired(lost)),
        ("more", NfsExpiryResult::Unknown),
    ];
    let servers = servers.map(|(volume, result)| (volume, attach(&manager, volume), result));
    let complete = attach(&manager, "complete");
    let exchange = |volume, attachment, state, answers| {
        exchange(&manager, volume, attachment, (Some(state), answers)).expect("taken")
    };
    exchange("complete", complete, NfsExportState::default(), Vec::new());
    for (volume, attachment, _) in servers {
        exchange(volume, attachment, state_without_holder(), Vec::new());
    }
    std::thread::scope(|scope| {
        let call = scope.spawn(|| manager.expire_nfs_client(HOLDER));
        let until = Instant::now() + Duration::from_secs(60);
        for (volume, attachment, result) in servers {
            let next_orders = || exchange(volume, attachment, state_without_holder(), Vec::new());
            while next_orders() != [HOLDER] {
                assert!(Instant::now() < until && !call.is_finished(), "no order");
                std::thread::yield_now();
            }
            let client = HOLDER;
            let answers = vec![NfsExpiry { client, result }];
            exchange(volume, attachment, state_without_holder(), answers);
        }
        let of_complete = exchange("complete", complete, NfsExportState::default(), Vec::new());
        assert_eq!(of_complete, []);
        assert_eq!(call.join().expect("no panic").expect("expired"), lost);
    });
    let texts = expiry_events(&manager);
    assert!(texts.len() == 1 && texts[0].contains("files"), "{texts:?}");
}

#[test]
fn unanswered_expiry_is_recorded() {
    let cluster = Cluster::new(2);
    let settings = ManagerSettings {
        nfs_order: Duration::from_secs(2),
        ..ManagerSettings::default()
    };
    let store = Store::open(&cluster.store()).expect("opened");
    let manager = cluster.manager_with_settings(store, settings);
    cluster.send_heartbeats(&manager);
    let attachment = attach(&manager, "files");
    let state = || (Some(state_with_holder()), Vec::new());
    exchange(&manager, "files", attachment, state()).expect("taken");
    let error = std::thread::scope(|scope| {
        let call = scope.spawn(|| manager.expire_nfs_client(HOLDER));
        // The server takes the order again and again, and answers never.
        while !call.is_finished() {
            exchange(&manager, "files", attachment, state()).expect("taken");
            std::thread::yield_now();
        }
        call.join().expect("no panic").expect_err("no answer")
    });
    assert!(error.to_string().contains("did not answer"), "{error}");
    let texts = expiry_events(&manager);
    assert!(
        texts.len() == 1 && texts[0].contains("got the order"),
        "{texts:?}"
    );
}

#[test]
fn unknown_nfs_client_is_not_expired() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let attachment = attach(&manager, "files");
    let unknown = manager.expire_nfs_client(HOLDER).expect_err("unknown");
    assert_eq!(unknown.code(), ErrorCode::NotFound);
    assert!(unknown.hint().contains("pagemesh nfs clients"));
    // The report of an earlier attachment does not count.
    let state = Some(state_with_holder());
    report(&manager, "files", attachment, state).expect("taken");
    attach_again(&manager, "files");
    assert_refused(manager.expire_nfs_client(HOLDER), ErrorCode::NotFound);
}

#[test]
fn order_ends_without_a_report_or_an_answer() {
    let cluster = Cluster::new(2);
    let settings = ManagerSettings {
        nfs_order: Duration::from_millis(200),
        ..ManagerSettings::default()
    };
    let store = Store::open(&cluster.store()).expect("opened");
    let manager = cluster.manager_with_settings(store, settings);
    cluster.send_heartbeats(&manager);
    let attachment = attach(&manager, "files");
    let state = Some(state_with_holder());
    report(&manager, "files", attachment, state).expect("taken");
    let expire = || manager.expire_nfs_client(HOLDER).expect_err("no answer");
    assert!(expire().to_string().contains("does not report"));
    // A late answer changes nothing, and the order is gone.
    let result = NfsExpiryResult::Unknown;
    let client = HOLDER;
    let answers = vec![NfsExpiry { client, result }];
    let late = exchange(
        &manager,
        "files",
        attachment,
        (Some(state_with_holder()), answers),
    );
    assert_eq!(late.expect("taken"), []);
    let many = vec![NfsExpiry { client, result }; NFS_ORDERS_MAX + 1];
    let many = exchange(&manager, "files", attachment, (None, many));
    assert_refused(many, ErrorCode::BadRequest);
}
