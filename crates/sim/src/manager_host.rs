//! The manager: the real one over a store in memory, and the connections to it.
//!
//! Clients call it directly, with each HTTP message taken through JSON. It reaches bricks with real
//! messages over the network.

use crate::brick_host::{CrashKind, brick_status};
use crate::cluster::{Cluster, tell};
use crate::disk::SimDisk;
use crate::network::Peer;
use crate::rng::SimRng;
use pagemesh_base::layout::{EpochNumber, Layout, Leg, VolumeName};
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceError};
use pagemesh_fabric::limits::Timeouts;
use pagemesh_manage::clock::Clock;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::store::Store;
use pagemesh_manage::wire::{self, BrickRegistration};
use pagemesh_manage::{BrickConnector, Manager, ManagerError, ManagerSettings, VolumeConnection};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

/// The manager in messages of its clients.
const URL: &str = "sim";

thread_local! {
    /// The last id that a manager of this thread's history gave.
    static LAST_ID: Cell<u128> = const { Cell::new(0) };
}

fn next_id() -> Uuid {
    LAST_ID.set(LAST_ID.get() + 1);
    Uuid::from_u128(LAST_ID.get())
}

struct FakeClock(Arc<Cluster>);

impl Clock for FakeClock {
    fn elapsed(&self) -> Duration {
        self.0.now()
    }

    fn unix_s(&self) -> u64 {
        self.0.now().as_secs()
    }
}

/// The manager's connections to bricks.
struct BrickDialer(Arc<Cluster>);

impl BrickConnector for BrickDialer {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let (remote, _) = self
            .0
            .connect(Peer::Manager, address, Timeouts::default())?;
        Ok(Box::new(remote))
    }
}

/// The manager's machine.
pub(crate) struct ManagerHost {
    cluster: Arc<Cluster>,
    disk: Mutex<SimDisk>,
    manager: Mutex<Option<Arc<Manager>>>,
    rng: Mutex<SplitMix64>,
    /// Decides which writes a loss of power leaves on the disk.
    power_rng: Mutex<SplitMix64>,
    /// Clients that cannot reach the manager.
    partitioned_clients: Mutex<BTreeSet<u32>>,
    /// Odds that an answer is lost; 0 for never.
    lost_answer_odds: Mutex<u64>,
    /// Layouts by epoch.
    layouts: Mutex<BTreeMap<u32, Layout>>,
    /// The epoch of the manager's last attach, whether the client got the answer or not.
    last_attach_epoch: AtomicU32,
    /// Whether an asynchronous replica is active, or was by the manager's last report.
    expects_promotion: AtomicBool,
    /// The epoch of its observed promotion.
    promotion_epoch: AtomicU32,
    /// How often the manager was started.
    starts: AtomicU32,
}

/// The result of a call of an operator.
pub(crate) enum OperatorCall<T> {
    /// The manager does not run, and does nothing.
    Unreachable,
    /// The manager died in the call, before or after its effect.
    Died,
    Answered(Result<T, Fault>),
}

impl ManagerHost {
    pub(crate) fn new(cluster: &Arc<Cluster>, rng: SplitMix64) -> Arc<ManagerHost> {
        LAST_ID.set(0);
        let manager_host = Arc::new(ManagerHost {
            cluster: Arc::clone(cluster),
            disk: Mutex::default(),
            manager: Mutex::default(),
            power_rng: Mutex::new(rng.derive()),
            rng: Mutex::new(rng),
            partitioned_clients: Mutex::default(),
            lost_answer_odds: Mutex::default(),
            layouts: Mutex::default(),
            last_attach_epoch: AtomicU32::new(0),
            expects_promotion: AtomicBool::new(false),
            promotion_epoch: AtomicU32::new(0),
            starts: AtomicU32::new(0),
        });
        manager_host.start();
        manager_host
    }

    pub(crate) fn manager(&self) -> Option<Arc<Manager>> {
        lock(&self.manager).clone()
    }

    /// Starts the manager if it is not running.
    pub(crate) fn start(&self) {
        if self.manager().is_some() {
            return;
        }
        let disk = lock(&self.disk).clone();
        let store = Store::open_on(disk, Path::new("disk"));
        let store = store.unwrap_or_else(|cause| panic!("the manager's store: {cause}"));
        let settings = ManagerSettings {
            new_id: next_id,
            overprovision_factor: 1000,
            ..ManagerSettings::default()
        };
        let ways = Arc::new(BrickDialer(Arc::clone(&self.cluster)));
        let clock = Arc::new(FakeClock(Arc::clone(&self.cluster)));
        let manager = Manager::new(store, ways, clock, settings);
        let manager = manager.unwrap_or_else(|cause| panic!("the manager: {cause}"));
        // An attach that failed with the disk may have reached the disk all the same.
        for made in manager.volumes().into_iter().filter_map(|it| it.attached) {
            self.last_attach_epoch
                .fetch_max(made.epoch.0, Ordering::Relaxed);
        }
        for volume in manager.volumes() {
            let detail = manager.show(&volume.name).expect("a volume");
            self.detect_promotion(&detail.layout);
        }
        *lock(&self.manager) = Some(Arc::new(manager));
        self.starts.fetch_add(1, Ordering::Relaxed);
        tell!(self.cluster, "the manager starts");
        let hosts = self.cluster.hosts().len();
        for host in 0..hosts {
            self.send_heartbeat(host);
        }
    }

    /// Kills the manager's process or machine; returns which.
    pub(crate) fn kill(&self) -> CrashKind {
        let death = match lock(&self.power_rng).one_in(2) {
            true => CrashKind::Process,
            false => CrashKind::Power,
        };
        self.crash(death);
        death
    }

    pub(crate) fn crash(&self, death: CrashKind) {
        let mut disk = lock(&self.disk);
        let next = disk.take_surviving_state(death, &mut lock(&self.power_rng));
        *disk = next;
        drop(disk);
        if lock(&self.manager).take().is_some() {
            tell!(self.cluster, "the manager dies: {death:?}");
        }
    }

    /// Makes the disk, and with it the manager, fail after this many writes.
    pub(crate) fn fail_disk_after(&self, writes: u32) {
        lock(&self.disk).fail_after(Some(writes));
    }

    pub(crate) fn partition_client(&self, client: u32) {
        lock(&self.partitioned_clients).insert(client);
    }

    pub(crate) fn lose_answers(&self, one_in: u64) {
        *lock(&self.lost_answer_odds) = one_in;
    }

    pub(crate) fn clear_faults(&self) {
        lock(&self.partitioned_clients).clear();
        self.lose_answers(0);
        // Calls without an answer to a client, as of an operator, may have met the failure last.
        self.crash_if_disk_failed();
        lock(&self.disk).fail_after(None);
        self.start();
    }

    /// Sends a brick's heartbeat.
    pub(crate) fn send_heartbeat(&self, host: usize) {
        let (Some(manager), Some(running)) = (self.manager(), self.cluster.running_brick(host))
        else {
            return;
        };
        if self.cluster.net().is_partitioned(Peer::Manager, host) {
            return;
        }
        let status = brick_status(&running);
        let address = self.cluster.hosts()[host].address();
        let registration = BrickRegistration {
            brick: status.brick,
            name: Some(format!("brick-{host}").parse().expect("a name")),
            name_is_default: false,
            address,
            map_socket: self
                .cluster
                .has_direct_clients
                .then(|| format!("/brick-{host}.sock")),
            domain: format!("machine-{host}"),
            durability: running.brick.durability(),
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            incarnation: status.incarnation,
            sessions: status.sessions,
            scrub: None,
            devices: None,
            tier: None,
            tier_pages: None,
        };
        if let Err(fault) = manager.heartbeat(json_round_trip(&registration)) {
            tell!(self.cluster, "the manager refuses brick {host}: {fault}");
            assert!(
                lock(&self.disk).has_failed() || matches!(fault, Fault::BrickDuplicate { .. }),
                "a heartbeat of brick {host} is refused: {fault}"
            );
        }
        self.crash_if_disk_failed();
    }

    fn crash_if_disk_failed(&self) {
        if lock(&self.disk).has_failed() {
            self.kill();
        }
    }

    fn call_manager<T: Serialize + DeserializeOwned>(
        &self,
        client: u32,
        what: &str,
        act: impl FnOnce(&Manager) -> Result<T, Fault>,
    ) -> Result<T, ManagerError> {
        let unreachable = || ManagerError::Unreachable {
            url: URL.into(),
            cause: "no answer".into(),
        };
        if lock(&self.partitioned_clients).contains(&client) {
            return Err(unreachable());
        }
        let manager = self.manager().ok_or_else(unreachable)?;
        let result = act(&manager);
        drop(manager);
        let word = match &result {
            Ok(_) => "done".to_owned(),
            Err(fault) => fault.to_string(),
        };
        tell!(
            self.cluster,
            "client {client} asks the manager: {what}: {word}"
        );
        let broke = lock(&self.disk).has_failed();
        self.crash_if_disk_failed();
        let deaf = *lock(&self.lost_answer_odds);
        if broke || (deaf > 0 && lock(&self.rng).one_in(deaf)) {
            tell!(self.cluster, "client {client} does not hear the answer");
            return Err(unreachable());
        }
        result
            .map(|answer| json_round_trip(&answer))
            .map_err(|fault| ManagerError::from_answer(URL, fault.to_body()))
    }
}

/// The value at the other end of a connection that carries JSON.
fn json_round_trip<T: Serialize + DeserializeOwned>(sent: &T) -> T {
    let text = serde_json::to_string(sent).expect("a value that becomes JSON");
    serde_json::from_str(&text).expect("the JSON of the value")
}

impl ManagerHost {
    /// Records a layout that a client gets.
    fn record_layout(&self, layout: &Layout) {
        lock(&self.layouts).insert(layout.epoch.0, layout.clone());
    }

    /// Whether another client took the volume after this attachment.
    pub(crate) fn is_superseded(&self, attachment: u32) -> bool {
        self.last_attach_epoch.load(Ordering::Relaxed) > attachment
    }

    /// The epoch of the last promotion; 0 before any.
    pub(crate) fn promotion_epoch(&self) -> u32 {
        self.promotion_epoch.load(Ordering::Relaxed)
    }

    /// An operator promotes a replica, and first ends the attachment of a client that is taken for
    /// dead. With `force` the manager ends it.
    pub(crate) fn promote(&self, name: &VolumeName, copy: usize, force: bool) {
        let Some(manager) = self.manager() else {
            return;
        };
        let request = wire::ChooseReplica {
            copy,
            force,
            expected: None,
        };
        if !force {
            self.detach(&manager, name);
        }
        let promoted = manager.promote_replica(name, json_round_trip(&request));
        drop(manager);
        let word = match &promoted {
            Ok(_) => "done".to_owned(),
            Err(fault) => fault.to_string(),
        };
        tell!(
            self.cluster,
            "copy {copy} is promoted, by force {force}: {word}"
        );
        self.crash_if_disk_failed();
        if let Ok(detail) = &promoted {
            // The client that had the volume is superseded, though no other has it yet.
            self.last_attach_epoch
                .fetch_max(detail.layout.epoch.0, Ordering::Relaxed);
            self.detect_promotion(&detail.layout);
        }
    }

    /// How often the manager was started.
    pub(crate) fn starts(&self) -> u32 {
        self.starts.load(Ordering::Relaxed)
    }

    /// A call of an operator.
    pub(crate) fn operate<T>(
        &self,
        what: &str,
        act: impl FnOnce(&Manager) -> Result<T, Fault>,
    ) -> OperatorCall<T> {
        let Some(manager) = self.manager() else {
            return OperatorCall::Unreachable;
        };
        let result = act(&manager);
        drop(manager);
        let word = result
            .as_ref()
            .err()
            .map_or("done".to_owned(), ToString::to_string);
        tell!(self.cluster, "an operator asks the manager: {what}: {word}");
        let has_died = lock(&self.disk).has_failed();
        self.crash_if_disk_failed();
        match has_died {
            true => OperatorCall::Died,
            false => OperatorCall::Answered(result),
        }
    }

    /// An operator ends the volume's attachment.
    pub(crate) fn end_attachment(&self, name: &VolumeName) {
        self.operate("detach", |manager| {
            self.detach(manager, name);
            Ok(())
        });
    }

    /// A client asks for an order to cut.
    pub(crate) fn cut_order(
        &self,
        client: u32,
        name: &VolumeName,
        attachment: u32,
    ) -> Result<Option<wire::CutOrder>, ManagerError> {
        self.call_manager(client, "order to cut", |manager| {
            manager.cut_order(name, EpochNumber(attachment))
        })
    }

    /// A client answers an order to cut.
    pub(crate) fn answer_cut(
        &self,
        client: u32,
        name: &VolumeName,
        answer: &wire::AnswerCut,
    ) -> Result<(), ManagerError> {
        let what = format!("answer {:?}", answer.result);
        self.call_manager(client, &what, |manager| {
            manager.answer_cut(name, json_round_trip(answer))
        })
    }

    /// Ends the volume's attachment.
    fn detach(&self, manager: &Manager, name: &VolumeName) {
        let ended = manager.detach(name, wire::DetachVolume::default());
        if let (Ok(_), Ok(detail)) = (ended, manager.show(name)) {
            self.last_attach_epoch
                .fetch_max(detail.layout.epoch.0 + 1, Ordering::Relaxed);
        }
    }

    /// Records that an asynchronous replica was added.
    pub(crate) fn expect_promotion_later(&self) {
        self.expects_promotion.store(true, Ordering::Relaxed);
    }

    fn detect_promotion(&self, layout: &Layout) {
        if replica_leg(layout).is_none() && self.expects_promotion.swap(false, Ordering::Relaxed) {
            self.promotion_epoch
                .store(layout.epoch.0, Ordering::Relaxed);
        }
    }

    /// The newest layout that a client has got.
    pub(crate) fn last_epoch(&self) -> Option<u32> {
        lock(&self.layouts).keys().next_back().copied()
    }

    /// The layout of an epoch that a client has got.
    pub(crate) fn layout_of(&self, epoch: u32) -> Layout {
        let layouts = lock(&self.layouts);
        let found = layouts.get(&epoch).cloned();
        found.unwrap_or_else(|| panic!("no client has got a layout of epoch {epoch}"))
    }
}

/// The asynchronous replica and its leg: there is one column.
pub(crate) fn replica_leg(layout: &Layout) -> Option<(usize, &Leg)> {
    let mut legs = layout.columns().next()?.legs.iter().enumerate();
    legs.find(|(_, leg)| leg.asynchronous)
}

/// The manager as one client reaches it.
pub(crate) struct ManagerConnection {
    pub(crate) manager_host: Arc<ManagerHost>,
    pub(crate) client: u32,
}

impl VolumeConnection for ManagerConnection {
    fn attach(
        &self,
        name: &VolumeName,
        request: &wire::AttachVolume,
    ) -> Result<wire::AttachReply, ManagerError> {
        let reply = self.manager_host.call_manager(self.client, "attach", |m| {
            let made = m.attach(name, &json_round_trip(request))?;
            self.manager_host
                .last_attach_epoch
                .fetch_max(made.layout.epoch.0, Ordering::Relaxed);
            self.manager_host.detect_promotion(&made.layout);
            Ok(made)
        })?;
        self.manager_host.record_layout(&reply.layout);
        Ok(reply)
    }

    fn change_legs(
        &self,
        name: &VolumeName,
        request: &wire::ChangeLegs,
    ) -> Result<Layout, ManagerError> {
        let what = format!("change {:?}", request.changes);
        let layout = self.manager_host.call_manager(self.client, &what, |m| {
            m.change_legs(name, &json_round_trip(request))
        })?;
        self.manager_host.record_layout(&layout);
        Ok(layout)
    }

    fn detail(
        &self,
        name: &VolumeName,
        report: Option<&wire::ReportReplication>,
    ) -> Result<wire::VolumeDetail, ManagerError> {
        let detail = self
            .manager_host
            .call_manager(self.client, "layout", |m| match report {
                Some(report) => m.report_replication(name, json_round_trip(report)),
                None => m.show(name),
            })?;
        self.manager_host.record_layout(&detail.layout);
        Ok(detail)
    }

    fn detach(&self, name: &VolumeName, request: wire::DetachVolume) -> Result<(), ManagerError> {
        self.manager_host
            .call_manager(self.client, "detach", |m| m.detach(name, request))
            .map(drop)
    }
}
