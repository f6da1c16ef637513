//! Bookmarks as starts of streams, and volumes that receive: they are read-only, and a killed receiver loses them.

use crate::support;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use support::{Cluster, PAGEMESH, Pools, program};

fn write(cluster: &Cluster, volume: &str, commands: &[&str]) {
    let export = cluster.export(&[volume], "map");
    export.io(commands);
    export.stop();
}

/// A cluster with a volume `v` of 16 MiB, its snapshot `one`, and a stream of that.
fn cluster() -> (Cluster, PathBuf) {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "16M", &["--layout", "mirror", "--copies", "2"]);
    write(
        &cluster,
        "v",
        &[
            "write -P 1 0 2M",
            "write -P 1 2M 2M",
            "write -P 2 8M 64k",
            "write -P 4 10M 64k",
        ],
    );
    cluster.ok(&["snapshot", "create", "v@one"]);
    let (stream, _) = send(&cluster, "full", &["v@one"]);
    (cluster, stream)
}

fn send(cluster: &Cluster, file: &str, args: &[&str]) -> (PathBuf, Value) {
    let path = cluster.dir().join(file);
    let to = ["--to", path.to_str().unwrap()];
    let sent = cluster.json(&[&["snapshot", "send"], args, &to].concat());
    (path, sent)
}

fn receive(cluster: &Cluster, stream: &Path, args: &[&str]) -> Output {
    let all = [&["snapshot", "receive", "--output", "json"], args].concat();
    let mut command = cluster.command(&all);
    command.stdin(File::open(stream).unwrap());
    command.output().unwrap()
}

#[track_caller]
fn received(cluster: &Cluster, stream: &Path, args: &[&str]) -> Value {
    let done = receive(cluster, stream, args);
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{error}");
    serde_json::from_slice(&done.stdout).unwrap()
}

/// Changes of `v` after its snapshot `one`, as `two` has them. Some discard, some restore equal bytes.
const CHANGES: [&str; 5] = [
    "write -P 3 1M 8k",
    "write -z -u 8M 64k",
    "discard 10M 64k",
    "write -P 1 0 4k",
    "write -P 5 12M 4k",
];

fn check_two(cluster: &Cluster, volume: &str) {
    let export = cluster.export(&[volume], "map");
    export.io(&[
        "read -P 1 0 1M",
        "read -P 3 1M 8k",
        "read -P 1 1056768 3137536",
    ]);
    export.io(&[
        "read -P 0 4M 8M",
        "read -P 5 12M 4k",
        "read -P 0 12587008 4190208",
    ]);
    export.stop();
}

#[test]
fn bookmark_starts_changes_after_its_snapshot_is_deleted() {
    let (cluster, full) = cluster();
    received(&cluster, &full, &["w"]);
    let made = cluster.json(&["bookmark", "create", "v@one", "sent"]);
    assert_eq!(
        (&made["name"], &made["snapshot"]),
        (&json!("sent"), &json!("one"))
    );
    cluster.refused(&["bookmark", "create", "v@one", "sent"], &["v#sent"]);
    cluster.ok(&["snapshot", "delete", "v@one", "--yes"]);
    write(&cluster, "v", &CHANGES);
    cluster.ok(&["snapshot", "create", "v@two"]);
    // Later changes are not of the stream.
    write(&cluster, "v", &["write -P 9 0 16M"]);
    let (changes, sent) = send(&cluster, "changes", &["v@two", "--from", "v#sent"]);
    // Pages that got equal bytes are sent, too.
    assert_eq!(sent["stream"]["data_bytes"], 16384, "{sent}");
    let made = received(&cluster, &changes, &["w"]);
    assert_eq!(made["name"], "two");
    cluster.ok(&["volume", "promote", "w"]);
    check_two(&cluster, "w");
    cluster.check_identical("w");
    let listed = cluster.json(&["bookmark", "list", "v"]);
    assert_eq!(listed[0]["name"], "sent");
    cluster.ok(&["bookmark", "delete", "v#sent"]);
    assert_eq!(cluster.json(&["bookmark", "list", "v"]), json!([]));
    cluster.refused(
        &["snapshot", "send", "v@two", "--from", "v#sent", "--dry-run"],
        &["no bookmark v#sent"],
    );
}

#[test]
fn cut_stream_from_bookmark_is_resumed() {
    let (cluster, full) = cluster();
    received(&cluster, &full, &["w"]);
    cluster.ok(&["bookmark", "create", "v@one"]);
    let change = ["write -P 6 0 3M", "discard 3M 512k", "discard 8M 64k"];
    write(&cluster, "v", &change);
    cluster.ok(&["snapshot", "create", "v@two"]);
    let from = ["v@two", "--from", "v#one"];
    let (changes, sent) = send(&cluster, "changes", &from);
    let bytes = std::fs::read(&changes).unwrap();
    let cut = cluster.dir().join("cut");
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let kept = cluster.dir().join("token");
    let keep = ["w", "--resume-file", kept.to_str().unwrap()];
    let done = receive(&cluster, &cut, &keep);
    assert!(!done.status.success());
    let token = std::fs::read_to_string(&kept).unwrap();
    assert!(token.starts_with("b1."), "{token}");
    // The rest begins at the snapshot, which is there still. The summary stays of one kind.
    let rest = ["v@two", "--from", "v@one", "--resume", token.trim()];
    let (rest, of_rest) = send(&cluster, "rest", &rest);
    assert_eq!(of_rest["stream"]["summary"], sent["stream"]["summary"]);
    received(&cluster, &rest, &keep);
    cluster.ok(&["volume", "promote", "w"]);
    let export = cluster.export(&["w"], "map");
    export.io(&[
        "read -P 6 0 3M",
        "read -P 0 3M 512k",
        "read -P 1 3584k 512k",
    ]);
    export.io(&["read -P 0 4M 6M", "read -P 4 10M 64k"]);
    export.stop();
}

#[test]
fn received_volume_is_read_only_until_promoted() {
    let (cluster, full) = cluster();
    received(&cluster, &full, &["w"]);
    let says = ["w receives snapshots", "pagemesh volume promote"];
    let socket = cluster.dir().join("nbd");
    let export = ["export", "nbd", "w", "--socket", socket.to_str().unwrap()];
    cluster.refused(&export, &says);
    let read_only = [&export[..], &["--read-only"]].concat();
    cluster.refused(&read_only, &says);
    cluster.refused(&["snapshot", "create", "w@mine"], &says);
    let shown = cluster.json(&["volume", "show", "w"]);
    assert!(shown["info"]["received"].is_u64(), "{shown}");
    // A reader of a snapshot does not keep the next changes away.
    let export = cluster.export(&["w@one"], "map");
    program::qemu_io_read_only(&export.uri, &["read -P 1 0 4M"]);
    write(&cluster, "v", &CHANGES);
    cluster.ok(&["snapshot", "create", "v@two"]);
    let (changes, _) = send(&cluster, "changes", &["v@two", "--from", "v@one"]);
    received(&cluster, &changes, &["w"]);
    program::qemu_io_read_only(&export.uri, &["read -P 1 0 4M"]);
    export.stop();
    for _ in 0..2 {
        cluster.ok(&["volume", "promote", "w"]);
    }
    check_two(&cluster, "w");
    let events = cluster.json(&["events", "--subject", "w"]);
    let events = events.as_array().unwrap().iter();
    assert_eq!(
        events.filter(|it| it["kind"] == "volume-promoted").count(),
        1
    );
}

/// Kills a receiver that waits for the rest of its stream.
fn kill_receiver(cluster: &Cluster, stream: &Path, volume: &str) {
    let bytes = std::fs::read(stream).unwrap();
    // The process itself, and not one that limits its time.
    let limited = cluster.command(&[]);
    let mut command = Command::new(PAGEMESH);
    command.args(["snapshot", "receive", volume]);
    let envs = limited
        .get_envs()
        .filter_map(|(key, value)| Some((key, value?)));
    command.envs(envs).stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&bytes[..bytes.len() - 100]).unwrap();
    support::until("the volume is attached", || {
        let shown = cluster.run(&["volume", "show", volume, "--output", "json"]);
        let shown: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        shown["info"]["attached"].is_object()
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn next_receive_takes_over_from_a_killed_receiver() {
    let (cluster, full) = cluster();
    kill_receiver(&cluster, &full, "w");
    let says = ["w has not received all of a snapshot"];
    cluster.ok(&["volume", "detach", "w"]);
    cluster.refused(&["volume", "promote", "w"], &says);
    kill_receiver(&cluster, &full, "w");
    received(&cluster, &full, &["w"]);
    // Changes that no other stream has.
    let all: Vec<String> = (0..8)
        .map(|at| format!("write -P 7 {}M 2M", 2 * at))
        .collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    write(&cluster, "v", &all);
    cluster.ok(&["snapshot", "create", "v@lost"]);
    let (lost, _) = send(&cluster, "lost", &["v@lost", "--from", "v@one"]);
    kill_receiver(&cluster, &lost, "w");
    let back = [
        "write -P 1 0 4M",
        "discard 4M 12M",
        "write -P 2 8M 64k",
        "write -P 4 10M 64k",
    ];
    write(&cluster, "v", &back);
    write(&cluster, "v", &CHANGES);
    cluster.ok(&["snapshot", "create", "v@two"]);
    let (changes, sent) = send(&cluster, "changes", &["v@two", "--from", "v@one"]);
    // The stream has all pages that were written back, and a new page.
    let sent_bytes = Some((4 << 20) + 4096);
    assert_eq!(sent["stream"]["data_bytes"].as_u64(), sent_bytes, "{sent}");
    let made = received(&cluster, &changes, &["w"]);
    assert_eq!(made["summary"], sent["stream"]["summary"]);
    let snapshots = cluster.json(&["snapshot", "list", "w"]);
    assert_eq!(snapshots.as_array().unwrap().len(), 2, "{snapshots}");
    cluster.ok(&["volume", "promote", "w"]);
    check_two(&cluster, "w");
}
