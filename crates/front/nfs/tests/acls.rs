//! The ACL protocol beside NFSv3, and permissions by ACLs.

use crate::support;
use pagemesh_nfs::acl3::{PROGRAM, mask};
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{AccessArguments, access};
use pagemesh_nfs::nfs3::status::Status;
use pagemesh_nfs::{ExportOptions, Squash};
use support::client::Encoder;
use support::decoder::Decoder;
use support::session::{Session, check};
use support::world::{OWNER, ServedWorld};

const NAMED_UID: u32 = 50;

/// The entries of an ACL: tag, id, rights.
type Entries = Vec<[u32; 3]>;

/// A list of the owner's file that gives the named user these rights.
fn list(rights: u32) -> Entries {
    vec![
        [1, OWNER.uid, 6],
        [2, NAMED_UID, rights],
        [4, OWNER.gid, 0],
        [16, 0, 7],
        [32, 0, 0],
    ]
}

/// The entries in a default ACL.
fn as_default(entries: &[[u32; 3]]) -> Entries {
    let mark = |[tag, id, rights]: &[u32; 3]| [tag | 0x1000, *id, *rights];
    entries.iter().map(mark).collect()
}

/// The result of a call of the ACL protocol.
fn call(session: &mut Session, number: u32, rest: &[u8]) -> Vec<u8> {
    let reply = session.exchange((PROGRAM, 3), number, rest).unwrap();
    let mut client = Decoder(&reply);
    let header: [u32; 4] = std::array::from_fn(|_| client.word());
    assert_eq!(header, [0; 4], "not executed");
    client.0.to_vec()
}

fn received(client: &mut Decoder<'_>) -> (u32, Entries) {
    let count = client.word();
    let entries = (0..client.word()).map(|_| std::array::from_fn(|_| client.word()));
    (count, entries.collect())
}

type Acls = (u32, (u32, Entries), (u32, Entries));

fn get(session: &mut Session, file: &[u8], wanted: u32) -> Result<Acls, Status> {
    let mut rest = Encoder::default();
    rest.opaque(file).word(wanted);
    let result = call(session, 1, &rest.0);
    let mut client = Decoder(&result);
    check(&mut client)?;
    client.attributes().unwrap();
    let acls = (client.word(), received(&mut client), received(&mut client));
    client.end();
    Ok(acls)
}

/// Sets ACLs; returns the new mode.
fn set(
    session: &mut Session,
    file: &[u8],
    parts: u32,
    acls: [&[[u32; 3]]; 2],
) -> Result<u32, Status> {
    let mut rest = Encoder::default();
    rest.opaque(file).word(parts);
    for entries in acls {
        let len = entries.len() as u32;
        rest.word(len).word(len);
        for word in entries.iter().flatten() {
            rest.word(*word);
        }
    }
    let result = call(session, 2, &rest.0);
    let mut client = Decoder(&result);
    check(&mut client)?;
    let attributes = client.attributes().unwrap();
    client.end();
    Ok(attributes.mode)
}

fn make(session: &mut Session, name: &str, bits: u32) -> Vec<u8> {
    let root = session.root();
    session.create(&root, name, bits).unwrap().handle
}

fn granted(session: &mut Session, file: &[u8]) -> u32 {
    let file = HandleBytes(file);
    let wanted = access::READ | access::MODIFY;
    let result = session.call(&Nfs3Call::Access(AccessArguments { file, wanted }));
    let mut client = Decoder(&result);
    check(&mut client).unwrap();
    client.attributes().unwrap();
    client.word()
}

#[test]
fn file_without_list_has_rights_of_mode() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let file = make(&mut session, "file", 0o640);
    let entries = vec![[1, OWNER.uid, 6], [4, OWNER.gid, 4], [16, 0, 4], [32, 0, 0]];
    let wanted = mask::ACCESS | mask::ACCESS_COUNT | mask::DEFAULT | mask::DEFAULT_COUNT;
    let found = get(&mut session, &file, wanted).unwrap();
    assert_eq!(found, (wanted, (4, entries.clone()), (0, vec![])));
    let counted = get(&mut session, &file, mask::ACCESS_COUNT).unwrap();
    assert_eq!(counted, (mask::ACCESS_COUNT, (4, vec![]), (0, vec![])));
    // A client may set a list that it has got.
    let mode = set(&mut session, &file, mask::ACCESS, [&entries, &[]]);
    assert_eq!(mode, Ok(0o640));
    assert_eq!(get(&mut session, &file, 16), Err(Status::Invalid));
    assert_eq!(call(&mut session, 0, &[]), b"");
}

#[test]
fn set_list_gives_rights_until_removed() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let mut named = Session::of(&world, Some((NAMED_UID, 99, vec![])));
    let file = make(&mut session, "file", 0o600);
    assert_eq!(granted(&mut named, &file), 0);
    let refused = set(&mut named, &file, mask::ACCESS, [&list(6), &[]]);
    assert_eq!(refused, Err(Status::Permission));
    let mode = set(&mut session, &file, mask::ACCESS, [&list(6), &[]]);
    assert_eq!(mode, Ok(0o670));
    assert_eq!(granted(&mut named, &file), access::READ | access::MODIFY);
    let found = get(&mut named, &file, mask::ACCESS).unwrap();
    assert_eq!(found.1, (5, list(6)));
    set(&mut session, &file, mask::ACCESS, [&list(4), &[]]).unwrap();
    assert_eq!(granted(&mut named, &file), access::READ);
    let default = as_default(&list(4));
    let refused = set(&mut session, &file, mask::DEFAULT, [&[], &default]);
    assert_eq!(refused, Err(Status::Access));
    let odd = [[1, 0, 6], [2, NAMED_UID, 6]];
    let refused = set(&mut session, &file, mask::ACCESS, [&odd, &[]]);
    assert_eq!(refused, Err(Status::Invalid));
    set(&mut session, &file, mask::ACCESS, [&[], &[]]).unwrap();
    assert_eq!(granted(&mut named, &file), 0);
}

#[test]
fn new_files_inherit_default_list() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let default = as_default(&list(4));
    let parts = mask::DEFAULT;
    set(&mut session, &root, parts, [&[], &default]).unwrap();
    let found = get(&mut session, &root, parts).unwrap();
    assert_eq!(found, (parts, (0, vec![]), (5, default)));
    let file = make(&mut session, "file", 0o640);
    let mut named = Session::of(&world, Some((NAMED_UID, 99, vec![])));
    assert_eq!(granted(&mut named, &file), access::READ);
    let private = make(&mut session, "private", 0o600);
    assert_eq!(granted(&mut named, &private), 0);
}

#[test]
fn read_only_and_squashed_clients_set_no_list() {
    let world = ServedWorld::with_options(ExportOptions {
        is_read_only: true,
        ..ExportOptions::default()
    });
    let mut session = Session::new(&world);
    let root = session.root();
    let refused = set(&mut session, &root, mask::ACCESS, [&list(6), &[]]);
    assert_eq!(refused, Err(Status::ReadOnly));
    get(&mut session, &root, mask::ACCESS).unwrap();

    let world = ServedWorld::with_options(ExportOptions {
        squash: Squash::Root,
        ..ExportOptions::default()
    });
    let mut session = Session::of(&world, Some((0, 0, vec![])));
    let root = session.root();
    let refused = set(&mut session, &root, mask::ACCESS, [&list(6), &[]]);
    assert_eq!(refused, Err(Status::Permission));
}

#[test]
fn malformed_acl_calls_are_refused() {
    const GARBAGE: u32 = 4;
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    for counts in [[5, 4], [4, 5], [u32::MAX, u32::MAX], [1025, 1025]] {
        let mut rest = Encoder::default();
        rest.opaque(&root).word(mask::ACCESS);
        rest.word(counts[0]).word(counts[1]).word(1);
        let reply = session.exchange((PROGRAM, 3), 2, &rest.0).unwrap();
        assert_eq!(reply[12..16], GARBAGE.to_be_bytes(), "{counts:?}");
    }
    let other_version = session.exchange((PROGRAM, 2), 0, &[]).unwrap();
    assert_eq!(other_version[12..16], 2u32.to_be_bytes());
}
