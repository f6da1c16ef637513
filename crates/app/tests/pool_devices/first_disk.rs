//! A pool in memory gets its first disk while its brick runs, under load.

use super::support::{Cluster, Pools, until};
use super::{DeviceCluster, Load, REST_KIB, under_load};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MEMORY_MIB: u64 = 24;

/// Adds a new file on a disk behind the pool of a brick.
fn add(cluster: &Cluster, brick: usize, path: &Path) -> Value {
    let brick = format!("brick-{brick}");
    let path = path.to_str().unwrap();
    cluster.json(&["pool", "device", "add", &brick, path, "--size", "64M"])
}

/// Bricks in memory get disks one after the other, while a client writes. All that was written is read back, also after a
/// restart.
fn check(bricks: usize, layout: &[&str], transport: &str) {
    let disks = Pools::Disk.dir();
    let cluster = Cluster::with_pools(Pools::Memory, &vec![MEMORY_MIB; bricks]);
    cluster.create("disk", "40M", layout);
    let mut bed = DeviceCluster { cluster };
    let paths: Vec<PathBuf> = (0..bricks)
        .map(|brick| disks.path().join(format!("disk-{brick}")))
        .collect();
    let pids: Vec<u32> = (0..bricks).map(|it| bed.cluster.brick(it).pid()).collect();
    let export = bed.cluster.export(&["disk"], transport);
    let mut load = Load::new();
    under_load(&export, &mut load, || {
        for (brick, path) in paths.iter().enumerate() {
            assert_eq!(add(&bed.cluster, brick, path)["state"], "active");
            export.await_state("healthy");
        }
        // More than memory has room for. In small parts, because several large requests need all of so small a memory at once.
        let (at, len) = REST_KIB;
        let parts = (at..at + len).step_by(64);
        let mut rest: Vec<String> = parts.map(|at| format!("write -P 0x77 {at}k 64k")).collect();
        rest.push("flush".to_owned());
        export.io(&rest.iter().map(String::as_str).collect::<Vec<_>>());
    });
    load.verify(&export);
    for (brick, pid) in pids.iter().enumerate() {
        assert_eq!(bed.cluster.brick(brick).pid(), *pid);
    }
    assert_eq!(bed.list().len(), 2);
    assert!(!bed.events("device-added").is_empty());
    let has_tier = |brick: &Value| brick["tier"]["flash_bytes"].as_u64() > Some(0);
    until("heartbeats report the tiers", || {
        let list = bed.cluster.json(&["brick", "list"]);
        list.as_array().unwrap().iter().all(has_tier)
    });
    // Memory has no room for all.
    let refused = [
        "pool",
        "device",
        "drain",
        "brick-0",
        paths[0].to_str().unwrap(),
    ];
    bed.cluster.refused(&refused, &["free", "add a device"]);
    for brick in 0..bricks {
        bed.cluster.kill_brick(brick);
        if bricks > 1 {
            load.verify(&export);
        }
        bed.cluster.restart_brick(brick);
        bed.cluster.await_bricks(bricks);
        export.await_state("healthy");
    }
    load.verify(&export);
    export.stop();
}

#[test]
fn one_leg_waits_while_memory_pool_gets_a_disk() {
    check(1, &["--layout", "concat"], "tcp");
}

#[test]
fn mapped_leg_waits_while_memory_pool_gets_a_disk() {
    check(1, &["--layout", "concat"], "map");
}

#[test]
fn mirror_goes_on_while_memory_pools_get_disks() {
    check(2, &["--layout", "mirror", "--copies", "2"], "tcp");
}

#[test]
fn mapped_mirror_goes_on_while_memory_pools_get_disks() {
    check(2, &["--layout", "mirror", "--copies", "2"], "map");
}

#[test]
fn refused_first_disk_costs_no_connection() {
    let disks = Pools::Disk.dir();
    let cluster = Cluster::with_pools(Pools::Memory, &[MEMORY_MIB]);
    let bed = DeviceCluster { cluster };
    let taken = disks.path().join("taken");
    std::fs::write(&taken, "data").unwrap();
    let args = ["pool", "device", "add", "brick-0"];
    let taken = taken.to_str().unwrap();
    bed.cluster
        .refused(&[&args[..], &[taken, "--size", "64M"]].concat(), &[taken]);
    let pool = bed.cluster.pool(0).to_str().unwrap();
    bed.cluster
        .refused(&[&args[..], &[pool]].concat(), &["device of this pool"]);
    assert!(!bed.cluster.brick(0).log().contains("opened again"));
    assert_eq!(std::fs::read(taken).unwrap(), b"data");
}

#[test]
fn disk_behind_memory_is_drained_into_free_memory() {
    let disks = Pools::Disk.dir();
    let cluster = Cluster::with_pools(Pools::Memory, &[MEMORY_MIB]);
    cluster.create("disk", "40M", &["--layout", "concat"]);
    let bed = DeviceCluster { cluster };
    let path = disks.path().join("disk");
    add(&bed.cluster, 0, &path);
    let export = bed.cluster.export(&["disk"], "map");
    // Some pages move to the disk, and memory has room for them once others are discarded.
    export.io(&["write -P 7 0 36M", "flush", "discard 4M 32M", "flush"]);
    let drain = [
        "pool",
        "device",
        "drain",
        "brick-0",
        path.to_str().unwrap(),
        "--wait",
    ];
    assert_eq!(bed.cluster.json(&drain)["state"], "removed");
    export.io(&["read -P 7 0 4M", "write -P 8 4M 8M", "read -P 8 4M 8M"]);
    assert_eq!(bed.list().len(), 1);
    // Clients took the pool for one without a tier.
    let next = disks.path().join("next");
    add(&bed.cluster, 0, &next);
    assert_eq!(bed.list().len(), 2);
    let log = bed.cluster.brick(0).log();
    assert_eq!(log.matches("opened again for its first disk").count(), 2);
    export.io(&["read -P 7 0 4M", "read -P 8 4M 8M"]);
    export.stop();
}
