//! `pagemesh clone` as users and programs call it.

use crate::snapshots::counters;
use crate::support;
use counters::{CounterLoad, EndGuard, SLOTS, prefix_of};
use std::fs;
use support::mounted::{self, TestMount};
use support::{Cluster, Pools, program};

const MIRROR: [&str; 4] = ["--layout", "mirror", "--copies", "2"];

/// The bytes of a volume or snapshot.
fn image_of(cluster: &Cluster, name: &str, transport: &str) -> Vec<u8> {
    let export = cluster.export(&[name], transport);
    let file = cluster.dir().join("image");
    program::ok("nbdcopy", &[&export.uri, file.to_str().unwrap()]);
    export.stop();
    let bytes = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    bytes
}

/// Clones a volume that is being written, writes the clone, promotes it meanwhile, and deletes the origin.
fn check_clone_under_load(pools: Pools, bricks: usize, layout: &[&str], transport: &str) {
    let mut cluster = Cluster::new(pools, bricks);
    cluster.create("v", "8M", layout);
    let export = cluster.export(&["v"], transport);
    let load = CounterLoad::new();
    let (seen, pages) = std::thread::scope(|scope| {
        let _guard = EndGuard(&load.is_over);
        let (load, socket) = (&load, export.socket());
        scope.spawn(move || load.run(&socket, "v"));
        load.await_more(SLOTS);
        cluster.ok(&["snapshot", "create", "v@s"]);
        load.await_more(SLOTS);
        cluster.ok(&["clone", "create", "v@s", "c"]);
        load.await_more(SLOTS);
        let seen = image_of(&cluster, "v@s", transport);
        assert!(
            image_of(&cluster, "c", transport) == seen,
            "the clone differs"
        );
        (prefix_of(&seen), seen)
    });
    cluster.refused(
        &["snapshot", "delete", "v@s", "--yes"],
        &["c", "clone promote"],
    );
    let clone = cluster.export(&["c"], transport);
    clone.io(&["write -P 7 4M 256k", "discard 5M 64k", "flush"]);
    assert!(
        image_of(&cluster, "v@s", transport) == pages,
        "the snapshot changed"
    );
    cluster.ok(&["snapshot", "create", "c@own"]);
    cluster.ok(&["clone", "create", "c@own", "d"]);
    cluster.refused(&["clone", "promote", "c"], &["d"]);
    clone.io(&["write -P 8 4M 64k", "flush"]);
    cluster.ok(&["clone", "promote", "d"]);
    cluster.ok(&["clone", "promote", "c"]);
    let live = prefix_of(&image_of(&cluster, "v", transport));
    assert!(live > seen && live == load.acknowledged(), "{live}");
    export.stop();
    cluster.ok(&["volume", "delete", "v", "--snapshots"]);
    clone.io(&[
        "read -P 8 4M 64k",
        "read -P 7 4160k 192k",
        "read -P 0 5M 64k",
    ]);
    clone.stop();
    for brick in 0..bricks {
        cluster.stop_brick(brick);
        cluster.restart_brick(brick);
    }
    cluster.await_bricks(bricks);
    let mut expected = pages;
    expected[4 << 20..][..256 << 10].fill(7);
    expected[5 << 20..][..64 << 10].fill(0);
    assert!(
        image_of(&cluster, "d", transport) == expected,
        "the clone of the clone"
    );
    expected[4 << 20..][..64 << 10].fill(8);
    assert!(image_of(&cluster, "c", transport) == expected, "the clone");
    cluster.check_identical("c");
    cluster.check_identical("d");
}

#[test]
fn clone_of_busy_volume_stands_alone_on_map() {
    check_clone_under_load(Pools::Memory, 2, &MIRROR, "map");
}

#[test]
fn clone_of_busy_volume_stands_alone_on_tcp() {
    check_clone_under_load(Pools::Memory, 2, &MIRROR, "tcp");
}

#[test]
fn clone_of_busy_volume_stands_alone_on_disks() {
    check_clone_under_load(Pools::Disk, 2, &MIRROR, "auto");
}

#[test]
fn clone_of_several_columns_stands_alone() {
    let layout = [
        "--layout",
        "stripe-mirror",
        "--columns",
        "2",
        "--copies",
        "2",
    ];
    check_clone_under_load(Pools::Memory, 4, &layout, "map");
}

#[test]
fn clone_takes_no_space_and_is_listed() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "16M", &MIRROR);
    let export = cluster.export(&["v"], "auto");
    export.io(&["write -P 3 0 16M", "flush"]);
    cluster.ok(&["snapshot", "create", "v@s"]);
    export.stop();
    let used = |cluster: &Cluster| {
        let listed = cluster.json(&["brick", "list"]);
        let bricks = listed.as_array().unwrap().clone();
        let used = bricks
            .iter()
            .map(|brick| brick["used_bytes"].as_u64().unwrap());
        used.sum::<u64>()
    };
    let before = used(&cluster);
    cluster.ok(&["clone", "create", "v@s", "c"]);
    // Eight leaves and three nodes on each brick, and free grants that were not counted before.
    assert!(used(&cluster) < before + (8 << 20), "{before}");
    let listed = cluster.json(&["clone", "list"]);
    assert_eq!(listed[0]["name"], "c", "{listed}");
    assert_eq!(listed[0]["origin"]["snapshot"], "s", "{listed}");
    let shown = cluster.ok(&["snapshot", "list"]);
    assert!(shown.contains("CLONES") && shown.contains('c'), "{shown}");
    cluster.refused(&["clone", "create", "v@s", "c"], &["c", "already"]);
    cluster.refused(
        &["clone", "create", "v@none", "d"],
        &["v@none", "snapshot list"],
    );
    cluster.refused(&["clone", "promote", "v"], &["v", "no clone"]);
    cluster.ok(&["volume", "delete", "c"]);
    cluster.ok(&["snapshot", "delete", "v@s", "--yes"]);
    assert_eq!(
        cluster.json(&["clone", "list"]).as_array().unwrap().len(),
        0
    );
}

#[test]
fn cloned_file_system_is_mounted_beside_its_origin() {
    let Some(cluster) = mounted::cluster(&[256, 256], "48M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    mount.sh("mkdir d; head -c 3000001 /dev/urandom > d/one; cp d/one copy; sync");
    cluster.ok(&["snapshot", "create", "files@s"]);
    cluster.ok(&["clone", "create", "files@s", "other"]);
    mount.sh("rm copy; echo 1 > mine; sync");
    let mounted = || TestMount::try_new(&cluster, "other", "other", "auto", "auto");
    let other = mounted().unwrap_or_else(|ended| panic!("no mount: {ended:?}"));
    other.sh("cmp d/one copy; test ! -e mine; echo 2 > theirs; cp d/one d/two; rm d/one; sync");
    mount.sh("test ! -e theirs; test -e d/one");
    cluster.ok(&["clone", "promote", "other"]);
    other.sh("cmp d/two copy");
    other.stop(&cluster);
    mount.sh("test -e mine; test ! -e d/two");
    mount.stop(&cluster);
    cluster.ok(&["snapshot", "delete", "files@s", "--yes"]);
    let other = mounted().unwrap_or_else(|ended| panic!("no mount: {ended:?}"));
    other.sh("cmp d/two copy; test -e theirs");
    other.stop(&cluster);
}
