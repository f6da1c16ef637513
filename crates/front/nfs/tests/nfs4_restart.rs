//! NFSv4.1 clients reclaim their state after a restart of the server, by the list in the file system.

use crate::support;
use pagemesh_fs::{Fs, MkfsOptions, mkfs};
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs4::state::{ClientId, RemovalReason};
use pagemesh_nfs::{
    ExpiryProgress, Export, ExportOptions, Exports, Nfs4Options, Server, ServiceFileStore,
};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs4::{Lock, Nfs4Client, Nfs4Result, Open, OpenFile, status};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::memory::{MemorySpace, wait};
use support::world::{ATTACHMENT, FREE_BYTES, KEY, OWNER, VOLUME, clock};
use uuid::Uuid;

/// Seconds beyond the longest grace period.
const BEYOND_GRACE: u64 = 181;

/// A file system in memory, and its server of the present run.
struct Restarts {
    memory: MemorySpace,
    options: ExportOptions,
    /// The number of times that the volume got an earlier content.
    content: u64,
    seconds: Arc<AtomicU64>,
    server: Option<Server>,
}

impl Restarts {
    fn new(options: ExportOptions) -> Restarts {
        let memory = MemorySpace::new(1 << 36);
        let made = MkfsOptions {
            uuid: Uuid::from_u128(1),
            hash_key: [2, 3],
            limit_bytes: 0,
            owner: OWNER,
            mode: 0o755,
        };
        mkfs(&memory.shared(), wait, clock, made).unwrap();
        let mut world = Restarts {
            memory,
            options,
            content: 0,
            seconds: Arc::default(),
            server: None,
        };
        world.restart();
        world
    }

    /// Ends the server, and starts another one over the same pages.
    fn restart(&mut self) {
        self.server = None;
        let fs = Arc::new(Fs::mount(self.memory.shared(), wait, clock).unwrap());
        let export = Export {
            name: "data".into(),
            fs: Arc::clone(&fs),
            volume: VOLUME,
            key: HandleKey::new(KEY),
            attachment: ATTACHMENT,
            options: self.options,
            free_space: Arc::new(|| Some(FREE_BYTES)),
        };
        let store = Box::new(ServiceFileStore::new(fs));
        let exports = Exports::new(vec![export]).unwrap();
        let exports = exports.with_client_list(VOLUME, self.content, store);
        let (start, passed) = (Instant::now(), Arc::clone(&self.seconds));
        let nfs4 = Nfs4Options {
            clock: Arc::new(move || start + Duration::from_secs(passed.load(Ordering::SeqCst))),
            ..Nfs4Options::default()
        };
        let listen = ["127.0.0.1:0".parse().unwrap()];
        let hook = Box::new(|_: &str, _: &_| {});
        let server = Server::start_nfs4(&listen, exports, hook, Limits::default(), &nfs4);
        self.server = Some(server.unwrap());
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    /// A client that has not sent RECLAIM_COMPLETE.
    fn connect(&self, owner: &str) -> Nfs4Client {
        let server = self.server().local_addrs()[0];
        let user = Credential::sys(OWNER.uid, OWNER.gid);
        let limit = Duration::from_secs(30);
        Nfs4Client::connect(server, user, (owner.as_bytes(), [1; 8]), limit).unwrap()
    }

    fn client(&self, owner: &str) -> Nfs4Client {
        let mut client = self.connect(owner);
        client.reclaim_complete().unwrap();
        client
    }

    fn clients_in_grace(&self) -> usize {
        self.server().nfs4_status().grace.map_or(0, |it| it.clients)
    }

    fn pass_grace(&self) {
        self.seconds.fetch_add(BEYOND_GRACE, Ordering::SeqCst);
    }
}

const CREATE: Open<'_> = Open {
    owner: b"opener",
    access: 3,
    deny: 0,
    creates: true,
};
const SHARED: Open<'_> = Open {
    creates: false,
    ..CREATE
};

fn range(is_reclaim: bool) -> Lock<'static> {
    Lock {
        owner: b"locker",
        offset: 0,
        length: 10,
        is_reclaim,
    }
}

fn opened(client: &mut Nfs4Client) -> OpenFile {
    let root = client.export(b"data").unwrap();
    client.open(&root, b"f", CREATE).unwrap()
}

fn locked(client: &mut Nfs4Client) -> OpenFile {
    let file = opened(client);
    client.lock(&file, range(false)).unwrap();
    file
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Nfs4Result<T>, wanted: u32) {
    assert_eq!(result.unwrap_err().status(), Some(wanted));
}

#[test]
fn client_reclaims_its_lock_and_others_wait() {
    let mut world = Restarts::new(ExportOptions::default());
    let mut client = world.client("first");
    let file = locked(&mut client);
    for run in 0..3 {
        world.restart();
        assert_eq!(world.clients_in_grace(), 1, "run {run}");
        let mut other = world.client("other");
        let root = other.export(b"data").unwrap();
        refused(other.open(&root, b"f", SHARED), status::GRACE);
        let mut client = world.connect("first");
        refused(client.open(&root, b"f", SHARED), status::GRACE);
        let again = client.reclaim_open(&file.handle, SHARED).unwrap();
        client.lock(&again, range(true)).unwrap();
        refused(other.open(&root, b"f", SHARED), status::GRACE);
        client.reclaim_complete().unwrap();
        refused(client.reclaim_open(&file.handle, SHARED), status::NO_GRACE);
        assert_eq!(client.write(&again, 0, b"data").unwrap(), 4);
        let others = other.open(&root, b"f", SHARED).unwrap();
        refused(other.lock(&others, range(false)), status::DENIED);
        // Only the first client is to be in the next grace period.
        other.close(&others).unwrap();
        other.destroy().unwrap();
    }
}

#[test]
fn expired_client_does_not_reclaim_after_a_crash() {
    let mut world = Restarts::new(ExportOptions::default());
    let mut client = world.client("first");
    let file = locked(&mut client);
    let id = ClientId(client.id());
    let listed = world.server().nfs4_clients();
    let named: Vec<_> = listed.iter().map(|it| &it.file_systems[..]).collect();
    assert_eq!(named, [["data"]]);
    let lost = world.server().expire_client(id).unwrap();
    assert_eq!((lost.opens, lost.ranges), (1, 1));
    refused(client.write(&file, 0, b"late"), status::BADSESSION);
    let until = Instant::now() + Duration::from_secs(60);
    // A sweep of the server writes the record.
    while world.server().expiry_progress(id, &lost.file_systems) != ExpiryProgress::Ended {
        assert!(Instant::now() < until, "the record is not durable");
        std::thread::yield_now();
    }
    let removals = world.server().nfs4_status().removals;
    assert_eq!(removals[RemovalReason::Operator as usize], 1);
    assert_eq!(world.server().expire_client(id), None);
    world.restart();
    assert_eq!(world.clients_in_grace(), 0);
    let mut client = world.connect("first");
    refused(client.reclaim_open(&file.handle, SHARED), status::NO_GRACE);
    locked(&mut world.client("other"));
}

#[test]
fn unlisted_client_may_not_reclaim() {
    let mut world = Restarts::new(ExportOptions::default());
    let file = locked(&mut world.client("first"));
    world.restart();
    let mut thief = world.connect("thief");
    refused(
        thief.reclaim_open(&file.handle, SHARED),
        status::RECLAIM_BAD,
    );
    assert_eq!(world.clients_in_grace(), 1);
}

#[test]
fn absent_client_loses_its_right_for_ever() {
    let mut world = Restarts::new(ExportOptions::default());
    let file = locked(&mut world.client("first"));
    world.restart();
    world.pass_grace();
    let mut other = world.client("other");
    let others = opened(&mut other);
    other.lock(&others, range(false)).unwrap();
    world.restart();
    assert_eq!(world.clients_in_grace(), 1, "the other one");
    let mut absent = world.connect("first");
    refused(
        absent.reclaim_open(&file.handle, SHARED),
        status::RECLAIM_BAD,
    );
    let mut other = world.connect("other");
    let again = other.reclaim_open(&others.handle, SHARED).unwrap();
    other.lock(&again, range(true)).unwrap();
}

#[test]
fn crash_in_grace_keeps_the_right_to_reclaim() {
    let mut world = Restarts::new(ExportOptions::default());
    let file = locked(&mut world.client("first"));
    world.restart();
    let mut client = world.connect("first");
    client.reclaim_open(&file.handle, SHARED).unwrap();
    world.restart();
    let mut client = world.connect("first");
    let again = client.reclaim_open(&file.handle, SHARED).unwrap();
    client.lock(&again, range(true)).unwrap();
}

#[test]
fn list_of_a_content_before_a_rollback_does_not_count() {
    let mut world = Restarts::new(ExportOptions::default());
    let file = locked(&mut world.client("first"));
    world.content = 1;
    world.restart();
    assert_eq!(world.clients_in_grace(), 0);
    let mut client = world.connect("first");
    refused(client.reclaim_open(&file.handle, SHARED), status::NO_GRACE);
    locked(&mut world.client("other"));
}

#[test]
fn client_without_opens_causes_no_grace_period() {
    let mut world = Restarts::new(ExportOptions::default());
    world.client("first").export(b"data").unwrap();
    world.restart();
    assert_eq!(world.clients_in_grace(), 0);
}

#[test]
fn read_only_file_system_has_no_list() {
    let options = ExportOptions {
        is_read_only: true,
        ..ExportOptions::default()
    };
    let world = Restarts::new(options);
    assert_eq!(world.server().nfs4_status().lists, []);
}
