//! Servers of several file systems, one of which another client has taken over.

use crate::support;
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::status::Status;
use std::io::Write;
use support::session::Session;
use support::world::ServedWorld;

const PAGE: u32 = 4096;

/// A root directory, and a file with a page of data.
fn made_in(session: &mut Session, path: &str) -> (Vec<u8>, Vec<u8>) {
    let root = session.mount(path).expect("mounted");
    let file = session.create(&root, "f", 0o644).expect("made").handle;
    let data = [1; PAGE as usize];
    session.write(&file, 0, &data).expect("written");
    (root, file)
}

/// Whether the server says that the export is fenced.
fn is_fenced(world: &ServedWorld, name: &str) -> bool {
    let exports = world.server.figures().exports;
    let named = exports.iter().find(|it| it.export.as_deref() == Some(name));
    named.expect("an export").is_fenced
}

#[test]
fn fenced_file_system_leaves_the_others_served() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let mut session = Session::new(&world);
    let (_, healthy) = made_in(&mut session, "/data");
    let (root, fenced) = made_in(&mut session, "/other");
    other.fence();
    assert_eq!(session.read(&fenced, 0, PAGE), Err(Status::Jukebox));
    assert!(is_fenced(&world, "other") && !is_fenced(&world, "data"));
    // Attributes in memory are old, too.
    assert_eq!(session.attributes(&fenced).map(drop), Err(Status::Jukebox));
    let made = session.create(&root, "g", 0o644).map(drop);
    assert_eq!(made, Err(Status::Jukebox));
    // MNT3ERR_IO: MOUNT has no status for later.
    assert_eq!(session.mount("/other"), Err(5));
    assert!(session.read(&healthy, 0, PAGE).is_ok(), "on one connection");
    assert!(session.mount("/data").is_ok());
}

#[test]
fn last_fenced_file_system_ends_connections_without_a_reply() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let mut session = Session::new(&world);
    let (_, first) = made_in(&mut session, "/data");
    let (_, second) = made_in(&mut session, "/other");
    other.fence();
    assert_eq!(session.read(&second, 0, PAGE), Err(Status::Jukebox));
    world.space.fence();
    for file in [first, second] {
        let mut client = Session::new(&world);
        let call = client.bytes_of(&Nfs3Call::Read(pagemesh_nfs::nfs3::files::ReadArguments {
            file: HandleBytes(&file),
            offset: 0,
            count: PAGE,
        }));
        client.stream.write_all(&call).expect("sent");
        assert_eq!(client.receive(), None);
    }
}

#[test]
fn file_system_is_fenced_before_a_call_fails() {
    let (world, _other) = ServedWorld::pair(Limits::default());
    let mut session = Session::new(&world);
    let (_, first) = made_in(&mut session, "/data");
    let (_, second) = made_in(&mut session, "/other");
    world.server.fence("other");
    let found = session.attributes(&second).map(drop);
    assert_eq!(found, Err(Status::Jukebox));
    assert!(session.attributes(&first).is_ok());
    world.server.fence("data");
    let call = session.bytes_of(&Nfs3Call::GetAttributes(HandleBytes(&first)));
    session.stream.write_all(&call).expect("sent");
    assert_eq!(session.receive(), None);
}
