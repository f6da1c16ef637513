//! The ACL attribute of NFSv4.1, and the names of owners.

use crate::support;
use pagemesh_fs::{AclTag, Acls, FileId, Ino};
use pagemesh_nfs::acl4::mask;
use support::client::Encoder;
use support::compounds::{Client4, make_directory, set_attributes};
use support::decoder::Decoder;
use support::session::Session;
use support::world::{OWNER, ServedWorld};

const PERMISSION: u32 = 1;
const ATTRIBUTE_NOT_SUPPORTED: u32 = 10_032;
const BAD_OWNER: u32 = 10_039;
const ACL: u32 = 12;
const ACL_SUPPORT: u32 = 13;
const MODE: u32 = 33;
const OWNER_NAME: u32 = 36;
const READ: u32 = mask::READ_DATA;
const WRITE: u32 = mask::WRITE_DATA | mask::APPEND_DATA;
const INHERIT_ONLY: u32 = 0xb;
const GROUP_FLAG: u32 = 0x40;

/// An entry: type, flags, mask and principal.
type Entry<'a> = (u32, u32, u32, &'a str);

fn acl(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut out = Encoder::default();
    out.word(entries.len() as u32);
    for (kind, flags, mask, principal) in entries {
        out.word(*kind).word(*flags).word(*mask);
        out.opaque(principal.as_bytes());
    }
    out.0
}

fn entries(values: &[u8]) -> Vec<(u32, u32, u32, String)> {
    let mut decoder = Decoder(values);
    let count = decoder.word();
    let entry = |_| {
        let (kind, flags, mask) = (decoder.word(), decoder.word(), decoder.word());
        let name = String::from_utf8(decoder.opaque().to_vec()).unwrap();
        (kind, flags, mask, name)
    };
    (0..count).map(entry).collect()
}

struct AclWorld {
    world: ServedWorld,
    client: Client4,
    root: Vec<u8>,
}

impl AclWorld {
    fn new() -> AclWorld {
        let world = ServedWorld::new();
        let mut client = Client4::new(Session::new(&world), "a");
        let root = client.walk(&["data"]).unwrap();
        AclWorld {
            world,
            client,
            root,
        }
    }

    /// Makes a file with these attributes; its handle.
    fn create(&mut self, name: &str, numbers: &[u32], values: &[u8]) -> Result<Vec<u8>, u32> {
        let create = Some((numbers, values));
        self.client.open(&self.root, name, (3, 0), create)?;
        self.client.lookup(&self.root, name)
    }

    /// The POSIX ACLs, and the mode.
    fn posix(&self, name: &str) -> (Acls, u16) {
        let owner = pagemesh_fs::Caller::trusted(OWNER.uid, OWNER.gid);
        let root: FileId = self.world.fs.attr(Ino::ROOT).unwrap().file_id();
        let found = self.world.fs.lookup_at(root, name.as_bytes(), &owner);
        let id = found.result.unwrap().file_id();
        let (acls, attr) = self.world.fs.acls_of(id).unwrap();
        (acls, attr.mode)
    }

    /// The rights of the entries of an access ACL.
    fn rights(&self, name: &str) -> Vec<(AclTag, u16)> {
        let acl = self.posix(name).0.access.unwrap();
        let entries = acl.entries().iter();
        entries.map(|it| (it.tag, it.rights)).collect()
    }
}

#[test]
fn file_without_an_acl_has_the_one_of_its_mode() {
    let mut world = AclWorld::new();
    let file = world.create("f", &[MODE], &[0, 0, 1, 0o240]).unwrap();
    let values = world.client.attributes(&file, &[ACL, ACL_SUPPORT]).unwrap();
    assert_eq!(values.numbers, [ACL, ACL_SUPPORT]);
    let listed = entries(&values.bytes);
    let wanted = [
        (0, 0, 0x16_0187, "OWNER@".to_owned()),
        (0, 0, 0x12_0081, "GROUP@".to_owned()),
        (0, 0, 0x12_0080, "EVERYONE@".to_owned()),
    ];
    assert_eq!(listed, wanted);
    assert_eq!(values.bytes[values.bytes.len() - 4..], [0, 0, 0, 3]);
    let listed = world.client.list(&world.root.clone(), &[ACL]).unwrap();
    assert_eq!(entries(&listed[0].values.bytes), wanted);
}

#[test]
fn acl_is_set_and_read_again() {
    let mut world = AclWorld::new();
    let file = world.create("f", &[MODE], &[0, 0, 1, 0o244]).unwrap();
    let wanted = acl(&[
        (0, 0, READ | WRITE, "OWNER@"),
        (0, 0, READ | WRITE, "2000"),
        (0, GROUP_FLAG, READ, "3000"),
        (0, 0, 0, "EVERYONE@"),
    ]);
    world
        .client
        .on(&file, set_attributes(&[ACL], &wanted))
        .unwrap();
    let rights = [
        (AclTag::UserObj, 6),
        (AclTag::User(2000), 6),
        (AclTag::GroupObj, 0),
        (AclTag::Group(3000), 4),
        (AclTag::Mask, 6),
        (AclTag::Other, 0),
    ];
    assert_eq!(world.rights("f"), rights);
    assert_eq!(world.posix("f").1 & 0o777, 0o660);
    let read = world.client.attributes(&file, &[ACL]).unwrap().bytes;
    world
        .client
        .on(&file, set_attributes(&[ACL], &read))
        .unwrap();
    assert_eq!(
        world.rights("f"),
        rights,
        "as nfs4_getfacl and nfs4_setfacl"
    );
    let again = world.client.attributes(&file, &[ACL]).unwrap().bytes;
    assert_eq!(again, read);
    // The mode comes first, and the ACL decides about it.
    let both = [acl(&[(0, 0, READ, "OWNER@")]), vec![0, 0, 1, 0o377]].concat();
    world
        .client
        .on(&file, set_attributes(&[ACL, MODE], &both))
        .unwrap();
    assert_eq!(world.posix("f").1, 0o400);
}

#[test]
fn acl_of_a_new_directory_is_inherited() {
    let mut world = AclWorld::new();
    let wanted = acl(&[
        (
            0,
            0,
            READ | WRITE | mask::EXECUTE | mask::DELETE_CHILD,
            "OWNER@",
        ),
        (0, INHERIT_ONLY, READ | WRITE | mask::DELETE_CHILD, "OWNER@"),
        (0, INHERIT_ONLY, READ, "2000"),
    ]);
    let root = world.root.clone();
    let make = make_directory("d", &[ACL], &wanted);
    world.client.on(&root, make).unwrap();
    let (acls, mode) = world.posix("d");
    assert_eq!(mode, 0o700);
    let default = acls.default.unwrap();
    let user = default.entries().iter();
    let mut user = user.filter(|it| it.tag == AclTag::User(2000));
    assert_eq!(user.next().unwrap().rights, 4);
    let d = world.client.lookup(&root, "d").unwrap();
    let listed = entries(&world.client.attributes(&d, &[ACL]).unwrap().bytes);
    let inherited = listed
        .iter()
        .filter(|it| it.1 & INHERIT_ONLY == INHERIT_ONLY);
    assert!(inherited.count() >= 4, "{listed:?}");
    // Without inherited entries, the directory loses its default ACL.
    let plain = acl(&[(0, 0, READ, "OWNER@")]);
    world.client.on(&d, set_attributes(&[ACL], &plain)).unwrap();
    assert_eq!(world.posix("d").0.default, None);
}

#[test]
fn acl_of_a_new_file_is_set_with_it() {
    let mut world = AclWorld::new();
    let wanted = acl(&[(0, 0, READ | WRITE, "OWNER@"), (0, 0, READ, "2000")]);
    world.create("f", &[ACL], &wanted).unwrap();
    let rights = world.rights("f");
    assert_eq!(rights[0], (AclTag::UserObj, 6));
    assert_eq!(rights[1], (AclTag::User(2000), 4));
    assert_eq!(world.posix("f").1, 0o640, "the mask is the group class");
}

#[test]
fn unusable_acl_changes_nothing() {
    let mut world = AclWorld::new();
    let file = world.create("f", &[MODE], &[0, 0, 1, 0o244]).unwrap();
    let check = |world: &mut AclWorld, entry: Entry<'_>, status| {
        let set = set_attributes(&[ACL, MODE], &[acl(&[entry]), vec![0; 4]].concat());
        assert_eq!(world.client.on(&file, set), Err(status), "{entry:?}");
        let made = world.create("new", &[ACL], &acl(&[entry]));
        assert_eq!(made, Err(status), "{entry:?}");
    };
    check(&mut world, (2, 0, READ, "OWNER@"), ATTRIBUTE_NOT_SUPPORTED);
    check(
        &mut world,
        (1, 0, mask::READ_ACL, "EVERYONE@"),
        ATTRIBUTE_NOT_SUPPORTED,
    );
    check(
        &mut world,
        (0, INHERIT_ONLY, READ, "OWNER@"),
        ATTRIBUTE_NOT_SUPPORTED,
    );
    check(&mut world, (0, 0, READ, "DIALUP@"), ATTRIBUTE_NOT_SUPPORTED);
    check(&mut world, (0, 0, READ, "anna@example.org"), BAD_OWNER);
    assert_eq!(world.posix("f"), (Acls::default(), 0o644));
    let names = world.client.names(&world.root.clone()).unwrap();
    assert_eq!(names, ["f"]);
}

#[test]
fn only_the_owner_sets_an_acl() {
    let mut world = AclWorld::new();
    let file = world.create("f", &[MODE], &[0, 0, 1, 0o266]).unwrap();
    let user = Some((OWNER.uid + 1, OWNER.gid, vec![]));
    let mut other = Client4::new(Session::of(&world.world, user), "b");
    let set = set_attributes(&[ACL], &acl(&[(0, 0, READ, "EVERYONE@")]));
    assert_eq!(other.on(&file, set), Err(PERMISSION));
    let name = world.client.attributes(&file, &[OWNER_NAME]).unwrap().bytes;
    assert_eq!(Decoder(&name).opaque(), OWNER.uid.to_string().as_bytes());
}
