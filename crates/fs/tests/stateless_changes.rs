//! Changes of names by file ids, as a stateless server makes them.

use crate::support;
use pagemesh_fs::{
    Attr, Caller, CreateMode, Created, FileId, Fs, Ino, InodeKind, SetAttributes, SetTime, Time,
    Wcc, WccReply,
};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use support::memory::{MemorySpace, wait};
use support::server::{NOTHING, SIZE, Server, around, compared, errno, mode, owner, size, user};
use support::{OWNER, clock, mount_and_free, new_fs};

fn create(
    server: &mut Server,
    name: &str,
    how: CreateMode,
    attrs: &SetAttributes,
    caller: &Caller,
) -> WccReply<Created> {
    let root = server.root();
    let fs = &server.fs;
    fs.create_at(root, name.as_bytes(), how, attrs, caller)
}

/// Makes a directory below the root as the owner.
fn make_directory(server: &Server, name: &str, bits: u16) -> FileId {
    let made = server
        .fs
        .make_directory_at(server.root(), name.as_bytes(), &mode(bits), &owner());
    made.result.unwrap().file_id()
}

fn set(server: &mut Server, id: FileId, wanted: &SetAttributes, caller: &Caller) -> WccReply<()> {
    let fs = &server.fs;
    fs.set_attributes(id, wanted, None, caller)
}

#[test]
fn guarded_create_makes_one_file() {
    let mut server = Server::new();
    let steps = server.memory.steps();
    let reply = create(
        &mut server,
        "file",
        CreateMode::Guarded,
        &mode(0o640),
        &owner(),
    );
    let made = reply.result.unwrap();
    assert_eq!(server.memory.steps(), steps + 1, "one transaction");
    assert!(made.is_new);
    assert_eq!(made.attr, server.fs.attr_of(made.attr.file_id()).unwrap());
    let Attr {
        mode: bits,
        uid,
        gid,
        ..
    } = made.attr;
    assert_eq!((bits, uid, gid), (0o640, OWNER.uid, OWNER.gid));
    let again = create(&mut server, "file", CreateMode::Guarded, &NOTHING, &owner());
    assert_eq!(errno(&again), Errno::EXIST);
    assert_eq!(again.wcc.after, server.fs.attr_of(server.root()).ok());
    assert_eq!(again.wcc.before, None);
    // No lookup is counted.
    server.fs.unlink(Ino::ROOT, b"file").unwrap();
    assert!(server.fs.attr(made.attr.ino).is_err());
}

#[test]
fn unchecked_create_returns_existing_file() {
    let mut server = Server::new();
    let id = server.file("file", 0o604);
    let pin = server.pin(id);
    server.write(&pin, 0, vec![1; 5000]).result.unwrap();
    let how = CreateMode::Unchecked;
    let kept = create(&mut server, "file", how, &mode(0o777), &user(50, 60));
    let kept = kept.result.unwrap();
    assert!(!kept.is_new);
    assert_eq!(kept.attr, server.fs.attr_of(id).unwrap());
    assert_eq!((kept.attr.mode, kept.attr.size), (0o604, 5000));
    let refused = create(&mut server, "file", how, &size(0), &user(50, 60));
    assert_eq!(errno(&refused), Errno::ACCESS);
    assert_eq!(server.read(&pin).len(), 5000);
    let cut = create(&mut server, "file", how, &size(0), &owner());
    let cut = cut.result.unwrap();
    assert_eq!((cut.attr.file_id(), cut.attr.size), (id, 0));
    assert_eq!(server.read(&pin), vec![]);
    make_directory(&server, "dir", 0o755);
    let found = create(&mut server, "dir", how, &size(0), &owner());
    assert_eq!(found.result.unwrap().attr.kind.bits(), 0o040_000);
}

#[test]
fn exclusive_create_recognizes_its_repetition() {
    for number in [0u64, 7, u64::MAX - 1] {
        let mut server = Server::new();
        let how = CreateMode::Exclusive(number.to_le_bytes());
        let first = create(&mut server, "file", how, &mode(0), &owner())
            .result
            .unwrap();
        let id = first.attr.file_id();
        // Other changes of the inode keep the verifier.
        set(&mut server, id, &mode(0o600), &owner()).result.unwrap();
        let (fs, channel) = mount_and_free(&server.memory);
        let memory = server.memory.clone();
        server = Server {
            memory,
            fs: Arc::new(fs),
            channel,
        };
        let again = create(&mut server, "file", how, &mode(0), &owner())
            .result
            .unwrap();
        assert_eq!((again.attr.file_id(), again.is_new), (id, false));
        let other = CreateMode::Exclusive((number ^ 5).to_le_bytes());
        let refused = create(&mut server, "file", other, &NOTHING, &owner());
        assert_eq!(errno(&refused), Errno::EXIST);
        // A file of another create has no verifier.
        server.file("plain", 0o600);
        let refused = create(&mut server, "plain", how, &NOTHING, &owner());
        assert_eq!(errno(&refused), Errno::EXIST);
        let pin = server.pin(id);
        server.write(&pin, 0, vec![1]).result.unwrap();
        let late = create(&mut server, "file", how, &NOTHING, &owner());
        assert_eq!(errno(&late), Errno::EXIST);
    }
}

fn check_initial(caller: &Caller, attrs: &SetAttributes, expected: Result<(u16, u32, u32), Errno>) {
    let mut server = Server::new();
    let id = server.root();
    set(&mut server, id, &mode(0o777), &owner()).result.unwrap();
    let reply = create(&mut server, "file", CreateMode::Guarded, attrs, caller);
    let found = server.fs.lookup_at(server.root(), b"file", &owner()).result;
    match expected {
        Err(expected) => {
            assert_eq!(errno(&reply), expected);
            assert_eq!(found.unwrap_err().errno(), Errno::NOENT);
        }
        Ok(expected) => {
            let attr = reply.result.unwrap().attr;
            assert_eq!(found.unwrap(), attr);
            assert_eq!((attr.mode, attr.uid, attr.gid), expected, "{attrs:?}");
        }
    }
}

#[test]
fn new_file_has_permitted_attributes() {
    let caller = Caller::new(50, 60, &[61]).unwrap();
    let group = |gid, bits| SetAttributes {
        gid: Some(gid),
        ..mode(bits)
    };
    let user_id = |uid| SetAttributes {
        uid: Some(uid),
        ..mode(0o4755)
    };
    check_initial(&caller, &NOTHING, Ok((0o600, 50, 60)));
    check_initial(&caller, &mode(0o6755), Ok((0o6755, 50, 60)));
    check_initial(&caller, &group(61, 0o2755), Ok((0o2755, 50, 61)));
    check_initial(&caller, &group(62, 0o755), Err(Errno::PERM));
    check_initial(&caller, &user_id(50), Ok((0o4755, 50, 60)));
    check_initial(&caller, &user_id(51), Err(Errno::PERM));
    check_initial(&user(0, 0), &user_id(51), Ok((0o4755, 51, 0)));
    check_initial(&user(0, 0), &group(62, 0o2755), Ok((0o2755, 0, 62)));
    check_initial(&caller, &size(1 << 45), Err(Errno::FBIG));
}

#[test]
fn new_file_has_size_and_times() {
    let mut server = Server::new();
    let at = Time { sec: 5, nsec: 6 };
    let attrs = SetAttributes {
        size: Some(1 << 20),
        mtime: Some(SetTime::At(at)),
        atime: Some(SetTime::Now),
        ..NOTHING
    };
    let made = create(&mut server, "file", CreateMode::Guarded, &attrs, &owner());
    let attr = made.result.unwrap().attr;
    assert_eq!((attr.size, attr.pages, attr.mtime), (1 << 20, 0, at));
    assert_eq!(attr.atime, attr.btime);
    let pin = server.pin(attr.file_id());
    assert_eq!(server.read(&pin), vec![0; 1 << 20]);
    let (fs, _) = mount_and_free(&server.memory);
    assert_eq!(fs.attr_of(attr.file_id()).unwrap(), attr);
}

#[test]
fn group_of_setgid_directory_is_inherited() {
    let server = Server::new();
    let parent = make_directory(&server, "parent", 0o2777);
    let other = user(50, 60);
    let made = server
        .fs
        .make_directory_at(parent, b"dir", &mode(0o755), &other);
    let made = made.result.unwrap();
    assert_eq!((made.mode, made.gid), (0o2755, OWNER.gid));
    let link = server
        .fs
        .symlink_at(parent, b"link", b"to", &mode(0), &other);
    let link = link.result.unwrap();
    assert_eq!((link.mode, link.gid, link.uid), (0o777, OWNER.gid, 50));
}

#[test]
fn only_root_makes_devices() {
    let server = Server::new();
    let root = server.root();
    let make = |node, caller: &Caller| {
        let made = server
            .fs
            .make_node_at(root, b"node", node, &mode(0o640), caller);
        made.result.map_err(|error| error.errno())
    };
    for kind in [InodeKind::CharDevice, InodeKind::BlockDevice] {
        assert_eq!(make((kind, 0x801), &owner()), Err(Errno::PERM));
        let made = make((kind, 0x801), &user(0, 0)).unwrap();
        assert_eq!((made.kind, made.device, made.mode), (kind, 0x801, 0o640));
        let removed = server.fs.remove_at(root, b"node", &owner());
        removed.result.unwrap();
    }
    for kind in [InodeKind::Fifo, InodeKind::Socket] {
        assert_eq!(make((kind, 0), &user(50, 60)), Err(Errno::ACCESS));
        let made = make((kind, 0), &owner()).unwrap();
        assert_eq!((made.kind, made.uid, made.mode), (kind, OWNER.uid, 0o640));
        assert_eq!(make((kind, 0), &owner()), Err(Errno::EXIST));
        let removed = server.fs.remove_at(root, b"node", &owner());
        removed.result.unwrap();
    }
    for kind in [InodeKind::File, InodeKind::Directory, InodeKind::Symlink] {
        assert_eq!(make((kind, 0), &user(0, 0)), Err(Errno::INVAL));
    }
}

/// Checks that a change connects to the attributes before, and that the directory is as it reports.
fn check_connected(server: &Server, id: FileId, last: &mut Attr, wcc: &Wcc, what: &str) {
    let (before, after) = around(wcc);
    assert_eq!(before, compared(last), "{what}");
    assert!(
        after.ctime > last.ctime && after.mtime > last.mtime,
        "{what}"
    );
    assert_eq!(after, server.fs.attr_of(id).unwrap(), "{what}");
    *last = after;
}

#[test]
fn attributes_around_changes_of_directory_are_connected() {
    let mut server = Server::new();
    let root = server.root();
    let caller = owner();
    let mut last = server.fs.attr_of(root).unwrap();
    let made = create(&mut server, "file", CreateMode::Guarded, &NOTHING, &caller);
    check_connected(&server, root, &mut last, &made.wcc, "create");
    let file = made.result.unwrap().attr;
    let made = server
        .fs
        .make_directory_at(root, b"dir", &mode(0o755), &caller);
    check_connected(&server, root, &mut last, &made.wcc, "mkdir");
    let directory = made.result.unwrap().file_id();
    let made = server
        .fs
        .symlink_at(root, b"link", b"to", &NOTHING, &caller);
    check_connected(&server, root, &mut last, &made.wcc, "symlink");
    let linked = server.fs.link_at(file.file_id(), root, b"other", &caller);
    linked.result.unwrap();
    check_connected(&server, root, &mut last, &linked.directory, "link");
    let (before, after) = around(&linked.file);
    assert_eq!((before, after.links), (compared(&file), 2));
    let moved = server
        .fs
        .rename_at((root, b"other"), (root, b"new"), &caller);
    assert_eq!((&moved.from, &moved.result), (&moved.to, &Ok(None)));
    check_connected(&server, root, &mut last, &moved.to, "rename");
    let mut last_below = server.fs.attr_of(directory).unwrap();
    let moved = server
        .fs
        .rename_at((root, b"new"), (directory, b"new"), &caller);
    moved.result.unwrap();
    check_connected(&server, root, &mut last, &moved.from, "rename from");
    check_connected(&server, directory, &mut last_below, &moved.to, "rename to");
    let removed = server.fs.remove_at(directory, b"new", &caller);
    assert_eq!(removed.result, Ok(file.file_id()));
    check_connected(&server, directory, &mut last_below, &removed.wcc, "remove");
    let removed = server.fs.remove_directory_at(root, b"dir", &caller);
    assert_eq!(removed.result, Ok(directory));
    check_connected(&server, root, &mut last, &removed.wcc, "rmdir");
}

#[test]
fn failed_changes_report_unchanged_directory() {
    let mut server = Server::new();
    let root = server.root();
    let file = server.file("file", 0o600);
    let directory = make_directory(&server, "dir", 0o755);
    server
        .fs
        .symlink_at(directory, b"below", b"to", &NOTHING, &owner())
        .result
        .unwrap();
    let before = server.fs.attr_of(root).ok();
    let check = |wcc: &Wcc, found: Errno, expected: Errno| {
        assert_eq!(found, expected);
        assert_eq!((wcc.before, &wcc.after), (None, &before));
    };
    let made = create(&mut server, "a/b", CreateMode::Guarded, &NOTHING, &owner());
    check(&made.wcc, errno(&made), Errno::INVAL);
    let made = server
        .fs
        .make_directory_at(root, b"file", &NOTHING, &owner());
    check(&made.wcc, errno(&made), Errno::EXIST);
    let made = server.fs.symlink_at(root, b"new", b"", &NOTHING, &owner());
    check(&made.wcc, errno(&made), Errno::NAMETOOLONG);
    let removed = server.fs.remove_at(root, b"none", &owner());
    check(&removed.wcc, errno(&removed), Errno::NOENT);
    let removed = server.fs.remove_at(root, b"dir", &owner());
    check(&removed.wcc, errno(&removed), Errno::ISDIR);
    let removed = server.fs.remove_directory_at(root, b"file", &owner());
    check(&removed.wcc, errno(&removed), Errno::NOTDIR);
    let removed = server.fs.remove_directory_at(root, b"dir", &owner());
    check(&removed.wcc, errno(&removed), Errno::NOTEMPTY);
    let removed = server.fs.remove_directory_at(root, b"..", &owner());
    check(&removed.wcc, errno(&removed), Errno::NOTEMPTY);
    let moved = server
        .fs
        .rename_at((root, b"dir"), (directory, b"x"), &owner());
    let found = moved.result.unwrap_err().errno();
    check(&moved.from, found, Errno::INVAL);
    assert_eq!(moved.to.after, server.fs.attr_of(directory).ok());
    let linked = server.fs.link_at(directory, root, b"new", &owner());
    let found = linked.result.unwrap_err().errno();
    check(&linked.directory, found, Errno::PERM);
    assert_eq!(linked.file.after, server.fs.attr_of(directory).ok());
    let refused = server.fs.make_directory_at(file, b"x", &NOTHING, &owner());
    assert_eq!(errno(&refused), Errno::NOTDIR);
}

/// The errors of each kind of change in a directory with this mode.
fn check_changes(bits: u16, caller: &Caller, expected: Result<(), Errno>) {
    let mut server = Server::new();
    let parent = make_directory(&server, "parent", 0o777);
    let file = server.file("file", 0o600);
    for name in [b"one".as_slice(), b"two", b"three", b"four"] {
        server
            .fs
            .link_at(file, parent, name, &owner())
            .result
            .unwrap();
    }
    let made = server
        .fs
        .make_directory_at(parent, b"dir", &mode(0o777), &owner());
    made.result.unwrap();
    set(&mut server, parent, &mode(bits), &owner())
        .result
        .unwrap();
    let how = CreateMode::Guarded;
    let fs = &server.fs;
    // Additions never depend on the owner of another entry.
    let may_add = expected == Ok(()) || expected == Err(Errno::PERM);
    let added = [
        fs.create_at(parent, b"a", how, &NOTHING, caller)
            .result
            .map(drop),
        fs.make_directory_at(parent, b"b", &NOTHING, caller)
            .result
            .map(drop),
        fs.symlink_at(parent, b"c", b"to", &NOTHING, caller)
            .result
            .map(drop),
        fs.link_at(file, parent, b"d", caller).result,
    ];
    for result in added {
        let expected = if may_add { Ok(()) } else { expected };
        assert_eq!(
            result.map_err(|error| error.errno()),
            expected,
            "{caller:?}"
        );
    }
    let removed = [
        fs.remove_at(parent, b"one", caller).result.map(drop),
        fs.remove_directory_at(parent, b"dir", caller)
            .result
            .map(drop),
        fs.rename_at((parent, b"two"), (parent, b"new"), caller)
            .result
            .map(drop),
        fs.rename_at((parent, b"four"), (parent, b"three"), caller)
            .result
            .map(drop),
    ];
    for result in removed {
        let found = result.map_err(|error| error.errno());
        assert_eq!(found, expected, "{bits:o} {caller:?}");
    }
}

#[test]
fn changes_of_entries_follow_mode_of_directory() {
    let other = user(50, 60);
    check_changes(0o755, &owner(), Ok(()));
    check_changes(0o555, &owner(), Err(Errno::ACCESS));
    check_changes(0o000, &user(0, 0), Ok(()));
    check_changes(0o755, &other, Err(Errno::ACCESS));
    check_changes(0o772, &other, Err(Errno::ACCESS));
    check_changes(0o773, &other, Ok(()));
    check_changes(0o770, &user(50, OWNER.gid), Ok(()));
    check_changes(0o1777, &owner(), Ok(()));
    check_changes(0o1777, &user(0, 0), Ok(()));
    check_changes(0o1777, &other, Err(Errno::PERM));
    check_changes(0o000, &Caller::trusted(50, 60), Ok(()));
}

#[test]
fn owner_of_entry_removes_it_from_sticky_directory() {
    let server = Server::new();
    let parent = make_directory(&server, "parent", 0o1777);
    let caller = user(50, 60);
    let fs = &server.fs;
    let how = CreateMode::Guarded;
    fs.create_at(parent, b"own", how, &NOTHING, &caller)
        .result
        .unwrap();
    let moved = fs.rename_at((parent, b"own"), (parent, b"new"), &caller);
    moved.result.unwrap();
    fs.remove_at(parent, b"new", &caller).result.unwrap();
}

/// A directory that changes its parent changes its entry "..".
#[test]
fn moved_directory_must_be_writable() {
    let server = Server::new();
    let (one, two) = (
        make_directory(&server, "one", 0o777),
        make_directory(&server, "two", 0o777),
    );
    let caller = user(50, 60);
    let made = server
        .fs
        .make_directory_at(one, b"dir", &mode(0o755), &owner());
    made.result.unwrap();
    let within = server.fs.rename_at((one, b"dir"), (one, b"new"), &caller);
    within.result.unwrap();
    let moved = server.fs.rename_at((one, b"new"), (two, b"new"), &caller);
    assert_eq!(moved.result.unwrap_err().errno(), Errno::ACCESS);
    let moved = server.fs.rename_at((one, b"new"), (two, b"new"), &owner());
    moved.result.unwrap();
}

#[test]
fn replaced_and_removed_inodes_live_while_pinned() {
    let mut server = Server::new();
    let root = server.root();
    let (one, two) = (server.file("one", 0o600), server.file("two", 0o600));
    let pin = server.pin(two);
    server.write(&pin, 0, vec![3; 9000]).result.unwrap();
    let moved = server
        .fs
        .rename_at((root, b"one"), (root, b"two"), &owner());
    assert_eq!(moved.result, Ok(Some(two)));
    assert_eq!(server.read(&pin), vec![3; 9000]);
    let linked = server.fs.link_at(two, root, b"back", &owner());
    assert_eq!(linked.result.unwrap_err().errno(), Errno::NOENT);
    drop(pin);
    assert_eq!(server.fs.attr_of(two).unwrap_err().errno(), Errno::STALE);
    let directory = make_directory(&server, "dir", 0o777);
    let pin = server.pin(directory);
    server
        .fs
        .remove_directory_at(root, b"dir", &owner())
        .result
        .unwrap();
    let made = server
        .fs
        .make_directory_at(directory, b"x", &NOTHING, &owner());
    assert_eq!(errno(&made), Errno::NOENT);
    drop(pin);
    assert_eq!(server.fs.remove_at(root, b"two", &owner()).result, Ok(one));
    assert_eq!(server.fs.attr_of(one).unwrap_err().errno(), Errno::STALE);
}

#[test]
fn stale_ids_change_nothing() {
    let server = Server::new();
    let root = server.root();
    let file = server.file("file", 0o600);
    let stale = FileId {
        birth: root.birth ^ 1,
        ..root
    };
    let steps = server.memory.steps();
    let fs = &server.fs;
    let how = CreateMode::Guarded;
    let caller = owner();
    let from = fs.rename_at((stale, b"file"), (root, b"x"), &caller);
    let to = fs.rename_at((root, b"file"), (stale, b"x"), &caller);
    assert_eq!((from.from, to.to), (Wcc::default(), Wcc::default()));
    assert_eq!(to.from.after, fs.attr_of(root).ok());
    let results = [
        fs.create_at(stale, b"x", how, &NOTHING, &caller)
            .result
            .map(drop),
        fs.make_directory_at(stale, b"x", &NOTHING, &caller)
            .result
            .map(drop),
        fs.symlink_at(stale, b"x", b"to", &NOTHING, &caller)
            .result
            .map(drop),
        fs.remove_at(stale, b"file", &caller).result.map(drop),
        fs.remove_directory_at(stale, b"file", &caller)
            .result
            .map(drop),
        fs.link_at(file, stale, b"x", &caller).result,
        fs.link_at(stale, root, b"x", &caller).result,
        fs.set_attributes(stale, &mode(0), None, &caller).result,
        fs.set_attributes(stale, &size(0), None, &caller).result,
        from.result.map(drop),
        to.result.map(drop),
    ];
    for (number, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().errno(), Errno::STALE, "{number}");
    }
    assert_eq!(server.memory.steps(), steps);
}

/// Names are committed before the reply, also with a commit interval.
#[test]
fn names_are_committed_before_reply() {
    let memory = MemorySpace::new(SIZE).with_write_cache();
    let (fs, _) = new_fs(&memory);
    fs.set_commit_interval(Duration::from_secs(3600), Box::new(|| {}));
    let fs: Arc<Fs> = Arc::new(fs);
    let root = fs.attr(Ino::ROOT).unwrap().file_id();
    let kind = pagemesh_fs::CreateKind::File;
    fs.create(Ino::ROOT, b"deferred", kind, 0o600, OWNER)
        .unwrap();
    assert!(
        fs.uncommitted_changes().pages > 0,
        "the interval has no effect"
    );
    let how = CreateMode::Guarded;
    let made = fs.create_at(root, b"file", how, &NOTHING, &owner());
    let id = made.result.unwrap().attr.file_id();
    assert_eq!(fs.uncommitted_changes().pages, 0);
    let crashed = memory.after_steps(memory.steps());
    let fs = Fs::mount(crashed.shared(), wait, clock).unwrap();
    fs.attr_of(id).unwrap();
}
