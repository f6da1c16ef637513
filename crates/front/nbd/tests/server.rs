//! Listening, limits, and the end of servers and exports.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use pagemesh_nbd::{ExportError, ExportOptions, Exports, Limits, Listen, Server, ServerError};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::client::*;
use support::memory::{Memory, Mode};
use support::{Running, await_that};

const SIZE: u64 = 1 << 20;

fn bind(path: &std::path::Path) -> Result<Server, ServerError> {
    Server::bind(Listen::Unix(path.into()), Exports::new())
}

#[test]
fn a_unix_socket_is_its_owners_and_goes_with_the_server() {
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
fn a_live_socket_is_refused_and_a_dead_one_replaced() {
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
fn what_is_not_a_socket_stays() {
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
fn a_path_that_became_anothers_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "new").unwrap();
    server.stop();
    assert!(path.exists());
}

#[test]
fn places_that_cannot_be_listened_on_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("x".repeat(120));
    assert!(matches!(bind(&long), Err(ServerError::PathTooLong(_))));
    let nowhere = dir.path().join("no/such/dir");
    let error = bind(&nowhere).err().unwrap().to_string();
    assert!(error.contains("no/such/dir"), "{error}");

    let tcp = Listen::Tcp("127.0.0.1:0".parse().unwrap());
    let first = Server::bind(tcp, Exports::new()).unwrap();
    let error = Server::bind(first.listens_on().clone(), Exports::new());
    assert!(matches!(error, Err(ServerError::InUse(_))));
}

#[test]
fn export_names_are_checked() {
    let exports = Exports::new();
    let add = |name: &str| {
        let space = Arc::new(Memory::new(4096, Mode::AtOnce));
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
    let running = Running::with(SIZE, Mode::AtOnce, limits);
    let mut first = Client::open(&running.path());
    let mut second = Client::connect(&running.path());
    let answers = second.option(GO, &info("disk", &[]));
    assert_eq!(answers[0].0, POLICY);
    assert_eq!(first.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);

    let _third = Client::connect(&running.path());
    assert!(Client::connect_silent(&running.path()).is_closed());
    let counters = running.server.counters();
    assert_eq!((counters.connections, counters.refused), (3, 1));
    assert_eq!((counters.accepted, counters.opened), (4, 1));

    first.send(&Ask::new(DISC, 0, 0).encode(1));
    assert!(first.is_closed());
    await_that("the place is free", || {
        running.exports.connections("disk") == Some(0)
    });
    second.go("disk");
}

#[test]
fn a_client_that_stops_amid_a_request_is_let_go() {
    let limits = Limits {
        stalled_message: Duration::from_millis(50),
        ..Limits::default()
    };
    let running = Running::with(SIZE, Mode::AtOnce, limits);
    let mut idle = Client::open(&running.path());
    for sent in [5, 28, 1000] {
        let mut client = Client::open(&running.path());
        client.send(&Ask::write(0, vec![1; 50_000]).encode(1)[..sent]);
        assert!(client.is_closed(), "after {sent} bytes");
    }
    assert_eq!(idle.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);
}

#[test]
fn a_removed_export_finishes_what_is_in_flight() {
    let running = Running::new(SIZE, Mode::Held);
    let mut client = Client::open(&running.path());
    client.send(&Ask::write(0, vec![1; 4096]).encode(1));
    let seen = running.memory.seen();
    await_that("the write is submitted", || {
        seen.submitted.load(Ordering::SeqCst) == 1
    });
    assert!(running.exports.remove("disk"));
    let mut late = Client::connect(&running.path());
    assert_eq!(late.option(GO, &info("disk", &[]))[0].0, UNKNOWN);
    running.memory.release();
    assert_eq!(client.answer(|_| 0), (1, Answer::Done));
    assert!(client.is_closed());
}

#[test]
fn stop_drains_and_then_cuts_off() {
    for released in [true, false] {
        let limits = Limits {
            drain: Duration::from_millis(if released { 10_000 } else { 50 }),
            ..Limits::default()
        };
        let running = Running::with(SIZE, Mode::Held, limits);
        let path = running.path();
        let mut client = Client::open(&path);
        let mut amid = Client::connect(&path);
        client.send(&Ask::write(0, vec![1; 4096]).encode(1));
        await_that("the write is submitted", || {
            running.memory.seen().submitted.load(Ordering::SeqCst) == 1
        });
        let server = running.server.clone();
        let stopping = std::thread::spawn(move || server.stop());
        assert!(amid.is_closed());
        if released {
            running.memory.release();
            assert_eq!(client.answer(|_| 0), (1, Answer::Done));
        }
        assert!(client.is_closed());
        let stopped = stopping.join().unwrap();
        assert_eq!(stopped.abandoned, 0);
        assert!(!released || stopped.cut_off == 0);
        assert!(!path.exists());
        running.await_idle();
    }
}
