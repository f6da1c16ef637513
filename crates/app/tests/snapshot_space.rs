//! The space of snapshots as users see it.

use crate::support;
use serde_json::{Value, json};
use support::{Cluster, MIB, Pools};

const MIRROR: [&str; 4] = ["--layout", "mirror", "--copies", "2"];

/// The bytes of a snapshot in a list.
fn bytes_of<'v>(listed: &'v Value, name: &str) -> &'v Value {
    let all = listed["snapshots"].as_array().unwrap();
    let found = all.iter().find(|it| it["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is not in {listed}"))
}

fn check_space(pools: Pools) {
    let cluster = Cluster::new(pools, 2);
    cluster.create("v", "16M", &MIRROR);
    let export = cluster.export(&["v"], "auto");
    export.io(&["write -P 1 0 4M", "flush"]);
    cluster.ok(&["snapshot", "create", "v@a"]);
    export.io(&["write -P 2 0 3M", "flush"]);
    cluster.ok(&["snapshot", "create", "v@b"]);
    export.io(&["write -P 3 2M 2M", "flush"]);

    let listed = cluster.json(&["snapshot", "list", "v", "--space"]);
    assert_eq!(listed["volume_bytes"], 4 * MIB, "{listed}");
    assert_eq!(listed["written_bytes"], 2 * MIB, "{listed}");
    // 3 MiB of a's own, 1 MiB of a and b, 1 MiB of b's own.
    assert_eq!(listed["snapshot_bytes"], 5 * MIB, "{listed}");
    let a = bytes_of(&listed, "a");
    assert_eq!(
        (&a["exclusive_bytes"], &a["shared_bytes"]),
        (&json!(3 * MIB), &json!(MIB))
    );
    assert_eq!(
        (&a["referenced_bytes"], &a["written_bytes"]),
        (&json!(4 * MIB), &json!(4 * MIB))
    );
    let b = bytes_of(&listed, "b");
    assert_eq!(
        (&b["exclusive_bytes"], &b["shared_bytes"]),
        (&json!(MIB), &json!(MIB))
    );
    assert_eq!(
        (&b["referenced_bytes"], &b["written_bytes"]),
        (&json!(4 * MIB), &json!(3 * MIB))
    );

    let freed = |names: &[&str]| {
        let args = [&["snapshot", "delete"], names, &["--dry-run"]].concat();
        cluster.json(&args)[0]["freed_bytes"].clone()
    };
    assert_eq!(freed(&["v@a"]), 3 * MIB);
    assert_eq!(freed(&["v@b"]), MIB);
    assert_eq!(freed(&["v@a%b"]), 5 * MIB);
    cluster.ok(&["snapshot", "delete", "v@a", "--yes"]);
    let listed = cluster.json(&["snapshot", "list", "v", "--space"]);
    assert_eq!(bytes_of(&listed, "b")["exclusive_bytes"], 2 * MIB);
    cluster.refused(&["snapshot", "delete", "v@a", "--dry-run"], &["v@a"]);
    export.stop();
}

#[test]
fn space_of_snapshots_adds_up() {
    check_space(Pools::Memory);
}

#[test]
fn space_of_snapshots_adds_up_on_disks() {
    check_space(Pools::Disk);
}
