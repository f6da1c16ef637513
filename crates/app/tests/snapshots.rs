//! `pagemesh snapshot` as users and programs call it.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use support::{Cluster, Pools};

#[test]
fn snapshot_commands_refuse_with_a_way_out() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &[]);
    let none = cluster.json(&["snapshot", "list"]);
    assert_eq!(none, serde_json::json!([]));
    let text = cluster.ok(&["snapshot", "list", "v"]);
    assert!(text.contains("no snapshots"), "{text}");
    let usage: &[&[&str]] = &[
        &["snapshot", "show", "v"],
        &["snapshot", "show", "v@"],
        &["snapshot", "show", "v@a@b"],
        &["snapshot", "create", "v"],
        &["snapshot", "create", "v@a/b"],
    ];
    for args in usage {
        let refused = cluster.run(args);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success(), "{args:?}");
        assert!(error.contains("VOLUME@NAME"), "{args:?}: {error}");
    }
    cluster.refused(&["snapshot", "list", "w"], &["w", "volume list"]);
    cluster.refused(&["snapshot", "create", "w@a"], &["w", "volume list"]);
    cluster.refused(&["snapshot", "show", "v@a"], &["v@a", "snapshot list"]);
    cluster.refused(&["snapshot", "hold", "t", "v@a"], &["v@a"]);
    cluster.refused(&["snapshot", "release", "t", "v@a"], &["v@a"]);
    cluster.refused(&["snapshot", "delete", "v@a"], &["--yes"]);
    cluster.refused(&["snapshot", "delete", "v@a", "--yes"], &["v@a"]);
    cluster.refused(&["snapshot", "delete", "v@a%b", "--yes"], &["v@a"]);
    cluster.ok(&["volume", "delete", "v", "--snapshots"]);
}
