//! Content of files through pins, as a stateless server reads and writes it.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AttrChanges, Caller, CreateKind, FileId, Fs, FsError, Ino};
use rustix::io::Errno;
use std::sync::Arc;
use support::lossy::LossySpace;
use support::memory::{MemorySpace, wait};
use support::server::{SIZE, Server, around, compared, errno, owner, user};
use support::{OWNER, clock, mount_and_free, new_fs};

const PAGE: usize = 4096;
const BIG: usize = 3 << 20;

fn is_stale<T: std::fmt::Debug>(result: Result<T, FsError>) -> bool {
    matches!(result, Err(FsError::Posix(Errno::STALE)))
}

/// A pinned file of 3 MiB.
fn big_file(server: &mut Server) -> (FileId, pagemesh_fs::Pin, Vec<u8>) {
    let id = server.file("big", 0o600);
    let pin = server.pin(id);
    let bytes: Vec<u8> = (0..BIG).map(|at| (at / 7) as u8).collect();
    for (piece, at) in bytes.chunks(1 << 20).zip((0..).step_by(1 << 20)) {
        let written = server.write(&pin, at, piece.to_vec());
        assert_eq!(written.result.unwrap(), piece.len() as u32);
    }
    (id, pin, bytes)
}

#[test]
fn unlinked_pinned_file_is_read_and_freed_after_drop() {
    for is_dropped in [true, false] {
        let mut server = Server::new();
        server.file("other", 0o600);
        let empty = server.memory.mapped_pages();
        let (id, pin, bytes) = big_file(&mut server);
        server.fs.unlink(Ino::ROOT, b"big").unwrap();
        assert_eq!(server.read(&pin), bytes);
        assert!(server.memory.mapped_pages() >= empty + BIG / PAGE);
        // A file without a name gets pins only as long as it has one.
        let second = server.pin(id);
        assert_eq!(server.fs.attr_of(id).unwrap().links, 0);
        drop(second);
        assert_eq!(server.read(&pin), bytes);
        match is_dropped {
            true => drop(pin),
            false => pin.release(&mut server.channel),
        }
        assert_eq!(server.memory.mapped_pages(), empty);
        assert!(is_stale(server.fs.attr_of(id)));
        assert!(is_stale(server.fs.pin(id).map(drop)));
    }
}

#[test]
fn pin_outlives_last_close_of_unlinked_file() {
    let mut server = Server::new();
    let (id, pin, bytes) = big_file(&mut server);
    server.fs.open(id.ino).unwrap();
    server.fs.unlink(Ino::ROOT, b"big").unwrap();
    server.fs.release(id.ino);
    assert_eq!(server.read(&pin), bytes);
    let full = server.memory.mapped_pages();
    drop(pin);
    assert!(server.memory.mapped_pages() < full - 700);
}

#[test]
fn file_without_name_and_pin_is_stale() {
    let server = Server::new();
    let unnamed = server.fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap();
    assert!(is_stale(server.fs.attr_of(unnamed.file_id())));
    assert!(is_stale(server.fs.pin(unnamed.file_id()).map(drop)));
    assert!(server.fs.attr(unnamed.ino).is_ok());
}

#[test]
fn identity_of_reused_number_is_stale() {
    let server = Server::new();
    let first = server.file("one", 0o600);
    server.fs.unlink(Ino::ROOT, b"one").unwrap();
    assert!(is_stale(server.fs.attr_of(first)));
    let second = server.file("two", 0o600);
    assert_eq!(second.ino, first.ino);
    assert!(is_stale(server.fs.attr_of(first)));
    assert_eq!(server.fs.attr_of(second).unwrap().file_id(), second);
    // A rollback brings back a number with its old generation.
    let rolled_back = FileId {
        birth: second.birth ^ 1,
        ..second
    };
    assert!(is_stale(server.fs.attr_of(rolled_back)));
    let table = FileId {
        ino: Ino(0),
        ..second
    };
    assert!(is_stale(server.fs.attr_of(table)));
    let beyond = FileId {
        ino: Ino(1 << 40),
        ..second
    };
    assert!(is_stale(server.fs.attr_of(beyond)));
}

#[test]
fn identity_survives_remount() {
    let server = Server::new();
    let id = server.file("file", 0o600);
    let (fs, _) = mount_and_free(&server.memory);
    assert_eq!(fs.attr_of(id).unwrap().ino, id.ino);
}

#[test]
fn dropped_pin_leaves_times_pending() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    server.write(&pin, 0, vec![1; PAGE]).result.unwrap();
    let written = server.write(&pin, 0, vec![2; PAGE]);
    let (_, after) = around(&written.wcc);
    let steps = server.memory.steps();
    drop(pin);
    assert_eq!(server.memory.steps(), steps, "a drop changed the volume");
    assert_eq!(server.fs.attr_of(id).unwrap(), after);
    server.fs.flush_all_times().unwrap();
    assert!(server.memory.steps() > steps);
    let (fs, _) = mount_and_free(&server.memory);
    assert_eq!(fs.attr_of(id).unwrap().mtime, after.mtime);
}

#[test]
fn read_reports_end_and_attributes() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    server.write(&pin, 0, vec![7; PAGE + 10]).result.unwrap();
    let read = |offset, len| {
        let reply = server.fs.read_at(&pin, offset, len, &owner());
        assert_eq!(reply.wcc.after.unwrap().size, PAGE as u64 + 10);
        let read = reply.result.unwrap();
        (read.bytes.len(), read.is_eof)
    };
    assert_eq!(read(0, 10), (10, false));
    assert_eq!(read(0, PAGE as u32 + 9), (PAGE + 9, false));
    assert_eq!(read(0, PAGE as u32 + 10), (PAGE + 10, true));
    assert_eq!(read(PAGE as u64, u32::MAX), (10, true));
    assert_eq!(read(u64::MAX, u32::MAX), (0, true));
    assert_eq!(read(PAGE as u64 + 10, 0), (0, true));
}

#[test]
fn long_read_and_write_are_cut() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    let long = server.write(&pin, 0, vec![7; (1 << 20) + 5]);
    assert_eq!(long.result.unwrap(), 1 << 20);
    server.write(&pin, 1 << 20, vec![8; 5]).result.unwrap();
    let reply = server.fs.read_at(&pin, 0, 2 << 20, &owner());
    let read = reply.result.unwrap();
    assert_eq!((read.bytes.len(), read.is_eof), (1 << 20, false));
}

#[test]
fn content_of_directory_and_link_is_refused() {
    let mut server = Server::new();
    let link = server.fs.create(
        Ino::ROOT,
        b"link",
        CreateKind::Symlink(b"target"),
        0o777,
        OWNER,
    );
    let link = link.unwrap().file_id();
    for (id, expected) in [(server.root(), Errno::ISDIR), (link, Errno::INVAL)] {
        let pin = server.pin(id);
        let reply = server.fs.read_at(&pin, 0, 10, &owner());
        assert_eq!(errno(&reply), expected);
        assert_eq!(errno(&server.write(&pin, 0, vec![1])), expected);
        assert_eq!(errno(&server.write(&pin, 0, vec![])), expected);
    }
    let target = server.fs.read_link_at(link);
    assert_eq!(target.result.unwrap(), b"target");
    assert_eq!(target.wcc.after.unwrap().ino, link.ino);
    assert_eq!(errno(&server.fs.read_link_at(server.root())), Errno::INVAL);
}

/// Whether a caller reads and writes a file with this mode.
fn check_rights(caller: &Caller, mode: u16, expected: (bool, bool)) {
    let mut server = Server::new();
    let id = server.file("file", mode);
    let pin = server.pin(id);
    let trusted = Caller::trusted(0, 0);
    let made = server.write_as(&trusted, &pin, 0, vec![5; 100]);
    made.result.unwrap();
    let read = server.fs.read_at(&pin, 0, 10, caller).result;
    let before = server.fs.attr_of(id).unwrap();
    let over = server.write_as(caller, &pin, 0, vec![6; 10]);
    let longer = server.write_as(caller, &pin, 50, vec![6; 2 * PAGE]);
    let none = server.write_as(caller, &pin, 0, vec![]);
    let written = [&over, &longer, &none].map(|reply| reply.result.is_ok());
    let (may_read, may_write) = expected;
    assert_eq!(read.is_ok(), may_read, "{caller:?} reads {mode:o}");
    assert_eq!(written, [may_write; 3], "{caller:?} writes {mode:o}");
    if !may_write {
        assert_eq!(errno(&over), Errno::ACCESS);
        assert_eq!(over.wcc.after.unwrap().mtime, before.mtime);
        assert_eq!(server.fs.attr_of(id).unwrap().size, 100);
        assert_eq!(server.read(&pin), vec![5; 100]);
    }
}

#[test]
fn rights_follow_class_of_caller() {
    let other = user(50, 60);
    let in_group = user(50, OWNER.gid);
    let in_groups = Caller::new(50, 60, &[9, OWNER.gid, 3]).unwrap();
    check_rights(&owner(), 0o000, (true, true));
    check_rights(&user(0, 0), 0o000, (true, true));
    check_rights(&other, 0o770, (false, false));
    check_rights(&other, 0o604, (true, false));
    check_rights(&other, 0o602, (false, true));
    check_rights(&other, 0o601, (true, false));
    for caller in [in_group, in_groups] {
        check_rights(&caller, 0o706, (false, false));
        check_rights(&caller, 0o640, (true, false));
        check_rights(&caller, 0o660, (true, true));
    }
    assert_eq!(
        Caller::new(1, 1, &[0; 1025]).unwrap_err().errno(),
        Errno::TOOBIG
    );
}

/// Each write reports the attributes that the one before it left.
#[test]
fn attributes_around_writes_are_connected() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    let mut last = server.fs.attr_of(id).unwrap();
    let writes = [
        (0, 10),
        (10, 5000),
        (0, 100),
        // Several transactions.
        (5010, 1 << 20),
        // A hole before it.
        (8 << 20, 10),
        (0, PAGE),
        (1 << 20, 1 << 20),
    ];
    for (offset, len) in writes {
        let reply = server.write(&pin, offset, vec![1; len]);
        assert_eq!(reply.result.unwrap(), len as u32);
        let (before, after) = around(&reply.wcc);
        assert_eq!(before, compared(&last), "{offset} {len}");
        assert!(after.mtime > last.mtime && after.ctime > last.ctime);
        assert_eq!(compared(&after), compared(&server.fs.attr_of(id).unwrap()));
        last = after;
    }
    let reply = server.write(&pin, 0, vec![]);
    assert_eq!(around(&reply.wcc), (compared(&last), last.clone()));
}

fn check_setid(caller: &Caller, offset: u64, expected: u16) {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    server.write(&pin, 0, vec![1; 2 * PAGE]).result.unwrap();
    let changes = AttrChanges {
        mode: Some(0o6777),
        ..AttrChanges::default()
    };
    server.fs.set_attr(id.ino, changes).unwrap();
    let reply = server.write_as(caller, &pin, offset, vec![2; PAGE]);
    assert_eq!(reply.result.unwrap(), PAGE as u32);
    assert_eq!(around(&reply.wcc).1.mode, expected);
    assert_eq!(server.fs.attr_of(id).unwrap().mode, expected);
    assert_eq!(server.read(&pin)[offset as usize..], vec![2; PAGE]);
}

#[test]
fn write_by_user_clears_setid() {
    for offset in [PAGE as u64, 2 * PAGE as u64] {
        check_setid(&owner(), offset, 0o777);
        check_setid(&user(50, 60), offset, 0o777);
        check_setid(&user(0, 0), offset, 0o6777);
    }
}

struct LossyServer {
    space: LossySpace,
    fs: Arc<Fs>,
    id: FileId,
}

impl LossyServer {
    fn new() -> LossyServer {
        let memory = MemorySpace::new(SIZE);
        drop(new_fs(&memory));
        let space = LossySpace::new(&memory);
        let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
        let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
        LossyServer {
            space,
            fs: Arc::new(fs),
            id: made.unwrap().file_id(),
        }
    }
}

#[test]
fn commit_returns_losses_and_leaves_errors_of_programs() {
    let LossyServer { space, fs, id } = LossyServer::new();
    let mut channel = fs.open_channel().unwrap();
    let cursor = fs.lost_write_cursor();
    let pin = fs.pin(id).unwrap();
    let data = Bytes::from(vec![1; PAGE]);
    let written = fs.write_at(&pin, 0, &data, false, &owner());
    written.result.unwrap();
    let flushes = space.flushes();
    let committed = fs.commit(&mut channel, &pin);
    assert_eq!(committed.result.unwrap(), 0);
    assert_eq!(committed.wcc.after.unwrap().size, PAGE as u64);
    assert_eq!(space.flushes(), flushes + 1);
    space.lose_writes();
    assert_eq!(fs.lost_writes(), 1);
    for _ in 0..2 {
        assert_eq!(fs.commit(&mut channel, &pin).result.unwrap(), 1);
    }
    let synced = fs.sync_open_file(&mut channel, id.ino, &cursor);
    assert_eq!(synced.unwrap_err().errno(), Errno::IO);
    fs.sync_open_file(&mut channel, id.ino, &cursor).unwrap();
    assert_eq!(fs.commit(&mut channel, &pin).result.unwrap(), 1);
}

#[test]
fn commit_stores_times() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    server.write(&pin, 0, vec![1; PAGE]).result.unwrap();
    let last = around(&server.write(&pin, 0, vec![2; PAGE]).wcc).1;
    server.fs.commit(&mut server.channel, &pin).result.unwrap();
    let (fs, _) = mount_and_free(&server.memory);
    assert_eq!(fs.attr_of(id).unwrap().mtime, last.mtime);
}

#[test]
fn snapshot_is_read_through_pins() {
    let mut server = Server::new();
    let (id, pin, bytes) = big_file(&mut server);
    drop(pin);
    let image = server.memory.shared();
    let fs = Arc::new(Fs::mount_snapshot(image, wait, clock).unwrap());
    let mut snapshot = Server {
        memory: server.memory.clone(),
        channel: fs.open_channel().unwrap(),
        fs,
    };
    let pin = snapshot.pin(id);
    assert_eq!(snapshot.read(&pin), bytes);
    let refused = snapshot.write(&pin, 0, vec![1]).result;
    assert_eq!(refused.unwrap_err(), FsError::Snapshot);
}

/// The kernel writes a page back that it read before the write. A program has stored into another byte of it.
#[test]
fn kernel_page_from_before_write_does_not_undo_it() {
    let mut server = Server::new();
    let kind = CreateKind::File;
    let made = server.fs.create(Ino::ROOT, b"file", kind, 0o600, OWNER);
    let id = made.unwrap().file_id();
    server.fs.open(id.ino).unwrap();
    let pin = server.pin(id);
    server.write(&pin, 0, vec![1; PAGE]).result.unwrap();
    server.fs.begin_caching(id.ino).unwrap();
    server.fs.record_kernel_read(id.ino).unwrap();
    let mut page = vec![1; PAGE];
    page[0] = 7;
    let page = Bytes::from(page);
    let mount = Arc::downgrade(&server.fs);
    let write_back = move |ino, _| {
        let fs = mount.upgrade().unwrap();
        let mut channel = fs.open_channel().unwrap();
        fs.buffer_mmap_write(&mut channel, ino, 0, &page).unwrap();
        true
    };
    server
        .fs
        .set_kernel_callbacks(Box::new(write_back), Box::new(|_, _, _| {}));
    server.write(&pin, 100, vec![9; 50]).result.unwrap();
    let bytes = server.read(&pin);
    assert_eq!((bytes[0], bytes[99], bytes[150]), (7, 1, 1));
    assert_eq!(bytes[100..150], [9; 50]);
    assert_eq!(server.fs.collect_direct_writes(), [id.ino]);
}

#[test]
fn write_without_kernel_leaves_no_notification() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let pin = server.pin(id);
    server.write(&pin, 0, vec![1; PAGE]).result.unwrap();
    server.write(&pin, 0, vec![2; PAGE]).result.unwrap();
    assert_eq!(server.fs.collect_direct_writes(), []);
}

/// A server shares pins among its threads.
#[test]
fn pin_is_shared_between_threads() {
    fn check<T: Send + Sync + 'static>() {}
    check::<pagemesh_fs::Pin>();
}
