//! Opens of NFSv4.1 beside NFSv3: denied accesses, and removed files of expired clients.

use crate::support;
use pagemesh_nfs::nfs3::attributes::SetAttributes;
use pagemesh_nfs::nfs3::names::CreateMode;
use pagemesh_nfs::nfs3::status::Status;
use std::sync::atomic::Ordering;
use support::compounds::{Client4, close, get_attributes};
use support::session::Session;
use support::world::ServedWorld;

const DENY_NONE: u32 = 0;
const DENY_READ: u32 = 1;
const DENY_WRITE: u32 = 2;
const ACCESS_BOTH: u32 = 3;
const BAD_SESSION: u32 = 10_052;
/// Seconds beyond a lease.
const BEYOND_LEASE: u64 = 91;

fn size(bytes: u64) -> SetAttributes {
    SetAttributes {
        size_bytes: Some(bytes),
        ..SetAttributes::default()
    }
}

#[test]
fn denied_access_stops_version_three() {
    let world = ServedWorld::new();
    let mut client = Client4::new(Session::new(&world), "a");
    let mut old = Session::new(&world);
    let root = old.root();
    let file = old.create(&root, "f", 0o644).unwrap().handle;
    let other = old.create(&root, "g", 0o644).unwrap().handle;
    old.write(&file, 0, b"data").unwrap();
    let state = client.open(&root, "f", (ACCESS_BOTH, DENY_WRITE), None);
    let busy = Status::Jukebox;
    assert_eq!(old.write(&file, 0, b"x").unwrap_err(), busy);
    let set = old.set_attributes(&file, size(0), None);
    assert_eq!(set.unwrap_err(), busy);
    let create = old.create_as(&root, "f", CreateMode::Unchecked(size(0)));
    assert_eq!(create.unwrap_err(), busy);
    // Reads, changes without data, and other files go on.
    assert_eq!(old.read(&file, 0, 10).unwrap().0, b"data");
    let mode = support::session::mode(0o600);
    old.set_attributes(&file, mode, None).unwrap();
    old.write(&other, 0, b"x").unwrap();
    client.on(&file, close(state.unwrap())).unwrap();
    old.write(&file, 0, b"x").unwrap();
    client
        .open(&root, "f", (ACCESS_BOTH, DENY_READ), None)
        .unwrap();
    assert_eq!(old.read(&file, 0, 10).unwrap_err(), busy);
    old.write(&file, 0, b"y").unwrap();
}

#[test]
fn expired_denial_yields_to_version_three() {
    let world = ServedWorld::new();
    let mut client = Client4::new(Session::new(&world), "a");
    let mut old = Session::new(&world);
    let root = old.root();
    let file = old.create(&root, "f", 0o644).unwrap().handle;
    client
        .open(&root, "f", (ACCESS_BOTH, DENY_WRITE), None)
        .unwrap();
    assert_eq!(old.write(&file, 0, b"x").unwrap_err(), Status::Jukebox);
    world
        .lease_seconds
        .fetch_add(BEYOND_LEASE, Ordering::SeqCst);
    old.write(&file, 0, b"x").unwrap();
}

#[test]
fn removal_ends_an_expired_client_with_the_file() {
    let world = ServedWorld::new();
    let mut client = Client4::new(Session::new(&world), "a");
    let mut old = Session::new(&world);
    let root = old.root();
    for name in ["f", "g", "h"] {
        old.create(&root, name, 0o644).unwrap();
    }
    let share = (ACCESS_BOTH, DENY_NONE);
    client.open(&root, "f", share, None).unwrap();
    client.open(&root, "g", share, None).unwrap();
    // A client with a lease keeps its state.
    old.remove(&root, "f").unwrap();
    client.on(&root, get_attributes(&[1])).unwrap();
    world
        .lease_seconds
        .fetch_add(BEYOND_LEASE, Ordering::SeqCst);
    // The client does not have this file open.
    old.remove(&root, "h").unwrap();
    client.on(&root, get_attributes(&[1])).unwrap();
    world
        .lease_seconds
        .fetch_add(BEYOND_LEASE, Ordering::SeqCst);
    old.remove(&root, "g").unwrap();
    let (status, _) = client.call(vec![get_attributes(&[1])]);
    assert_eq!(status, BAD_SESSION);
}
