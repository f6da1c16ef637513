//! Names by file ids, as a stateless server looks them up and changes them.

use crate::support;
use pagemesh_fs::{AccessMask, Attr, AttrChanges, Caller, CreateKind, FileId, Ino};
use rustix::io::Errno;
use std::collections::BTreeMap;
use support::OWNER;
use support::server::{Server, errno, owner, user};

const ALL: AccessMask = AccessMask(0x3f);

/// Gives an inode another mode.
fn chmod(server: &Server, id: FileId, mode: u16) {
    let changes = AttrChanges {
        mode: Some(mode),
        ..AttrChanges::default()
    };
    server.fs.set_attr(id.ino, changes).unwrap();
}

#[test]
fn lookup_gives_both_attributes_and_counts_nothing() {
    let server = Server::new();
    let id = server.file("file", 0o600);
    let root = server.root();
    let reply = server.fs.lookup_at(root, b"file", &owner());
    let found = reply.result.unwrap();
    assert_eq!(found, server.fs.attr_of(id).unwrap());
    assert_eq!(found.file_id(), id);
    assert_eq!(reply.wcc.after, server.fs.attr_of(root).ok());
    for name in [b".".as_slice(), b".."] {
        let reply = server.fs.lookup_at(root, name, &owner());
        assert_eq!(reply.result.unwrap().file_id(), root);
    }
    // A counted inode would live on without its name.
    server.fs.unlink(Ino::ROOT, b"file").unwrap();
    assert_eq!(server.fs.attr(id.ino).unwrap_err().errno(), Errno::STALE);
}

#[test]
fn failed_lookup_gives_attributes_of_directory() {
    let server = Server::new();
    let file = server.file("file", 0o600);
    let root = server.root();
    let check = |directory: FileId, name: &[u8], caller: &Caller, expected: Errno| {
        let reply = server.fs.lookup_at(directory, name, caller);
        assert_eq!(errno(&reply), expected, "{name:?}");
        assert_eq!(reply.wcc.after, server.fs.attr_of(directory).ok());
    };
    check(root, b"none", &owner(), Errno::NOENT);
    check(root, b"", &owner(), Errno::NOENT);
    check(root, &[b'a'; 256], &owner(), Errno::NAMETOOLONG);
    check(file, b"name", &owner(), Errno::NOTDIR);
    let stale = FileId {
        generation: file.generation + 1,
        ..file
    };
    check(stale, b"name", &owner(), Errno::STALE);
    chmod(&server, root, 0o744);
    check(root, b"file", &user(50, 60), Errno::ACCESS);
    assert!(
        server
            .fs
            .lookup_at(root, b"file", &user(0, 0))
            .result
            .is_ok()
    );
}

/// All entries from a cookie on, page by page.
fn list(server: &Server, caller: &Caller) -> BTreeMap<Vec<u8>, Option<Attr>> {
    let mut all = BTreeMap::new();
    let mut after = 0;
    loop {
        let reply = server
            .fs
            .list_with_attributes(server.root(), after, caller, |entry, attr| {
                after = entry.cookie;
                let is_new = all.insert(entry.name.clone(), attr.cloned());
                assert!(is_new.is_none(), "{:?} is listed twice", entry.name);
                assert!(attr.is_none_or(|attr| attr.ino == entry.ino));
                true
            });
        if reply.result.unwrap() {
            return all;
        }
    }
}

#[test]
fn listing_has_attributes_of_each_entry() {
    for count in [0, 61, 62, 63, 254, 255, 600] {
        let server = Server::new();
        let ids: Vec<FileId> = (0..count)
            .map(|number| server.file(&format!("file {number}"), 0o600))
            .collect();
        let all = list(&server, &owner());
        assert_eq!(all.len(), count + 2);
        for (number, id) in ids.iter().enumerate() {
            let attr = all[format!("file {number}").as_bytes()].as_ref();
            assert_eq!(attr, server.fs.attr_of(*id).ok().as_ref());
        }
        assert_eq!(all[b"..".as_slice()].as_ref().unwrap().ino, Ino::ROOT);
    }
}

#[test]
fn listing_ends_where_visitor_ends() {
    let server = Server::new();
    for number in 0..100 {
        server.file(&number.to_string(), 0o600);
    }
    let mut seen = 0;
    let reply = server
        .fs
        .list_with_attributes(server.root(), 0, &owner(), |_, _| {
            seen += 1;
            seen < 80
        });
    assert_eq!((reply.result.unwrap(), seen), (false, 80));
    for cookie in [1 << 63, u64::MAX] {
        let reply = server
            .fs
            .list_with_attributes(server.root(), cookie, &owner(), |_, _| {
                panic!("no entry is so far behind")
            });
        assert!(reply.result.unwrap());
    }
}

#[test]
fn listing_needs_rights_to_directory() {
    let server = Server::new();
    server.file("file", 0o600);
    let root = server.root();
    chmod(&server, root, 0o754);
    let all = list(&server, &user(50, 60));
    assert!(all.len() == 3 && all.values().all(Option::is_none));
    assert!(
        list(&server, &user(50, OWNER.gid))
            .values()
            .all(Option::is_some)
    );
    chmod(&server, root, 0o711);
    let reply = server
        .fs
        .list_with_attributes(root, 0, &user(50, 60), |_, _| true);
    assert_eq!(errno(&reply), Errno::ACCESS);
    assert_eq!(reply.wcc.after, server.fs.attr_of(root).ok());
    let file = server.fs.lookup_at(root, b"file", &owner()).result.unwrap();
    let reply = server
        .fs
        .list_with_attributes(file.file_id(), 0, &owner(), |_, _| true);
    assert_eq!(errno(&reply), Errno::NOTDIR);
}

fn check_mask(server: &Server, id: FileId, caller: &Caller, expected: u32) {
    let (granted, attr) = server.fs.access_mask(id, caller, ALL).unwrap();
    assert_eq!(granted.0, expected, "{:o} {caller:?}", attr.mode);
    let (one, _) = server.fs.access_mask(id, caller, AccessMask::READ).unwrap();
    assert_eq!(one.0, expected & 1);
}

#[test]
fn access_mask_follows_mode() {
    let server = Server::new();
    let file = server.file("file", 0o751);
    check_mask(&server, file, &owner(), 0x2d);
    check_mask(&server, file, &user(50, OWNER.gid), 0x21);
    check_mask(&server, file, &user(50, 60), 0x20);
    check_mask(&server, file, &user(0, 0), 0x2d);
    chmod(&server, file, 0o600);
    check_mask(&server, file, &user(0, 0), 0x0d);
    let made = server
        .fs
        .create(Ino::ROOT, b"dir", CreateKind::Directory, 0o753, OWNER);
    let directory = made.unwrap().file_id();
    check_mask(&server, directory, &owner(), 0x1f);
    check_mask(&server, directory, &user(50, OWNER.gid), 0x03);
    check_mask(&server, directory, &user(50, 60), 0x1e);
    chmod(&server, directory, 0o000);
    check_mask(&server, directory, &owner(), 0);
    check_mask(&server, directory, &user(0, 0), 0x1f);
}
