//! Snapshots sent from one cluster to another as streams, whole, cut and damaged.

use crate::support;
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use support::{Cluster, MIB, Pools};

/// A volume of 16 MiB with a snapshot, and an empty cluster to receive it.
struct Pair {
    from: Cluster,
    to: Cluster,
}

impl Pair {
    fn new() -> Pair {
        let from = Cluster::new(Pools::Memory, 2);
        from.create("v", "16M", &["--layout", "mirror", "--copies", "2"]);
        let pair = Pair {
            from,
            to: Cluster::new(Pools::Memory, 2),
        };
        pair.write(&pair.from, "v", &["write -P 1 0 2M", "write -P 2 8M 64k"]);
        pair.from.ok(&["snapshot", "create", "v@one"]);
        pair
    }

    fn write(&self, cluster: &Cluster, volume: &str, commands: &[&str]) {
        let export = cluster.export(&[volume], "map");
        export.io(commands);
        export.stop();
    }

    /// A stream in a file.
    fn send(&self, file: &str, args: &[&str]) -> (PathBuf, Value) {
        let path = self.from.dir().join(file);
        let to = ["--to", path.to_str().unwrap()];
        let sent = self.from.json(&[&["snapshot", "send"], args, &to].concat());
        (path, sent)
    }

    fn receive(&self, stream: &Path, args: &[&str]) -> Output {
        let all = [&["snapshot", "receive", "--output", "json"], args].concat();
        let mut command = self.to.command(&all);
        command.stdin(File::open(stream).unwrap());
        command.output().unwrap()
    }

    #[track_caller]
    fn received(&self, stream: &Path, args: &[&str]) -> Value {
        let done = self.receive(stream, args);
        let error = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{error}");
        serde_json::from_slice(&done.stdout).unwrap()
    }

    #[track_caller]
    fn refused(&self, stream: &Path, args: &[&str], parts: &[&str]) -> String {
        let done = self.receive(stream, args);
        let error = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success(), "{args:?} succeeded");
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
        error
    }

    fn has_volume(&self, name: &str) -> bool {
        let volumes = self.to.json(&["volume", "list"]);
        let mut volumes = volumes.as_array().unwrap().iter();
        volumes.any(|it| it["name"] == name)
    }
}

#[test]
fn snapshot_and_its_changes_arrive_in_another_cluster() {
    let pair = Pair::new();
    let dry = pair.from.json(&["snapshot", "send", "v@one", "--dry-run"]);
    assert_eq!(dry["changed_bytes"], 2 * MIB + 65536, "{dry}");
    let (full, sent) = pair.send("full", &["v@one"]);
    assert_eq!(sent["stream"]["data_bytes"], 2 * MIB + 65536, "{sent}");
    let received = pair.received(&full, &["w"]);
    assert_eq!(received["name"], "one");
    assert_eq!(received["summary"], sent["stream"]["summary"]);

    let changes = ["write -P 3 1M 8k", "write -z -u 8M 64k", "write -P 1 0 4k"];
    pair.write(&pair.from, "v", &changes);
    pair.from.ok(&["snapshot", "create", "v@two"]);
    pair.write(&pair.from, "v", &["write -P 9 0 16M"]);
    let (changes, sent) = pair.send("changes", &["v@two", "--from", "v@one", "--compress"]);
    // The page that was written with equal bytes is sent: a comparison would read all pages twice.
    assert_eq!(sent["stream"]["data_bytes"], 8192 + 4096, "{sent}");
    assert_eq!(sent["stream"]["zero_bytes"], 65536, "{sent}");
    let received = pair.received(&changes, &["w"]);
    assert_eq!(received["summary"], sent["stream"]["summary"]);
    pair.refused(&changes, &["w"], &["has this snapshot already", "w@two"]);
    pair.refused(&full, &["w"], &["has this snapshot already", "w@one"]);
    pair.refused(&changes, &["x"], &["no volume x", "since the snapshot one"]);
    assert!(!pair.has_volume("x"));

    pair.to.ok(&["volume", "promote", "w"]);
    let export = pair.to.export(&["w"], "map");
    export.io(&[
        "read -P 1 0 1M",
        "read -P 3 1M 8k",
        "read -P 1 1056768 1040384",
    ]);
    export.io(&["read -P 0 2M 14M"]);
    export.stop();
    pair.to.check_identical("w");
}

#[test]
fn promoted_volume_gets_no_changes() {
    let pair = Pair::new();
    let (full, _) = pair.send("full", &["v@one"]);
    pair.received(&full, &["w", "--copies", "1"]);
    pair.from.ok(&["snapshot", "create", "v@two"]);
    pair.from.ok(&["snapshot", "create", "v@three"]);
    let (later, _) = pair.send("later", &["v@three", "--from", "v@two"]);
    pair.refused(
        &later,
        &["w"],
        &["begins at the snapshot two", "newest snapshot of w is one"],
    );
    let (changes, _) = pair.send("changes", &["v@two", "--from", "v@one"]);
    pair.to.refused(
        &["volume", "check", "w"],
        &["w receives snapshots", "pagemesh volume promote"],
    );
    pair.to.ok(&["volume", "promote", "w"]);
    pair.write(&pair.to, "w", &["write -P 7 0 4k"]);
    pair.refused(&changes, &["w"], &["receives no snapshots"]);
    pair.from.refused(
        &["snapshot", "send", "v@one", "--from", "v@two", "--dry-run"],
        &["v@two is not earlier than v@one"],
    );
}

#[test]
fn damaged_and_cut_streams_leave_nothing() {
    let pair = Pair::new();
    let (full, _) = pair.send("full", &["v@one"]);
    let bytes = std::fs::read(&full).unwrap();
    let bad = pair.from.dir().join("bad");
    let mut flipped = bytes.clone();
    flipped[bytes.len() / 2] ^= 4;
    let mut later = bytes.clone();
    later[8] = 2;
    let cases: [(&[u8], &str); 5] = [
        (&flipped, "damaged"),
        (&bytes[..bytes.len() / 2], "was cut"),
        (&later, "version 2"),
        (b"some text", "no stream"),
        (&[&bytes[..], &bytes[..]].concat(), "bytes follow the end"),
    ];
    for (bytes, says) in cases {
        std::fs::write(&bad, bytes).unwrap();
        pair.refused(&bad, &["w"], &[says]);
        assert!(!pair.has_volume("w"), "{says}");
    }
    pair.received(&full, &["w"]);
}

#[test]
fn cut_stream_is_resumed_from_its_token() {
    let pair = Pair::new();
    let (full, sent) = pair.send("full", &["v@one"]);
    let bytes = std::fs::read(&full).unwrap();
    let cut = pair.from.dir().join("cut");
    std::fs::write(&cut, &bytes[..bytes.len() - 5000]).unwrap();
    let kept = pair.to.dir().join("token");
    let keep = ["w", "--resume-file", kept.to_str().unwrap()];
    let error = pair.refused(&cut, &keep, &["was cut", "--resume r1."]);
    let token = std::fs::read_to_string(&kept).unwrap();
    assert!(error.contains(token.trim()), "{error}");
    let snapshots = pair.to.json(&["snapshot", "list", "w"]);
    assert_eq!(snapshots, serde_json::json!([]));
    pair.to.refused(
        &["volume", "promote", "w"],
        &["w has not received all of a snapshot"],
    );
    let bad = pair
        .from
        .run(&["snapshot", "send", "v@one", "--resume", "r1.x"]);
    assert!(String::from_utf8_lossy(&bad.stderr).contains("no resume token"));

    let (rest, _) = pair.send("rest", &["v@one", "--resume", token.trim()]);
    let received = pair.received(&rest, &keep);
    assert_eq!(received["summary"], sent["stream"]["summary"]);
    assert!(!kept.exists(), "the token is used");
    pair.refused(&rest, &["w"], &["has this snapshot already"]);
}

#[test]
fn cut_stream_of_changes_is_resumed_unless_another_was_received() {
    let pair = Pair::new();
    let (full, _) = pair.send("full", &["v@one"]);
    for volume in ["w", "used"] {
        pair.received(&full, &[volume]);
    }
    pair.write(&pair.from, "v", &["write -P 5 1M 3M"]);
    pair.from.ok(&["snapshot", "create", "v@two"]);
    let (changes, _) = pair.send("changes", &["v@two", "--from", "v@one"]);
    let bytes = std::fs::read(&changes).unwrap();
    let cut = pair.from.dir().join("cut");
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let kept = pair.to.dir().join("token");
    let rest = |volume: &str| {
        let keep = [volume, "--resume-file", kept.to_str().unwrap()];
        pair.refused(&cut, &keep, &["was cut", "unfinished"]);
        let token = std::fs::read_to_string(&kept).unwrap();
        let args = ["v@two", "--from", "v@one", "--resume", token.trim()];
        pair.send(&format!("rest-{volume}"), &args).0
    };
    let (of_w, of_used) = (rest("w"), rest("used"));
    pair.refused(&of_w, &["used"], &["not as the cut stream left it"]);
    // The stream from its start undoes the part that arrived.
    pair.received(&changes, &["used"]);
    pair.refused(&of_used, &["used"], &["has this snapshot already"]);
    pair.received(&of_w, &["w"]);
    pair.to.ok(&["volume", "promote", "w"]);
    let export = pair.to.export(&["w"], "map");
    export.io(&["read -P 1 0 1M", "read -P 5 1M 3M", "read -P 2 8M 64k"]);
    export.stop();
}

#[test]
fn stream_flows_through_a_pipe_at_its_rate() {
    let pair = Pair::new();
    let send = ["snapshot", "send", "v@one", "--rate", "16M", "--compress"];
    let mut sender = pair.from.command(&send);
    let mut sender = sender.stdout(Stdio::piped()).spawn().unwrap();
    let mut receiver = pair.to.command(&["snapshot", "receive", "w"]);
    let received = receiver
        .stdin(sender.stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(sender.wait().unwrap().success());
    let error = String::from_utf8_lossy(&received.stderr);
    assert!(received.status.success(), "{error}");
}
