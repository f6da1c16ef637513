//! Receivers that die, damaged streams, and targets without room: no part of a snapshot is visible, and a later receive ends
//! equal to the source.

use crate::support;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use support::random::Random;
use support::{Cluster, PAGEMESH, Pools, program, until};

const MIRROR: [&str; 4] = ["--layout", "mirror", "--copies", "2"];

/// A cluster with a volume of 16 MiB and its snapshots.
fn source() -> Cluster {
    let from = Cluster::new(Pools::Memory, 2);
    from.create("v", "16M", &MIRROR);
    write(&from, &["write -P 1 0 6M", "write -P 2 8M 1M"]);
    from.ok(&["snapshot", "create", "v@one"]);
    write(&from, &["write -P 3 1M 3M", "write -z -u 8M 64k"]);
    from.ok(&["snapshot", "create", "v@two"]);
    from
}

fn write(cluster: &Cluster, commands: &[&str]) {
    let export = cluster.export(&["v"], "map");
    export.io(commands);
    export.stop();
}

fn send(from: &Cluster, file: &str, args: &[&str]) -> PathBuf {
    let path = from.dir().join(file);
    let to = ["--to", path.to_str().unwrap()];
    from.json(&[&["snapshot", "send"], args, &to].concat());
    path
}

fn receive(to: &Cluster, stream: &Path, args: &[&str]) -> Output {
    let mut command = to.command(&[&["snapshot", "receive"], args].concat());
    command.stdin(File::open(stream).unwrap());
    command.output().unwrap()
}

#[track_caller]
fn received(to: &Cluster, stream: &Path, args: &[&str]) {
    let done = receive(to, stream, args);
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{error}");
}

/// Kills a receiver after it got a part of a stream.
fn kill_after(to: &Cluster, bytes: &[u8]) {
    let mut child = receiver(to, Stdio::piped());
    let mut input = child.stdin.take().unwrap();
    // The pipe is open until the end, so the receiver waits for the rest.
    input.write_all(bytes).unwrap();
    kill(to, &mut child);
}

/// Starts a receiver: the process itself, and not one that limits its time.
fn receiver(to: &Cluster, input: Stdio) -> Child {
    let limited = to.command(&[]);
    let mut command = Command::new(PAGEMESH);
    command.args(["snapshot", "receive", "w"]).stdin(input);
    let envs = limited.get_envs();
    command.envs(envs.filter_map(|(key, value)| Some((key, value?))));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Kills a receiver, and ends its attachment.
fn kill(to: &Cluster, child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
    if has_volume(to) {
        to.ok(&["volume", "detach", "w"]);
    }
}

fn snapshots(cluster: &Cluster) -> Vec<String> {
    let listed = cluster.json(&["snapshot", "list", "w"]);
    let names = listed.as_array().unwrap().iter();
    let mut names: Vec<String> = names
        .map(|it| it["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

fn has_volume(cluster: &Cluster) -> bool {
    let volumes = cluster.json(&["volume", "list"]);
    volumes
        .as_array()
        .unwrap()
        .iter()
        .any(|it| it["name"] == "w")
}

fn check_content(to: &Cluster, snapshot: &str, commands: &[&str]) {
    let export = to.export(&[snapshot], "map");
    program::qemu_io_read_only(&export.uri, commands);
    export.stop();
}

/// Prefixes of a stream: within the header, early, in the middle, and all but the last bytes.
fn cuts(len: usize) -> [usize; 4] {
    [20, len / 5, len * 2 / 3, len - 1]
}

#[test]
fn killed_receiver_leaves_no_part_and_a_later_one_ends_equal() {
    let from = source();
    let to = Cluster::new(Pools::Memory, 2);
    let full = send(&from, "full", &["v@one"]);
    let bytes = fs::read(&full).unwrap();
    for cut in cuts(bytes.len()) {
        kill_after(&to, &bytes[..cut]);
        if has_volume(&to) {
            assert_eq!(snapshots(&to), [""; 0], "after {cut} bytes");
            let promote = ["volume", "promote", "w"];
            to.refused(&promote, &["w has not received all of a snapshot"]);
        }
    }
    received(&to, &full, &["w"]);
    let of_one = ["read -P 1 0 6M", "read -P 0 6M 2M", "read -P 2 8M 1M"];
    check_content(&to, "w@one", &of_one);

    let changes = send(&from, "changes", &["v@two", "--from", "v@one"]);
    let bytes = fs::read(&changes).unwrap();
    for cut in cuts(bytes.len()) {
        kill_after(&to, &bytes[..cut]);
        let listed = snapshots(&to);
        assert!(
            !listed.contains(&"two".to_owned()),
            "after {cut} bytes: {listed:?}"
        );
        check_content(&to, "w@one", &of_one);
    }
    received(&to, &changes, &["w"]);
    assert_eq!(snapshots(&to), ["one", "two"]);
    check_content(&to, "w@one", &of_one);
    let of_two = [
        "read -P 1 0 1M",
        "read -P 3 1M 3M",
        "read -P 1 4M 2M",
        "read -P 0 8M 64k",
    ];
    check_content(&to, "w@two", &of_two);
    to.ok(&["volume", "promote", "w"]);
    to.check_identical("w");
}

/// The texts of the events of the volume, the oldest first.
fn events(to: &Cluster) -> Vec<String> {
    let events = to.json(&["events", "--subject", "w"]);
    let texts = events.as_array().unwrap().iter();
    texts
        .map(|it| it["text"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn snapshot_is_made_after_its_content_was_read() {
    let from = source();
    let to = Cluster::new(Pools::Memory, 2);
    let full = send(&from, "full", &["v@one"]);
    received(&to, &full, &["w"]);
    let events = events(&to);
    let at = |text: &str| events.iter().position(|it| it.contains(text));
    let is_check = |it: &&String| it.contains("w@receive-check-");
    let checks: Vec<_> = events.iter().filter(is_check).collect();
    assert_eq!(checks.len(), 2, "one is made and deleted: {events:?}");
    let (deleted, made) = (at(checks[1]), at("The snapshot w@one was made"));
    assert!(deleted < made && made.is_some(), "{events:?}");
    assert_eq!(snapshots(&to), ["one"]);
}

#[test]
fn receiver_killed_at_its_end_leaves_a_whole_snapshot_or_none() {
    let from = source();
    let to = Cluster::new(Pools::Memory, 2);
    let full = send(&from, "full", &["v@one"]);
    let mut child = receiver(&to, File::open(&full).unwrap().into());
    until("the receiver makes a snapshot", || {
        has_volume(&to) && !snapshots(&to).is_empty()
    });
    kill(&to, &mut child);
    let of_one = ["read -P 1 0 6M", "read -P 0 6M 2M", "read -P 2 8M 1M"];
    if !snapshots(&to).contains(&"one".to_owned()) {
        to.refused(
            &["volume", "promote", "w"],
            &["w has not received all of a snapshot"],
        );
        received(&to, &full, &["w"]);
    }
    assert_eq!(snapshots(&to), ["one"]);
    check_content(&to, "w@one", &of_one);
}

/// Streams with a wrong bit, with two parts exchanged, and with a repeated part.
fn damaged_streams(bytes: &[u8], seed: u64) -> [Vec<u8>; 3] {
    const PART: usize = 4096;
    let mut random = Random::new(seed);
    let mut flipped = bytes.to_vec();
    flipped[random.below(bytes.len() as u64) as usize] ^= 1 << random.below(8);
    let parts = (bytes.len() / PART) as u64;
    let (one, other) = (random.below(parts / 2), parts / 2 + random.below(parts / 2));
    let (one, other) = (one as usize * PART, other as usize * PART);
    let mut exchanged = bytes.to_vec();
    exchanged[one..one + PART].copy_from_slice(&bytes[other..other + PART]);
    exchanged[other..other + PART].copy_from_slice(&bytes[one..one + PART]);
    let mut repeated = bytes[..one + PART].to_vec();
    repeated.extend_from_slice(&bytes[one..]);
    [flipped, exchanged, repeated]
}

/// Seeds of damaged streams.
const SEEDS: u64 = 8;

#[test]
fn damaged_stream_of_changes_leaves_the_target_as_it_was() {
    let from = source();
    let to = Cluster::new(Pools::Memory, 2);
    let full = send(&from, "full", &["v@one"]);
    received(&to, &full, &["w"]);
    let changes = send(&from, "changes", &["v@two", "--from", "v@one"]);
    let bytes = fs::read(&changes).unwrap();
    let damaged = from.dir().join("damaged");
    for seed in 0..SEEDS {
        for (kind, stream) in damaged_streams(&bytes, seed).into_iter().enumerate() {
            if stream == bytes {
                continue;
            }
            fs::write(&damaged, stream).unwrap();
            let refused = receive(&to, &damaged, &["w"]);
            assert!(!refused.status.success(), "seed {seed}, kind {kind}");
            assert_eq!(snapshots(&to), ["one"], "seed {seed}, kind {kind}");
        }
    }
    check_content(&to, "w@one", &["read -P 1 0 6M", "read -P 2 8M 1M"]);
    received(&to, &changes, &["w"]);
    check_content(&to, "w@two", &["read -P 3 1M 3M", "read -P 1 4M 2M"]);
}

#[test]
fn target_with_a_newer_snapshot_gets_no_older_stream() {
    let from = source();
    let to = Cluster::new(Pools::Memory, 2);
    let (one, two) = (
        send(&from, "one", &["v@one"]),
        send(&from, "two", &["v@two", "--from", "v@one"]),
    );
    from.ok(&["snapshot", "create", "v@three"]);
    let three = send(&from, "three", &["v@three", "--from", "v@one"]);
    received(&to, &one, &["w"]);
    received(&to, &three, &["w"]);
    let refused = receive(&to, &two, &["w"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(error.contains("newest snapshot of w is three"), "{error}");
    assert_eq!(snapshots(&to), ["one", "three"]);
    check_content(&to, "w@three", &["read -P 3 1M 3M", "read -P 1 4M 2M"]);
}

#[test]
fn target_without_room_keeps_what_it_has() {
    let from = source();
    let to = Cluster::with_pools(Pools::Memory, &[16, 16]);
    let full = send(&from, "full", &["v@one"]);
    // Less room than the first stream needs.
    to.create("filler", "16M", &MIRROR);
    let filler = to.export(&["filler"], "map");
    filler.io(&["write -P 9 0 9M"]);
    filler.stop();
    let refused = receive(&to, &full, &["w"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(error.contains("no space is left"), "{error}");
    assert!(!has_volume(&to), "{error}");
    to.ok(&["volume", "delete", "filler"]);
    received(&to, &full, &["w"]);

    // Less room than the changes need: the snapshot keeps the versions that they replace.
    to.create("filler", "16M", &MIRROR);
    let filler = to.export(&["filler"], "map");
    filler.io(&["write -P 9 0 6M"]);
    filler.stop();
    let changes = send(&from, "changes", &["v@two", "--from", "v@one"]);
    let refused = receive(&to, &changes, &["w"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(error.contains("no space is left"), "{error}");
    assert_eq!(snapshots(&to), ["one"]);
    check_content(&to, "w@one", &["read -P 1 0 6M", "read -P 2 8M 1M"]);
    to.ok(&["volume", "delete", "filler"]);
    check_content(&to, "w@one", &["read -P 1 0 6M", "read -P 2 8M 1M"]);
}
