//! The messages of snapshots: they arrive, and a brick that does not know them gets none.

use crate::support;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::*;
use pagemesh_base::space::Extent;
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::message::reply::AttachReply;

use pagemesh_fabric::test_api::{self, Stream};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use support::*;

fn requests() -> [(SliceRequest, SliceReply); 5] {
    let snapshot = Epoch(7);
    let extent = Extent {
        len: 4096,
        mapped: true,
    };
    [
        (SliceRequest::PrepareSnapshot { snapshot }, SliceReply::Done),
        (
            SliceRequest::ReadVersion {
                snapshot,
                offset: 5,
                len: 3,
            },
            SliceReply::Data(vec![1, 2, 3]),
        ),
        (
            SliceRequest::VersionExtents {
                snapshot,
                offset: 0,
                len: 4096,
            },
            SliceReply::Extents(vec![extent]),
        ),
        (
            SliceRequest::VersionLeaf { snapshot, leaf: 3 },
            SliceReply::Data(vec![1; VERSION_LEAF_BYTES]),
        ),
        (
            SliceRequest::VersionChanges {
                from: Epoch(3),
                to: snapshot,
                offset: 0,
                len: 4096,
            },
            SliceReply::Extents(vec![extent]),
        ),
    ]
}

#[test]
fn snapshot_requests_of_slice_arrive_unchanged() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    for (request, reply) in requests() {
        memory.change(|state| state.script = [Ok(reply.clone())].into());
        assert_eq!(execute(&mut leg, request.clone()), Ok(reply));
        assert_eq!(memory.state().requests.last(), Some(&request));
    }
    let (request, _) = &requests()[1];
    let short = Ok(SliceReply::Data(vec![1]));
    memory.change(|state| state.script = [short].into());
    assert_lost(&execute(&mut leg, request.clone()), "answers nothing");
}

#[test]
fn manager_prepares_lists_and_drops_snapshots() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let client = BrickClient::connect(server.address(), &key(), timeouts()).expect("connected");
    assert_eq!(client.snapshots(SLICE), Ok(vec![]));
    for snapshot in [9, 4] {
        assert_eq!(client.prepare_snapshot(SLICE, Epoch(snapshot)), Ok(()));
    }
    assert_eq!(client.snapshots(SLICE), Ok(vec![Epoch(4), Epoch(9)]));
    assert_eq!(client.drop_snapshots(SLICE, &[]), Ok(()));
    assert_eq!(client.drop_snapshots(SLICE, &[Epoch(4), Epoch(5)]), Ok(()));
    assert_eq!(client.snapshots(SLICE), Ok(vec![Epoch(9)]));
    let many = vec![Epoch(1); DROPPED_SNAPSHOTS_MAX + 1];
    let refused = client.drop_snapshots(SLICE, &many);
    assert!(matches!(refused, Err(SliceError::OutOfRange(_))));
    assert_eq!(client.drop_snapshots(SLICE, &many[1..]), Ok(()));
}

#[test]
fn long_list_of_snapshots_comes_in_parts() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let client = BrickClient::connect(server.address(), &key(), timeouts()).expect("connected");
    let all: Vec<Epoch> = (1..=2 * LIST_ENTRIES_MAX as u32 + 3).map(Epoch).collect();
    memory.change(|state| state.snapshots = all.iter().copied().collect());
    assert!(client.snapshots(SLICE) == Ok(all));
}

/// An older brick would end the connection at a message that it does not know.
#[test]
fn older_brick_gets_no_message_of_snapshots() {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let pair = socketpair(family, SocketType::STREAM, flags, None).expect("a pair of sockets");
    let (brick, stream) = (pair.0, Stream::unix(pair.1));
    let client = test_api::brick_client(stream, BRICK, TEST_TIMEOUT);
    let unknown = SliceError::snapshots_unknown();
    assert_eq!(client.snapshots(SLICE), Err(unknown.clone()));
    assert_eq!(
        client.drop_snapshots(SLICE, &[Epoch(1)]),
        Err(unknown.clone())
    );
    assert_eq!(
        client.prepare_snapshot(SLICE, Epoch(1)),
        Err(unknown.clone())
    );
    let attached = AttachReply {
        handle: 0,
        size_bytes: SLICE_BYTES,
    };
    let mut leg = test_api::tcp_leg(client, attached, timeouts());
    for (request, _) in requests() {
        assert_eq!(execute(&mut leg, request), Err(unknown.clone()));
    }
    let mut buffer = [0; 64];
    let sent = recv(&brick, &mut buffer[..], RecvFlags::DONTWAIT);
    assert!(sent.is_err(), "the brick got a message");
}
