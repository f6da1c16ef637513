//! Listening, limits, and the end of servers and exports.

use crate::support;
use pagemesh_nbd::{ExportError, ExportOptions, Exports, Limits, Listen, Server, ServerError};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::client::*;
use support::memory::{CompletionMode, Memory};
use support::{TestServer, wait_until};

const SIZE: u64 = 1 << 20;

fn bind(path: &std::path::Path) -> Result<Server, ServerError> {
    Server::bind(Listen::Unix(path.into()), Exports::new())
}

#[test]
fn unix_socket_is_private_and_removed_at_stop() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = bind(&path).unwrap();
    let mode = path.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    server.stop();
    assert!(!path.exists());
    server.stop();
}

#[test]
fn live_socket_is_refused_and_stale_one_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let live = bind(&path).unwrap();
    let error = bind(&path).err().unwrap();
    assert!(matches!(error, ServerError::InUse(_)), "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()));
    live.stop();

    drop(UnixListener::bind(&path).unwrap());
    assert!(UnixStream::connect(&path).is_err());
    let server = bind(&path).unwrap();
    UnixStream::connect(&path).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    server.stop();
}

#[test]
fn file_at_socket_path_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    std::fs::write(&path, "precious").unwrap();
    let error = bind(&path).err().unwrap();
    assert!(matches!(error, ServerError::NotASocket(_)), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let link = dir.path().join("l");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(matches!(bind(&link), Err(ServerError::NotASocket(_))));
}

#[test]
fn socket_path_of_another_server_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "new").unwrap();
    server.stop();
    assert!(path.exists());
}

#[test]
fn unusable_listen_address_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("x".repeat(120));
    assert!(matches!(bind(&long), Err(ServerError::PathTooLong(_))));
    let nowhere = dir.path().join("no/such/dir");
    let error = bind(&nowhere).err().unwrap().to_string();
    assert!(error.contains("no/such/dir"), "{error}");

    let tcp = Listen::Tcp("127.0.0.1:0".parse().unwrap());
    let first = Server::bind(tcp, Exports::new()).unwrap();
    let error = Server::bind(first.listen_address().clone(), Exports::new());
    assert!(matches!(error, Err(ServerError::InUse(_))));
}

#[test]
fn export_names_are_checked() {
    let exports = Exports::new();
    let add = |name: &str| {
        let space = Arc::new(Memory::new(4096, CompletionMode::AtOnce));
        exports.add(name, space, ExportOptions::default())
    };
    add("a/b c").unwrap();
    assert_eq!(add("a/b c"), Err(ExportError::Exists("a/b c".into())));
    for bad in ["", "a\nb", &"x".repeat(256)] {
        assert!(matches!(add(bad), Err(ExportError::BadName { .. })));
    }
    assert_eq!(exports.names(), ["a/b c"]);
    assert!(exports.remove("a/b c"));
    assert!(!exports.remove("a/b c"));
    add("a/b c").unwrap();
}

#[test]
fn connections_are_limited_in_total_and_per_export() {
    let limits = Limits {
        connections_max: 3,
        export_connections_max: 1,
        ..Limits::default()
    };
    let running = TestServer::with_limits(SIZE, CompletionMode::AtOnce, limits);
    let mut first = NbdClient::open(&running.path());
    let mut second = NbdClient::connect(&running.path());
    let answers = second.option(GO, &info("disk", &[]));
    assert_eq!(answers[0].0, POLICY);
    assert_eq!(first.request(&NbdRequest::new(FLUSH, 0, 0)), NbdReply::Done);

    let _third = NbdClient::connect(&running.path());
    assert!(NbdClient::connect_without_handshake(&running.path()).is_closed());
    let counters = running.server.counters();
    assert_eq!((counters.connections, counters.refused), (3, 1));
    assert_eq!((counters.accepted, counters.opened), (4, 1));

    first.send(&NbdRequest::new(DISC, 0, 0).encode(1));
    assert!(first.is_closed());
    wait_until("the place is free", || {
        running.exports.connections("disk") == Some(0)
    });
    second.go("disk");
}

#[test]
fn client_stalled_in_request_is_disconnected() {
    let limits = Limits {
        stalled_message: Duration::from_millis(50),
        ..Limits::default()
    };
    let running = TestServer::with_limits(SIZE, CompletionMode::AtOnce, limits);
    let mut idle = NbdClient::open(&running.path());
    for sent in [5, 28, 1000] {
        let mut client = NbdClient::open(&running.path());
        client.send(&NbdRequest::write(0, vec![1; 50_000]).encode(1)[..sent]);
        assert!(client.is_closed(), "after {sent} bytes");
    }
    assert_eq!(idle.request(&NbdRequest::new(FLUSH, 0, 0)), NbdReply::Done);
}

#[test]
fn removed_export_finishes_requests_in_flight() {
    let running = TestServer::new(SIZE, CompletionMode::Held);
    let mut client = NbdClient::open(&running.path());
    client.send(&NbdRequest::write(0, vec![1; 4096]).encode(1));
    let seen = running.memory.counters();
    wait_until("the write is submitted", || {
        seen.submitted.load(Ordering::SeqCst) == 1
    });
    assert!(running.exports.remove("disk"));
    let mut late = NbdClient::connect(&running.path());
    assert_eq!(late.option(GO, &info("disk", &[]))[0].0, UNKNOWN);
    running.memory.release();
    assert_eq!(client.read_reply(|_| 0), (1, NbdReply::Done));
    assert!(client.is_closed());
}

#[test]
fn stop_drains_and_then_cuts_off() {
    for released in [true, false] {
        let limits = Limits {
            drain: Duration::from_millis(if released { 10_000 } else { 50 }),
            ..Limits::default()
        };
        let running = TestServer::with_limits(SIZE, CompletionMode::Held, limits);
        let path = running.path();
        let mut client = NbdClient::open(&path);
        let mut amid = NbdClient::connect(&path);
        client.send(&NbdRequest::write(0, vec![1; 4096]).encode(1));
        wait_until("the write is submitted", || {
            running.memory.counters().submitted.load(Ordering::SeqCst) == 1
        });
        let server = running.server.clone();
        let stopping = std::thread::spawn(move || server.stop());
        assert!(amid.is_closed());
        if released {
            running.memory.release();
            assert_eq!(client.read_reply(|_| 0), (1, NbdReply::Done));
        }
        assert!(client.is_closed());
        let stopped = stopping.join().unwrap();
        assert_eq!(stopped.abandoned, 0);
        assert!(!released || stopped.cut_off == 0);
        assert!(!path.exists());
        running.wait_until_idle();
    }
}
