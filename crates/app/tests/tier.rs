//! `pagemesh pool create --flash`: a pool in memory with a disk behind it.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use support::{Cluster, Pools};

/// Three times the memory of the pool.
const SET_MIB: u64 = 96;

/// Commands for each MiB of the set, which has a byte of its own.
fn commands(verb: &str) -> Vec<String> {
    let command = |at| format!("{verb} -P {} {at}M 1M", 1 + at);
    (0..SET_MIB).map(command).collect()
}

#[test]
fn set_larger_than_memory_survives_a_killed_brick() {
    let mut cluster = Cluster::with_pools(Pools::Memory, &[]);
    let disks = Pools::Disk.dir();
    let disk = disks.path().join("disk");
    let flash = ["--flash", disk.to_str().unwrap(), "--flash-size", "160M"];
    cluster.add_brick("32M", &flash, true);
    cluster.await_bricks(1);
    cluster.create("set", &format!("{SET_MIB}M"), &["--layout", "concat"]);
    let export = cluster.export(&["set"], "auto");
    let (writes, reads) = (commands("write"), commands("read"));
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    export.io(&writes);
    export.io(&["flush"]);
    cluster.kill_brick(0);
    cluster.restart_brick(0);
    cluster.await_bricks(1);
    export.await_state("healthy");
    export.io(&reads);
    export.stop();
}

#[test]
fn disk_behind_a_pool_on_a_disk_is_refused() {
    let cluster = Cluster::with_pools(Pools::Disk, &[]);
    let disks = Pools::Disk.dir();
    let [pool, disk] = ["pool", "disk"].map(|name| disks.path().join(name));
    let [pool, disk_text] = [&pool, &disk].map(|path| path.to_str().unwrap());
    let create = ["pool", "create", pool, "--size", "16M"];
    let flash = ["--flash", disk_text, "--flash-size", "16M"];
    let parts = [pool, "file-sync", "pool device add"];
    cluster.refused(&[&create[..], &flash].concat(), &parts);
    assert!(!disk.exists());
}
