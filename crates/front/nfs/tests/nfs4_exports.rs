//! The pseudo file system of NFSv4.1: exports of directories, their rules, and the way between them.

use crate::support;
use pagemesh_fs::{Caller, Ino, SetAttributes};
use pagemesh_nfs::exports_file::ExportsFile;
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::{Export, ExportOptions, Exports, Server};
use std::sync::Arc;
use support::compounds::{Client4, make_directory};
use support::session::{NFS, Session};
use support::world::{ATTACHMENT, FREE_BYTES, KEY, OWNER, ServedWorld, VOLUME};

const COMPOUND: u32 = 1;
/// Words of a denied call (RFC 5531, section 9).
const DENIED: u32 = 1;
const AUTHENTICATION_ERROR: u32 = 1;
const REJECTED_CREDENTIAL: u32 = 2;
const NO_ENTRY: u32 = 2;
const ACCESS: u32 = 13;
const READ_ONLY: u32 = 30;
const STALE: u32 = 70;
const CHANGE: u32 = 3;
const FSID: u32 = 8;
const RDATTR_ERROR: u32 = 11;
const FILEID: u32 = 20;
const MODE: u32 = 33;
const MOUNTED_ON: u32 = 55;
const HOST: &str = "127.0.0.2";

/// A server of `/data` with the rules of a text. The file system has `home/inner` and `home/other`.
struct RuledWorld {
    world: ServedWorld,
    exports: Exports,
}

impl RuledWorld {
    fn new(text: &str) -> RuledWorld {
        let world = ServedWorld::new();
        let owner = Caller::trusted(OWNER.uid, OWNER.gid);
        let attrs = SetAttributes {
            mode: Some(0o777),
            ..SetAttributes::default()
        };
        let fs = &world.fs;
        let make = |parent, name: &[u8]| {
            let made = fs.make_directory_at(parent, name, &attrs, &owner);
            made.result.unwrap().file_id()
        };
        let home = make(fs.attr(Ino::ROOT).unwrap().file_id(), b"home");
        make(home, b"inner");
        make(home, b"other");
        let export = Export {
            name: "data".into(),
            fs: Arc::clone(fs),
            volume: VOLUME,
            key: HandleKey::new(KEY),
            attachment: ATTACHMENT,
            options: ExportOptions::default(),
            free_space: Arc::new(|| Some(FREE_BYTES)),
        };
        let exports = Exports::new(vec![export]).unwrap();
        exports.apply(&file(text)).unwrap();
        let listen = ["127.0.0.1:0".parse().unwrap()];
        let server = Server::start(&listen, exports.clone(), Box::new(|_, _| {}));
        let world = ServedWorld {
            server: server.unwrap(),
            ..world
        };
        RuledWorld { world, exports }
    }

    fn at(&self, address: &str) -> Client4 {
        let user = Some((OWNER.uid, OWNER.gid, vec![]));
        let from = format!("{address}:0").parse().unwrap();
        Client4::new(Session::from_address(&self.world, from, user), address)
    }
}

fn file(text: &str) -> ExportsFile {
    ExportsFile::parse("exports", text.as_bytes()).unwrap()
}

#[test]
fn directories_lead_to_an_exported_directory() {
    let world = RuledWorld::new("/data/home/inner *(rw,insecure)");
    let mut client = world.at(HOST);
    let root = client.walk(&[]).unwrap();
    assert_eq!(client.names(&root).unwrap(), ["data"]);
    let data = client.walk(&["data"]).unwrap();
    assert_eq!(client.names(&data).unwrap(), ["home"]);
    let home = client.walk(&["data", "home"]).unwrap();
    assert_eq!(client.names(&home).unwrap(), ["inner"], "not `other`");
    assert_eq!(client.lookup(&home, "other"), Err(NO_ENTRY));
    let inner = client.walk(&["data", "home", "inner"]).unwrap();
    assert_eq!(client.names(&inner).unwrap(), Vec::<String>::new());
    let mode = 0o755_u32.to_be_bytes();
    let make = make_directory("d", &[MODE], &mode);
    client.on(&inner, make).unwrap();
    assert_eq!(
        client.on(&home, make_directory("d", &[], &[])),
        Err(READ_ONLY)
    );
    // LOOKUPP goes the same way back, and not into the file system.
    assert_eq!(client.parent(&inner).unwrap(), home);
    assert_eq!(client.parent(&home).unwrap(), data);
    assert_eq!(client.parent(&data).unwrap(), root);
    assert_eq!(client.parent(&root), Err(NO_ENTRY));
    let d = client.lookup(&inner, "d").unwrap();
    assert_eq!(client.parent(&d).unwrap(), inner);
}

/// Any user of a machine has ports above 1023, and could replace the state of its other users.
#[test]
fn state_is_for_ports_that_some_rule_takes() {
    let header = |rules: &str| {
        let world = RuledWorld::new(rules);
        let user = Some((OWNER.uid, OWNER.gid, vec![]));
        let from = format!("{HOST}:0").parse().unwrap();
        let mut session = Session::from_address(&world.world, from, user);
        // No tag, version 4.1, and no operation.
        let empty = [0, 1, 0].map(u32::to_be_bytes).concat();
        let reply = session.exchange((NFS, 4), COMPOUND, &empty).unwrap();
        reply[..12].to_vec()
    };
    let refused = [DENIED, AUTHENTICATION_ERROR, REJECTED_CREDENTIAL];
    assert_eq!(
        header("/data *(rw)"),
        refused.map(u32::to_be_bytes).concat()
    );
    let accepted = header("/data *(rw)\n/data/home *(ro,insecure)");
    assert_eq!(accepted, [0; 12], "accepted");
}

#[test]
fn file_system_id_changes_at_exports() {
    let world = RuledWorld::new("/data/home/inner *(rw,insecure)");
    let mut client = world.at(HOST);
    let home = client.walk(&["data", "home"]).unwrap();
    let inner = client.lookup(&home, "inner").unwrap();
    let fsid = |client: &mut Client4, file: &[u8]| client.attributes(file, &[FSID]).unwrap();
    assert_eq!(fsid(&mut client, &home).bytes, [0; 16]);
    assert_ne!(fsid(&mut client, &inner).bytes, [0; 16]);
    // The listing shows the root of the export, and the number of the directory that it covers.
    let listed = client.list(&home, &[FSID, FILEID, MOUNTED_ON]).unwrap();
    let own = client.attributes(&inner, &[FSID, FILEID, MOUNTED_ON]);
    assert_eq!(listed[0].values, own.unwrap());
    let number = client.attributes(&inner, &[FILEID]).unwrap().long();
    let covered = client.attributes(&inner, &[MOUNTED_ON]).unwrap().long();
    assert_ne!(number, covered);
    let d = client.attributes(&home, &[FILEID]).unwrap().long();
    assert_eq!(client.attributes(&home, &[MOUNTED_ON]).unwrap().long(), d);
}

#[test]
fn exports_without_access_are_invisible() {
    let world = RuledWorld::new(
        "/data/home/inner 127.0.0.2(rw,insecure)\n/data/home/other 127.0.0.3(ro,insecure)",
    );
    let (mut one, mut other) = (world.at("127.0.0.2"), world.at("127.0.0.3"));
    let home = one.walk(&["data", "home"]).unwrap();
    assert_eq!(one.names(&home).unwrap(), ["inner"]);
    assert_eq!(other.names(&home).unwrap(), ["other"]);
    let inner = one.lookup(&home, "inner").unwrap();
    assert_eq!(other.lookup(&home, "inner"), Err(NO_ENTRY));
    assert_eq!(other.attributes(&inner, &[FSID]), Err(ACCESS));
    let own = other.lookup(&home, "other").unwrap();
    assert_eq!(
        other.on(&own, make_directory("d", &[], &[])),
        Err(READ_ONLY)
    );
    world
        .exports
        .apply(&file("/data/home/inner *(insecure)"))
        .unwrap();
    assert_eq!(other.attributes(&own, &[FSID]), Err(STALE));
}

#[test]
fn rules_of_an_inner_export_decide_inside_of_it() {
    let world = RuledWorld::new(
        "/data *(rw,insecure)\n/data/home/inner 127.0.0.2(ro,insecure) 127.0.0.4(rw,insecure)",
    );
    let mut client = world.at("127.0.0.2");
    let home = client.walk(&["data", "home"]).unwrap();
    let inner = client.lookup(&home, "inner").unwrap();
    let make = || make_directory("d", &[], &[]);
    assert_eq!(client.on(&inner, make()), Err(READ_ONLY));
    assert_eq!(client.parent(&inner).unwrap(), home, "an export above");
    client.on(&home, make()).unwrap();
    let listed = client.list(&home, &[FSID, FILEID, MOUNTED_ON]).unwrap();
    let of_inner = listed.iter().find(|it| it.name == "inner").unwrap();
    let own = client.attributes(&inner, &[FSID, FILEID, MOUNTED_ON]);
    assert_eq!(of_inner.values, own.unwrap());
    // A client without a rule for it uses the rules of the export above.
    let mut third = world.at("127.0.0.3");
    let inner = third.lookup(&home, "inner").unwrap();
    third.on(&inner, make()).unwrap();
}

#[test]
fn root_changes_when_exports_are_loaded() {
    let world = RuledWorld::new("/data *(rw,insecure)");
    let mut client = world.at(HOST);
    let root = client.walk(&[]).unwrap();
    let first = client.attributes(&root, &[CHANGE]).unwrap().long();
    assert_ne!(first, 0);
    assert_eq!(client.attributes(&root, &[CHANGE]).unwrap().long(), first);
    world
        .exports
        .apply(&file("/data/home *(rw,insecure)"))
        .unwrap();
    let second = client.attributes(&root, &[CHANGE]).unwrap().long();
    assert!(second > first);
    let data = client.walk(&["data"]).unwrap();
    world.exports.apply(&file("/data *(rw,insecure)")).unwrap();
    // The path leads to an export now; the directory stays for clients that have its handle.
    assert!(client.attributes(&data, &[CHANGE]).unwrap().long() > second);
}

#[test]
fn failing_export_stops_no_listing_of_the_root() {
    let (world, space) = ServedWorld::pair(Limits::default());
    let mut client = Client4::new(Session::new(&world), "a");
    let root = client.walk(&[]).unwrap();
    let numbers = [FSID, FILEID];
    assert_eq!(client.list(&root, &numbers).unwrap().len(), 2);
    let mut second = Session::new(&world);
    let handle = second.mount("/other").unwrap();
    assert_eq!(client.walk(&["other"]).unwrap(), handle);
    space.fence();
    // A change finds out that another host has the volume.
    let made = second.make_directory(&handle, "d", 0o755).map(drop);
    assert_eq!(made, Err(pagemesh_nfs::nfs3::status::Status::Jukebox));
    let listed = client.list(&root, &numbers).unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].name, "data");
    let listed = client.list(&root, &[RDATTR_ERROR, FSID]).unwrap();
    assert_eq!(listed[1].name, "other");
    assert_eq!(listed[1].values.numbers, [RDATTR_ERROR]);
    assert_eq!(client.names(&root).unwrap(), ["data", "other"]);
}
