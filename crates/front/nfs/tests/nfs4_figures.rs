//! Requests of NFSv4.1 in the figures: each is one call of COMPOUND.

use crate::support;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::{COMPOUND, CallFigures, PROCEDURE_NAMES};
use std::time::Duration;
use support::compounds::{Client4, get_attributes, lookup, lookup_parent, op, put, put_root};
use support::session::Session;
use support::world::ServedWorld;

const NO_ENTRY: u32 = 2;
const TYPE: u32 = 1;
/// EXCHANGE_ID, CREATE_SESSION, and RECLAIM_COMPLETE.
const SESSION_REQUESTS: u64 = 3;

/// The requests of a file system, or without one.
#[track_caller]
fn compounds(world: &ServedWorld, export: Option<&str>) -> CallFigures {
    let exports = world.server.figures().exports;
    let named = exports.iter().find(|it| it.export.as_deref() == export);
    named.expect("an export").procedures[COMPOUND]
}

#[test]
fn compounds_count_for_their_last_file_system() {
    assert_eq!(PROCEDURE_NAMES[COMPOUND], "compound");
    let (world, _) = ServedWorld::pair(Limits::default());
    let mut client = Client4::new(Session::new(&world), "a");
    let calls = || ["data", "other"].map(|name| compounds(&world, Some(name)).calls);
    assert_eq!(compounds(&world, None).calls, SESSION_REQUESTS);
    assert_eq!(calls(), [0, 0]);
    let data = client.walk(&["data"]).expect("a root");
    assert_eq!(calls(), [1, 0]);
    // From one file system to the other, and the other way round by SAVEFH and RESTOREFH.
    let other = [put(&data), lookup_parent(), lookup("other")];
    assert_eq!(client.call(other.into()).0, 0);
    assert_eq!(calls(), [1, 1]);
    let restored = [put(&data), op(32, &[]), put_root(), lookup("other")];
    let restored = restored.into_iter().chain([op(31, &[])]);
    assert_eq!(client.call(restored.collect()).0, 0);
    assert_eq!(calls(), [2, 1]);
    // The last operation on a file counts, and not the directory of all exports after it.
    let above = [put(&data), get_attributes(&[TYPE]), put_root()];
    assert_eq!(client.call(above.into()).0, 0);
    assert_eq!(calls(), [3, 1]);
    assert_eq!(client.call(vec![put_root()]).0, 0);
    assert_eq!(compounds(&world, None).calls, SESSION_REQUESTS + 1);
    assert_eq!(calls(), [3, 1]);
    assert_eq!(world.server.counters().compounds, SESSION_REQUESTS + 5);
}

#[test]
fn compounds_have_errors_bytes_and_latencies() {
    let world = ServedWorld::new();
    let mut client = Client4::new(Session::new(&world), "a");
    let data = client.walk(&["data"]).expect("a root");
    assert_eq!(client.lookup(&data, "none"), Err(NO_ENTRY));
    let now = compounds(&world, Some("data"));
    assert_eq!((now.calls, now.errors), (2, 1));
    assert!(now.bytes_received > 200 && now.bytes_sent > 200, "{now:?}");
    assert!(now.time > Duration::ZERO && now.queue_time <= now.time);
    assert_eq!(now.latency.iter().sum::<u64>(), 2);
    // No procedure of NFSv3 has a call.
    let exports = world.server.figures().exports;
    let others = exports.iter().flat_map(|it| &it.procedures[..COMPOUND]);
    assert!(others.clone().count() > 0 && others.clone().all(|it| it.calls == 0));
}

#[test]
fn refused_handle_counts_for_the_file_system_that_it_names() {
    let (world, _) = ServedWorld::pair(Limits::default());
    let mut client = Client4::new(Session::new(&world), "a");
    let mut handle = client.walk(&["other"]).expect("a root");
    let last = handle.last_mut().expect("a byte");
    *last ^= 1;
    assert!(client.on(&handle, get_attributes(&[TYPE])).is_err());
    let now = compounds(&world, Some("other"));
    assert_eq!((now.calls, now.errors), (2, 1));
}
