//! `.snapshot` in exports: names, handles and listings of snapshots, and refused changes.

use crate::support;
use pagemesh_fs::{
    Fs, OPEN_SNAPSHOTS_MAX, OpenSnapshots, SNAPSHOT_LIST_AGE, SnapshotEntry, SnapshotSource,
};
use pagemesh_nfs::ExportOptions;
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{Attributes, FileType};
use pagemesh_nfs::nfs3::listing::CookieVerifier;
use pagemesh_nfs::nfs3::names::{CreateMode, LinkArguments};
use pagemesh_nfs::nfs3::status::Status;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use support::memory::{MemorySpace, wait};
use support::session::{Listed, Session, at, mode};
use support::world::{ServedWorld, VOLUME, clock};

/// Copies of the memory of a file system, by their epochs.
#[derive(Clone)]
struct Copies {
    memory: MemorySpace,
    taken: Arc<Mutex<BTreeMap<u32, (String, MemorySpace)>>>,
    opened: Arc<Mutex<Vec<Weak<Fs>>>>,
    opens: Arc<AtomicUsize>,
    lists: Arc<AtomicUsize>,
    /// An open takes it once it is counted.
    gate: Arc<Mutex<()>>,
}

impl Copies {
    fn take(&self, name: &str, epoch: u32) {
        let copy = (name.to_owned(), self.memory.snapshot());
        self.taken.lock().unwrap().insert(epoch, copy);
    }

    fn delete(&self, epoch: u32) {
        self.taken.lock().unwrap().remove(&epoch);
    }

    /// The snapshots that are open.
    fn open_count(&self) -> usize {
        let opened = self.opened.lock().unwrap();
        opened.iter().filter(|fs| fs.strong_count() > 0).count()
    }
}

impl SnapshotSource for Copies {
    fn list(&self) -> Result<Vec<SnapshotEntry>, Errno> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        let taken = self.taken.lock().unwrap();
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
        self.opens.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.lock().unwrap());
        let taken = self.taken.lock().unwrap();
        let (_, memory) = taken.get(&id).ok_or(Errno::STALE)?;
        let fs = Fs::mount_snapshot(memory.shared(), wait, clock);
        let fs = Arc::new(fs.map_err(|_| Errno::IO)?);
        self.opened.lock().unwrap().push(Arc::downgrade(&fs));
        Ok(fs)
    }
}

fn world(are_listed: bool) -> (ServedWorld, Copies) {
    let mut made = None;
    let (options, limits) = (ExportOptions::default(), Limits::default());
    let world = ServedWorld::with_exports(options, limits, false, |exports, memory| {
        let copies = made.insert(Copies {
            memory: memory.clone(),
            taken: Arc::default(),
            opened: Arc::default(),
            opens: Arc::default(),
            lists: Arc::default(),
            gate: Arc::default(),
        });
        let open = Arc::new(OpenSnapshots::new(Box::new(copies.clone())));
        exports.with_snapshots(VOLUME, &open, are_listed)
    });
    (world, made.unwrap())
}

/// Names of a whole listing, read in small parts.
fn list(session: &mut Session, directory: &[u8], is_plus: bool) -> Vec<Listed> {
    let (mut all, mut from) = (Vec::new(), (0, CookieVerifier::default()));
    loop {
        let part = session.list(directory, from, 600, is_plus).unwrap();
        all.extend(part.entries);
        if part.is_end {
            return all;
        }
        from = (all.last().unwrap().cookie, part.verifier);
    }
}

fn names(listed: &[Listed]) -> Vec<&str> {
    listed.iter().map(|it| it.name.as_str()).collect()
}

/// The directory of a snapshot.
fn view(session: &mut Session, directory: &[u8], name: &str) -> Result<Vec<u8>, Status> {
    let own = session.lookup(directory, ".snapshot")?.handle;
    Ok(session.lookup(&own, name)?.handle)
}

#[test]
fn snapshots_show_directories_as_they_were() {
    let (world, copies) = world(false);
    let mut client = Session::new(&world);
    let root = client.root();
    let directory = client.make_directory(&root, "dir", 0o755).unwrap().handle;
    let file = client.create(&directory, "file", 0o644).unwrap();
    client.write(&file.handle, 0, b"before").unwrap();
    copies.take("one", 7);
    client.write(&file.handle, 0, b"behind").unwrap();
    client.create(&directory, "new", 0o644).unwrap();
    let later = client.make_directory(&root, "later", 0o755).unwrap().handle;

    let old = view(&mut client, &directory, "one").unwrap();
    assert_eq!(names(&list(&mut client, &old, true)), [".", "..", "file"]);
    let found = client.lookup(&old, "file").unwrap();
    assert_eq!(client.read(&found.handle, 0, 100).unwrap().0, b"before");
    assert_eq!(client.read(&file.handle, 0, 100).unwrap().0, b"behind");
    assert_eq!(found.attributes.file_system, file.attributes.file_system);
    assert_ne!(found.attributes.inode, file.attributes.inode);
    let above = client.lookup(&old, "..").unwrap().handle;
    assert_eq!(view(&mut client, &root, "one").unwrap(), above);
    assert_eq!(
        client.lookup(&old, ".snapshot").unwrap_err(),
        Status::NoEntry
    );
    assert_eq!(
        view(&mut client, &later, "one").unwrap_err(),
        Status::NoEntry
    );
    assert_eq!(
        view(&mut client, &root, "two").unwrap_err(),
        Status::NoEntry
    );
    assert_eq!(client.mount("/data/dir/.snapshot/one"), Ok(old));
    let listed = list(&mut client, &root, false);
    assert!(!names(&listed).contains(&".snapshot"));
}

#[test]
fn directory_of_snapshots_lists_them_by_epoch() {
    let (world, copies) = world(true);
    let mut client = Session::new(&world);
    let root = client.root();
    let empty = client.lookup(&root, ".snapshot").unwrap();
    assert_eq!(empty.attributes.kind, FileType::Directory);
    for epoch in 1..=40 {
        copies.take(&format!("number-{epoch}"), epoch);
    }
    let first = client.list(&empty.handle, (0, CookieVerifier::default()), 600, false);
    let first = first.unwrap();
    assert!(!first.is_end);
    let own = client.lookup(&root, ".snapshot").unwrap();
    assert_eq!(own.handle, empty.handle);
    assert_ne!(
        own.attributes.modified, empty.attributes.modified,
        "clients list again"
    );
    // A deletion between two parts moves no entry.
    copies.delete(1);
    copies.take("last", 50);
    let from = (first.entries.last().unwrap().cookie, first.verifier);
    let rest = client.list(&own.handle, from, 60_000, true).unwrap();
    assert!(rest.is_end);
    let all = [first.entries, rest.entries].concat();
    let expected = (1..=40).map(|epoch| format!("number-{epoch}"));
    let dots = [".", ".."].map(str::to_owned).into_iter();
    let expected: Vec<String> = dots.chain(expected).chain(["last".to_owned()]).collect();
    assert_eq!(names(&all), expected);
    let back = client.lookup(&own.handle, "..").unwrap();
    assert_eq!(back.handle, root);
    // The live listing shows the directory, once, behind all names.
    client.create(&root, "file", 0o644).unwrap();
    let live = list(&mut client, &root, false);
    assert_eq!(names(&live), [".", "..", "file", ".snapshot"]);
    assert_eq!(live[3].inode, own.attributes.inode);
    let view = client.lookup(&own.handle, "last").unwrap().handle;
    assert_eq!(names(&list(&mut client, &view, false)), [".", ".."]);
}

#[test]
fn changes_in_snapshots_are_refused() {
    let (world, copies) = world(false);
    let mut client = Session::new(&world);
    let root = client.root();
    let live = client.create(&root, "file", 0o666).unwrap().handle;
    copies.take("one", 3);
    let own = client.lookup(&root, ".snapshot").unwrap().handle;
    let old = client.lookup(&own, "one").unwrap().handle;
    let file = client.lookup(&old, "file").unwrap().handle;
    for directory in [&own, &old] {
        let made = client.create_as(directory, "x", CreateMode::Unchecked(mode(0o644)));
        assert_eq!(made.unwrap_err(), Status::ReadOnly);
        assert_eq!(
            client.remove(directory, "file").unwrap_err(),
            Status::ReadOnly
        );
        let moved = client.rename((directory, "file"), (&root, "x"));
        assert_eq!(moved.unwrap_err(), Status::ReadOnly);
        let moved = client.rename((&root, "file"), (directory, "x"));
        assert_eq!(moved.unwrap_err(), Status::ReadOnly);
    }
    assert_eq!(client.write(&file, 0, b"x").unwrap_err(), Status::ReadOnly);
    let set = client.set_attributes(&file, mode(0o600), None);
    assert_eq!(set.unwrap_err(), Status::ReadOnly);
    let linked = client.call(&Nfs3Call::Link(LinkArguments {
        file: HandleBytes(&file),
        at: at(&root, "x"),
    }));
    assert_eq!(linked[..4], (Status::ReadOnly as u32).to_be_bytes());
    // New entries would hide the views.
    let made = client.create(&root, ".snapshot", 0o644);
    assert_eq!(made.unwrap_err(), Status::Exists);
    let made = client.make_directory(&root, ".snapshot", 0o755);
    assert_eq!(made.unwrap_err(), Status::Exists);
    let moved = client.rename((&root, "file"), (&root, ".snapshot"));
    assert_eq!(moved.unwrap_err(), Status::Exists);
    assert_eq!(client.write(&live, 0, b"x").unwrap().count, 1);
}

#[test]
fn handle_outlives_closed_snapshot_and_not_deleted_one() {
    let (world, copies) = world(false);
    let mut client = Session::new(&world);
    let root = client.root();
    let live = client.create(&root, "file", 0o644).unwrap().handle;
    let count = 2 * OPEN_SNAPSHOTS_MAX as u32;
    let mut files: Vec<(u32, Vec<u8>)> = Vec::new();
    for epoch in 1..=count {
        client.write(&live, 0, &[epoch as u8; 10]).unwrap();
        copies.take(&format!("s{epoch}"), epoch);
        let old = view(&mut client, &root, &format!("s{epoch}")).unwrap();
        files.push((epoch, client.lookup(&old, "file").unwrap().handle));
        assert!(copies.open_count() <= OPEN_SNAPSHOTS_MAX);
    }
    for (epoch, file) in &files {
        assert_eq!(client.read(file, 0, 99).unwrap().0, [*epoch as u8; 10]);
        assert!(copies.open_count() <= OPEN_SNAPSHOTS_MAX);
    }
    assert!(copies.opens.load(Ordering::SeqCst) > count as usize);
    // The first one is closed.
    let attributes: Attributes = client.attributes(&files[0].1).unwrap();
    assert_eq!(client.attributes(&files[0].1).unwrap(), attributes);
    copies.delete(2);
    assert_eq!(client.attributes(&files[1].1).unwrap_err(), Status::Stale);
    assert_eq!(client.read(&files[1].1, 0, 1).unwrap_err(), Status::Stale);
    assert_eq!(view(&mut client, &root, "s2").unwrap_err(), Status::NoEntry);
}

#[test]
fn attributes_of_views_list_the_snapshots_once() {
    let (world, copies) = world(false);
    let mut client = Session::new(&world);
    let root = client.root();
    copies.take("one", 5);
    let own = client.lookup(&root, ".snapshot").unwrap().handle;
    let (begin, before) = (Instant::now(), copies.lists.load(Ordering::SeqCst));
    for _ in 0..200 {
        client.attributes(&own).unwrap();
    }
    let lists = copies.lists.load(Ordering::SeqCst) - before;
    let periods = begin.elapsed().as_secs() / SNAPSHOT_LIST_AGE.as_secs();
    assert!(lists as u64 <= periods + 1, "{lists} lists");
}

#[test]
fn new_and_deleted_snapshots_are_seen_at_once() {
    let (world, copies) = world(false);
    let mut client = Session::new(&world);
    let root = client.root();
    copies.take("one", 5);
    let own = client.lookup(&root, ".snapshot").unwrap().handle;
    let before = client.attributes(&own).unwrap();
    copies.take("two", 6);
    assert_eq!(
        names(&list(&mut client, &own, false)),
        [".", "..", "one", "two"]
    );
    let after = client.attributes(&own).unwrap();
    assert_ne!(before.modified, after.modified);
    copies.take("three", 7);
    client.lookup(&own, "three").unwrap();
    let named = client.attributes(&own).unwrap();
    assert_ne!(after.modified, named.modified);
    copies.delete(7);
    let gone = client.lookup(&own, "three").map(drop);
    assert_eq!(gone, Err(Status::NoEntry));
    assert_eq!(client.attributes(&own).unwrap().modified, after.modified);
}

#[test]
fn slow_open_of_a_snapshot_is_made_once_and_holds_one_worker() {
    let (world, copies) = world(false);
    let mut client = Session::new(&world);
    let root = client.root();
    copies.take("one", 5);
    let held = copies.gate.lock().unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| view(&mut Session::new(&world), &root, "one").map(drop));
        let until = Instant::now() + Duration::from_secs(20);
        while copies.opens.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < until, "the first open begins");
            std::thread::yield_now();
        }
        for _ in 0..3 {
            let other = view(&mut client, &root, "one").map(drop);
            assert_eq!(other, Err(Status::Jukebox));
        }
        assert!(client.attributes(&root).is_ok());
        drop(held);
        assert_eq!(first.join().unwrap(), Ok(()));
    });
    view(&mut client, &root, "one").unwrap();
    assert_eq!(copies.opens.load(Ordering::SeqCst), 1);
}
