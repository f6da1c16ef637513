//! Changes of attributes by file ids, as a stateless server makes them.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{Caller, CreateKind, FileId, Fs, Ino, SetAttributes, SetTime, Time, WccReply};
use rustix::io::Errno;
use std::sync::Arc;
use support::memory::{MemorySpace, wait};
use support::server::{NOTHING, SIZE, Server, around, compared, errno, mode, owner, size, user};
use support::{OWNER, mount_and_free, new_fs};

fn set(server: &mut Server, id: FileId, wanted: &SetAttributes, caller: &Caller) -> WccReply<()> {
    let fs = &server.fs;
    fs.set_attributes(id, wanted, None, caller)
}

fn check_set(caller: &Caller, bits: u16, wanted: &SetAttributes, expected: Result<(), Errno>) {
    let mut server = Server::new();
    let id = server.file("file", bits);
    let before = server.fs.attr_of(id).unwrap();
    let reply = set(&mut server, id, wanted, caller);
    let found = reply.result.clone().map_err(|error| error.errno());
    assert_eq!(found, expected, "{caller:?} {bits:o} {wanted:?}");
    let after = server.fs.attr_of(id).unwrap();
    assert_eq!(reply.wcc.after.as_ref(), Some(&after));
    match expected {
        Ok(()) => assert_eq!(reply.wcc.before, Some(compared(&before))),
        Err(_) => assert_eq!((reply.wcc.before, after), (None, before)),
    }
}

#[test]
fn changes_of_attributes_follow_rules() {
    let other = user(50, 60);
    let member = Caller::new(OWNER.uid, 1, &[61]).unwrap();
    let root = user(0, 0);
    let uid = |uid| SetAttributes {
        uid: Some(uid),
        ..NOTHING
    };
    let gid = |gid| SetAttributes {
        gid: Some(gid),
        ..NOTHING
    };
    let time = |time| SetAttributes {
        mtime: Some(time),
        ..NOTHING
    };
    let at = SetTime::At(Time { sec: 1, nsec: 2 });
    check_set(&owner(), 0o000, &mode(0o600), Ok(()));
    check_set(&root, 0o000, &mode(0o600), Ok(()));
    check_set(&other, 0o777, &mode(0o600), Err(Errno::PERM));
    check_set(&owner(), 0o600, &uid(50), Err(Errno::PERM));
    check_set(&owner(), 0o600, &uid(OWNER.uid), Ok(()));
    check_set(&root, 0o600, &uid(50), Ok(()));
    check_set(&member, 0o600, &gid(61), Ok(()));
    check_set(&member, 0o600, &gid(62), Err(Errno::PERM));
    check_set(&other, 0o777, &gid(60), Err(Errno::PERM));
    check_set(&owner(), 0o000, &time(at), Ok(()));
    check_set(&other, 0o777, &time(at), Err(Errno::PERM));
    check_set(&other, 0o602, &time(SetTime::Now), Ok(()));
    check_set(&other, 0o604, &time(SetTime::Now), Err(Errno::ACCESS));
    check_set(&owner(), 0o000, &size(10), Ok(()));
    check_set(&other, 0o602, &size(10), Ok(()));
    check_set(&other, 0o604, &size(10), Err(Errno::ACCESS));
    check_set(&owner(), 0o600, &size(1 << 45), Err(Errno::FBIG));
    let both = SetAttributes {
        size: Some(0),
        ..mode(0o600)
    };
    check_set(&other, 0o777, &both, Err(Errno::PERM));
    check_set(&owner(), 0o600, &NOTHING, Ok(()));
}

#[test]
fn setgid_needs_membership() {
    let mut server = Server::new();
    let id = server.file("file", 0o755);
    let other = user(OWNER.uid, 99);
    set(&mut server, id, &mode(0o6755), &other).result.unwrap();
    assert_eq!(server.fs.attr_of(id).unwrap().mode, 0o4755);
    set(&mut server, id, &mode(0o6755), &owner())
        .result
        .unwrap();
    assert_eq!(server.fs.attr_of(id).unwrap().mode, 0o6755);
    set(&mut server, id, &size(5), &user(0, 0)).result.unwrap();
    assert_eq!(server.fs.attr_of(id).unwrap().mode, 0o6755);
    set(&mut server, id, &size(6), &owner()).result.unwrap();
    assert_eq!(server.fs.attr_of(id).unwrap().mode, 0o755);
}

#[test]
fn guard_refuses_change_after_other_change() {
    let mut server = Server::new();
    let id = server.file("file", 0o600);
    let old = server.fs.attr_of(id).unwrap().ctime;
    set(&mut server, id, &mode(0o640), &owner()).result.unwrap();
    let now = server.fs.attr_of(id).unwrap();
    for wanted in [mode(0o777), size(9)] {
        let fs = &server.fs;
        let reply = fs.set_attributes(id, &wanted, Some(old), &owner());
        assert_eq!(errno(&reply), Errno::AGAIN);
        assert_eq!(reply.wcc.after.as_ref(), Some(&now));
    }
    for wanted in [mode(0o777), size(9)] {
        let guard = Some(server.fs.attr_of(id).unwrap().ctime);
        let fs = &server.fs;
        let reply = fs.set_attributes(id, &wanted, guard, &owner());
        reply.result.unwrap();
    }
}

/// After a crash a new size and the other attributes are there, or neither.
#[test]
fn size_and_mode_change_in_one_transaction() {
    for new in [0, 4100, 400_000] {
        let mut server = Server::new();
        let id = server.file("file", 0o600);
        let pin = server.pin(id);
        server.write(&pin, 0, vec![1; 200_000]).result.unwrap();
        let begin = server.memory.steps();
        let at = SetTime::At(Time { sec: 3, nsec: 4 });
        let wanted = SetAttributes {
            size: Some(new),
            mtime: Some(at),
            ..mode(0o640)
        };
        let reply = set(&mut server, id, &wanted, &owner());
        let (_, after) = around(&reply.wcc);
        assert_eq!(after, server.fs.attr_of(id).unwrap());
        let mut seen = vec![];
        for step in begin..=server.memory.steps() {
            let (fs, _) = mount_and_free(&server.memory.after_steps(step));
            let attr = fs.attr_of(id).unwrap();
            seen.push((attr.size, attr.mode, attr.mtime == Time { sec: 3, nsec: 4 }));
        }
        let (old, new) = ((200_000, 0o600, false), (new, 0o640, true));
        assert!(
            seen.iter().all(|found| *found == old || *found == new),
            "{seen:?}"
        );
        assert_eq!((seen[0], seen[seen.len() - 1]), (old, new));
    }
}

/// A clock within one tick.
fn stopped_clock() -> Time {
    Time {
        sec: 2_000_000,
        nsec: 4_000_000,
    }
}

/// A client that compares attributes sees each change, although the clock stands still.
#[test]
fn changes_in_one_tick_have_different_attributes() {
    let memory = MemorySpace::new(SIZE);
    drop(new_fs(&memory));
    let fs = Arc::new(Fs::mount(memory.shared(), wait, stopped_clock).unwrap());
    let root = fs.attr(Ino::ROOT).unwrap().file_id();
    let mut times = vec![];
    for name in [b"one".as_slice(), b"two", b"three"] {
        let made = fs.make_directory_at(root, name, &NOTHING, &owner());
        let (before, after) = around(&made.wcc);
        assert!(before.mtime < after.mtime && before.ctime < after.ctime);
        times.push(after.mtime);
    }
    assert!(times.is_sorted_by(|one, next| one < next), "{times:?}");
    let file = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
    let id = file.unwrap().file_id();
    let pin = fs.pin(id).unwrap();
    let data = Bytes::from(vec![1; 5000]);
    let mut last = fs.attr_of(id).unwrap();
    for offset in [0, 0, 100, 0] {
        let reply = fs.write_at(&pin, offset, &data, false, &owner());
        let (before, after) = around(&reply.wcc);
        assert_eq!(before, compared(&last));
        assert!(after.mtime > last.mtime && after.ctime > last.ctime);
        last = after;
    }
    for wanted in [size(10), mode(0o640)] {
        let reply = fs.set_attributes(id, &wanted, None, &owner());
        let (before, after) = around(&reply.wcc);
        assert!(after.ctime > before.ctime);
    }
}
