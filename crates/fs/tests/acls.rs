//! Access control lists in the file system: stored with the mode, inherited, and enforced for callers that no kernel has
//! checked.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{
    AccessMask, Acl, AclEntry, AclKind, AclTag, AttrChanges, Caller, CreateKind, FileId, Fs, Ino,
    NewMode, SetXattrMode,
};
use rustix::io::Errno;
use support::OWNER;
use support::image::{FsImage, XATTRS, errno as errno_of};
use support::memory::wait;
use support::server::{NOTHING, Server, errno, mode, owner, user};
use support::{clock, mount_and_free};

/// The byte of an inode with the kinds of its extended attributes, from docs/formats.md.
const XATTR_KINDS: usize = 108;
const NAMED_UID: u32 = 50;
const NAMED_GID: u32 = 60;

fn entry(tag: AclTag, rights: u16) -> AclEntry {
    AclEntry { tag, rights }
}

/// A list that gives the named user and the named group these rights, with a mask.
fn list(bits: u16, of_user: u16, of_group: u16, mask: u16) -> Acl {
    Acl::new(vec![
        entry(AclTag::UserObj, bits >> 6 & 7),
        entry(AclTag::User(NAMED_UID), of_user),
        entry(AclTag::GroupObj, bits >> 3 & 7),
        entry(AclTag::Group(NAMED_GID), of_group),
        entry(AclTag::Mask, mask),
        entry(AclTag::Other, bits & 7),
    ])
    .unwrap()
}

fn set_access(fs: &Fs, ino: Ino, acl: &Acl) {
    let set = fs.set_xattr(
        ino,
        AclKind::Access.attribute(),
        &acl.encode(),
        SetXattrMode::Always,
    );
    set.unwrap();
}

fn set_default(fs: &Fs, ino: Ino, acl: &Acl) {
    fs.set_acl(ino, AclKind::Default, Some(acl), false).unwrap();
}

fn chmod(fs: &Fs, ino: Ino, bits: u16) {
    let changes = AttrChanges {
        mode: Some(bits),
        ..AttrChanges::default()
    };
    fs.set_attr(ino, changes).unwrap();
}

fn mode_of(fs: &Fs, ino: Ino) -> u16 {
    fs.attr(ino).unwrap().mode
}

#[test]
fn access_list_and_mode_change_each_other() {
    let server = Server::new();
    let (fs, ino) = (&server.fs, server.file("file", 0o4640).ino);
    assert_eq!(fs.acl(ino, AclKind::Access).unwrap(), None);
    set_access(fs, ino, &list(0o751, 6, 4, 5));
    assert_eq!(mode_of(fs, ino), 0o4751);
    let ctime = fs.attr(ino).unwrap().ctime;
    chmod(fs, ino, 0o624);
    let found = fs.acl(ino, AclKind::Access).unwrap();
    assert_eq!(found, Some(list(0o654, 6, 4, 2)));
    assert!(fs.attr(ino).unwrap().ctime > ctime);
    let names = fs.xattr_names(ino).unwrap();
    assert_eq!(names, [AclKind::Access.attribute()]);
    // A list that says no more than the mode becomes the mode.
    fs.set_acl(ino, AclKind::Access, Some(&Acl::of_mode(0o705)), false)
        .unwrap();
    assert_eq!(mode_of(fs, ino), 0o705);
    let gone = errno_of(fs.xattr(ino, AclKind::Access.attribute()));
    assert_eq!(gone, Some(Errno::NODATA));
    assert!(fs.xattr_names(ino).unwrap().is_empty());
    // Removal keeps the mode.
    set_access(fs, ino, &list(0o751, 6, 4, 5));
    fs.remove_xattr(ino, AclKind::Access.attribute()).unwrap();
    fs.remove_xattr(ino, AclKind::Access.attribute()).unwrap();
    assert_eq!(mode_of(fs, ino), 0o751);
}

#[test]
fn lists_stand_beside_other_attributes() {
    let server = Server::new();
    let (fs, ino) = (&server.fs, server.file("file", 0o640).ino);
    let set = |name: &[u8]| fs.set_xattr(ino, name, b"value", SetXattrMode::Always);
    set(b"user.a").unwrap();
    set_access(fs, ino, &list(0o751, 6, 4, 5));
    set(b"user.b").unwrap();
    chmod(fs, ino, 0o600);
    assert_eq!(fs.xattr_names(ino).unwrap().len(), 3);
    assert_eq!(fs.xattr(ino, b"user.a").unwrap(), b"value");
    assert_eq!(
        fs.acl(ino, AclKind::Access).unwrap(),
        Some(list(0o650, 6, 4, 0))
    );
}

#[test]
fn unusable_lists_are_refused() {
    let server = Server::new();
    let fs = &server.fs;
    let file = server.file("file", 0o640).ino;
    let link = fs.create(
        Ino::ROOT,
        b"link",
        CreateKind::Symlink(b"file"),
        0o777,
        OWNER,
    );
    let link = link.unwrap().ino;
    let acl = list(0o751, 6, 4, 5);
    let set = |ino, kind: AclKind, value: &[u8]| {
        errno_of(fs.set_xattr(ino, kind.attribute(), value, SetXattrMode::Always))
    };
    let value = acl.encode();
    assert_eq!(set(file, AclKind::Default, &value), Some(Errno::ACCESS));
    assert_eq!(set(link, AclKind::Access, &value), Some(Errno::OPNOTSUPP));
    assert_eq!(set(file, AclKind::Access, b""), Some(Errno::INVAL));
    assert_eq!(set(file, AclKind::Access, &value[..12]), Some(Errno::INVAL));
    assert_eq!(
        set(file, AclKind::Access, &[3, 0, 0, 0]),
        Some(Errno::OPNOTSUPP)
    );
    assert_eq!(mode_of(fs, file), 0o640);
    // No entries: no list.
    assert_eq!(set(file, AclKind::Access, &value[..4]), None);
    assert!(fs.xattr_names(file).unwrap().is_empty());
}

/// A new inode in a directory with a default list, and its access list.
#[track_caller]
fn check_created(make: CreateKind<'_>, bits: u16, mode: u16, access: Option<Acl>) {
    let server = Server::new();
    let fs = &server.fs;
    let default = list(0o775, 7, 5, 7);
    set_default(fs, Ino::ROOT, &default);
    let how = NewMode {
        mode: bits,
        umask: 0o077,
    };
    let made = fs.create(Ino::ROOT, b"new", make, how, OWNER).unwrap();
    assert_eq!(made.mode, mode, "{make:?}");
    let of_server = fs.attr(made.ino).unwrap();
    assert_eq!(of_server.mode, mode);
    assert_eq!(fs.acl(made.ino, AclKind::Access).unwrap(), access);
    let inherited = (make == CreateKind::Directory).then_some(default);
    assert_eq!(fs.acl(made.ino, AclKind::Default).unwrap(), inherited);
}

#[test]
fn new_inodes_inherit_default_list() {
    let pipe = CreateKind::Special(pagemesh_fs::InodeKind::Fifo, 0);
    let of_file = Some(list(0o674, 7, 5, 6));
    check_created(CreateKind::File, 0o666, 0o664, of_file.clone());
    check_created(pipe, 0o666, 0o664, of_file);
    let of_directory = Some(list(0o775, 7, 5, 7));
    check_created(CreateKind::Directory, 0o777, 0o775, of_directory);
    let private = Some(list(0o670, 7, 5, 0));
    check_created(CreateKind::File, 0o4600, 0o4600, private);
    check_created(CreateKind::Symlink(b"to"), 0o777, 0o777, None);
}

#[test]
fn umask_counts_without_default_list() {
    let server = Server::new();
    let fs = &server.fs;
    let how = NewMode {
        mode: 0o1777,
        umask: 0o027,
    };
    let make = CreateKind::Directory;
    let plain = fs.create(Ino::ROOT, b"plain", make, how, OWNER).unwrap();
    assert_eq!(plain.mode, 0o1750);
    assert_eq!(
        fs.create_unnamed(Ino::ROOT, how, OWNER).unwrap().mode,
        0o1750
    );
    // A default list that only has the rights of a mode is a list, too.
    set_default(fs, plain.ino, &Acl::of_mode(0o705));
    let made = fs.create_opened(plain.ino, b"file", how, OWNER).unwrap();
    assert_eq!(made.mode, 0o1705);
    assert!(fs.xattr_names(made.ino).unwrap().is_empty());
    let unnamed = fs.create_unnamed(plain.ino, how, OWNER).unwrap();
    assert_eq!(unnamed.mode, 0o1705);
}

fn rights(server: &Server, id: FileId, caller: &Caller) -> u32 {
    let all = AccessMask(0x3f);
    server.fs.access_mask(id, caller, all).unwrap().0.0
}

#[test]
fn callers_have_rights_of_their_entries() {
    let server = Server::new();
    let id = server.file("file", 0o600);
    let read = AccessMask::READ.0;
    let write = AccessMask::MODIFY.0 | AccessMask::EXTEND.0;
    let member = |groups: &[u32]| Caller::new(99, 98, groups).unwrap();
    let check = |acl: &Acl, caller: &Caller, expected| {
        set_access(&server.fs, id.ino, acl);
        assert_eq!(rights(&server, id, caller), expected, "{acl:?} {caller:?}");
    };
    let acl = list(0o600, 6, 4, 6);
    check(&acl, &user(NAMED_UID, 99), read | write);
    check(&acl, &member(&[NAMED_GID]), read);
    check(&acl, &user(99, NAMED_GID), read);
    check(&acl, &member(&[OWNER.gid]), 0);
    check(&acl, &member(&[OWNER.gid, NAMED_GID]), read);
    check(&acl, &member(&[]), 0);
    check(&acl, &owner(), read | write);
    check(&acl, &user(0, 0), read | write);
    check(&list(0o606, 6, 4, 4), &user(NAMED_UID, 99), read);
    check(&list(0o606, 0, 0, 7), &user(NAMED_UID, 99), 0);
    check(&list(0o606, 0, 0, 7), &member(&[NAMED_GID]), 0);
    check(&list(0o066, 6, 6, 6), &owner(), 0);
    // As in Linux, the rights of others count if the group class of the mode is empty.
    check(&list(0o604, 6, 6, 0), &user(NAMED_UID, 99), read);
}

/// Each call of a stateless server asks the list.
#[test]
fn stateless_calls_obey_the_list() {
    let mut server = Server::new();
    let made = server
        .fs
        .make_directory_at(server.root(), b"d", &mode(0o700), &owner());
    let directory = made.result.unwrap().file_id();
    let (named, foreign) = (user(NAMED_UID, 99), user(98, 97));
    let set = |server: &Server, id, acl: &Acl| {
        let change = [(AclKind::Access, Some(acl.clone()))];
        server.fs.set_acls(id, &change, &owner()).result.unwrap();
    };
    set(&server, directory, &list(0o700, 7, 0, 7));
    let make = |server: &mut Server, name: &[u8], caller: &Caller| {
        let fs = &server.fs;
        let how = pagemesh_fs::CreateMode::Guarded;
        fs.create_at(directory, name, how, &mode(0o600), caller)
    };
    assert_eq!(errno(&make(&mut server, b"a", &foreign)), Errno::ACCESS);
    let made = make(&mut server, b"a", &named).result.unwrap().attr;
    assert_eq!(made.uid, NAMED_UID);
    assert_eq!(
        errno(&server.fs.lookup_at(directory, b"a", &foreign)),
        Errno::ACCESS
    );
    server.fs.lookup_at(directory, b"a", &named).result.unwrap();
    let list_all = |server: &Server, caller: &Caller| {
        server
            .fs
            .list_with_attributes(directory, 0, caller, |_, _| true)
    };
    assert_eq!(errno(&list_all(&server, &foreign)), Errno::ACCESS);
    list_all(&server, &named).result.unwrap();
    let (old, new) = ((directory, b"a".as_slice()), (directory, b"b".as_slice()));
    let refused = server.fs.rename_at(old, new, &foreign).result;
    assert_eq!(errno_of(refused), Some(Errno::ACCESS));
    server.fs.rename_at(old, new, &named).result.unwrap();
    assert_eq!(
        errno(&server.fs.remove_at(directory, b"b", &foreign)),
        Errno::ACCESS
    );
    server.fs.remove_at(directory, b"b", &named).result.unwrap();

    let id = server.file("file", 0o600);
    set(&server, id, &list(0o600, 6, 4, 6));
    let pin = server.pin(id);
    for bytes in [vec![1; 5000], vec![2; 100], vec![3; 500_000]] {
        let refused = server.write_as(&foreign, &pin, 0, bytes.clone());
        assert_eq!(errno(&refused), Errno::ACCESS);
        server.write_as(&named, &pin, 0, bytes).result.unwrap();
    }
    let read = |server: &mut Server, caller: &Caller| server.fs.read_at(&pin, 0, 10, caller);
    assert_eq!(errno(&read(&mut server, &foreign)), Errno::ACCESS);
    assert_eq!(read(&mut server, &named).result.unwrap().bytes, [3; 10]);
}

#[test]
fn only_owner_changes_lists() {
    let server = Server::new();
    let id = server.file("file", 0o2770);
    let change = [(AclKind::Access, Some(list(0o770, 7, 7, 7)))];
    let set = |caller: &Caller| server.fs.set_acls(id, &change, caller);
    assert_eq!(errno(&set(&user(NAMED_UID, OWNER.gid))), Errno::PERM);
    let reply = set(&owner());
    assert_eq!(reply.wcc.after.unwrap().mode, 0o2770);
    // The owner outside the group loses set-group-id.
    let reply = set(&user(OWNER.uid, 99));
    assert_eq!(reply.wcc.after.unwrap().mode, 0o770);
    let (acls, attr) = server.fs.acls_of(id).unwrap();
    assert_eq!((acls.access, acls.default), (change[0].1.clone(), None));
    assert_eq!(attr.mode, 0o770);
    let stale = FileId {
        generation: id.generation + 1,
        ..id
    };
    assert_eq!(errno_of(server.fs.acls_of(stale)), Some(Errno::STALE));
}

/// SETATTR of a client changes the mask.
#[test]
fn stateless_chmod_changes_the_mask() {
    let server = Server::new();
    let id = server.file("file", 0o600);
    set_access(&server.fs, id.ino, &list(0o600, 6, 4, 6));
    let fs = &server.fs;
    let both = pagemesh_fs::SetAttributes {
        size: Some(5),
        ..mode(0o640)
    };
    for (wanted, mask) in [(mode(0o620), 2), (both, 4)] {
        let set = fs.set_attributes(id, &wanted, None, &owner());
        set.result.unwrap();
        let found = fs.acl(id.ino, AclKind::Access).unwrap();
        assert_eq!(found, Some(list(0o600, 6, 4, mask)));
    }
    let set = fs.set_attributes(id, &NOTHING, None, &owner());
    set.result.unwrap();
}

/// Writes a file with an ACL. The page of its attributes cannot be read.
fn check_writes(knows_kinds: bool) {
    let server = Server::new();
    let id = server.file("file", 0o640);
    set_access(&server.fs, id.ino, &list(0o640, 6, 4, 6));
    let image = FsImage {
        memory: server.memory.clone(),
        ..support::image::plain_image()
    };
    let page = image.field_word(id.ino, XATTRS) & !(0xff << 56);
    drop((server.fs, server.channel));
    if !knows_kinds {
        image.put(image.field(id.ino, XATTR_KINDS), [0; 4]);
    }

    let (fs, mut channel) = mount_and_free(&image.memory);
    image.memory.make_unreadable(page);
    fs.open(id.ino).unwrap();
    let data = Bytes::from(vec![1; 8192]);
    for offset in [0, 8192, 0, 4096] {
        let written = fs.write(&mut channel, id.ino, Some(offset), &data, false);
        assert_eq!(written.is_ok(), knows_kinds, "{written:?}");
    }
    let cut = fs.set_size(&mut channel, id.ino, 5);
    assert_eq!(cut.is_ok(), knows_kinds);
    assert!(fs.acl(id.ino, AclKind::Access).is_err());
}

#[test]
fn writes_do_not_read_the_list() {
    check_writes(true);
    check_writes(false);
}

/// An earlier release clears the kinds of attributes, and changes the mode without the list.
#[test]
fn change_by_earlier_release_is_understood() {
    let server = Server::new();
    let id = server.file("file", 0o600);
    set_access(&server.fs, id.ino, &list(0o600, 6, 4, 6));
    let image = FsImage {
        memory: server.memory.clone(),
        ..support::image::plain_image()
    };
    drop((server.fs, server.channel));
    image.put(image.field(id.ino, XATTR_KINDS), [0; 4]);
    image.put(image.field(id.ino, 0), (0o100_644u16).to_le_bytes());

    let (fs, mut channel) = mount_and_free(&image.memory);
    let found = fs.acl(id.ino, AclKind::Access).unwrap();
    assert_eq!(found, Some(list(0o604, 6, 4, 4)));
    let data = Bytes::from_static(b"x");
    fs.write(&mut channel, id.ino, Some(0), &data, false)
        .unwrap();
    chmod(&fs, id.ino, 0o660);
    let found = fs.acl(id.ino, AclKind::Access).unwrap();
    assert_eq!(found, Some(list(0o600, 6, 4, 6)));
}

/// A stored value that is no list gives no rights, and the owner can replace it.
#[test]
fn invalid_stored_list_gives_no_rights() {
    let server = Server::new();
    let id = server.file("file", 0o666);
    set_access(&server.fs, id.ino, &list(0o666, 6, 4, 6));
    let image = FsImage {
        memory: server.memory.clone(),
        ..support::image::plain_image()
    };
    let page = image.field_word(id.ino, XATTRS) & !(0xff << 56);
    drop((server.fs, server.channel));
    let at = 5 + AclKind::Access.attribute().len();
    image.put((page, at), [9]);

    let (fs, _) = mount_and_free(&image.memory);
    let asked = fs.access_mask(id, &user(NAMED_UID, 99), AccessMask::READ);
    assert_eq!(errno_of(asked), Some(Errno::IO));
    assert!(fs.damage().is_none());
    fs.access_mask(id, &owner(), AccessMask::READ).unwrap();
    chmod(&fs, id.ino, 0o600);
    set_access(&fs, id.ino, &list(0o666, 6, 4, 6));
    let asked = fs.access_mask(id, &user(NAMED_UID, 99), AccessMask::READ);
    assert_eq!(asked.unwrap().0, AccessMask::READ);
}

/// After a crash the list and the mode are both old or both new.
#[test]
fn list_and_mode_change_in_one_transaction() {
    let server = Server::new();
    let (fs, ino) = (&server.fs, server.file("file", 0o600).ino);
    let begin = server.memory.steps();
    set_access(fs, ino, &list(0o640, 6, 4, 6));
    chmod(fs, ino, 0o600);
    let states = [
        (0o600, None),
        (0o660, Some(list(0o640, 6, 4, 6))),
        (0o600, Some(list(0o640, 6, 4, 0))),
    ];
    let mut seen = vec![];
    for step in begin..=server.memory.steps() {
        let (fs, _) = mount_and_free(&server.memory.after_steps(step));
        let found = (mode_of(&fs, ino), fs.acl(ino, AclKind::Access).unwrap());
        assert!(states.contains(&found), "{found:?} after step {step}");
        seen.push(found);
    }
    seen.dedup();
    assert_eq!(seen, states);
}

#[test]
fn snapshot_has_lists_and_keeps_them() {
    let server = Server::new();
    let id = server.file("file", 0o600);
    set_access(&server.fs, id.ino, &list(0o640, 6, 4, 6));
    let image = server.memory.snapshot();
    let snapshot = Fs::mount_snapshot(image.shared(), wait, clock).unwrap();
    let (acls, _) = snapshot.acls_of(id).unwrap();
    assert_eq!(acls.access, Some(list(0o640, 6, 4, 6)));
    let change = [(AclKind::Access, None)];
    let refused = snapshot.set_acls(id, &change, &owner());
    assert_eq!(errno(&refused), Errno::ROFS);
    let asked = snapshot.access_mask(id, &user(NAMED_UID, 99), AccessMask::MODIFY);
    assert_eq!(asked.unwrap().0, AccessMask::MODIFY);
}
