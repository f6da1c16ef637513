//! Scrubs of real processes: flipped bits in the pools of a mirrored volume are
//! found while it is served, repaired from the other copy and counted; what no
//! copy has is named.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use pagemesh_store::geometry::Geometry;
use pagemesh_store::slot::Slot;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use support::{Cluster, Export, MIB, PAGEMESH, Pools, until};

const PAGE: usize = 4096;

/// The frame of a pool that is full of this byte, there being one.
fn frame_of(pool: &Path, pattern: u8) -> usize {
    let bytes = std::fs::read(pool).unwrap();
    let numbers = Geometry::plan(64 * MIB).unwrap().frame_numbers();
    let is_it = |frame: &u64| bytes[*frame as usize * PAGE..][..PAGE] == [pattern; PAGE];
    let found: Vec<u64> = numbers.filter(is_it).collect();
    assert_eq!(found.len(), 1, "{pattern:#x}: {found:?}");
    found[0] as usize
}

/// Where the slot lies that names this frame.
fn slot_of(pool: &Path, frame: usize) -> usize {
    let bytes = std::fs::read(pool).unwrap();
    let start = Geometry::plan(64 * MIB).unwrap().frames.start as usize;
    let words = bytes[start..].as_chunks::<8>().0.iter();
    let names = |word: &[u8; 8]| {
        let slot = Slot::decode(u64::from_le_bytes(*word));
        slot.ok().and_then(Slot::frame).map(|it| it.0) == Some(frame as u64)
    };
    start + 8 * words.clone().position(names).unwrap()
}

/// Flips a bit of a pool that a brick serves.
fn flip(pool: &Path, byte: usize, bit: u8) {
    let file = File::options().read(true).write(true).open(pool).unwrap();
    let mut found = [0];
    file.read_exact_at(&mut found, byte as u64).unwrap();
    file.write_all_at(&[found[0] ^ 1 << bit], byte as u64)
        .unwrap();
}

/// Has the volume scrubbed; what was found.
fn scrub(export: &Export) -> Value {
    let passes = export.status()["scrub"]["passes"].as_u64().unwrap();
    export.daemon.signal("USR2");
    let mut last = Value::Null;
    until("the scrub ends", || {
        last = export.status();
        last["scrub"]["passes"].as_u64() == Some(passes + 1)
    });
    assert_eq!(last["state"], "healthy", "{last}");
    last
}

/// Has a brick scrub its pool; what was found.
fn scrub_pool(cluster: &Cluster, n: usize) -> Value {
    let brick = cluster.brick(n);
    let status = || -> Value {
        brick.signal("USR1");
        serde_json::from_str(&brick.line()).unwrap()
    };
    let passes = status()["scrub"]["passes"].as_u64().unwrap();
    brick.signal("USR2");
    let mut last = Value::Null;
    until("the scrub of the pool ends", || {
        last = status();
        last["scrub"]["passes"].as_u64() == Some(passes + 1)
    });
    assert_eq!(last["brick"], cluster.brick_id(n), "{last}");
    last["scrub"]["last"].clone()
}

fn story(pools: Pools, transport: &str) {
    let cluster = Cluster::new(pools, 2);
    cluster.create("disk", "8M", &[]);
    let place = cluster.dir().join("scrub.sock");
    let options = ["--scrub-every", "never", "--scrub-rate", "1G", "--socket"];
    let options = [&options[..], &[place.to_str().unwrap()]].concat();
    let export = cluster.export_at(&["disk"], transport, &options);
    let write = |page: u8| format!("write -P {page} {page}M 4k");
    let writes: Vec<String> = (1..8).map(write).collect();
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    export.io(&writes);
    export.io(&["flush"]);
    let clean = scrub(&export);
    let found = &clean["scrub"]["last"]["found"];
    assert_eq!(found["pages_compared"], 8 * MIB / PAGE as u64, "{clean}");
    assert_eq!(found["pages_damaged"], 0, "{clean}");

    // Data on each copy and, where slots lie in shared memory, page tables.
    let (one, other) = (cluster.pool(0), cluster.pool(1));
    flip(one, frame_of(one, 1) * PAGE + 77, 3);
    flip(other, frame_of(other, 2) * PAGE + 4095, 7);
    let mut damaged = vec![1, 2];
    if pools == Pools::Memory {
        flip(one, slot_of(one, frame_of(one, 3)) + 1, 0);
        flip(other, slot_of(other, frame_of(other, 4)) + 6, 5);
        damaged.extend([3, 4]);
    }
    let told = scrub(&export);
    let found = &told["scrub"]["last"]["found"];
    assert_eq!(found["pages_damaged"], damaged.len(), "{told}");
    assert_eq!(found["pages_repaired"], damaged.len(), "{told}");
    assert_eq!(told["counters"]["pages_repaired"], damaged.len(), "{told}");
    let damages = found["damages"].as_array().unwrap().iter();
    let mut offsets: Vec<u64> = damages.map(|it| it["offset"].as_u64().unwrap()).collect();
    offsets.sort_unstable();
    let expected: Vec<u64> = damaged.iter().map(|page| page * MIB).collect();
    assert_eq!(offsets, expected, "{told}");
    let log = export.daemon.log();
    assert!(log.contains("damaged page was repaired"), "{log}");
    assert!(log.contains(&cluster.brick_id(0)), "{log}");
    let read = |page: u8| format!("read -P {page} {page}M 4k");
    let reads: Vec<String> = (1..8).map(read).collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    (0..2).for_each(|_| drop(export.io(&reads)));
    assert_eq!(scrub(&export)["scrub"]["last"]["found"]["pages_damaged"], 0);

    // What only the brick knows: a superblock and, above a leaf, a slot under
    // which no page could be written.
    flip(one, PAGE + 40, 2);
    if pools == Pools::Memory {
        let leaf = slot_of(one, frame_of(one, 6)) / PAGE;
        flip(one, slot_of(one, leaf) + 2, 4);
    }
    let found = scrub_pool(&cluster, 0);
    assert_eq!(found["superblocks"], 1, "{found}");
    assert_eq!(found["slots"], u64::from(pools == Pools::Memory), "{found}");
    assert_eq!(found["damaged"], 0, "{found}");
    let log = cluster.brick(0).log();
    assert!(log.contains("scrub mended"), "{log}");
    assert_eq!(scrub(&export)["scrub"]["last"]["found"]["pages_damaged"], 0);
    (0..2).for_each(|_| drop(export.io(&reads)));

    // Both copies of one page: nothing is left to repair it from.
    for pool in [one, other] {
        flip(pool, frame_of(pool, 5) * PAGE + 9, 1);
    }
    let told = scrub(&export);
    let damage = &told["scrub"]["last"]["found"]["damages"][0];
    assert_eq!(damage["offset"], 5 * MIB, "{told}");
    assert_eq!(damage["repaired"], false, "{told}");
    assert_eq!(damage["bricks"].as_array().unwrap().len(), 2, "{told}");
    let args = ["-f", "raw", "-c", "read 5M 4k", &export.uri];
    let read = support::program::run("qemu-io", &args);
    let said = [read.stdout, read.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(said.contains("Input/output error"), "{said}");
    let named = format!("byte {} is damaged", 5 * MIB);
    let log = export.daemon.log();
    assert!(log.contains(&named), "{log}");
    export.io(&["write -P 9 5M 4k", "read -P 9 5M 4k"]);
    export.stop();
    cluster.check_identical("disk");
}

#[test]
fn copies_in_memory_that_clients_map() {
    story(Pools::Memory, "auto");
}

#[test]
fn copies_in_memory_over_tcp() {
    story(Pools::Memory, "tcp");
}

#[test]
fn copies_on_a_disk() {
    story(Pools::Disk, "auto");
}

#[test]
fn intervals_that_are_none_are_refused() {
    for wrong in ["7", "d", "-1d", "0s", "1w", "99999999999999d", "Never"] {
        let mut command = std::process::Command::new(PAGEMESH);
        command.args(["export", "nbd", "disk", "--socket", "/nowhere"]);
        let output = command
            .arg(format!("--scrub-every={wrong}"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("12h"), "{wrong}: {told}");
    }
}
