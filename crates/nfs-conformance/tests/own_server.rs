//! The server keeps RFC 1813, on a file system in memory.

use crate::support;
use pagemesh_nfs::Squash;
use pagemesh_nfs_conformance::{ExpectedFailures, ServerUnderTest, run};
use std::time::Duration;
use support::{OWNER, TestServer};

fn server_under_test(server: &TestServer, trusts_root: bool) -> ServerUnderTest {
    ServerUnderTest {
        nfs: server.address(),
        mount: server.address(),
        path: "/data".into(),
        uid: OWNER.uid,
        gid: OWNER.gid,
        trusts_root,
        half_open: 200,
        limit: Duration::from_secs(60),
    }
}

/// The failures of this server.
const EXPECTED: &str = include_str!("../expected/pagemesh.txt");

/// Fails with the table of all cases that fail.
#[track_caller]
fn check(server: &TestServer, trusts_root: bool, only: &str) {
    let server = server_under_test(server, trusts_root);
    let expected = ExpectedFailures::parse(EXPECTED).expect("a list");
    let report = run(&server, only, &expected).expect("prepared");
    assert!(!report.cases.is_empty());
    assert_eq!(report.failures().count(), 0, "\n{}", report.table());
}

#[test]
fn every_case_passes() {
    check(&TestServer::start(Squash::Root), false, "");
}

#[test]
fn every_case_passes_with_a_write_cache() {
    check(&TestServer::with_write_cache(), false, "");
}

#[test]
fn trusted_root_keeps_the_rules_of_root() {
    check(&TestServer::start(Squash::None), true, "root");
}

/// The suite must see a broken server: a read-only export fails nearly all cases.
#[test]
fn read_only_server_cannot_be_prepared() {
    let server = TestServer::read_only();
    let server = server_under_test(&server, false);
    assert!(run(&server, "getattr", &ExpectedFailures::default()).is_err());
}
