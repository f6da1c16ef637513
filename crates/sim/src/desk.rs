//! The manager: the real one over a store in memory, and the ways to it.
//!
//! Its calls are made directly, with what would go over HTTP taken through
//! JSON; it reaches bricks with real messages over the network.

use crate::cluster::{Cluster, guard, tell};
use crate::dice::Dice;
use crate::disk::Disk;
use crate::house::{Death, status};
use crate::network::Peer;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, Leg, Name};
use pagemesh_base::slice::{BrickControl, SliceError};
use pagemesh_fabric::limits::Timeouts;
use pagemesh_manage::clock::Clock;
use pagemesh_manage::fault::{Code, Fault};
use pagemesh_manage::store::Store;
use pagemesh_manage::wire::{self, BrickRegistration};
use pagemesh_manage::{Bricks, Durability, Manager, Settings};
use pagemesh_volume::{Attached, Authority, AuthorityError, BrickAddress, CopyReport, LegChange};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

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

/// How the manager reaches bricks.
struct Ways(Arc<Cluster>);

impl Bricks for Ways {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let (remote, _) = self
            .0
            .connect(Peer::Manager, address, Timeouts::default())?;
        Ok(Box::new(remote))
    }
}

/// The manager's machine.
pub(crate) struct Desk {
    cluster: Arc<Cluster>,
    disk: Mutex<Disk>,
    manager: Mutex<Option<Arc<Manager>>>,
    dice: Mutex<Dice>,
    /// What a loss of power leaves on the disk.
    lots: Mutex<Dice>,
    /// Clients that cannot reach it.
    cut: Mutex<BTreeSet<u32>>,
    /// One answer in so many is lost; 0 for none.
    deaf: Mutex<u64>,
    /// By epoch.
    layouts: Mutex<BTreeMap<u32, Layout>>,
    /// The epoch of the last attach that it made, whether it was heard or not.
    last_attach: AtomicU32,
    /// A copy follows, or did when a manager last told.
    follows: AtomicBool,
    /// The epoch with which that was seen to have been promoted.
    promoted: AtomicU32,
}

impl Desk {
    pub(crate) fn new(cluster: &Arc<Cluster>, dice: Dice) -> Arc<Desk> {
        LAST_ID.set(0);
        let desk = Arc::new(Desk {
            cluster: Arc::clone(cluster),
            disk: Mutex::default(),
            manager: Mutex::default(),
            lots: Mutex::new(dice.beside()),
            dice: Mutex::new(dice),
            cut: Mutex::default(),
            deaf: Mutex::default(),
            layouts: Mutex::default(),
            last_attach: AtomicU32::new(0),
            follows: AtomicBool::new(false),
            promoted: AtomicU32::new(0),
        });
        desk.start();
        desk
    }

    pub(crate) fn manager(&self) -> Option<Arc<Manager>> {
        guard(&self.manager).clone()
    }

    /// Starts the manager, if it is not running.
    pub(crate) fn start(&self) {
        if self.manager().is_some() {
            return;
        }
        let disk = guard(&self.disk).clone();
        let store = Store::open_on(disk, Path::new("disk"));
        let store = store.unwrap_or_else(|cause| panic!("the manager's store: {cause}"));
        let settings = Settings {
            new_id: next_id,
            overprovision_factor: 1000,
            ..Settings::default()
        };
        let ways = Arc::new(Ways(Arc::clone(&self.cluster)));
        let clock = Arc::new(FakeClock(Arc::clone(&self.cluster)));
        let manager = Manager::new(store, ways, clock, settings);
        let manager = manager.unwrap_or_else(|cause| panic!("the manager: {cause}"));
        // An attach that failed with the disk may have reached it all the same.
        for made in manager.volumes().into_iter().filter_map(|it| it.attached) {
            self.last_attach.fetch_max(made.epoch.0, Ordering::Relaxed);
        }
        for volume in manager.volumes() {
            let detail = manager.show(&volume.name).expect("a volume");
            self.notice_promotion(&detail.layout);
        }
        *guard(&self.manager) = Some(Arc::new(manager));
        tell!(self.cluster, "the manager starts");
        let houses = self.cluster.houses().len();
        for house in 0..houses {
            self.hear(house);
        }
    }

    /// Ends the manager's process, or its machine. Tells which.
    pub(crate) fn kill(&self) -> Death {
        let death = match guard(&self.lots).one_in(2) {
            true => Death::Process,
            false => Death::Power,
        };
        self.die(death);
        death
    }

    pub(crate) fn die(&self, death: Death) {
        let mut disk = guard(&self.disk);
        let next = disk.leave(death, &mut guard(&self.lots));
        *disk = next;
        drop(disk);
        if guard(&self.manager).take().is_some() {
            tell!(self.cluster, "the manager dies: {death:?}");
        }
    }

    /// Its disk, and with it its process, ends after so many writes.
    pub(crate) fn light(&self, writes: u32) {
        guard(&self.disk).light(Some(writes));
    }

    pub(crate) fn cut(&self, client: u32) {
        guard(&self.cut).insert(client);
    }

    pub(crate) fn be_deaf(&self, one_in: u64) {
        *guard(&self.deaf) = one_in;
    }

    pub(crate) fn mend(&self) {
        guard(&self.cut).clear();
        self.be_deaf(0);
        guard(&self.disk).light(None);
        self.start();
    }

    /// A brick's heartbeat.
    pub(crate) fn hear(&self, house: usize) {
        let (Some(manager), Some(running)) = (self.manager(), self.cluster.running(house)) else {
            return;
        };
        if self.cluster.net().is_cut(Peer::Manager, house) {
            return;
        }
        let status = status(&running);
        let address = self.cluster.houses()[house].address();
        let registration = BrickRegistration {
            brick: status.brick,
            address,
            map_socket: self
                .cluster
                .has_guests
                .then(|| format!("/brick-{house}.sock")),
            domain: format!("machine-{house}"),
            durability: Durability::Pmem,
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            incarnation: status.incarnation,
            sessions: status.sessions,
            scrub: None,
        };
        if let Err(fault) = manager.heartbeat(trip(&registration)) {
            tell!(self.cluster, "the manager refuses brick {house}: {fault}");
            assert!(
                guard(&self.disk).has_failed() || matches!(fault, Fault::BrickTwice { .. }),
                "a heartbeat of brick {house} is refused: {fault}"
            );
        }
        self.die_if_broken();
    }

    fn die_if_broken(&self) {
        if guard(&self.disk).has_failed() {
            self.kill();
        }
    }

    fn ask<T: Serialize + DeserializeOwned>(
        &self,
        client: u32,
        what: &str,
        act: impl FnOnce(&Manager) -> Result<T, Fault>,
    ) -> Result<T, AuthorityError> {
        let unreachable = || AuthorityError::Unreachable("no answer".into());
        if guard(&self.cut).contains(&client) {
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
        let broke = guard(&self.disk).has_failed();
        self.die_if_broken();
        let deaf = *guard(&self.deaf);
        if broke || (deaf > 0 && guard(&self.dice).one_in(deaf)) {
            tell!(self.cluster, "client {client} does not hear the answer");
            return Err(unreachable());
        }
        result
            .map(|answer| trip(&answer))
            .map_err(|fault| told(&fault))
    }
}

/// What comes out at the other end of a connection that carries JSON.
fn trip<T: Serialize + DeserializeOwned>(sent: &T) -> T {
    let text = serde_json::to_string(sent).expect("it becomes JSON");
    serde_json::from_str(&text).expect("it was JSON")
}

/// As the manager's client and its user in the app translate refusals.
fn told(fault: &Fault) -> AuthorityError {
    match (fault.code(), fault.epoch()) {
        (Code::EpochConflict, Some(epoch)) => AuthorityError::Conflict {
            current: epoch.into(),
        },
        (Code::Fenced, _) => AuthorityError::Fenced,
        _ => AuthorityError::Refused(fault.to_string()),
    }
}

impl Desk {
    /// Remembers a layout as a client is told of it.
    fn keep(&self, layout: &Layout) {
        guard(&self.layouts).insert(layout.epoch.0, layout.clone());
    }

    /// Whether somebody took the volume after this attachment was made.
    pub(crate) fn is_superseded(&self, attachment: u32) -> bool {
        self.last_attach.load(Ordering::Relaxed) > attachment
    }

    /// The epoch of the last promotion; 0 before any.
    pub(crate) fn promoted(&self) -> u32 {
        self.promoted.load(Ordering::Relaxed)
    }

    /// An operator promotes a copy, and first ends the attachment of a client that is
    /// taken for dead; with force the manager ends it.
    pub(crate) fn promote(&self, name: &Name, copy: usize, force: bool) {
        let Some(manager) = self.manager() else {
            return;
        };
        let wish = wire::ChooseReplica {
            copy,
            force,
            expected: None,
        };
        if !force {
            self.detach(&manager, name);
        }
        let promoted = manager.promote_replica(name, trip(&wish));
        drop(manager);
        let word = match &promoted {
            Ok(_) => "done".to_owned(),
            Err(fault) => fault.to_string(),
        };
        tell!(
            self.cluster,
            "copy {copy} is promoted, by force {force}: {word}"
        );
        self.die_if_broken();
        if let Ok(detail) = &promoted {
            // The client that had the volume is over, though nobody has it yet.
            self.last_attach
                .fetch_max(detail.layout.epoch.0, Ordering::Relaxed);
            self.notice_promotion(&detail.layout);
        }
    }

    /// Ends the attachment of whoever has the volume.
    fn detach(&self, manager: &Manager, name: &Name) {
        let ended = manager.detach(name, wire::DetachVolume::default());
        if let (Ok(_), Ok(detail)) = (ended, manager.show(name)) {
            self.last_attach
                .fetch_max(detail.layout.epoch.0 + 1, Ordering::Relaxed);
        }
    }

    /// A copy was added that may follow.
    pub(crate) fn expect_promotion(&self) {
        self.follows.store(true, Ordering::Relaxed);
    }

    fn notice_promotion(&self, layout: &Layout) {
        if follower(layout).is_none() && self.follows.swap(false, Ordering::Relaxed) {
            self.promoted.store(layout.epoch.0, Ordering::Relaxed);
        }
    }

    /// The layout of an epoch that a client was told of.
    pub(crate) fn layout_of(&self, epoch: u32) -> Layout {
        let layouts = guard(&self.layouts);
        let found = layouts.get(&epoch).cloned();
        found.unwrap_or_else(|| panic!("nobody was told of a layout of epoch {epoch}"))
    }
}

/// The copy that may follow, with its leg: there is one column.
pub(crate) fn follower(layout: &Layout) -> Option<(usize, &Leg)> {
    let mut legs = layout.columns().next()?.legs.iter().enumerate();
    legs.find(|(_, leg)| leg.asynchronous)
}

fn tell(attachment: Epoch, told: &CopyReport) -> wire::TellCopies {
    let lag = told.lag.map(|lag| wire::Lag {
        changes: lag.changes,
        bytes: lag.bytes,
        age_us: lag.age_us,
    });
    let returns = told.returns.iter().map(|(&copy, resync)| wire::CopyReturn {
        copy,
        bytes_todo: resync.bytes_todo,
        bytes_done: resync.bytes_done,
        elapsed_ms: resync.elapsed_ms,
    });
    wire::TellCopies {
        attachment: EpochNumber(attachment.0),
        lag,
        returns: returns.collect(),
    }
}

/// The manager as one client reaches it.
pub(crate) struct Counter {
    pub(crate) desk: Arc<Desk>,
    pub(crate) client: u32,
    /// It has attached in vain: no in-sync copy was in reach.
    pub(crate) unreachable: bool,
}

fn attached(layout: Layout, bricks: BTreeMap<BrickId, wire::BrickAddress>) -> Attached {
    let address = |address: wire::BrickAddress| BrickAddress {
        tcp: address.tcp,
        map_socket: address.map_socket,
        durability: address.durability.to_string(),
    };
    let bricks = bricks.into_iter();
    Attached {
        layout,
        bricks: bricks.map(|(brick, at)| (brick, address(at))).collect(),
    }
}

impl Authority for Counter {
    fn attach(&self, name: &Name, client: &str) -> Result<Attached, AuthorityError> {
        let wish = wire::AttachVolume {
            client: client.to_owned(),
            unreachable: self.unreachable,
        };
        let told = self.desk.ask(self.client, "attach", |m| {
            let made = m.attach(name, &trip(&wish))?;
            self.desk
                .last_attach
                .fetch_max(made.layout.epoch.0, Ordering::Relaxed);
            self.desk.notice_promotion(&made.layout);
            Ok(made)
        })?;
        self.desk.keep(&told.layout);
        Ok(attached(told.layout, told.bricks))
    }

    fn change_legs(
        &self,
        name: &Name,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError> {
        let change = |change: &LegChange| wire::LegChange {
            segment: change.segment,
            column: change.column,
            leg: change.leg,
            to: change.to,
            note: None,
        };
        let wish = wire::ChangeLegs {
            expected: EpochNumber(expected.0),
            attachment: Some(EpochNumber(attachment.0)),
            changes: changes.iter().map(change).collect(),
        };
        let what = format!("change {changes:?}");
        let layout = self
            .desk
            .ask(self.client, &what, |m| m.change_legs(name, &trip(&wish)))?;
        self.desk.keep(&layout);
        Ok(layout)
    }

    fn layout(
        &self,
        name: &Name,
        attachment: Epoch,
        told: &CopyReport,
    ) -> Result<Attached, AuthorityError> {
        let told = (!told.is_empty()).then(|| tell(attachment, told));
        let detail = self.desk.ask(self.client, "layout", |m| match &told {
            Some(told) => m.tell_copies(name, trip(told)),
            None => m.show(name),
        })?;
        self.desk.keep(&detail.layout);
        match detail.is_attached_as(EpochNumber(attachment.0)) {
            true => Ok(attached(detail.layout, detail.bricks)),
            false => Err(AuthorityError::Fenced),
        }
    }

    fn detach(&self, name: &Name, attachment: Epoch) -> Result<(), AuthorityError> {
        let wish = wire::DetachVolume {
            attachment: Some(EpochNumber(attachment.0)),
        };
        self.desk
            .ask(self.client, "detach", |m| m.detach(name, wish))
            .map(drop)
    }
}
