//! The figures that clients report: `pagemesh why`, and the histories in REST.

use crate::support;
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use support::mounted::{TestMount, cluster, direct_command};
use support::program::{self, qemu_io};
use support::{Cluster, Pools};

const STAGES: [&str; 6] = ["queue", "lock", "fabric", "brick", "media", "finish"];

/// The stages of a volume's operations, after its client has ended and so reported.
fn why(cluster: &Cluster, volume: &str, kind: &str) -> Value {
    cluster.json(&["why", volume, "--kind", kind, "--percentile", "50"])
}

fn sum(stages: &Value) -> u64 {
    STAGES
        .map(|stage| stages[stage].as_u64().unwrap())
        .iter()
        .sum()
}

/// Writes `count` pages and reads one.
fn write_pages(uri: &str, count: usize) {
    let writes: Vec<String> = (0..count)
        .map(|page| format!("write {} 4k", page * 4096))
        .collect();
    let mut commands: Vec<&str> = writes.iter().map(String::as_str).collect();
    commands.extend(["read 0 64k", "flush"]);
    qemu_io(uri, &commands);
}

#[test]
fn why_shows_stages_of_writes_over_tcp() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("demo", "8M", &[]);
    let export = cluster.export(&["demo"], "tcp");
    write_pages(&export.uri, 20);
    export.stop();
    let writes = why(&cluster, "demo", "write");
    // The first bytes of a new disk may be probed, but nothing else writes.
    assert_eq!(writes["operations"], 20);
    assert_eq!(writes["timed"], 20, "every operation over a socket");
    let (median, around) = (
        writes["latency_ns"].as_u64().unwrap(),
        sum(&writes["stages_ns"]),
    );
    // Both lie in the same power of two.
    assert!(around < median * 2 && median < around * 2, "{writes}");
    for stage in ["fabric", "brick", "media"] {
        assert!(
            writes["mean_stages_ns"][stage].as_u64().unwrap() > 0,
            "{writes}"
        );
    }
    let reads = why(&cluster, "demo", "read");
    assert!(reads["operations"].as_u64().unwrap() >= 1, "{reads}");
    let text = cluster.ok(&["why", "demo"]);
    assert!(text.contains("20 writes of demo"), "{text}");
    assert!(text.contains("Around that latency"), "{text}");
    let listed = cluster.ok(&["top", "--once"]);
    let row = listed
        .lines()
        .find(|line| line.trim_start().starts_with("demo"));
    assert!(row.is_some_and(|row| row.contains(" s ago")), "{listed}");
    let sample = cluster.json(&["top"]);
    assert_eq!(sample["figures"]["volumes"][0]["name"], "demo");
    assert_eq!(sample["figures"]["cluster"]["kinds"][1]["operations"], 20);
    let bricks = sample["figures"]["bricks"].as_array().unwrap();
    assert!(bricks.len() <= 2, "{sample}");
}

#[test]
fn mapped_writes_are_sampled() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("demo", "8M", &[]);
    let export = cluster.export(&["demo"], "map");
    write_pages(&export.uri, 200);
    export.stop();
    let writes = why(&cluster, "demo", "write");
    assert_eq!(writes["operations"], 200);
    let timed = writes["timed"].as_u64().unwrap();
    assert!((1..=200 / 64 + 2).contains(&timed), "{writes}");
    let stages = &writes["mean_stages_ns"];
    assert!(stages["media"].as_u64().unwrap() > 0, "{writes}");
    assert_eq!(stages["fabric"], 0, "{writes}");
}

#[test]
fn unknown_and_silent_volumes_are_explained() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.refused(&["why", "nothing"], &["nothing"]);
    cluster.create("demo", "8M", &[]);
    let text = cluster.ok(&["why", "demo"]);
    assert!(text.contains("no client has reported"), "{text}");
    for (option, value, says) in [
        ("--kind", "erase", "read, write or flush"),
        ("--percentile", "101", "0 to 100"),
        ("--percentile", "nan", "0 to 100"),
    ] {
        let output = cluster.run(&["why", "demo", option, value]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn direct_operations_are_in_the_figures_of_the_mount() {
    let Some(cluster) = cluster(&[64, 64], "16M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "map");
    let path = mount.path("file");
    let file = OpenOptions::new()
        .create_new(true)
        .write(true)
        .open(&path)
        .unwrap();
    file.write_all_at(&[1; 1 << 20], 0).unwrap();
    drop(file);
    let of = format!("of={}", path.display());
    let args = ["if=/dev/zero", &of, "bs=4k", "count=256", "conv=notrunc"];
    let mut dd = direct_command(&["dd"]);
    program::succeeded("dd", dd.args(args).output().unwrap());
    mount.stop(&cluster);
    let writes = why(&cluster, "files", "write");
    let operations = writes["operations"].as_u64().unwrap();
    assert!(operations >= 250, "the direct writes count: {writes}");
}

#[test]
fn bytes_to_media_of_mirror_are_twice_the_users() {
    for transport in ["map", "tcp"] {
        let mut cluster = Cluster::new(Pools::Memory, 2);
        cluster.create("demo", "8M", &[]);
        let export = cluster.export(&["demo"], transport);
        write_pages(&export.uri, 500);
        export.stop();
        // A brick reports at its end.
        (0..2).for_each(|n| cluster.stop_brick(n));
        let figures = cluster.json(&["top"])["figures"].take();
        let media = &figures["media"];
        let (written, ratio) = (&media["written"], media["per_user_byte"].as_f64());
        let ratio = ratio.unwrap_or_else(|| panic!("no ratio over {transport}: {figures}"));
        // Nodes of page tables are in the data, so it is a little more than the user's bytes.
        let data = written["data_bytes"].as_u64().unwrap();
        assert!(
            (2 * 500 * 4096..2 * 520 * 4096).contains(&data),
            "{figures}"
        );
        // A line in the journal for each write.
        let journal = written["journal_bytes"].as_u64().unwrap();
        assert!((2 * 500 * 64..2 * 600 * 64).contains(&journal), "{figures}");
        assert!((2.03..2.5).contains(&ratio), "{figures}");
        let metadata = media["metadata_per_user_byte"].as_f64().unwrap();
        assert!((0.03..0.4).contains(&metadata), "{figures}");
        assert_eq!(figures["bricks"].as_array().unwrap().len(), 2, "{figures}");
    }
}
