//! `pool check`: it writes nothing unless asked, names the damage, repairs all that the pool's own
//! redundancy allows, and leaves the rest to the other copy of a volume.

use crate::support;
use pagemesh_store::geometry::Geometry;
use serde_json::Value;
use support::{Cluster, MIB, Pools};

const PAGE: usize = 4096;

/// Runs `pool check`, asserts its exit code, and returns its report.
fn check(cluster: &Cluster, args: &[&str], code: i32) -> Value {
    let pool = cluster.pool(0).to_str().unwrap();
    let all = [&["pool", "check", pool, "--output", "json"], args].concat();
    let output = cluster.run(&all);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {told}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn finding_texts(told: &Value) -> Vec<(String, bool)> {
    let findings = told["findings"].as_array().unwrap().iter();
    let what = |it: &Value| it["what"].as_str().unwrap().to_owned();
    findings
        .map(|it| (what(it), it["repaired"].as_bool().unwrap()))
        .collect()
}

fn check_damage_and_repair(pools: Pools) {
    let mut cluster = Cluster::new(pools, 2);
    cluster.create("disk", "8M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&["write -P 0x5a 0 4M", "flush"]);
    let pool = cluster.pool(0).to_owned();
    let name = pool.to_str().unwrap();
    cluster.refused(&["pool", "check", name], &[name, "in use"]);
    export.stop();

    cluster.kill_brick(0);
    // Opening the pool checks every record: the report on a page differs if a record is left.
    cluster.restart_brick(0);
    cluster.kill_brick(0);
    let killed = std::fs::read(&pool).unwrap();
    let told = check(&cluster, &[], 0);
    assert_eq!(told["pages_read"], 1024, "{told}");
    assert_eq!(told["slices"], 1, "{told}");
    assert!(
        std::fs::read(&pool).unwrap() == killed,
        "nothing is written"
    );

    // A superblock, a frame in use, and a page.
    let geometry = Geometry::plan(64 * MIB).unwrap();
    let frames = geometry.first_frames();
    let mut frames = frames.map(|frame| frame as usize);
    let data = frames
        .find(|frame| killed[frame * PAGE..][..PAGE] == [0x5a; PAGE])
        .unwrap();
    let mut damaged = killed.clone();
    damaged[PAGE + 40] ^= 4;
    damaged[data * PAGE + 77] ^= 1;
    std::fs::write(&pool, &damaged).unwrap();
    let told = check(&cluster, &[], 3);
    let expected = [("superblock", false), ("bytes", false)];
    let found = finding_texts(&told);
    assert_eq!(found.len(), expected.len(), "{told}");
    for ((what, repaired), (word, expected)) in found.iter().zip(expected) {
        assert!(what.contains(word) && *repaired == expected, "{told}");
    }
    let page = &told["findings"][1];
    assert_eq!(page["frame"], data, "{told}");
    assert_eq!(page["remedy"], "copy", "{told}");
    assert!(page["slice"].is_string() && page["page"].is_u64(), "{told}");
    assert!(
        std::fs::read(&pool).unwrap() == damaged,
        "nothing is written"
    );
    assert_eq!(check(&cluster, &["--skip-data"], 3)["pages_read"], 0);

    let told = check(&cluster, &["--repair"], 3);
    let repaired: Vec<_> = finding_texts(&told)
        .iter()
        .map(|(_, repaired)| *repaired)
        .collect();
    assert_eq!(repaired, [true, false], "{told}");
    assert_eq!(
        check(&cluster, &[], 3)["findings"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let mut bytes = std::fs::read(&pool).unwrap();
    // A line has the bits of 448 frames.
    let bit_at = geometry.bitmap.start as usize + data / 448 * 64 + data % 448 / 8;
    bytes[bit_at] ^= 1 << (data % 8);
    std::fs::write(&pool, &bytes).unwrap();
    let told = check(&cluster, &["--repair"], 3);
    assert!(finding_texts(&told)[0].0.contains("bitmap"), "{told}");
    assert_eq!(finding_texts(&told).len(), 2, "{told}");
    let people = cluster.run(&["pool", "check", name]);
    let people = String::from_utf8_lossy(&people.stdout).into_owned();
    assert!(people.contains("volume check --repair-from"), "{people}");
    assert!(people.contains(&format!("frame {data}")), "{people}");

    // The other copy has the page.
    cluster.restart_brick(0);
    let export = cluster.export(&["disk"], "auto");
    export.await_state("healthy");
    export.io(&["read -P 0x5a 0 4M"]);
    export.stop();
    cluster.ok(&["volume", "check", "disk", "--repair-from", "1"]);
    cluster.stop_brick(0);
    let told = check(&cluster, &[], 0);
    assert!(told["sound"].as_bool().unwrap(), "{told}");
}

#[test]
fn memory_pool_damage_is_found_and_repaired() {
    check_damage_and_repair(Pools::Memory);
}

#[test]
fn disk_pool_damage_is_found_and_repaired() {
    check_damage_and_repair(Pools::Disk);
}
