//! A mount beside another front of the same process, which calls the file system as an NFS server does. The tests need root, or
//! fusermount3; those with mappings need python3.

use crate::memory;
use crate::skip;
use crate::support_mount;
use bytes::Bytes;
use pagemesh_fs::{
    Acl, AclEntry, AclKind, AclTag, Caller, CreateMode, FileId, Fs, Ino, IoChannel, SetAttributes,
};
use pagemesh_fuse::{MountOptions, Transport, now};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;
use support_mount::{BUSY_LIMIT, TestMount, new_memory_fs, options};

/// The other front.
struct Server {
    fs: Arc<Fs>,
    channel: IoChannel,
    caller: Caller,
}

impl Server {
    fn new() -> Server {
        let memory = new_memory_fs();
        let fs = Arc::new(Fs::mount(memory.shared(), memory::wait, now).unwrap());
        Server {
            channel: fs.open_channel().unwrap(),
            fs,
            caller: Caller::new(0, 0, &[]).unwrap(),
        }
    }

    fn root(&self) -> FileId {
        self.fs.attr(Ino::ROOT).unwrap().file_id()
    }

    fn find(&self, name: &str) -> FileId {
        let found = self
            .fs
            .lookup_at(self.root(), name.as_bytes(), &self.caller);
        found.result.unwrap().file_id()
    }

    fn create(&mut self, name: &str) -> FileId {
        let (root, attrs) = (self.root(), SetAttributes::default());
        let how = CreateMode::Guarded;
        let (fs, caller) = (&self.fs, &self.caller);
        let made = fs.create_at(root, name.as_bytes(), how, &attrs, caller);
        made.result.unwrap().attr.file_id()
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) {
        let pin = self.fs.pin(self.find(name)).unwrap();
        let data = Bytes::copy_from_slice(bytes);
        let fs = &self.fs;
        let written = fs.write_at(&pin, offset, &data, false, &self.caller);
        assert_eq!(written.result.unwrap() as usize, bytes.len());
        pin.release(&mut self.channel);
    }

    fn read(&mut self, name: &str) -> Vec<u8> {
        let pin = self.fs.pin(self.find(name)).unwrap();
        let fs = &self.fs;
        let read = fs.read_at(&pin, 0, 1 << 20, &self.caller);
        pin.release(&mut self.channel);
        read.result.unwrap().bytes
    }

    fn set(&mut self, name: &str, wanted: &SetAttributes) {
        let id = self.find(name);
        let (fs, caller) = (&self.fs, &self.caller);
        let set = fs.set_attributes(id, wanted, None, caller);
        set.result.unwrap();
    }

    fn resize(&mut self, name: &str, size: u64) {
        let wanted = SetAttributes {
            size: Some(size),
            ..SetAttributes::default()
        };
        self.set(name, &wanted);
    }

    fn remove(&self, name: &str) {
        let gone = self
            .fs
            .remove_at(self.root(), name.as_bytes(), &self.caller);
        gone.result.unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        let (from, to) = ((self.root(), from.as_bytes()), (self.root(), to.as_bytes()));
        self.fs.rename_at(from, to, &self.caller).result.unwrap();
    }

    fn used(&self) -> u64 {
        self.fs.usage().used_bytes
    }

    /// None, with a message, if this user cannot mount.
    fn mount(&self) -> Option<TestMount> {
        let options = MountOptions {
            is_shared: true,
            ..options(Transport::Classic)
        };
        TestMount::of(Arc::clone(&self.fs), &options)
    }
}

fn open(mount: &TestMount, name: &str) -> File {
    let mut options = OpenOptions::new();
    let path = mount.path(name);
    options.read(true).write(true).open(path).unwrap()
}

/// Waits for an effect of another thread.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + BUSY_LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// All bytes of an open file, at its current size.
fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn writes_of_either_front_are_seen_by_the_other_at_once() {
    check_writes(&open);
}

/// Only a file that is open for writes can have dirty pages, so its pages are dropped also before each write.
#[test]
fn foreign_writes_are_seen_by_readers_at_once() {
    check_writes(&|mount, name| File::open(mount.path(name)).unwrap());
}

fn check_writes(open: &dyn Fn(&TestMount, &str) -> File) {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    for len in [1, 100, 4096, 5000, 12_288, 300_001] {
        let name = format!("file-{len}");
        let mut expected = vec![1; len];
        fs::write(mount.path(&name), &expected).unwrap();
        let file = open(&mount, &name);
        assert_eq!(bytes_of(&file), expected, "its pages are cached");
        assert_eq!(server.read(&name), expected);
        // Within, over the end, and behind a hole.
        for (at, add) in [
            (len / 2, len / 3 + 1),
            (len - 1, 5000),
            (2 * len + 9000, 77),
        ] {
            let fill = vec![(at % 251) as u8 + 2; add];
            server.write(&name, at as u64, &fill);
            expected.resize(expected.len().max(at + add), 0);
            expected[at..at + add].copy_from_slice(&fill);
            assert_eq!(bytes_of(&file), expected, "{len} at {at}");
            assert_eq!(
                fs::metadata(mount.path(&name)).unwrap().len(),
                expected.len() as u64
            );
            assert_eq!(fs::read(mount.path(&name)).unwrap(), expected);
        }
        self::open(&mount, &name).write_all_at(b"back", 0).unwrap();
        expected[..4].copy_from_slice(b"back");
        assert_eq!(server.read(&name), expected);
    }
}

#[test]
fn appends_of_both_fronts_alternate_without_loss() {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    fs::write(mount.path("log"), b"").unwrap();
    let mut log = OpenOptions::new();
    let mut log = log.append(true).read(true).open(mount.path("log")).unwrap();
    let mut expected = Vec::new();
    for turn in 0..200_usize {
        let line = vec![turn as u8; 40 + turn % 37];
        log.write_all(&line).unwrap();
        expected.extend(&line);
        // The kernel learns the end from the server alone: no program asks for it between two appends.
        if turn % 5 == 4 {
            assert_eq!(bytes_of(&log), expected, "{turn}");
        }
        let line = vec![!turn as u8; 30 + turn % 41];
        server.write("log", expected.len() as u64, &line);
        expected.extend(&line);
    }
    assert_eq!(bytes_of(&log), expected);
    assert_eq!(server.read("log"), expected);
}

#[test]
fn truncation_by_other_front_cuts_cached_file() {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    let mut expected = vec![7; 20_000];
    fs::write(mount.path("file"), &expected).unwrap();
    let file = open(&mount, "file");
    assert_eq!(bytes_of(&file), expected);
    for size in [5000, 30_000, 4096, 4097, 0, 10] {
        server.resize("file", size);
        expected.resize(size as usize, 0);
        assert_eq!(bytes_of(&file), expected, "{size}");
        assert_eq!(fs::read(mount.path("file")).unwrap(), expected);
    }
}

#[test]
fn names_and_modes_of_other_front_are_seen_at_once() {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    let is_there = |name: &str| mount.path(name).symlink_metadata().is_ok();
    for turn in 0..20 {
        fs::write(mount.path("one"), [turn]).unwrap();
        fs::write(mount.path("two"), b"22").unwrap();
        assert!(is_there("one") && !is_there("moved"));
        server.rename("one", "moved");
        assert!(!is_there("one") && is_there("moved"));
        assert_eq!(fs::read(mount.path("moved")).unwrap(), [turn]);
        server.rename("moved", "two");
        assert!(!is_there("moved"));
        assert_eq!(fs::read(mount.path("two")).unwrap(), [turn]);
        let mode = SetAttributes {
            mode: Some(0o640),
            ..SetAttributes::default()
        };
        server.set("two", &mode);
        let mode = fs::metadata(mount.path("two"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o640);
        server.remove("two");
        let missing = fs::metadata(mount.path("two")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        server.create("made");
        assert_eq!(fs::read(mount.path("made")).unwrap(), b"");
        fs::remove_file(mount.path("made")).unwrap();
        let root = server.fs.lookup_at(server.root(), b"made", &server.caller);
        assert!(root.result.is_err());
    }
}

/// The ACL of an open file, as the kernel has it.
fn acl_of(file: &File) -> Vec<u8> {
    let mut value = vec![0; 1024];
    let len = rustix::fs::fgetxattr(file, "system.posix_acl_access", &mut value[..]).unwrap();
    value.truncate(len);
    value
}

/// No lookup makes the kernel ask for the ACL of an open file again.
#[test]
fn acl_set_by_other_front_is_seen_at_once() {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    fs::write(mount.path("file"), b"1").unwrap();
    let file = open(&mount, "file");
    let id = server.find("file");
    let entry = |tag, rights| AclEntry { tag, rights };
    for rights in [6, 4, 0, 7] {
        let entries = vec![
            entry(AclTag::UserObj, 6),
            entry(AclTag::User(4321), rights),
            entry(AclTag::GroupObj, 4),
            entry(AclTag::Mask, 7),
            entry(AclTag::Other, 0),
        ];
        let acl = Acl::new(entries).unwrap();
        let expected = acl.encode();
        let change = [(AclKind::Access, Some(acl))];
        let set = server.fs.set_acls(id, &change, &server.caller);
        set.result.unwrap();
        assert_eq!(acl_of(&file), expected, "{rights}");
        // The mode is the mask.
        let mode = SetAttributes {
            mode: Some(0o600),
            ..SetAttributes::default()
        };
        server.set("file", &mode);
        let masked = Acl::decode(&acl_of(&file)).unwrap().unwrap();
        let mask = masked.entries().iter().find(|it| it.tag == AclTag::Mask);
        assert_eq!(mask.unwrap().rights, 0);
    }
}

/// The kernel has looked the file up, and keeps that reference as long as it likes.
#[test]
fn file_removed_by_other_front_frees_its_pages() {
    let server = Server::new();
    let Some(mount) = server.mount() else { return };
    let before = server.used();
    for name in ["one", "two"] {
        fs::write(mount.path(name), vec![1; 8 << 20]).unwrap();
        assert_eq!(fs::read(mount.path(name)).unwrap().len(), 8 << 20);
    }
    let open = open(&mount, "two");
    server.remove("one");
    wait_until("the pages of one are free", || {
        server.used() < before + (12 << 20)
    });
    server.remove("two");
    // A program still has it open.
    assert_eq!(bytes_of(&open).len(), 8 << 20);
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    drop(open);
    wait_until("the pages of two are free", || {
        server.used() < before + (1 << 20)
    });
}

/// A program with a mapping of a file. It takes `OFFSET BYTE` lines to store, `OFFSET` lines to load, and answers each.
struct Mapper {
    child: Child,
    answers: BufReader<ChildStdout>,
}

const MAPPER: &str = r#"
import mmap, os, sys
file = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
print('mapped', flush=True)
for line in sys.stdin:
    words = [int(word) for word in line.split()]
    if len(words) == 2:
        file[words[0]] = words[1]
    print(file[words[0]], flush=True)
"#;

impl Mapper {
    fn start(path: &Path) -> Option<Mapper> {
        let child = Command::new("python3")
            .args(["-c", MAPPER])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            skip::skip("needs python3");
            return None;
        };
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut mapper = Mapper { child, answers };
        assert_eq!(mapper.answer(), "mapped");
        Some(mapper)
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self, line: &str) -> u8 {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.answer().parse().unwrap()
    }

    fn store(&mut self, at: usize, byte: u8) {
        assert_eq!(self.ask(&format!("{at} {byte}")), byte);
    }

    fn load(&mut self, at: usize) -> u8 {
        self.ask(&at.to_string())
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn stores_into_mappings_and_foreign_writes_meet_in_a_page() {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    let mut expected = vec![1; 3 * 4096];
    fs::write(mount.path("file"), &expected).unwrap();
    let Some(mut mapper) = Mapper::start(&mount.path("file")) else {
        return;
    };
    for turn in 1..30_u8 {
        for page in 0..3 {
            let at = page * 4096 + usize::from(turn) * 100;
            mapper.store(at, turn);
            expected[at] = turn;
        }
        assert_eq!(server.read("file"), expected, "{turn}");
        let at = 4096 + usize::from(turn) * 100;
        mapper.store(at + 1, turn);
        expected[at + 1] = turn;
        // The neighbours of a dirty byte.
        server.write("file", at as u64 + 2, &[200 + turn; 50]);
        expected[at + 2..at + 52].fill(200 + turn);
        assert_eq!(mapper.load(at + 1), turn);
        assert_eq!(mapper.load(at + 51), 200 + turn);
        assert_eq!(server.read("file"), expected, "{turn}");
        assert_eq!(fs::read(mount.path("file")).unwrap(), expected);
    }
    // The program ends with a dirty page.
    mapper.store(5, 99);
    expected[5] = 99;
    drop(mapper);
    assert_eq!(server.read("file"), expected);
}

#[test]
fn mount_ends_and_another_follows_while_other_front_serves() {
    let mut server = Server::new();
    let Some(mount) = server.mount() else { return };
    let before = server.used();
    fs::write(mount.path("file"), b"first").unwrap();
    fs::write(mount.path("gone"), vec![1; 8 << 20]).unwrap();
    let open = open(&mount, "gone");
    let listed = fs::read_dir(mount.dir.path()).unwrap();
    fs::remove_file(mount.path("gone")).unwrap();
    // The kernel sends no further request about the open files.
    mount.unmounter.abort().unwrap();
    drop(mount);
    drop((open, listed));
    assert!(server.used() < before + (1 << 20), "its pages are free");
    server.write("file", 5, b" and second");
    assert_eq!(server.read("file"), b"first and second");
    server.create("made");

    let mount = server.mount().unwrap();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"first and second");
    server.write("file", 0, b"FIRST");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"FIRST and second");
    server.remove("made");
    assert!(fs::metadata(mount.path("made")).is_err());
    drop(mount);
    server.write("file", 0, b"third");
    assert_eq!(server.read("file"), b"third and second");
}
