//! `pagemesh pool device`: devices join and leave the pool of a running brick, under load, and its restart in the middle of
//! a drain.

mod first_disk;

use crate::support;
use pagemesh_base::rng::SplitMix64;
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use support::{Cluster, Export, Pools, program, until};

/// Blocks of 64 KiB that the load writes.
const LOAD_BLOCKS: u64 = 256;
const BLOCK_KIB: u64 = 64;
/// The rest of the volume, in KiB.
const REST_KIB: (u64, u64) = (LOAD_BLOCKS * BLOCK_KIB, 24 << 10);

struct DeviceCluster {
    cluster: Cluster,
}

impl DeviceCluster {
    /// A brick with a pool of 24 MiB, and a volume of 40 MiB on it.
    fn new() -> DeviceCluster {
        let cluster = Cluster::with_pools(Pools::Disk, &[24]);
        cluster.create("disk", "40M", &["--layout", "concat"]);
        DeviceCluster { cluster }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.pool(0).parent().unwrap().join(name)
    }

    fn add(&self, name: &str, size: &str) -> Value {
        let path = self.path(name);
        let args = ["pool", "device", "add", "brick-0", path.to_str().unwrap()];
        self.cluster.json(&[&args[..], &["--size", size]].concat())
    }

    fn list(&self) -> Vec<Value> {
        let list = self.cluster.json(&["pool", "device", "list", "brick-0"]);
        list.as_array().unwrap().clone()
    }

    fn find(&self, name: &str) -> Option<Value> {
        let path = self.path(name);
        let is_it = |device: &Value| device["path"].as_str() == path.to_str();
        self.list().into_iter().find(is_it)
    }

    fn drain(&self, name: &str, args: &[&str]) -> Value {
        let path = self.path(name);
        let head = ["pool", "device", "drain", "brick-0", path.to_str().unwrap()];
        self.cluster.json(&[&head[..], args].concat())
    }

    fn events(&self, kind: &str) -> Vec<Value> {
        let events = self.cluster.json(&["events"]);
        let events = events.as_array().unwrap().iter();
        events.filter(|it| it["kind"] == kind).cloned().collect()
    }
}

fn is_locked(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err()
}

/// The contents of the blocks that a load writes.
struct Load {
    fills: Vec<u8>,
    rng: SplitMix64,
}

impl Load {
    fn new() -> Load {
        Load {
            fills: vec![0; LOAD_BLOCKS as usize],
            rng: SplitMix64::new(5),
        }
    }

    /// Writes random blocks until told to stop.
    fn run(&mut self, export: &Export, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            let writes: Vec<String> = (0..16)
                .map(|_| {
                    let (block, fill) = (self.rng.below(LOAD_BLOCKS), 1 + self.rng.below(250));
                    self.fills[block as usize] = fill as u8;
                    format!("write -P {fill} {}k {BLOCK_KIB}k", block * BLOCK_KIB)
                })
                .collect();
            let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
            export.io(&writes);
        }
    }

    fn verify(&self, export: &Export) {
        let reads = self.fills.iter().enumerate().map(|(block, fill)| {
            let at = block as u64 * BLOCK_KIB;
            format!("read -P {fill} {at}k {BLOCK_KIB}k")
        });
        let (at, len) = REST_KIB;
        let reads: Vec<String> = reads
            .chain([format!("read -P 0x77 {at}k {len}k")])
            .collect();
        let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
        export.io(&reads);
    }
}

/// Does some work while a load runs.
fn under_load<T>(export: &Export, load: &mut Load, work: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| load.run(export, &is_over));
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        done
    })
}

#[test]
fn pool_grows_and_shrinks_under_load() {
    let mut bed = DeviceCluster::new();
    let export = bed.cluster.export(&["disk"], "tcp");
    let mut load = Load::new();
    under_load(&export, &mut load, || {
        assert_eq!(bed.add("second", "48M")["state"], "active");
        let (at, len) = REST_KIB;
        export.io(&[&format!("write -P 0x77 {at}k {len}k"), "flush"]);
    });
    until("a heartbeat reports the use of the second device", || {
        bed.find("second").unwrap()["used_bytes"].as_u64() > Some(8 << 20)
    });
    let drained = under_load(&export, &mut load, || {
        bed.add("third", "48M");
        bed.drain("second", &["--wait"])
    });
    assert_eq!(drained["state"], "removed");
    assert_eq!(bed.find("second"), None);
    until("the drained file is unlocked", || {
        !is_locked(&bed.path("second"))
    });
    load.verify(&export);
    for kind in ["device-added", "device-drain-started", "device-drained"] {
        assert!(!bed.events(kind).is_empty(), "{kind}");
    }

    // The brick dies in the middle of the next drain, or soon after it.
    bed.add("fourth", "48M");
    bed.drain("third", &[]);
    bed.cluster.kill_brick(0);
    bed.cluster.restart_brick(0);
    bed.cluster.await_bricks(1);
    until("the drain ends", || bed.find("third").is_none());
    export.await_state("healthy");
    load.verify(&export);
    assert_eq!(bed.list().len(), 2);
    export.stop();
    bed.cluster.stop_brick(0);
    let pool = bed.cluster.pool(0).to_str().unwrap();
    bed.cluster.ok(&["pool", "check", pool]);
}

#[test]
fn impossible_change_of_devices_is_refused() {
    let bed = DeviceCluster::new();
    let cluster = &bed.cluster;
    bed.add("second", "8M");
    let path = |name: &str| bed.path(name).to_str().unwrap().to_owned();
    let (second, absent, small) = (path("second"), path("absent"), path("small"));
    let add = |place: &str, size: &[&str], parts: &[&str]| {
        let args = ["pool", "device", "add", "brick-0", place];
        cluster.refused(&[&args[..], size].concat(), parts);
    };
    add(&absent, &[], &[&absent, "does not exist", "give a size"]);
    add(&small, &["--size", "1M"], &["at least 2 MiB"]);
    add(
        &second,
        &["--size", "8M"],
        &[&second, "of this pool already"],
    );
    add("relative", &["--size", "8M"], &["absolute path"]);
    let pool = cluster.pool(0).to_str().unwrap();
    add(pool, &["--size", "8M"], &[pool, "of this pool already"]);
    assert!(!bed.events("device-refused").is_empty());
    let drain = |device: &str, args: &[&str], parts: &[&str]| {
        let head = ["pool", "device", "drain", "brick-0", device];
        cluster.refused(&[&head[..], args].concat(), parts);
    };
    drain("ffffffff-0000", &[], &["has no device ffffffff-0000"]);
    drain(pool, &[], &["first device", "journals and tables"]);
    drain(&second, &["--cancel"], &["is not draining"]);
    let export = cluster.export(&["disk"], "tcp");
    export.io(&["write -P 1 0 24M", "flush"]);
    drain(&second, &[], &["free", "add a device"]);
    cluster.refused(
        &["pool", "device", "list", "nobody"],
        &["no brick nobody", "pagemesh status"],
    );
}

#[test]
fn operator_may_drain_but_not_add_a_device() {
    let bed = DeviceCluster::new();
    bed.add("second", "8M");
    let made = ["token", "create", "--name", "op", "--role", "operator"];
    let made = bed.cluster.json(&made);
    let token = made["token"].as_str().unwrap();
    let run = |args: &[&str]| {
        let mut command = bed.cluster.command(&[&["pool", "device"], args].concat());
        command
            .env("PAGEMESH_TOKEN", token)
            .env_remove("PAGEMESH_KEY");
        command.output().unwrap()
    };
    let (second, third) = (bed.path("second"), bed.path("third"));
    let add = ["add", "brick-0", third.to_str().unwrap(), "--size", "8M"];
    program::refused("add", &run(&add), &["admin"]);
    assert!(!third.exists());
    let drain = ["drain", "brick-0", second.to_str().unwrap(), "--wait"];
    program::succeeded("drain", run(&drain));
    assert_eq!(bed.list().len(), 1);
    let drained = bed.events("device-drain-started");
    assert!(drained.iter().all(|it| it["actor"] == "op"), "{drained:?}");
}

fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {out:?}");
    String::from_utf8(out.stdout).unwrap().trim().into()
}

/// A block device that is larger than the memory below it: its writes fail once that is full.
struct ThinDevice {
    path: PathBuf,
    mount: PathBuf,
}

impl ThinDevice {
    const BYTES: u64 = 32 << 20;

    fn new(mount: PathBuf) -> ThinDevice {
        std::fs::create_dir(&mount).unwrap();
        let at = mount.to_str().unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=4m", "none", at]);
        let below = mount.join("below");
        File::create(&below)
            .and_then(|file| file.set_len(ThinDevice::BYTES))
            .unwrap();
        let path = run("losetup", &["--find", "--show", below.to_str().unwrap()]);
        ThinDevice {
            path: path.into(),
            mount,
        }
    }
}

impl Drop for ThinDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
    }
}

/// Scrubs the exported volume once.
fn scrub(export: &Export) {
    let passes = || {
        export.daemon.signal("USR1");
        let status: Value = serde_json::from_str(&export.daemon.line()).unwrap();
        status["scrub"]["passes"].as_u64().unwrap()
    };
    let before = passes();
    export.daemon.signal("USR2");
    until("the scrub ends", || passes() > before);
}

#[test]
fn brick_goes_on_when_a_further_device_fails() {
    if !rustix::process::geteuid().is_root() {
        support::skip::skip("loop devices are made by root");
        return;
    }
    let cluster = Cluster::with_pools(Pools::Disk, &[24, 64]);
    cluster.create("disk", "40M", &["--layout", "mirror", "--copies", "2"]);
    let mut bed = DeviceCluster { cluster };
    let thin = ThinDevice::new(bed.path("thin"));
    let path = thin.path.to_str().unwrap();
    bed.cluster
        .json(&["pool", "device", "add", "brick-0", path]);
    let pid = bed.cluster.brick(0).pid();
    let export = bed.cluster.export(&["disk"], "tcp");
    let blocks = || (0..9).map(|block| (block, format!("{} {}M 4M", block + 1, block * 4)));
    for (_, block) in blocks() {
        export.io(&[&format!("write -P {block}"), "flush"]);
    }
    let state = |bed: &DeviceCluster| bed.find(path).map(|it| it["state"].clone());
    until("the device has failed", || {
        state(&bed) == Some("failed".into())
    });
    assert_eq!(bed.cluster.brick(0).pid(), pid);
    assert!(!bed.events("device-failed").is_empty());
    // The first error was survived with the device, and the second one without it.
    assert_eq!(bed.find(path).unwrap()["errors"], 2);
    // Another device takes the pages, and a scrub repairs the damaged ones from the other copy.
    bed.add("third", "64M");
    export.await_state("healthy");
    scrub(&export);
    bed.cluster
        .ok(&["pool", "device", "drain", "brick-0", path, "--wait"]);
    assert_eq!(state(&bed), None);
    bed.cluster.kill_brick(1);
    for (_, block) in blocks() {
        export.io(&[&format!("read -P {block}")]);
    }
    let log = bed.cluster.brick(0).log();
    assert!(log.contains("is used once more") && log.contains("opened again"));
    export.stop();
}
