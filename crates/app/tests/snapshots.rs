//! `pagemesh snapshot` as users and programs call it.

pub mod counters;

use crate::faults::nbd as wire;
use crate::support;
use counters::{CounterLoad, EndGuard, SLOTS, prefix_of};
use serde_json::json;
use std::fs;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::mounted::{self, CLASSIC, TestMount};
use support::{Cluster, Export, MIB, Pools, program};
use wire::{Command, NbdConnection};

const PAGE: u64 = 4096;
/// EPERM of the NBD specification: a change of a read-only export.
const EPERM: u32 = 1;
const MIRROR: [&str; 4] = ["--layout", "mirror", "--copies", "2"];

/// The bytes of an export.
fn image_of(cluster: &Cluster, uri: &str, name: &str) -> Vec<u8> {
    let file = cluster.dir().join(name);
    let shown = file.to_str().unwrap();
    program::ok("nbdcopy", &[uri, shown]);
    let bytes = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    bytes
}

/// Reads a snapshot through an export of its own.
fn snapshot_image(cluster: &Cluster, snapshot: &str, transport: &str) -> Vec<u8> {
    let export = cluster.export(&[snapshot], transport);
    let image = image_of(cluster, &export.uri, "snapshot.img");
    export.stop();
    image
}

/// Takes snapshots under a load, and reads each of them, at once and at the end.
fn check_snapshots_under_load(pools: Pools, bricks: usize, layout: &[&str], transport: &str) {
    let cluster = Cluster::new(pools, bricks);
    cluster.create("v", "8M", layout);
    let export = cluster.export(&["v"], transport);
    let load = CounterLoad::new();
    let mut taken = Vec::new();
    std::thread::scope(|scope| {
        let _guard = EndGuard(&load.is_over);
        let (load, socket) = (&load, export.socket());
        scope.spawn(move || load.run(&socket, "v"));
        for number in 0..6 {
            load.await_more(SLOTS);
            let name = format!("v@s{number}");
            let before = load.acknowledged();
            cluster.ok(&["snapshot", "create", &name]);
            let after = load.sent.load(Ordering::SeqCst);
            let image = snapshot_image(&cluster, &name, transport);
            let last = prefix_of(&image);
            assert!(
                (before..=after).contains(&last),
                "{before}..={after}: {last}"
            );
            taken.push((name, image));
        }
        load.await_more(SLOTS);
    });
    for (name, image) in &taken {
        let again = snapshot_image(&cluster, name, "auto");
        assert!(again == *image, "{name} has changed");
    }
    let live = image_of(&cluster, &export.uri, "v.img");
    assert_eq!(prefix_of(&live), load.acknowledged());
    // The load's client was not fenced.
    export.stop();
    cluster.check_identical("v");
}

#[test]
fn snapshots_under_load_hold_prefixes_on_map() {
    check_snapshots_under_load(Pools::Memory, 2, &MIRROR, "map");
}

#[test]
fn snapshots_under_load_hold_prefixes_on_tcp() {
    check_snapshots_under_load(Pools::Memory, 2, &MIRROR, "tcp");
}

#[test]
fn snapshots_under_load_hold_prefixes_on_disks() {
    check_snapshots_under_load(Pools::Disk, 2, &MIRROR, "auto");
}

#[test]
fn snapshots_of_several_columns_hold_prefixes() {
    let layout = [
        "--layout",
        "stripe-mirror",
        "--columns",
        "2",
        "--copies",
        "2",
    ];
    check_snapshots_under_load(Pools::Memory, 4, &layout, "map");
}

/// Reads snapshots from each copy alone, after its brick was killed and started again.
fn check_copies_after_restarts(pools: Pools) {
    let mut cluster = Cluster::new(pools, 2);
    cluster.create("v", "8M", &MIRROR);
    let export = cluster.export(&["v"], "auto");
    let load = CounterLoad::new();
    std::thread::scope(|scope| {
        let _guard = EndGuard(&load.is_over);
        let (load, socket) = (&load, export.socket());
        scope.spawn(move || load.run(&socket, "v"));
        for name in ["v@a", "v@b"] {
            load.await_more(2 * SLOTS);
            cluster.ok(&["snapshot", "create", name]);
        }
        load.await_more(2 * SLOTS);
    });
    let images = ["v@a", "v@b"].map(|name| (name, snapshot_image(&cluster, name, "auto")));
    export.stop();
    for (dead, alive) in [(0, 1), (1, 0), (0, 1)] {
        cluster.kill_brick(dead);
        for (name, image) in &images {
            let found = snapshot_image(&cluster, name, "auto");
            assert!(found == *image, "{name} differs on brick {alive}");
        }
        cluster.restart_brick(dead);
        let (id, address) = (cluster.brick_id(dead), cluster.brick_address(dead));
        support::until("the manager knows the brick's new address", || {
            cluster.json(&["snapshot", "show", "v@a"])["bricks"][&id]["tcp"] == address.as_str()
        });
    }
    // A new cut after the restarts leaves the older snapshots as they were.
    let export = cluster.export(&["v"], "auto");
    cluster.ok(&["snapshot", "create", "v@c"]);
    export.io(&["write -P 9 0 8M", "flush"]);
    for (name, image) in &images {
        let found = snapshot_image(&cluster, name, "auto");
        assert!(found == *image, "{name} has changed");
    }
    assert_eq!(
        prefix_of(&snapshot_image(&cluster, "v@c", "tcp")),
        load.acknowledged()
    );
    cluster.ok(&["snapshot", "delete", "v@a%b", "--yes"]);
    assert_eq!(
        prefix_of(&snapshot_image(&cluster, "v@c", "auto")),
        load.acknowledged()
    );
    export.stop();
}

#[test]
fn each_copy_has_snapshots_after_restarts() {
    check_copies_after_restarts(Pools::Memory);
}

#[test]
fn each_copy_has_snapshots_after_restarts_on_disks() {
    check_copies_after_restarts(Pools::Disk);
}

/// A copy that is lost and returns keeps the snapshots from before, and has no part in those made meanwhile.
#[test]
fn returned_copy_has_snapshots_from_before_its_loss() {
    let mut cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &MIRROR);
    let export = cluster.export(&["v"], "auto");
    let load = CounterLoad::new();
    let mut images = Vec::new();
    std::thread::scope(|scope| {
        let _guard = EndGuard(&load.is_over);
        let (load, socket) = (&load, export.socket());
        scope.spawn(move || load.run(&socket, "v"));
        let mut take = |cluster: &Cluster, name| {
            load.await_more(SLOTS);
            let before = load.acknowledged();
            cluster.ok(&["snapshot", "create", name]);
            let image = snapshot_image(cluster, name, "auto");
            assert!(prefix_of(&image) >= before, "{name}");
            images.push((name, image));
        };
        take(&cluster, "v@before");
        cluster.kill_brick(0);
        take(&cluster, "v@without");
        cluster.restart_brick(0);
        load.await_more(SLOTS);
        export.await_state("healthy");
        take(&cluster, "v@after");
        load.await_more(SLOTS);
    });
    export.stop();
    cluster.check_identical("v");
    let legs = |name| {
        let shown = cluster.json(&["snapshot", "show", name]);
        let legs = &shown["layout"]["segments"][0]["columns"][0]["legs"];
        legs.as_array().unwrap().len()
    };
    assert_eq!(["v@before", "v@without", "v@after"].map(legs), [2, 1, 2]);
    for (name, image) in &images {
        assert!(snapshot_image(&cluster, name, "auto") == *image, "{name}");
    }
    cluster.kill_brick(1);
    for (name, image) in images.iter().filter(|(name, _)| *name != "v@without") {
        let found = snapshot_image(&cluster, name, "auto");
        assert!(found == *image, "{name} differs on the returned copy");
    }
    let without = cluster.export(&["v@without"], "auto");
    let mut nbd = NbdConnection::connect(&without.socket(), "v@without", true).unwrap();
    assert_ne!(errno(&mut nbd, Command::Read, &[]), 0);
    assert!(nbd.last_error.contains("v@without"), "{}", nbd.last_error);
    drop(nbd);
    without.stop();
}

/// Names in a list, the newest first.
fn names(cluster: &Cluster, args: &[&str]) -> Vec<String> {
    let found = cluster.json(&[&["snapshot", "list"], args].concat());
    let found = found.as_array().unwrap().iter();
    found
        .map(|it| it["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn detached_volume_has_snapshots_with_holds() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &MIRROR);
    let export = cluster.export(&["v"], "auto");
    export.io(&["write -P 1 0 1M", "flush"]);
    export.stop();
    cluster.ok(&["snapshot", "create", "v@a", "--label", "nightly"]);
    let export = cluster.export(&["v"], "auto");
    export.io(&["write -P 2 4k 64k", "discard 128k 128k", "flush"]);
    cluster.ok(&["snapshot", "create", "v@b"]);
    export.io(&["write -P 3 0 1M", "flush"]);
    export.stop();
    assert_eq!(names(&cluster, &["v"]), ["b", "a"]);
    assert_eq!(names(&cluster, &["v", "--label", "nightly"]), ["a"]);
    cluster.refused(&["snapshot", "create", "v@a"], &["v@a", "already"]);
    let shown = cluster.json(&["snapshot", "show", "v@a"]);
    assert_eq!(shown["info"]["labels"], json!(["nightly"]));
    assert_eq!(shown["info"]["size_bytes"], 8 * MIB);
    let legs = &shown["layout"]["segments"][0]["columns"][0]["legs"];
    assert_eq!(legs.as_array().unwrap().len(), 2, "{shown}");
    assert_eq!(shown["bricks"].as_object().unwrap().len(), 2, "{shown}");

    cluster.ok(&["snapshot", "hold", "backup", "v@a"]);
    cluster.refused(
        &["snapshot", "delete", "v@a", "--yes"],
        &["v@a", "backup", "snapshot release"],
    );
    cluster.refused(&["volume", "delete", "v"], &["2 snapshots", "--snapshots"]);
    cluster.refused(
        &["volume", "delete", "v", "--snapshots"],
        &["v@a", "backup"],
    );
    let a = cluster.export(&["v@a"], "auto");
    read_all(&a, &["read -P 1 0 1M", "read -P 0 1M 1M"]);
    a.stop();
    cluster.ok(&["snapshot", "release", "backup", "v@a"]);
    cluster.ok(&["snapshot", "delete", "v@a", "--yes"]);
    assert_eq!(names(&cluster, &["v"]), ["b"]);
    let b = cluster.export(&["v@b"], "auto");
    read_all(
        &b,
        &[
            "read -P 1 0 4k",
            "read -P 2 4k 64k",
            "read -P 1 68k 60k",
            "read -P 0 128k 128k",
            "read -P 1 256k 768k",
        ],
    );
    b.stop();
    // The name is free again.
    cluster.ok(&["snapshot", "create", "v@a"]);
    let a = cluster.export(&["v@a"], "auto");
    read_all(&a, &["read -P 3 0 1M"]);
    a.stop();
    cluster.ok(&["volume", "delete", "v", "--snapshots"]);
    assert!(names(&cluster, &[]).is_empty());
}

/// Reads patterns of a read-only export.
fn read_all(export: &Export, commands: &[&str]) {
    program::qemu_io_read_only(&export.uri, commands);
}

/// The errno of a request to an export.
fn errno(nbd: &mut NbdConnection, command: Command, data: &[u8]) -> u32 {
    nbd.send(1, (command, 0), 0, PAGE as u32, data).unwrap();
    nbd.reply().unwrap().errno
}

#[test]
fn export_of_snapshot_is_read_only_and_fences_nobody() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &MIRROR);
    let volume = cluster.export(&["v"], "auto");
    volume.io(&["write -P 1 0 64k", "flush"]);
    cluster.ok(&["snapshot", "create", "v@a"]);
    volume.io(&["write -P 2 0 64k"]);
    let attached = |cluster: &Cluster| cluster.json(&["volume", "show", "v"])["attachment"].clone();
    let before = attached(&cluster);
    let exports = ["map", "tcp", "auto"].map(|transport| cluster.export(&["v@a"], transport));
    for export in &exports {
        read_all(export, &["read -P 1 0 64k", "read -P 0 64k 64k"]);
        let told: serde_json::Value =
            serde_json::from_str(&program::ok("nbdinfo", &["--json", &export.uri])).unwrap();
        let told = &told["exports"][0];
        assert_eq!(told["is_read_only"], true, "{told}");
        assert_eq!(told["export-name"], "v@a", "{told}");
        assert_eq!(told["export-size"], 8 * MIB, "{told}");
        let map = program::ok("nbdinfo", &["--map", "--totals", &export.uri]);
        assert!(map.contains("65536"), "{map}");
        let mut nbd = NbdConnection::connect(&export.socket(), "v@a", true).unwrap();
        assert_eq!(errno(&mut nbd, Command::Write, &[3; PAGE as usize]), EPERM);
        assert_eq!(errno(&mut nbd, Command::Trim, &[]), EPERM);
        assert_eq!(errno(&mut nbd, Command::Zero, &[]), EPERM);
        assert_eq!(errno(&mut nbd, Command::Read, &[]), 0);
    }
    assert_eq!(attached(&cluster), before);
    volume.io(&["read -P 2 0 64k", "write -P 4 0 64k"]);
    exports.into_iter().for_each(Export::stop);
    volume.stop();
}

#[test]
fn volume_and_its_snapshots_share_a_server() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &MIRROR);
    let first = cluster.export(&["v"], "auto");
    first.io(&["write -P 1 0 64k", "flush"]);
    first.stop();
    cluster.ok(&["snapshot", "create", "v@a"]);
    let mut server = cluster.export(&["v", "v@a"], "auto");
    program::qemu_io(&server.uris[0], &["write -P 2 0 64k"]);
    program::qemu_io_read_only(&server.uris[1], &["read -P 1 0 64k"]);
    // Another client takes the volume. The snapshot is served on.
    let newer = cluster.export(&["v"], "auto");
    newer.io(&["read -P 2 0 64k", "write -P 3 0 64k"]);
    support::until("the fence is reported", || {
        server.daemon.log().contains("another client took over")
    });
    program::qemu_io_read_only(&server.uris[1], &["read -P 1 0 64k"]);
    assert!(server.daemon.is_running());
    server.stop();
    newer.stop();
}

#[test]
fn unreadable_snapshot_is_named_in_errors() {
    let mut cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &MIRROR);
    let socket = cluster.dir().join("none.sock");
    let socket = socket.to_str().unwrap();
    let export = |name| ["export", "nbd", name, "--socket", socket];
    cluster.refused(&export("v@a"), &["v@a", "snapshot list"]);
    cluster.refused(&export("w@a"), &["w", "volume list"]);
    let usage = cluster.run(&export("v@a@b"));
    let usage = String::from_utf8_lossy(&usage.stderr).into_owned();
    assert!(usage.contains("VOLUME@NAME"), "{usage}");
    let volume = cluster.export(&["v"], "auto");
    volume.io(&["write -P 1 0 64k", "flush"]);
    volume.stop();
    cluster.ok(&["snapshot", "create", "v@a"]);
    let snapshot = cluster.export(&["v@a"], "auto");
    let mut nbd = NbdConnection::connect(&snapshot.socket(), "v@a", true).unwrap();
    assert_eq!(errno(&mut nbd, Command::Read, &[]), 0);
    // The other copy answers.
    cluster.kill_brick(0);
    assert_eq!(errno(&mut nbd, Command::Read, &[]), 0);
    cluster.ok(&["snapshot", "delete", "v@a", "--yes"]);
    assert_ne!(errno(&mut nbd, Command::Read, &[]), 0);
    assert!(nbd.last_error.contains("v@a"), "{}", nbd.last_error);
    drop(nbd);
    snapshot.stop();
}

#[test]
fn mounted_snapshot_shows_files_of_its_time() {
    let Some(cluster) = mounted::cluster(&[128, 128], "48M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    mount
        .sh("mkdir d; head -c 3000001 /dev/urandom > d/one; cp d/one copy; ln -s one d/link; sync");
    cluster.ok(&["snapshot", "create", "files@a"]);
    mount.sh("printf changed | dd of=d/one bs=1 seek=5000 conv=notrunc status=none; rm copy; echo 2 > two; sync");
    for (at, transport, fuse) in [("s1", "map", CLASSIC), ("s2", "tcp", "auto")] {
        let shot = TestMount::try_new(&cluster, "files@a", at, transport, fuse);
        let shot = shot.unwrap_or_else(|ended| panic!("no mount: {ended:?}"));
        shot.sh(
            "cmp d/one copy; cmp d/link copy; test ! -e two; test $(stat -c %s copy) = 3000001",
        );
        let error = |done: std::io::Result<()>| done.unwrap_err().kind();
        let refused = ErrorKind::ReadOnlyFilesystem;
        assert_eq!(error(fs::write(shot.path("new"), "no")), refused);
        assert_eq!(error(fs::remove_file(shot.path("copy"))), refused);
        // The file system goes on meanwhile.
        mount.sh("echo 3 > three; sync; test ! -e copy; rm three");
        shot.stop(&cluster);
    }
    mount.stop(&cluster);
    // A snapshot of a file system that no process has mounted.
    cluster.ok(&["snapshot", "create", "files@b"]);
    let shot = TestMount::new(&cluster, "files@b", "auto");
    shot.sh("test -e two; ! cmp -s d/one copy");
    shot.stop(&cluster);
    let dir = cluster.dir().join("mnt");
    let dir = dir.to_str().unwrap();
    cluster.refused(&["mount", "files@c", dir], &["files@c", "snapshot list"]);
    cluster.refused(
        &["mount", "files@a", dir, "--force"],
        &["files@a", "--force"],
    );
    let socket = cluster.dir().join("none.sock");
    let socket = socket.to_str().unwrap();
    cluster.refused(
        &["export", "nbd", "files@a", "--socket", socket],
        &["files@a", "pagemesh mount files@a"],
    );
    cluster.create("blocks", "8M", &MIRROR);
    cluster.ok(&["snapshot", "create", "blocks@a"]);
    cluster.refused(
        &["mount", "blocks@a", dir],
        &["blocks@a", "pagemesh export nbd blocks@a"],
    );
}

/// Files that replace each other by a rename, in order: a snapshot has a prefix of the renames.
#[test]
fn snapshots_of_busy_file_system_hold_prefixes() {
    const FILES: u64 = 64;
    let Some(cluster) = mounted::cluster(&[256, 256], "128M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    let (is_over, renamed) = (AtomicBool::new(false), AtomicU64::new(0));
    let content = |number: u64| number.to_le_bytes().repeat(1000 + number as usize % 3000);
    let renamed_now = || renamed.load(Ordering::SeqCst);
    let await_more = |count: u64| {
        let wanted = renamed_now() + count;
        support::until("files are renamed", || renamed_now() >= wanted);
    };
    std::thread::scope(|scope| {
        let _guard = EndGuard(&is_over);
        scope.spawn(|| {
            for number in 1.. {
                let mut file = fs::File::create(mount.path("new")).unwrap();
                file.write_all(&content(number)).unwrap();
                file.sync_all().unwrap();
                let name = (number % FILES).to_string();
                fs::rename(mount.path("new"), mount.path(&name)).unwrap();
                renamed.store(number, Ordering::SeqCst);
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for name in ["files@a", "files@b", "files@c"] {
            await_more(FILES);
            let before = renamed_now();
            cluster.ok(&["snapshot", "create", name]);
            let after = renamed_now() + 1;
            let shot = TestMount::try_new(&cluster, name, "shot", "auto", CLASSIC);
            let shot = shot.unwrap_or_else(|ended| panic!("no mount: {ended:?}"));
            let found = (0..FILES).map(|file| fs::read(shot.path(&file.to_string())).unwrap());
            let found: Vec<Vec<u8>> = found.collect();
            let number = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let last = found.iter().map(|it| number(it)).max().unwrap();
            assert!(
                (before..=after).contains(&last),
                "{before}..={after}: {last}"
            );
            for (file, found) in (0..).zip(found) {
                let wanted = last - (last % FILES + FILES - file) % FILES;
                assert!(
                    found == content(wanted),
                    "file {file} of {last}: not {wanted}"
                );
            }
            shot.stop(&cluster);
        }
        await_more(1);
    });
    mount.stop(&cluster);
}

#[test]
fn snapshot_commands_refuse_with_a_way_out() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &[]);
    let none = cluster.json(&["snapshot", "list"]);
    assert_eq!(none, serde_json::json!([]));
    let text = cluster.ok(&["snapshot", "list", "v"]);
    assert!(text.contains("no snapshots"), "{text}");
    let long = format!("v@{}", "a".repeat(256));
    let usage: &[&[&str]] = &[
        &["snapshot", "create", &long],
        &["snapshot", "create", "v@a\nb"],
        &["snapshot", "create", "v@a\u{1b}[2J"],
        &["snapshot", "create", "v@.."],
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
