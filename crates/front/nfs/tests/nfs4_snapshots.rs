//! `.snapshot` over NFSv4.1: names, attributes, listings, opens, and refused changes.

use crate::support;
use pagemesh_fs::{Fs, OpenSnapshots, SnapshotEntry, SnapshotSource};
use pagemesh_nfs::ExportOptions;
use pagemesh_nfs::limits::Limits;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use support::compounds::{Client4, close, make_directory, op, put, remove, set_attributes};
use support::memory::{MemorySpace, wait};
use support::session::Session;
use support::world::{ServedWorld, VOLUME, clock};

const NO_ENTRY: u32 = 2;
const IS_DIRECTORY: u32 = 21;
const READ_ONLY: u32 = 30;
const STALE: u32 = 70;
const TYPE: u32 = 1;
const CHANGE: u32 = 3;
const SIZE: u32 = 4;
const FSID: u32 = 8;
const FILEID: u32 = 20;
const MODE: u32 = 33;
const MOUNTED_ON: u32 = 55;
const READ: (u32, u32) = (1, 0);

/// Copies of the memory of a file system, by their epochs.
#[derive(Clone, Default)]
struct Copies(Arc<Mutex<BTreeMap<u32, (String, MemorySpace)>>>);

impl SnapshotSource for Copies {
    fn list(&self) -> Result<Vec<SnapshotEntry>, Errno> {
        let taken = self.0.lock().unwrap();
        let entry = |(id, (name, _)): (&u32, &(String, _))| SnapshotEntry {
            name: name.clone(),
            id: *id,
        };
        Ok(taken.iter().rev().map(entry).collect())
    }

    fn find(&self, name: &str) -> Result<u32, Errno> {
        let listed = self.list()?;
        let found = listed.iter().find(|it| it.name == name);
        found.map(|it| it.id).ok_or(Errno::NOENT)
    }

    fn open(&self, id: u32) -> Result<Arc<Fs>, Errno> {
        let taken = self.0.lock().unwrap();
        let (_, memory) = taken.get(&id).ok_or(Errno::STALE)?;
        let fs = Fs::mount_snapshot(memory.shared(), wait, clock);
        Ok(Arc::new(fs.map_err(|_| Errno::IO)?))
    }
}

struct SnapshotWorld {
    world: ServedWorld,
    copies: Copies,
    client: Client4,
    root: Vec<u8>,
}

impl SnapshotWorld {
    fn new(are_listed: bool) -> SnapshotWorld {
        let copies = Copies::default();
        let open = Arc::new(OpenSnapshots::new(Box::new(copies.clone())));
        let (options, limits) = (ExportOptions::default(), Limits::default());
        let world = ServedWorld::with_exports(options, limits, false, |exports, _| {
            exports.with_snapshots(VOLUME, &open, are_listed)
        });
        let mut client = Client4::new(Session::new(&world), "a");
        let root = client.walk(&["data"]).unwrap();
        SnapshotWorld {
            world,
            copies,
            client,
            root,
        }
    }

    fn take(&self, name: &str, epoch: u32) {
        let copy = (name.into(), self.world.space.memory.snapshot());
        self.copies.0.lock().unwrap().insert(epoch, copy);
    }

    /// Makes a file with data below the root.
    fn write(&mut self, name: &str, data: &[u8]) {
        let create: (&[u32], &[u8]) = (&[MODE], &[0, 0, 1, 0o244]);
        let made = self.client.open(&self.root, name, (2, 0), Some(create));
        let state = match made {
            Ok(state) => state,
            Err(_) => {
                let opened = self.client.open(&self.root, name, (2, 0), None);
                opened.unwrap()
            }
        };
        let file = self.client.lookup(&self.root, name).unwrap();
        let mut write = op(38, &[&state[..], &[0, 0, 2]].concat());
        write.opaque(data);
        self.client.on(&file, write).unwrap();
        self.client.on(&file, close(state)).unwrap();
    }
}

#[test]
fn snapshot_shows_files_as_they_were() {
    let mut world = SnapshotWorld::new(false);
    world.write("file", b"before");
    world.take("one", 7);
    world.write("file", b"behind");
    world.write("new", b"");
    let (root, client) = (world.root.clone(), &mut world.client);
    let views = client.lookup(&root, ".snapshot").unwrap();
    let old = client.lookup(&views, "one").unwrap();
    assert_eq!(client.names(&old).unwrap(), ["file"]);
    let file = client.lookup(&old, "file").unwrap();
    assert_eq!(
        client.walk(&["data", ".snapshot", "one", "file"]),
        Ok(file.clone())
    );
    assert_eq!(client.read(&file, 100).unwrap(), b"before");
    assert_eq!(client.attributes(&file, &[SIZE]).unwrap().long(), 6);
    let live = client.lookup(&root, "file").unwrap();
    assert_eq!(client.read(&live, 100).unwrap(), b"behind");
    let number = |client: &mut Client4, file: &[u8]| client.attributes(file, &[FILEID]).unwrap();
    assert_ne!(number(client, &file), number(client, &live));
    let fsid = |client: &mut Client4, file: &[u8]| client.attributes(file, &[FSID]).unwrap();
    assert_eq!(fsid(client, &file), fsid(client, &live));
    assert_eq!(client.lookup(&views, "two"), Err(NO_ENTRY));
    assert_eq!(client.lookup(&old, "new"), Err(NO_ENTRY));
    assert_eq!(client.lookup(&old, ".snapshot"), Err(NO_ENTRY));
    // The way back.
    assert_eq!(client.parent(&old), Ok(views.clone()));
    assert_eq!(client.parent(&views), Ok(root));
}

#[test]
fn file_in_a_snapshot_is_opened_to_read() {
    let mut world = SnapshotWorld::new(false);
    world.write("file", b"before");
    world.take("one", 7);
    let (root, client) = (world.root.clone(), &mut world.client);
    let old = client.walk(&["data", ".snapshot", "one"]).unwrap();
    let live = client.open(&root, "file", (3, 1), None).unwrap();
    // The open of the live file denies reads of that one only.
    let state = client.open(&old, "file", READ, None).unwrap();
    let again = client.open(&old, "file", READ, None).unwrap();
    assert_eq!(state[1..], again[1..], "one open of the owner");
    let file = client.lookup(&old, "file").unwrap();
    let read = op(25, &[&again[..], &[0, 2, 100]].concat());
    let fields = client.on(&file, read).unwrap();
    assert_eq!(fields[8..12], *b"fore");
    // LOCK of a read lock by a new owner.
    let mut lock = op(12, &[1, 0, 0, 0, 0, 10, 1, 0]);
    for word in again {
        lock.word(word);
    }
    lock.word(0).word(0).word(0).opaque(b"locker");
    client.on(&file, lock).unwrap();
    client.on(&file, close(again)).unwrap();
    assert_eq!(client.open(&old, "file", (2, 0), None), Err(READ_ONLY));
    assert_eq!(
        client.open(&root, ".snapshot", READ, None),
        Err(IS_DIRECTORY)
    );
    let file = client.lookup(&root, "file").unwrap();
    client.on(&file, close(live)).unwrap();
}

#[test]
fn changes_in_snapshots_are_refused() {
    let mut world = SnapshotWorld::new(false);
    world.write("file", b"before");
    world.take("one", 7);
    let (root, client) = (world.root.clone(), &mut world.client);
    let views = client.walk(&["data", ".snapshot"]).unwrap();
    let old = client.lookup(&views, "one").unwrap();
    let file = client.lookup(&old, "file").unwrap();
    for directory in [&views, &old] {
        let made = client.on(directory, make_directory("d", &[], &[]));
        assert_eq!(made, Err(READ_ONLY));
        assert_eq!(client.on(directory, remove("file")), Err(READ_ONLY));
        let create: (&[u32], &[u8]) = (&[], &[]);
        let made = client.open(directory, "f", (2, 0), Some(create));
        assert_eq!(made, Err(READ_ONLY));
        let mut rename = op(29, &[]);
        rename.opaque(b"file").opaque(b"x");
        let (status, _) = client.call(vec![put(&root), op(32, &[]), put(directory), rename]);
        assert_eq!(status, READ_ONLY);
    }
    let mut write = op(38, &[0, 0, 0, 0, 0, 0, 2]);
    write.opaque(b"x");
    assert_eq!(client.on(&file, write), Err(READ_ONLY));
    let set = set_attributes(&[MODE], &[0, 0, 1, 0]);
    assert_eq!(client.on(&file, set), Err(READ_ONLY));
    let mut link = op(11, &[]);
    link.opaque(b"x");
    let (status, _) = client.call(vec![put(&file), op(32, &[]), put(&root), link]);
    assert_eq!(status, READ_ONLY);
}

#[test]
fn snapshots_are_listed_without_opening_them() {
    let mut world = SnapshotWorld::new(true);
    let root = world.root.clone();
    let views = world.client.lookup(&root, ".snapshot").unwrap();
    let change = |world: &mut SnapshotWorld| {
        let change = world.client.attributes(&views, &[CHANGE]);
        change.unwrap().long()
    };
    let before = change(&mut world);
    for epoch in 1..=30 {
        world.take(&format!("number-{epoch}"), epoch);
    }
    let numbers = [TYPE, SIZE, FSID, FILEID, MOUNTED_ON];
    let listed = world.client.list(&views, &numbers).unwrap();
    assert_ne!(change(&mut world), before, "clients list again");
    let names: Vec<_> = listed.iter().map(|it| it.name.clone()).collect();
    let expected: Vec<_> = (1..=30).map(|epoch| format!("number-{epoch}")).collect();
    assert_eq!(names, expected);
    let known = [TYPE, FSID, FILEID, MOUNTED_ON];
    let own = world.client.lookup(&views, "number-3").unwrap();
    let own = world.client.attributes(&own, &known).unwrap();
    assert_eq!(listed[2].values, own);
    world.write("file", b"");
    assert_eq!(world.client.names(&root).unwrap(), ["file", ".snapshot"]);
    let listed = world.client.list(&root, &[FILEID]).unwrap();
    let own = world.client.attributes(&views, &[FILEID]).unwrap();
    assert_eq!(listed[1].values, own);
}

#[test]
fn handle_of_a_deleted_snapshot_is_stale() {
    let mut world = SnapshotWorld::new(false);
    world.write("file", b"before");
    world.take("one", 7);
    let path = ["data", ".snapshot", "one", "file"];
    let file = world.client.walk(&path).unwrap();
    world.copies.0.lock().unwrap().clear();
    world.take("two", 8);
    let other = world.client.walk(&["data", ".snapshot", "two", "file"]);
    assert_ne!(other.unwrap(), file);
    assert_eq!(world.client.walk(&path), Err(NO_ENTRY));
    let mut plain = SnapshotWorld::new(false);
    assert_eq!(plain.client.attributes(&file, &[SIZE]), Err(STALE));
}
