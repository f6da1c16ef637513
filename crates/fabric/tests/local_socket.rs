//! A server's unix socket, for clients on the same machine.

use crate::support;
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::slice::{Leg, SliceError, SliceReply, SliceRequest};
use pagemesh_fabric::tcp::{Endpoint, TcpLeg, TcpServer};
use std::path::PathBuf;
use support::{BRICK, MemoryBrick, SLICE, key, reap, serve, stamp, timeouts};
use tempfile::TempDir;

struct LocalServer {
    server: TcpServer,
    path: PathBuf,
    _directory: TempDir,
}

fn serve_local(memory: &std::sync::Arc<MemoryBrick>) -> LocalServer {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("brick.sock");
    let mut server = serve(memory);
    server.serve_local(&path).expect("a free path");
    LocalServer {
        server,
        path,
        _directory: directory,
    }
}

fn connect(local: &LocalServer, key: &Key) -> Result<TcpLeg, SliceError> {
    let endpoint = Endpoint::Local(&local.path);
    TcpLeg::connect(endpoint, key, timeouts(), SLICE, Epoch(1))
}

#[test]
fn unix_socket_serves_as_tcp_does() {
    let memory = MemoryBrick::new();
    let local = serve_local(&memory);
    let mut near = connect(&local, &key()).expect("attached");
    let mut far = support::attach(&local.server);
    assert_eq!(near.brick(), BRICK);
    assert_eq!(local.server.connections(), 2);
    assert_eq!(memory.state().peers[0].address, None);
    // More than a socket's buffer holds, so that both ends send and receive in parts.
    let bytes: Bytes = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    for tag in 0..3 {
        let write = SliceRequest::Write {
            offset: tag << 20,
            data: bytes.clone(),
            stamp: stamp(1),
        };
        near.submit(tag, write);
    }
    let written = reap(&mut near, 3);
    assert!(written.iter().all(|it| it.result == Ok(SliceReply::Done)));
    let read = SliceRequest::Read {
        offset: 2 << 20,
        len: 1 << 20,
    };
    for leg in [&mut near, &mut far] {
        leg.submit(9, read.clone());
        let found = reap(leg, 1).remove(0).result;
        assert_eq!(found, Ok(SliceReply::Data(bytes.to_vec())));
    }
}

#[test]
fn unix_socket_refuses_another_key() {
    let memory = MemoryBrick::new();
    let local = serve_local(&memory);
    let refused = connect(&local, &Key::from_bytes([8; 32])).err();
    assert!(
        matches!(refused, Some(SliceError::Refused(_))),
        "{refused:?}"
    );
    assert_eq!(memory.state().opened, 0);
}

#[test]
fn stop_ends_connections_of_unix_socket() {
    let memory = MemoryBrick::new();
    let local = serve_local(&memory);
    let mut leg = connect(&local, &key()).expect("attached");
    local.server.stop().expect("all ended");
    assert!(!local.path.exists());
    let read = SliceRequest::Read { offset: 0, len: 1 };
    leg.submit(1, read);
    let lost = reap(&mut leg, 1).remove(0).result;
    assert!(matches!(lost, Err(SliceError::Lost(_))), "{lost:?}");
    assert_eq!(memory.state().dropped, 1);
}

#[test]
fn second_server_is_refused_at_the_path() {
    let memory = MemoryBrick::new();
    let local = serve_local(&memory);
    let mut other = serve(&memory);
    assert!(other.serve_local(&local.path).is_err());
    drop(other);
    connect(&local, &key()).expect("the first server goes on");
}
