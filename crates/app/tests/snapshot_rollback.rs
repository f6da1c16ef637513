//! `pagemesh snapshot rollback` of volumes and file systems: to a snapshot, back, and after interruptions.

use crate::support;
use serde_json::Value;
use std::fs;
use std::process::{Child, Stdio};
use support::mounted::{self, TestMount};
use support::{Cluster, MIB, Pools, until};

const MIRROR: [&str; 4] = ["--layout", "mirror", "--copies", "2"];
const BEFORE: &str = "before-rollback-one";

/// A volume with ones in its first 2 MiB in the snapshot `one`. At present they are twos in the first MiB, a hole
/// behind, and threes elsewhere.
fn volume(pools: Pools) -> Cluster {
    let cluster = Cluster::new(pools, 2);
    cluster.create("v", "8M", &MIRROR);
    write(&cluster, &["write -P 1 0 2M"]);
    cluster.ok(&["snapshot", "create", "v@one"]);
    let changes = ["write -P 2 0 1M", "discard 1M 64k", "write -P 3 4M 512k"];
    write(&cluster, &changes);
    cluster
}

fn write(cluster: &Cluster, commands: &[&str]) {
    let export = cluster.export(&["v"], "auto");
    export.io(commands);
    export.stop();
}

fn check_snapshot_content(cluster: &Cluster) {
    write(cluster, &["read -P 1 0 2M", "read -P 0 2M 6M"]);
    cluster.check_identical("v");
}

fn check_present_content(cluster: &Cluster) {
    let reads = [
        "read -P 2 0 1M",
        "read -P 0 1M 64k",
        "read -P 1 1114112 983040",
        "read -P 3 4M 512k",
        "read -P 0 5M 3M",
    ];
    write(cluster, &reads);
    cluster.check_identical("v");
}

fn roll_back(cluster: &Cluster) -> Value {
    cluster.json(&["snapshot", "rollback", "v@one", "--yes"])
}

fn undo(cluster: &Cluster) -> Value {
    cluster.json(&["snapshot", "rollback", "--undo", "v", "--yes"])
}

/// The phase of the rollback of the volume.
fn phase(cluster: &Cluster) -> Value {
    cluster.json(&["volume", "show", "v"])["info"]["rollback"]["phase"].clone()
}

fn holds(cluster: &Cluster, snapshot: &str) -> Value {
    cluster.json(&["snapshot", "show", snapshot])["info"]["holds"].clone()
}

fn spawn(cluster: &Cluster, args: &[&str]) -> Child {
    let mut command = cluster.command(args);
    command.stderr(Stdio::null()).stdout(Stdio::null());
    command.spawn().unwrap()
}

/// Kills a command that has attached the volume, and waits for its end.
fn kill(cluster: &Cluster, mut child: Child) {
    let client = cluster.json(&["volume", "show", "v"])["info"]["attached"]["client"].clone();
    let (_, pid) = client.as_str().unwrap().rsplit_once(':').unwrap();
    let stat = format!("/proc/{pid}/stat");
    // The command runs in the process group of a program that limits its time.
    let group = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
    child.wait().unwrap();
    until("the command has ended", || {
        fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))
    });
}

fn check_rollback_and_undo(pools: Pools) {
    let cluster = volume(pools);
    let dry = cluster.json(&["snapshot", "rollback", "v@one", "--dry-run"]);
    let changed = MIB + 65536 + 512 * 1024;
    assert_eq!(dry["changed_bytes"], changed, "{dry}");
    check_present_content(&cluster);
    cluster.refused(
        &["snapshot", "rollback", "v@one"],
        &["no terminal", "--yes"],
    );
    let newer = ["snapshot", "create", "v@newer"];
    cluster.ok(&newer);
    let done = roll_back(&cluster);
    assert_eq!(done["copied_bytes"], changed, "{done}");
    assert_eq!(
        (&done["content"], &done["before"]),
        (&"one".into(), &BEFORE.into())
    );
    check_snapshot_content(&cluster);
    let held = format!("v@{BEFORE}");
    cluster.refused(
        &["snapshot", "delete", &held, "--yes"],
        &["held by rollback"],
    );
    cluster.ok(&["snapshot", "show", "v@newer"]);

    let undone = undo(&cluster);
    assert_eq!(undone["content"], BEFORE, "{undone}");
    check_present_content(&cluster);
    assert_eq!(holds(&cluster, &held), serde_json::json!([]));
    // An undo is a rollback, too.
    let redone = undo(&cluster);
    assert_eq!(redone["content"], undone["before"], "{redone}");
    check_snapshot_content(&cluster);
}

#[test]
fn volume_is_rolled_back_and_back_again() {
    check_rollback_and_undo(Pools::Memory);
}

#[test]
fn volume_on_disks_is_rolled_back_and_back_again() {
    check_rollback_and_undo(Pools::Disk);
}

#[test]
fn volume_in_use_is_refused_or_fenced() {
    let cluster = volume(Pools::Memory);
    let mut export = cluster.export(&["v"], "map");
    let client = cluster.json(&["volume", "show", "v"])["info"]["attached"]["client"].clone();
    let client = client.as_str().unwrap();
    cluster.refused(
        &["snapshot", "rollback", "v@one", "--yes"],
        &["in use by", client, "--force"],
    );
    assert_eq!(phase(&cluster), Value::Null);
    export.io(&["write -P 2 0 4k"]);
    cluster.ok(&["snapshot", "rollback", "v@one", "--yes", "--force"]);
    export.await_fenced();
    check_snapshot_content(&cluster);
    undo(&cluster);
    check_present_content(&cluster);
}

/// Begins a rollback that copies slowly, and kills it between two pages.
fn interrupt(cluster: &Cluster) {
    let args = ["snapshot", "rollback", "v@one", "--yes", "--rate", "1k"];
    let child = spawn(cluster, &args);
    until("pages are copied", || phase(cluster) == "copying");
    kill(cluster, child);
}

#[test]
fn interrupted_rollback_refuses_other_uses_and_goes_on() {
    let mut cluster = volume(Pools::Memory);
    interrupt(&cluster);
    let refused = cluster.try_export_from(0, &["v"], "map").err().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    for part in ["rolled back to v@one", "--undo"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    cluster.refused(
        &["snapshot", "create", "v@other"],
        &["rolled back to v@one"],
    );
    cluster.refused(
        &["snapshot", "delete", "v@one", "--yes"],
        &["rolled back to v@one"],
    );
    cluster.refused(
        &["snapshot", "rollback", "v@before-rollback-one", "--yes"],
        &["rolled back to v@one"],
    );
    cluster.kill_manager();
    cluster.start_manager();
    cluster.await_bricks(2);
    assert_eq!(phase(&cluster), "copying");
    let done = cluster.json(&["snapshot", "rollback", "v@one"]);
    assert_eq!(done["before"], BEFORE);
    check_snapshot_content(&cluster);
    undo(&cluster);
    check_present_content(&cluster);
}

#[test]
fn interrupted_rollback_is_undone() {
    let cluster = volume(Pools::Memory);
    interrupt(&cluster);
    // The undo is interrupted, too.
    let args = [
        "snapshot", "rollback", "--undo", "v", "--yes", "--rate", "1k",
    ];
    let child = spawn(&cluster, &args);
    // If the rollback was killed before its first page, the undo has no page to copy, and ends by itself.
    let mut child = child;
    let is_attached = || cluster.json(&["volume", "show", "v"])["info"]["attached"].is_object();
    until("the undo copies, or has ended", || {
        phase(&cluster) == "undoing" && is_attached() || child.try_wait().unwrap().is_some()
    });
    if child.try_wait().unwrap().is_none() {
        kill(&cluster, child);
        cluster.refused(
            &["snapshot", "rollback", "v@one", "--yes"],
            &["the rollback is being undone"],
        );
        undo(&cluster);
    }
    check_present_content(&cluster);
    assert_eq!(phase(&cluster), Value::Null);
    assert_eq!(
        holds(&cluster, &format!("v@{BEFORE}")),
        serde_json::json!([])
    );
}

#[test]
fn full_pool_stops_a_rollback_that_is_undone() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "24M", &MIRROR);
    let export = cluster.export(&["v"], "map");
    export.io(&["write -P 1 0 24M"]);
    cluster.ok(&["snapshot", "create", "v@one"]);
    export.io(&["write -P 2 0 20M"]);
    export.stop();
    cluster.create("filler", "32M", &["--layout", "mirror", "--copies", "2"]);
    let filler = cluster.export(&["filler"], "map");
    filler.io(&["write -P 9 0 8M"]);
    filler.stop();
    cluster.refused(
        &["snapshot", "rollback", "v@one", "--yes"],
        &[
            "unfinished",
            "nothing is lost",
            "--undo v",
            "no space is left",
        ],
    );
    assert_eq!(phase(&cluster), "copying");
    undo(&cluster);
    write(&cluster, &["read -P 2 0 20M", "read -P 1 20M 4M"]);
    cluster.check_identical("v");
}

#[test]
fn file_system_is_rolled_back_and_back_again() {
    let Some(cluster) = mounted::cluster(&[128, 128], "64M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    mount.sh("mkdir a; echo one > a/file; head -c 2M /dev/zero | tr '\\0' x > large; sync .");
    cluster.ok(&["snapshot", "create", "files@one"]);
    mount.sh("rm large; echo two > a/file; mv a b; sync .");
    cluster.refused(
        &["snapshot", "rollback", "files@one", "--yes"],
        &["in use by"],
    );
    mount.stop(&cluster);
    cluster.ok(&["snapshot", "rollback", "files@one", "--yes"]);
    let mount = TestMount::new(&cluster, "files", "auto");
    mount.sh(
        "[ $(cat a/file) = one ]; [ $(stat -c %s large) = 2097152 ]; [ ! -e b ]; echo three > c",
    );
    mount.stop(&cluster);
    cluster.ok(&["snapshot", "rollback", "--undo", "files", "--yes"]);
    let mount = TestMount::new(&cluster, "files", "auto");
    mount.sh("[ $(cat b/file) = two ]; [ ! -e large ]; [ ! -e c ]");
    mount.stop(&cluster);
}
