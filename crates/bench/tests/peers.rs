//! fio against the other servers. If they are not installed, the tests report that and check
//! nothing.

use pagemesh_bench::BenchError;
use pagemesh_bench::peers::{BlockCase, Direction, NbdPeer, PeerOptions, RUNTIME_MIN, run_peers};
use pagemesh_bench::process_cpu;
use pagemesh_bench::report::{Report, ReportCell};
use std::path::Path;
use std::time::Duration;

const SIZE: u64 = 1 << 20;

/// One short case.
fn short_options() -> PeerOptions {
    PeerOptions {
        runtime: RUNTIME_MIN,
        size_bytes: SIZE,
        cases: vec![BlockCase {
            direction: Direction::Read,
            queue_depth: 2,
        }],
        ..PeerOptions::default()
    }
}

/// Returns `None`, and prints a message, if a program is not installed.
fn unless_missing<T>(result: Result<T, BenchError>) -> Option<T> {
    match result {
        Ok(found) => Some(found),
        Err(error @ BenchError::Missing { .. }) => {
            eprintln!("not checked: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn start_peers(dir: &Path) -> Option<Vec<NbdPeer>> {
    let servers = [
        NbdPeer::nbdkit_memory(SIZE),
        NbdPeer::qemu_nbd(dir, SIZE),
        NbdPeer::qemu_quorum(SIZE),
    ];
    servers.into_iter().map(unless_missing).collect()
}

fn check_rows(report: &Report, peers: &[NbdPeer]) {
    for (row, peer) in report.rows.iter().zip(peers) {
        assert_eq!(row[1], ReportCell::from(peer.name.as_str()));
        assert_eq!(row[2], ReportCell::from(peer.class.as_str()));
        for cell in &row[3..8] {
            assert!(matches!(cell, ReportCell::Number(n) if *n > 0.0), "{row:?}");
        }
    }
}

#[test]
fn other_servers_are_compared_and_ended() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(peers) = start_peers(dir.path()) else {
        return;
    };
    let Some(report) = unless_missing(run_peers(&peers, &short_options())) else {
        return;
    };
    assert_eq!(report.rows.len(), 3);
    check_rows(&report, &peers);
    let rounds = &report.raw["samples_by_case_endpoint_round"][0][2];
    assert_eq!(rounds.as_array().map(Vec::len), Some(5));
    assert_eq!(report.class, "none");
    let pids: Vec<u32> = peers.iter().flat_map(|peer| peer.pids.clone()).collect();
    assert_eq!(pids.len(), 5);
    assert!(pids.iter().all(|pid| process_cpu(*pid).is_some()));
    drop(peers);
    assert!(pids.iter().all(|pid| process_cpu(*pid).is_none()));
    assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 0);
}

#[test]
fn missing_endpoint_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let uri = format!("nbd+unix:///?socket={}", dir.path().join("none").display());
    let peers = [NbdPeer::external("ours", "process", &uri, &[])];
    match run_peers(&peers, &short_options()) {
        Err(error @ BenchError::Missing { .. }) => eprintln!("not checked: {error}"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("ours") && text.contains(&uri), "{text}");
        }
        Ok(_) => panic!("nothing serves there"),
    }
}

fn check_refused(change: impl FnOnce(&mut PeerOptions), word: &str) {
    let mut options = short_options();
    change(&mut options);
    let peers = [NbdPeer::external("ours", "process", "nbd+unix:///", &[])];
    let error = run_peers(&peers, &options).expect_err("refused");
    assert!(matches!(error, BenchError::Option(_)), "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn invalid_options_are_refused() {
    check_refused(|o| o.rounds = 4, "4 rounds");
    check_refused(|o| o.cases.clear(), "nothing to compare");
    check_refused(|o| o.cases[0].queue_depth = 0, "queue depth");
    check_refused(|o| o.runtime = Duration::ZERO, "100 ms");
    check_refused(|o| o.runtime = Duration::MAX, "an hour");
    check_refused(|o| o.size_bytes = 0, "whole MiB");
    check_refused(|o| o.size_bytes = SIZE + 1, "whole MiB");
    let error = run_peers(&[], &short_options()).expect_err("refused");
    assert!(error.to_string().contains("nothing to compare"), "{error}");
}
