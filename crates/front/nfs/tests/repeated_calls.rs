//! Calls that a client sends again.

use crate::support;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::names::{CreateArguments, CreateMode};
use pagemesh_nfs::nfs3::status::Status;
use std::io::Write;
use support::decoder::Decoder;
use support::session::{Session, at, mode};
use support::world::ServedWorld;

/// The status of a reply to an executed call.
fn status(reply: &[u8]) -> u32 {
    let mut client = Decoder(reply);
    (0..6).for_each(|_| {
        client.word();
    });
    client.word()
}

fn send(session: &mut Session, record: &[u8]) -> Vec<u8> {
    session.stream.write_all(record).expect("sent");
    session.receive().expect("a reply")
}

#[test]
fn repeated_change_gets_the_first_reply() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let create = session.bytes_of(&Nfs3Call::Create(CreateArguments {
        at: at(&root, "f"),
        mode: CreateMode::Guarded(mode(0o644)),
    }));
    let first = send(&mut session, &create);
    assert_eq!(status(&first), 0);
    assert_eq!(send(&mut session, &create), first);
    // The client has connected again, from another port.
    let mut again = Session::new(&world);
    assert_eq!(send(&mut again, &create), first);
    let made = session.create(&root, "f", 0o644);
    assert_eq!(made.unwrap_err(), Status::Exists);

    let remove = session.bytes_of(&Nfs3Call::Remove(at(&root, "f")));
    let first = send(&mut session, &remove);
    assert_eq!(status(&first), 0);
    assert_eq!(send(&mut again, &remove), first);
    assert_eq!(session.remove(&root, "f"), Err(Status::NoEntry));
    let counters = world.server.counters();
    assert_eq!(counters.repeated_calls, 3);
    assert_eq!((counters.calls[8], counters.calls[12]), (2, 2));
}

#[test]
fn other_user_with_the_same_call_is_checked() {
    let world = ServedWorld::new();
    let mut owner = Session::new(&world);
    let root = owner.root();
    let mut other = Session::of(&world, Some((2000, 2000, vec![])));
    other.root();
    let call = Nfs3Call::Create(CreateArguments {
        at: at(&root, "f"),
        mode: CreateMode::Unchecked(mode(0o644)),
    });
    let of_other = other.bytes_of(&call);
    let of_owner = owner.bytes_of(&call);
    assert_eq!(of_owner[4..8], of_other[4..8], "another xid");
    let refused = status(&send(&mut other, &of_other));
    assert_eq!(refused, Status::Access.number());
    assert_eq!(status(&send(&mut owner, &of_owner)), 0);
    assert_eq!(world.server.counters().repeated_calls, 0);
}

#[test]
fn call_that_still_runs_is_not_run_beside_itself() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    session.create(&root, "f", 0o644).expect("made");
    let remove = session.bytes_of(&Nfs3Call::Remove(at(&root, "f")));
    let mut again = Session::new(&world);
    world.space.memory.while_stalled(|wait_for_request| {
        session.stream.write_all(&remove).expect("sent");
        wait_for_request();
        again.stream.write_all(&remove).expect("sent");
        world.wait_until("the repetition", |now| now.repeated_calls == 1);
    });
    let first = session.receive().expect("a reply");
    assert_eq!(status(&first), 0);
    assert_eq!(again.receive(), Some(first));
    assert_eq!(world.server.counters().calls[12], 1);
}
