//! `pagemesh pool create --flash`: a pool in memory with a disk behind it.

use crate::support;
use serde_json::{Value, json};
use support::mounted::{TestMount, may_mount};
use support::{Cluster, Pools, program, until};
use tempfile::TempDir;

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

/// A cluster of bricks with 32 MiB of memory before 160 MiB on a disk.
struct TierCluster {
    cluster: Cluster,
    _disks: TempDir,
}

impl TierCluster {
    fn new(bricks: usize) -> TierCluster {
        TierCluster::with_memory(bricks, &["32M"])
    }

    /// The size of the memory, and further arguments of `pool create`.
    fn with_memory(bricks: usize, memory: &[&str]) -> TierCluster {
        let mut cluster = Cluster::with_pools(Pools::Memory, &[]);
        let disks = Pools::Disk.dir();
        for number in 0..bricks {
            let disk = disks.path().join(format!("disk-{number}"));
            let flash = ["--flash", disk.to_str().unwrap(), "--flash-size", "160M"];
            cluster.add_brick(memory[0], &[&flash[..], &memory[1..]].concat(), true);
        }
        cluster.await_bricks(bricks);
        TierCluster {
            cluster,
            _disks: disks,
        }
    }

    fn stat(&self, names: &[&str]) -> Value {
        self.cluster.json(&[&["tier", "stat"], names].concat())
    }

    /// Waits until the bricks of a volume have these effects.
    fn await_effects(&self, volume: &str, wanted: &[&str]) {
        until(&format!("{volume} is {wanted:?}"), || {
            let stat = self.stat(&[volume]);
            let bricks = stat["volumes"][0]["bricks"].as_array().unwrap();
            let effects = bricks.iter().map(|it| it["effect"].as_str().unwrap());
            effects.eq(wanted.iter().copied())
        });
    }

    fn figure(&self, name: &str) -> u64 {
        let stat = self.stat(&["brick-0"]);
        stat["bricks"][0]["tier"][name].as_u64().unwrap()
    }
}

#[test]
fn pinned_volume_stays_in_memory_across_restarts() {
    let mut tiers = TierCluster::new(1);
    let cluster = &tiers.cluster;
    cluster.create("hot", "4M", &["--layout", "concat", "--tier", "memory"]);
    cluster.create("cold", "96M", &["--layout", "concat"]);
    tiers.await_effects("hot", &["applied"]);
    let hot = cluster.export(&["hot"], "tcp");
    hot.io(&["write -P 7 0 4M", "flush"]);
    let cold = cluster.export(&["cold"], "tcp");
    let writes = commands("write");
    cold.io(&writes.iter().map(String::as_str).collect::<Vec<_>>());
    until("demotions are reported", || {
        tiers.figure("demoted_pages") > 0
    });
    until("the pages of both are counted", || {
        let held = |volume| tiers.stat(&[volume])["volumes"][0]["held"].clone();
        let of_cold = held("cold")["flash_bytes"].as_u64();
        let of_hot = json!({"memory_bytes": 4 << 20, "flash_bytes": 0});
        held("hot") == of_hot && of_cold.is_some_and(|bytes| bytes >= 64 << 20)
    });
    tiers.cluster.stop_manager();
    tiers.cluster.kill_brick(0);
    tiers.cluster.start_manager();
    tiers.cluster.restart_brick(0);
    tiers.cluster.await_bricks(1);
    hot.await_state("healthy");
    cold.await_state("healthy");
    tiers.await_effects("hot", &["applied"]);
    cold.io(&writes.iter().map(String::as_str).collect::<Vec<_>>());
    let touched = |tiers: &TierCluster| ["recent_hits", "recent_misses"].map(|it| tiers.figure(it));
    // The brick was started less than a minute ago, and only these reads were sent to it.
    hot.io(&["read -P 7 0 4M"]);
    until("the reads are reported", || touched(&tiers)[0] >= 1024);
    assert_eq!(touched(&tiers)[1], 0, "no read went to flash");
    hot.stop();
    cold.stop();
}

#[test]
fn policy_reaches_a_leg_that_was_away() {
    let mut tiers = TierCluster::new(2);
    tiers.cluster.create("v", "4M", &[]);
    tiers.cluster.kill_brick(1);
    tiers.cluster.await_bricks(1);
    let said = tiers.cluster.ok(&["tier", "pin", "v"]);
    assert!(said.contains("dead") && said.contains("brick-1"), "{said}");
    tiers.cluster.restart_brick(1);
    let both = ["applied", "applied"];
    tiers.await_effects("v", &both);
    // A copy that is made later obeys, too.
    let unpinned = tiers.cluster.json(&["tier", "unpin", "v"]);
    assert_eq!(unpinned["policy"], "auto");
    tiers.await_effects("v", &both);
    tiers.cluster.ok(&["tier", "prefer", "v", "flash"]);
    tiers.await_effects("v", &both);
}

/// The bricks of volumes and bricks have the same UUIDs, and a shortened one finds its brick.
fn check_ids(tiers: &TierCluster, stat: &Value) {
    let id = &stat["bricks"][0]["brick"];
    let legs = stat["volumes"][0]["bricks"].as_array().unwrap();
    assert!(legs.iter().any(|leg| leg["brick"] == *id), "{stat}");
    let short = &id.as_str().unwrap()[..8];
    assert_eq!(tiers.stat(&[short])["bricks"][0]["brick"], *id);
}

#[test]
fn tier_stat_has_its_fields_and_names_errors() {
    let mut tiers = TierCluster::new(1);
    tiers.cluster.add_brick("16M", &[], true);
    tiers.cluster.await_bricks(2);
    let cluster = &tiers.cluster;
    cluster.create("v", "4M", &[]);
    let said = cluster.ok(&["tier", "pin", "v"]);
    assert!(
        said.contains("no disk") && said.contains("brick-1"),
        "{said}"
    );
    tiers.await_effects("v", &["applied", "no-tier"]);
    let stat = tiers.stat(&[]);
    assert_eq!(stat["volumes"][0]["volume"], "v");
    assert_eq!(stat["volumes"][0]["policy"], "memory");
    let bricks = stat["bricks"].as_array().unwrap();
    assert_eq!(bricks.len(), 1, "only those with a tier: {stat}");
    assert_eq!(
        (&bricks[0]["name"], &bricks[0]["alive"]),
        (&"brick-0".into(), &true.into())
    );
    check_ids(&tiers, &stat);
    let tier = bricks[0]["tier"].as_object().unwrap();
    let fields: Vec<&str> = tier.keys().map(String::as_str).collect();
    let wanted = [
        "abandoned_moves",
        "demoted_pages",
        "flash_bytes",
        "flash_free_bytes",
        "hit_ratio",
        "memory_bytes",
        "memory_free_bytes",
        "policies",
        "promoted_pages",
        "recent_hits",
        "recent_misses",
        "waits",
    ];
    assert_eq!(fields, wanted);
    assert_eq!(tiers.stat(&["brick-1"])["bricks"][0]["tier"], Value::Null);
    until("the pages are counted", || {
        tiers.stat(&["v"])["volumes"][0]["held"] == json!({"memory_bytes": 0, "flash_bytes": 0})
    });
    let text = cluster.ok(&["tier", "stat"]);
    let wanted = ["brick-0", "memory"];
    assert!(wanted.iter().all(|it| text.contains(it)), "{text}");
    cluster.refused(
        &["tier", "stat", "nothing"],
        &["nothing", "pagemesh status"],
    );
    cluster.refused(
        &["tier", "pin", "nothing"],
        &["nothing", "pagemesh volume list"],
    );
    let wrong = cluster.run(&["tier", "prefer", "v", "disk"]);
    let error = String::from_utf8(wrong.stderr).unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{error}");
    assert!(error.contains("auto, memory, flash"), "{error}");
}

#[test]
fn viewer_may_not_change_a_tier() {
    let cluster = Cluster::with_pools(Pools::Memory, &[16]);
    cluster.create("v", "4M", &["--layout", "concat"]);
    let made = cluster.json(&["token", "create", "--name", "looker", "--role", "viewer"]);
    let mut command = cluster.command(&["tier", "pin", "v"]);
    command.env("PAGEMESH_TOKEN", made["token"].as_str().unwrap());
    let refused = command.env_remove("PAGEMESH_KEY").output().unwrap();
    program::refused("a viewer", &refused, &["operator"]);
    assert_eq!(
        cluster.json(&["volume", "show", "v"])["info"]["tier"],
        "auto"
    );
}

/// The pin goes all the way: attribute, mount, wire, brick.
#[test]
fn files_of_pinned_directory_stay_in_memory() {
    const HOT_BYTES: u64 = 4 << 20;
    if !may_mount() {
        return;
    }
    // Each thread of the mount has a session.
    let tiers = TierCluster::with_memory(1, &["64M", "--sessions", "40"]);
    let cluster = &tiers.cluster;
    cluster.ok(&["fs", "create", "files", "--size", "64M", "--copies", "1"]);
    cluster.create("cold", "96M", &["--layout", "concat"]);
    let cold = cluster.export(&["cold"], "tcp");
    let writes = commands("write");
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    let mount = TestMount::new(cluster, "files", "tcp");
    mount.sh("mkdir hot");
    let hot = mount.path("hot");
    let hot = hot.to_str().unwrap();
    let pinned = cluster.json(&["tier", "pin", hot]);
    assert_eq!(
        (&pinned["tier"], &pinned["entries"]),
        (&json!("memory"), &json!(1))
    );
    mount.sh(
        "head -c 4M /dev/urandom > hot/data; head -c 4M /dev/urandom > other; sync hot/data other",
    );
    let data = format!("{hot}/data");
    let stat = cluster.json(&["tier", "stat", &data, mount.path("other").to_str().unwrap()]);
    assert_eq!(
        (&stat[0]["tier"], &stat[1]["tier"]),
        (&json!("memory"), &json!("auto"))
    );
    let held = || {
        let stat = tiers.stat(&["files"]);
        ["memory_bytes", "flash_bytes"]
            .map(|it| stat["volumes"][0]["held"][it].as_u64().unwrap_or(0))
    };
    until("the other file is on flash", || {
        cold.io(&writes);
        held()[1] >= HOT_BYTES
    });
    assert!(held()[0] >= HOT_BYTES, "{:?}", held());
    let unpinned = cluster.json(&["tier", "unpin", hot, "--recursive"]);
    assert_eq!(unpinned["read_bytes"], json!(HOT_BYTES));
    until("the directory is on flash, too", || {
        cold.io(&writes);
        held()[0] < HOT_BYTES / 2
    });
    let refused = cluster.run(&["tier", "pin", cluster.dir().to_str().unwrap()]);
    program::refused("no mount", &refused, &["no file system of pagemesh"]);
    mount.stop(cluster);
    cold.stop();
}
