//! Files and directories over NFS.

use crate::support;
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{
    Attributes, ChangeAttributes, DeviceNumber, EarlierAttributes, FileType, SetAttributes,
};
use pagemesh_nfs::nfs3::files::{CommitArguments, Durability, ReadArguments};
use pagemesh_nfs::nfs3::listing::CookieVerifier;
use pagemesh_nfs::nfs3::names::{CreateMode, LinkArguments, SymlinkArguments, SymlinkTarget};
use pagemesh_nfs::nfs3::status::Status;
use pagemesh_nfs::{ExportOptions, Squash};
use std::collections::BTreeSet;
use std::io::Write;
use support::decoder::Decoder;
use support::session::{Session, at, check, mode};
use support::world::{ATTACHMENT, FREE_BYTES, OWNER, ServedWorld};

/// The earlier attributes of a change equal these, and the later ones are those of GETATTR.
#[track_caller]
fn assert_around(
    session: &mut Session,
    file: &[u8],
    before: &Attributes,
    change: &ChangeAttributes,
) {
    assert_eq!(change.before, Some(EarlierAttributes::from(before)));
    assert_eq!(change.after, Some(session.attributes(file).expect("there")));
    assert_ne!(change.after.map(|it| it.changed), Some(before.changed));
}

/// The verifier of a COMMIT.
fn commit(session: &mut Session, file: &[u8]) -> Result<u64, Status> {
    let result = session.call(&Nfs3Call::Commit(CommitArguments {
        file: HandleBytes(file),
        offset: 0,
        count: 0,
    }));
    let mut client = Decoder(&result);
    check(&mut client)?;
    client.change();
    let verifier = client.long();
    client.end();
    Ok(verifier)
}

#[test]
fn tree_is_written_and_read_back() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let directory = session.make_directory(&root, "d", 0o755).expect("made");
    assert_eq!(directory.attributes.kind, FileType::Directory);
    let made = session.create(&directory.handle, "f", 0o640).expect("made");
    assert_eq!(
        (made.attributes.mode, made.attributes.uid),
        (0o640, OWNER.uid)
    );
    let data: Vec<u8> = (0..(1 << 20) + 5000u32)
        .map(|it| (it % 251) as u8)
        .collect();
    let (first, second) = data.split_at(1 << 20);
    let written = session.write(&made.handle, 0, first).expect("written");
    assert_eq!(written.count, 1 << 20);
    session
        .write(&made.handle, 1 << 20, second)
        .expect("written");
    commit(&mut session, &made.handle).expect("committed");

    let mut other = Session::new(&world);
    let directory = other.lookup(&root, "d").expect("found").handle;
    let found = other.lookup(&directory, "f").expect("found");
    assert_eq!(found.handle, made.handle);
    assert_eq!(found.attributes.size_bytes, data.len() as u64);
    assert_eq!(other.attributes(&found.handle), Ok(found.attributes));
    let first = other.read(&found.handle, 0, u32::MAX).expect("read");
    assert_eq!(first, (data[..1 << 20].to_vec(), false));
    let last = other.read(&found.handle, 1 << 20, 1 << 20).expect("read");
    assert_eq!(last, (data[1 << 20..].to_vec(), true));
    let beyond = other.read(&found.handle, 1 << 40, 10).expect("read");
    assert_eq!(beyond, (Vec::new(), true));
    assert_eq!(other.read(&found.handle, 5, 0).expect("read").0, []);
    let nothing = other.write(&found.handle, 1 << 30, &[]).expect("written");
    assert_eq!(nothing.count, 0);
    let size = other.attributes(&found.handle).expect("there").size_bytes;
    assert_eq!(size, data.len() as u64);
    assert_eq!(other.read(&directory, 0, 10), Err(Status::IsDirectory));
    assert_eq!(other.lookup(&root, "none").unwrap_err(), Status::NoEntry);
    let long = "x".repeat(256);
    assert_eq!(other.lookup(&root, &long).unwrap_err(), Status::NameTooLong);
}

/// Lists all of a directory in parts.
#[track_caller]
fn list_all(session: &mut Session, directory: &[u8], bytes: u32, is_plus: bool) -> Vec<String> {
    let mut names = Vec::new();
    let mut from = (0, CookieVerifier::default());
    let mut parts = 0;
    loop {
        let part = session
            .list(directory, from, bytes, is_plus)
            .expect("listed");
        parts += 1;
        for entry in &part.entries {
            let attributes = entry.attributes;
            assert_eq!(attributes.is_some(), is_plus, "{entry:?}");
            if let Some(handle) = &entry.handle {
                assert_eq!(session.attributes(handle).ok(), attributes);
                assert_eq!(attributes.map(|it| it.inode), Some(entry.inode));
            }
            names.push(entry.name.clone());
        }
        let Some(last) = part.entries.last() else {
            panic!("a part without entries");
        };
        from = (last.cookie, part.verifier);
        if part.is_end {
            assert!(parts > 1, "nothing limits a part");
            return names;
        }
    }
}

#[test]
fn directory_is_listed_in_small_parts() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let mut wanted = BTreeSet::from([".".to_owned(), "..".to_owned()]);
    for number in 0..400 {
        let name = format!("file-{number}");
        session.create(&root, &name, 0o644).expect("made");
        wanted.insert(name);
    }
    // The last one has more room; the file system ends it after 256 entries with attributes.
    let budgets = [
        (512, false),
        (4096, false),
        (700, true),
        (8192, true),
        (1 << 16, true),
    ];
    for (bytes, is_plus) in budgets {
        let names = list_all(&mut session, &root, bytes, is_plus);
        assert_eq!(names.len(), wanted.len(), "a name is there twice");
        assert_eq!(BTreeSet::from_iter(names), wanted, "{bytes}");
    }
    let none = (0, CookieVerifier::default());
    let small = session.list(&root, none, 110, false);
    assert_eq!(small.unwrap_err(), Status::TooSmall);
    let unknown = session.list(&root, (7, CookieVerifier([9; 8])), 4096, false);
    assert_eq!(unknown.unwrap_err(), Status::BadCookie);
    let end = session
        .list(&root, (u64::MAX, none.1), 4096, true)
        .expect("listed");
    assert!(end.entries.is_empty() && end.is_end);
}

#[test]
fn cookie_survives_the_removal_of_its_entry() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    for number in 0..30 {
        session
            .create(&root, &format!("{number}"), 0o644)
            .expect("made");
    }
    let start = (0, CookieVerifier::default());
    let all = session.list(&root, start, 4096, false).expect("listed");
    let tenth = &all.entries[10];
    session.remove(&root, &tenth.name).expect("removed");
    let from = (tenth.cookie, all.verifier);
    let rest = session.list(&root, from, 4096, false).expect("listed");
    assert_eq!(rest.entries, all.entries[11..]);
}

#[test]
fn parent_of_the_root_is_the_root() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    for name in [".", ".."] {
        let found = session.lookup(&root, name).expect("found");
        assert_eq!(found.handle, root);
    }
    let inode = session.attributes(&root).expect("there").inode;
    let start = (0, CookieVerifier::default());
    let listed = session.list(&root, start, 4096, true).expect("listed");
    let names: Vec<_> = listed
        .entries
        .iter()
        .map(|it| (it.name.as_str(), it.inode))
        .collect();
    assert_eq!(names, [(".", inode), ("..", inode)]);
    assert!(
        listed
            .entries
            .iter()
            .all(|it| it.handle.as_ref() == Some(&root))
    );
}

#[test]
fn attributes_around_changes_are_those_of_getattr() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let mut before = session.attributes(&root).expect("there");
    let file = session.create(&root, "f", 0o644).expect("made");
    assert_around(&mut session, &root, &before, &file.directory);

    before = session.attributes(&root).expect("there");
    let directory = session.make_directory(&root, "d", 0o755).expect("made");
    assert_around(&mut session, &root, &before, &directory.directory);

    let empty = session.attributes(&file.handle).expect("there");
    let written = session.write(&file.handle, 0, b"hello").expect("written");
    assert_around(&mut session, &file.handle, &empty, &written.change);
    let full = session.attributes(&file.handle).expect("there");
    let written = session.write(&file.handle, 0, b"HELLO").expect("written");
    assert_around(&mut session, &file.handle, &full, &written.change);

    let full = session.attributes(&file.handle).expect("there");
    let change = session.set_attributes(&file.handle, mode(0o600), None);
    assert_around(&mut session, &file.handle, &full, &change.expect("set"));

    before = session.attributes(&root).expect("there");
    let target = session.attributes(&directory.handle).expect("there");
    let (from, to) = session
        .rename((&root, "f"), (&directory.handle, "g"))
        .expect("renamed");
    assert_around(&mut session, &root, &before, &from);
    assert_around(&mut session, &directory.handle, &target, &to);

    before = session.attributes(&directory.handle).expect("there");
    let removed = session.remove(&directory.handle, "g").expect("removed");
    assert_around(&mut session, &directory.handle, &before, &removed);
    before = session.attributes(&root).expect("there");
    let call = Nfs3Call::RemoveDirectory(at(&root, "d"));
    let removed = session.change(&call).expect("removed");
    assert_around(&mut session, &root, &before, &removed);
}

#[test]
fn removed_file_is_stale_and_frees_its_pages() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "f", 0o644).expect("made").handle;
    let used = world.fs.usage();
    session.write(&file, 0, &[1; 1 << 16]).expect("written");
    assert_ne!(world.fs.usage(), used);
    let read = session.read(&file, 0, 1).expect("read");
    assert_eq!(read, (vec![1], false));
    session.remove(&root, "f").expect("removed");
    assert_eq!(session.attributes(&file), Err(Status::Stale));
    assert_eq!(session.read(&file, 0, 1), Err(Status::Stale));
    assert_eq!(session.write(&file, 0, &[1]).unwrap_err(), Status::Stale);
    assert_eq!(commit(&mut session, &file), Err(Status::Stale));
    let left = world.fs.usage();
    assert!(left.used_bytes <= used.used_bytes, "{left:?}, {used:?}");
    // The number is used again, with another handle.
    let again = session.create(&root, "f", 0o644).expect("made").handle;
    assert_ne!(again, file);
    assert_eq!(session.attributes(&file), Err(Status::Stale));
}

#[test]
fn replaced_file_is_stale_and_frees_its_pages() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let old = session.create(&root, "old", 0o644).expect("made").handle;
    let new = session.create(&root, "new", 0o644).expect("made").handle;
    let used = world.fs.usage();
    session.write(&old, 0, &[1; 1 << 16]).expect("written");
    session
        .rename((&root, "new"), (&root, "old"))
        .expect("renamed");
    assert_eq!(session.attributes(&old), Err(Status::Stale));
    assert_eq!(session.lookup(&root, "old").expect("found").handle, new);
    assert_eq!(session.lookup(&root, "new").unwrap_err(), Status::NoEntry);
    assert!(world.fs.usage().used_bytes <= used.used_bytes);
}

#[test]
fn creates_have_three_modes() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let verifier = [1; 8];
    let exclusive = CreateMode::Exclusive(&verifier);
    let first = session.create_as(&root, "e", exclusive).expect("made");
    let repeated = session.create_as(&root, "e", exclusive).expect("made");
    assert_eq!(first.handle, repeated.handle);
    let other = CreateMode::Exclusive(&[2; 8]);
    assert_eq!(
        session.create_as(&root, "e", other).unwrap_err(),
        Status::Exists
    );
    assert_eq!(
        session.create(&root, "e", 0o644).unwrap_err(),
        Status::Exists
    );

    session.write(&first.handle, 0, b"hello").expect("written");
    let keep = CreateMode::Unchecked(SetAttributes::default());
    let found = session.create_as(&root, "e", keep).expect("found");
    assert_eq!(
        (found.handle, found.attributes.size_bytes),
        (first.handle, 5)
    );
    let empty = SetAttributes {
        size_bytes: Some(0),
        ..SetAttributes::default()
    };
    let found = session.create_as(&root, "e", CreateMode::Unchecked(empty));
    assert_eq!(found.expect("found").attributes.size_bytes, 0);
}

#[test]
fn guard_refuses_a_change_of_other_attributes() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "f", 0o644).expect("made");
    let guard = Some(file.attributes.changed);
    let size = SetAttributes {
        size_bytes: Some(3),
        ..SetAttributes::default()
    };
    session
        .set_attributes(&file.handle, size, guard)
        .expect("set");
    let late = session.set_attributes(&file.handle, mode(0o600), guard);
    assert_eq!(late, Err(Status::NotSynchronized));
    let found = session.attributes(&file.handle).expect("there");
    assert_eq!((found.size_bytes, found.mode), (3, 0o644));
}

#[test]
fn links_are_made_and_read() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let link = session.make(&Nfs3Call::MakeSymlink(SymlinkArguments {
        at: at(&root, "link"),
        attributes: SetAttributes::default(),
        target: SymlinkTarget(b"../a b"),
    }));
    let link = link.expect("made");
    assert_eq!(link.attributes.kind, FileType::Symlink);
    let result = session.call(&Nfs3Call::ReadSymlink(HandleBytes(&link.handle)));
    let mut client = Decoder(&result);
    check(&mut client).expect("read");
    assert!(client.attributes().is_some());
    assert_eq!(client.opaque(), b"../a b");

    let file = session.create(&root, "f", 0o644).expect("made").handle;
    let before = session.attributes(&root).expect("there");
    let result = session.call(&Nfs3Call::Link(LinkArguments {
        file: HandleBytes(&file),
        at: at(&root, "g"),
    }));
    let mut client = Decoder(&result);
    check(&mut client).expect("linked");
    assert_eq!(client.attributes().map(|it| it.links), Some(2));
    let change = client.change();
    assert_around(&mut session, &root, &before, &change);
    assert_eq!(session.lookup(&root, "g").expect("found").handle, file);
}

#[test]
fn special_files_have_their_type_and_number() {
    use pagemesh_nfs::nfs3::names::{MakeNodeArguments, SpecialFile};
    let world = ServedWorld::with_options(ExportOptions {
        squash: Squash::None,
        ..ExportOptions::default()
    });
    let root = Session::new(&world).root();
    let make = |uid, name, file| {
        let mut session = Session::of(&world, Some((uid, OWNER.gid, vec![])));
        let at = at(&root, name);
        session.make(&Nfs3Call::MakeNode(MakeNodeArguments { at, file }))
    };
    let number = DeviceNumber {
        major: 0x123,
        minor: 0x4_5678,
    };
    let check = |uid, name, file, kind, number| {
        let made = make(uid, name, file).expect("made").attributes;
        assert_eq!((made.kind, made.device, made.mode), (kind, number, 0o640));
        let found = Session::new(&world).lookup(&root, name).expect("found");
        assert_eq!(found.attributes, made);
    };
    let none = DeviceNumber { major: 0, minor: 0 };
    let mode = mode(0o640);
    let owner = OWNER.uid;
    check(owner, "f", SpecialFile::Fifo(mode), FileType::Fifo, none);
    check(
        owner,
        "s",
        SpecialFile::Socket(mode),
        FileType::Socket,
        none,
    );
    let character = SpecialFile::CharacterDevice(mode, number);
    let block = SpecialFile::BlockDevice(mode, number);
    let refused = |uid, file| make(uid, "n", file).expect_err("refused");
    assert_eq!(refused(owner, character), Status::Permission);
    assert_eq!(refused(owner, block), Status::Permission);
    check(0, "c", character, FileType::CharacterDevice, number);
    check(0, "b", block, FileType::BlockDevice, number);
    let large = DeviceNumber {
        major: 0x1000,
        minor: 0,
    };
    let large = SpecialFile::CharacterDevice(mode, large);
    assert_eq!(refused(0, large), Status::Invalid);
    let unsuitable = SpecialFile::Unsuitable(FileType::Regular);
    assert_eq!(refused(0, unsuitable), Status::BadType);
    // Another request: an equal one would be a repetition.
    let exists = make(owner, "f", SpecialFile::Socket(mode));
    assert_eq!(exists.expect_err("refused"), Status::Exists);
}

#[test]
fn file_system_tells_its_properties() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let mut words = |call: &Nfs3Call<'_>| {
        let result = session.call(call);
        let mut client = Decoder(&result);
        check(&mut client).expect("told");
        assert!(client.attributes().is_some());
        let words: Vec<u32> = (0..client.0.len() / 4).map(|_| client.word()).collect();
        words
    };
    let usage = words(&Nfs3Call::SpaceUsage(HandleBytes(&root)));
    let long = |at: usize| u64::from(usage[at]) << 32 | u64::from(usage[at + 1]);
    let used = world.fs.usage();
    assert_eq!(
        (long(0), long(2)),
        (used.used_bytes + FREE_BYTES, FREE_BYTES)
    );
    assert_eq!(long(6), used.inodes + FREE_BYTES / 4096);
    let limits = words(&Nfs3Call::ServerLimits(HandleBytes(&root)));
    assert_eq!(limits[..4], [1 << 20, 1 << 20, 4096, 1 << 20]);
    let rules = words(&Nfs3Call::NameRules(HandleBytes(&root)));
    assert_eq!(rules, [65_000, 255, 1, 1, 0, 1]);
}

#[test]
fn exports_and_directories_are_mounted() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    assert_eq!(session.mount("data//"), Ok(root.clone()));
    let directory = session
        .make_directory(&root, "d", 0o755)
        .expect("made")
        .handle;
    session.create(&root, "f", 0o644).expect("made");
    assert_eq!(session.mount("/data/d"), Ok(directory));
    assert_eq!(session.mount("/data/d/../.."), Ok(root));
    assert_eq!(session.mount("/data/none"), Err(2));
    assert_eq!(session.mount("/data/f"), Err(20));
    for path in ["/", "", "/dat", "/other"] {
        assert_eq!(session.mount(path), Err(2), "{path}");
    }
    let listed = session.mount_call(5);
    let mut client = Decoder(&listed);
    assert_eq!((client.word(), client.opaque()), (1, &b"/data"[..]));
    assert_eq!((client.word(), client.word()), (0, 0));
    client.end();
    assert_ne!(session.mount_call(2), [0; 4]);
    assert!(session.mount_call(4).is_empty());
    assert_eq!(session.mount_call(2), [0; 4]);
}

#[test]
fn space_without_a_write_cache_writes_at_once() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "f", 0o644).expect("made").handle;
    let written = session.write(&file, 0, b"hello").expect("written");
    assert_eq!(written.durability, Durability::FileSync as u32);
}

#[test]
fn lost_write_changes_the_verifier() {
    let world = ServedWorld::with(ExportOptions::default(), Limits::default(), true);
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "f", 0o644).expect("made").handle;
    let first = u64::from(ATTACHMENT) << 32;
    let written = session.write(&file, 0, b"hello").expect("written");
    let unstable = Durability::Unstable as u32;
    assert_eq!((written.durability, written.verifier), (unstable, first));
    assert_eq!(commit(&mut session, &file), Ok(first));
    let written = session.write(&file, 0, b"HELLO").expect("written");
    assert_eq!(written.verifier, first);
    world.space.lose_writes();
    assert_eq!(commit(&mut session, &file), Ok(first + 1));
    let stable = session.write_as(&file, 0, b"HELLO", Durability::DataSync);
    let stable = stable.expect("written");
    let wanted = (Durability::FileSync as u32, first + 1);
    assert_eq!((stable.durability, stable.verifier), wanted);
}

/// Unstable data at the end of a file is in the memory of the server alone.
#[test]
fn full_pool_changes_the_verifier() {
    let world = ServedWorld::with(ExportOptions::default(), Limits::default(), true);
    // With a reserve the server answers before it stores the data.
    while world.fs.free_deferred_piece() {}
    let mut session = Session::new(&world);
    let root = session.root();
    let files = ["f", "g"].map(|name| session.create(&root, name, 0o644).expect("made").handle);
    let data = [vec![1; 9000], vec![2; 5000]];
    let write = |session: &mut Session, number: usize| {
        let written = session.write(&files[number], 0, &data[number]);
        written.map(|it| (it.durability, it.verifier))
    };
    let unstable = Durability::Unstable as u32;
    let first = u64::from(ATTACHMENT) << 32;
    for number in [0, 1] {
        assert_eq!(write(&mut session, number), Ok((unstable, first)));
    }
    world.space.memory.set_room(Some(0));
    for number in [0, 1] {
        // The first COMMIT loses the data of both files.
        assert_eq!(commit(&mut session, &files[number]), Ok(first + 1));
        let read = session.read(&files[number], 0, 10_000);
        assert_eq!(read, Ok((Vec::new(), true)));
        assert_eq!(write(&mut session, number), Err(Status::NoSpace));
    }
    world.space.memory.set_room(None);
    for number in [0, 1] {
        assert_eq!(write(&mut session, number), Ok((unstable, first + 1)));
    }
    for number in [0, 1] {
        assert_eq!(commit(&mut session, &files[number]), Ok(first + 1));
        let read = session.read(&files[number], 0, 10_000);
        assert_eq!(read, Ok((data[number].clone(), true)));
    }
}

/// The pin of the read keeps the pages until it has them.
#[test]
fn read_in_progress_survives_the_removal_of_its_file() {
    let world = ServedWorld::new();
    let mut reader = Session::new(&world);
    let root = reader.root();
    let file = reader.create(&root, "f", 0o644).expect("made").handle;
    let used = world.fs.usage().used_bytes;
    reader.write(&file, 0, &[7; 1 << 16]).expect("written");
    let read = reader.bytes_of(&Nfs3Call::Read(ReadArguments {
        file: HandleBytes(&file),
        offset: 0,
        count: 1 << 16,
    }));
    let mut other = Session::new(&world);
    let remove = other.bytes_of(&Nfs3Call::Remove(at(&root, "f")));
    world.space.memory.while_stalled(|wait_for_request| {
        reader.stream.write_all(&read).expect("sent");
        wait_for_request();
        other.stream.write_all(&remove).expect("sent");
        world.wait_until("the removal", |now| now.calls[12] == 1);
    });
    let reply = reader.receive().expect("a reply");
    assert_eq!(reply[reply.len() - (1 << 16)..], [7; 1 << 16]);
    let removed = other.receive().expect("a reply");
    assert_eq!(removed[24..28], [0; 4], "the status");
    assert!(world.fs.usage().used_bytes <= used);
    assert_eq!(reader.attributes(&file), Err(Status::Stale));
}
