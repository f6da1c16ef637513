//! Stable lists of NFSv4.1 clients on file systems that fail, or do not answer.

use crate::support;
use pagemesh_fs::FsError;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs4::state::limits::{GRACE, LATE_RECLAIM_WAIT};
use pagemesh_nfs::nfs4::state::{ClientId, Instance, JournalRecord, Principal};
use pagemesh_nfs::{ExpiryProgress, ExportOptions, ListIdentity, StableStore, StoredList};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs4::{Lock, Nfs4Client, Open, OpenFile, status};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use support::session::Session;
use support::world::{OTHER_VOLUME, OWNER, ServedWorld, VOLUME, export};
use uuid::Uuid;

const IO_ERROR: u32 = 5;
/// The longest wait of a test that fails.
const PATIENCE: Duration = Duration::from_secs(30);
const CREATE: Open<'_> = Open {
    owner: b"opener",
    access: 3,
    deny: 0,
    creates: true,
};
const LOCK: Lock<'_> = Lock {
    owner: b"locker",
    offset: 0,
    length: 10,
    is_reclaim: false,
};

#[derive(Default)]
struct StoreState {
    bytes: Vec<u8>,
    is_failing: bool,
    is_stalled: bool,
}

/// A list in memory. Its writes fail or wait when a test says so.
#[derive(Clone, Default)]
struct TestStore(Arc<(Mutex<StoreState>, Condvar)>);

impl TestStore {
    fn set(&self, change: impl FnOnce(&mut StoreState)) {
        change(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
    }
}

impl StableStore for TestStore {
    fn len(&self) -> Result<u64, FsError> {
        Ok(self.0.0.lock().unwrap().bytes.len() as u64)
    }

    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, FsError> {
        let state = self.0.0.lock().unwrap();
        let rest = state.bytes.get(offset as usize..).unwrap_or_default();
        Ok(rest[..rest.len().min(bytes)].to_vec())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FsError> {
        let (state, changed) = &*self.0;
        let state = state.lock().unwrap();
        let mut state = changed.wait_while(state, |it| it.is_stalled).unwrap();
        if state.is_failing {
            return Err(rustix::io::Errno::IO.into());
        }
        let end = offset as usize + bytes.len();
        let len = state.bytes.len().max(end);
        state.bytes.resize(len, 0);
        state.bytes[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> Result<(), FsError> {
        Ok(())
    }
}

/// Ends a stall, also when a test fails, so that the server can stop.
struct Stall<'a>(&'a TestStore);

impl<'a> Stall<'a> {
    fn begin(store: &'a TestStore) -> Stall<'a> {
        store.set(|it| it.is_stalled = true);
        Stall(store)
    }
}

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        self.0.set(|it| it.is_stalled = false);
    }
}

/// The exports `data` and `other` with these lists.
fn pair(data: impl StableStore + 'static, other: impl StableStore + 'static) -> ServedWorld {
    let options = ExportOptions::default();
    let exports = [("data", VOLUME), ("other", OTHER_VOLUME)];
    let exports = exports.map(|(name, volume)| export(name, volume, options, false));
    ServedWorld::of(exports.into(), Limits::default(), |exports| {
        exports
            .with_client_list(VOLUME, 0, Box::new(data))
            .with_client_list(OTHER_VOLUME, 0, Box::new(other))
    })
}

/// A client that has not sent RECLAIM_COMPLETE.
fn connect(world: &ServedWorld, owner: &str) -> Nfs4Client {
    let server = world.server.local_addrs()[0];
    let user = Credential::sys(OWNER.uid, OWNER.gid);
    Nfs4Client::connect(server, user, (owner.as_bytes(), [1; 8]), PATIENCE).unwrap()
}

/// A client that has opened a file of `data`.
fn opened(world: &ServedWorld, owner: &str) -> (Nfs4Client, OpenFile) {
    let mut client = connect(world, owner);
    client.reclaim_complete().unwrap();
    let root = client.export(b"data").unwrap();
    let file = client.open(&root, b"f", CREATE).unwrap();
    (client, file)
}

fn pass(world: &ServedWorld, time: Duration) {
    world
        .lease_seconds
        .fetch_add(time.as_secs(), Ordering::SeqCst);
}

/// Stores a list of an earlier run with these clients.
fn store_clients(store: &TestStore, volume: Uuid, owners: &[&str]) {
    let identity = ListIdentity { volume, content: 0 };
    let list = StoredList::read("earlier", identity, Box::new(store.clone())).begin(Instance(1));
    for owner in owners {
        let principal = Principal {
            flavor: 1,
            uid: OWNER.uid,
            gid: OWNER.gid,
        };
        let owner = Arc::from(owner.as_bytes());
        list.append(&JournalRecord::Active { owner, principal });
    }
    list.wait().unwrap();
}

#[test]
fn expiry_waits_for_lists_of_its_client_alone() {
    let failing = TestStore::default();
    let world = pair(TestStore::default(), failing.clone());
    let (first, _) = opened(&world, "first");
    let (mut second, _) = opened(&world, "second");
    let root = second.export(b"other").unwrap();
    second.open(&root, b"f", CREATE).unwrap();
    failing.set(|it| it.is_failing = true);
    let expire = |client: &Nfs4Client| {
        let id = ClientId(client.id());
        (id, world.server.expire_client(id).unwrap().file_systems)
    };
    // The list of `other` has a record that cannot be written.
    let (second, second_lists) = expire(&second);
    let (first, first_lists) = expire(&first);
    let await_end = |client, lists: &[u32]| {
        let until = Instant::now() + PATIENCE;
        while world.server.expiry_progress(client, lists) != ExpiryProgress::Ended {
            assert!(Instant::now() < until, "the expiry does not end");
            std::thread::yield_now();
        }
    };
    await_end(first, &first_lists);
    let progress = world.server.expiry_progress(second, &second_lists);
    assert_eq!(progress, ExpiryProgress::Unwritten);
    failing.set(|it| it.is_failing = false);
    await_end(second, &second_lists);
}

#[test]
fn lock_whose_records_are_not_stored_stays_free() {
    let store = TestStore::default();
    let world = pair(store.clone(), TestStore::default());
    let (mut holder, file) = opened(&world, "holder");
    holder.lock(&file, LOCK).unwrap();
    let (mut second, of_second) = opened(&world, "second");
    let (mut third, of_third) = opened(&world, "third");
    pass(&world, Duration::from_secs(60));
    second.export(b"data").unwrap();
    third.export(b"data").unwrap();
    // The lease of the holder is over. The list takes no record of that.
    pass(&world, Duration::from_secs(40));
    store.set(|it| it.is_failing = true);
    let refused = second.lock(&of_second, LOCK).unwrap_err();
    assert_eq!(refused.status(), Some(IO_ERROR));
    store.set(|it| it.is_failing = false);
    third.lock(&of_third, LOCK).unwrap();
    let denied = second.lock(&of_second, LOCK).unwrap_err();
    assert_eq!(denied.status(), Some(status::DENIED));
}

/// A list. Its read waits until the reads of all lists have begun.
struct MeetingStore {
    /// Readers that have come, of two.
    readers: Arc<(Mutex<usize>, Condvar)>,
}

impl StableStore for MeetingStore {
    fn len(&self) -> Result<u64, FsError> {
        let (readers, changed) = &*self.readers;
        let mut count = readers.lock().unwrap();
        *count += 1;
        changed.notify_all();
        let waited = changed.wait_timeout_while(count, PATIENCE, |it| *it < 2);
        assert!(!waited.unwrap().1.timed_out(), "one list after the other");
        Ok(0)
    }

    fn read(&self, _: u64, _: usize) -> Result<Vec<u8>, FsError> {
        Ok(Vec::new())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), FsError> {
        Ok(())
    }

    fn sync(&self) -> Result<(), FsError> {
        Ok(())
    }
}

#[test]
fn lists_of_file_systems_are_read_at_once() {
    let readers = Arc::default();
    let store = || MeetingStore {
        readers: Arc::clone(&readers),
    };
    let world = pair(store(), store());
    assert_eq!(world.server.nfs4_status().lists.len(), 2);
    assert_eq!(*readers.0.lock().unwrap(), 2);
}

#[test]
fn stalled_list_delays_a_late_reclaim_complete_briefly() {
    let store = TestStore::default();
    store_clients(&store, OTHER_VOLUME, &["late", "absent"]);
    let world = pair(TestStore::default(), store.clone());
    let mut old = Session::new(&world);
    let root = old.mount("/other").unwrap();
    let file = old.create(&root, "f", 0o644).unwrap().handle;
    let mut late = connect(&world, "late");
    let shared = Open {
        creates: false,
        ..CREATE
    };
    late.reclaim_open(&file, shared).unwrap();
    pass(&world, GRACE - Duration::from_secs(30));
    let data = late.export(b"data").unwrap();
    let stall = Stall::begin(&store);
    pass(&world, Duration::from_secs(31));
    let delayed = late.reclaim_complete().unwrap_err();
    assert_eq!(delayed.status(), Some(status::DELAY));
    let refused = late.open(&data, b"f", CREATE).unwrap_err();
    assert_eq!(refused.status(), Some(status::GRACE));
    pass(&world, LATE_RECLAIM_WAIT);
    late.reclaim_complete().unwrap();
    late.open(&data, b"f", CREATE).unwrap();
    drop(stall);
    // The record is written after the stall: the client keeps its right to reclaim in both file systems.
    drop(world);
    let identity = ListIdentity {
        volume: OTHER_VOLUME,
        content: 0,
    };
    let known = StoredList::read("other", identity, Box::new(store)).known();
    let owners: Vec<_> = known.iter().map(|(owner, _)| owner.to_vec()).collect();
    assert_eq!(owners, [b"late".to_vec()]);
}
