//! Scrubs of real processes: a scrub finds flipped bits in the pools of a mirrored volume while it
//! is served, repairs them from the other copy, and counts them. It names pages that no copy holds
//! intact.

use crate::support;
use pagemesh_store::geometry::Geometry;
use pagemesh_store::slot::{FRAMES_MAX, Slot};
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use support::daemon::Daemon;
use support::mounted::{self, TestMount};
use support::{Cluster, Export, MIB, PAGEMESH, Pools, until};

const PAGE: usize = 4096;

/// Frames of a pool that are full of this byte.
fn find_frames(pool: &Path, pattern: u8) -> Vec<u64> {
    let bytes = std::fs::read(pool).unwrap();
    let numbers = Geometry::plan(64 * MIB).unwrap().first_frames();
    let is_it = |frame: &u64| bytes[*frame as usize * PAGE..][..PAGE] == [pattern; PAGE];
    numbers.filter(is_it).collect()
}

/// The only frame that is full of this byte.
fn frame_of(pool: &Path, pattern: u8) -> usize {
    let found = find_frames(pool, pattern);
    assert_eq!(found.len(), 1, "{pattern:#x}: {found:?}");
    found[0] as usize
}

/// The offset of the slot that names this frame.
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
fn flip_bit(pool: &Path, byte: usize, bit: u8) {
    let file = File::options().read(true).write(true).open(pool).unwrap();
    let mut found = [0];
    file.read_exact_at(&mut found, byte as u64).unwrap();
    file.write_all_at(&[found[0] ^ 1 << bit], byte as u64)
        .unwrap();
}

/// Scrubs the volume of an export; returns the findings.
fn scrub_export(export: &Export) -> Value {
    scrub_volume(&export.daemon)
}

/// Scrubs the volume through the client that has it attached.
fn scrub_volume(client: &Daemon) -> Value {
    let status = || -> Value {
        client.signal("USR1");
        serde_json::from_str(&client.line()).unwrap()
    };
    let passes = status()["scrub"]["passes"].as_u64().unwrap();
    client.signal("USR2");
    let mut last = Value::Null;
    until("the scrub ends", || {
        last = status();
        last["scrub"]["passes"].as_u64() == Some(passes + 1)
    });
    assert_eq!(last["state"], "healthy", "{last}");
    last
}

/// Has a brick scrub its pool; returns the findings.
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
    assert_eq!(last["name"], format!("brick-{n}"), "{last}");
    last["scrub"]["last"].clone()
}

fn check_volume_scrub(pools: Pools, transport: &str) {
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
    let clean = scrub_export(&export);
    let found = &clean["scrub"]["last"]["found"];
    assert_eq!(found["pages_compared"], 8 * MIB / PAGE as u64, "{clean}");
    assert_eq!(found["pages_damaged"], 0, "{clean}");

    // Data on each copy and, where slots are in shared memory, page tables.
    let (one, other) = (cluster.pool(0), cluster.pool(1));
    flip_bit(one, frame_of(one, 1) * PAGE + 77, 3);
    flip_bit(other, frame_of(other, 2) * PAGE + 4095, 7);
    let mut damaged = vec![1, 2];
    if pools == Pools::Memory {
        flip_bit(one, slot_of(one, frame_of(one, 3)) + 1, 0);
        flip_bit(other, slot_of(other, frame_of(other, 4)) + 6, 5);
        damaged.extend([3, 4]);
    }
    let told = scrub_export(&export);
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
    assert!(log.contains("brick-0"), "{log}");
    let read = |page: u8| format!("read -P {page} {page}M 4k");
    let reads: Vec<String> = (1..8).map(read).collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    (0..2).for_each(|_| drop(export.io(&reads)));
    assert_eq!(
        scrub_export(&export)["scrub"]["last"]["found"]["pages_damaged"],
        0
    );

    // Damage that only the brick can detect: a superblock and, above a leaf, a slot under which no
    // page could be written.
    for (n, pool) in [one, other].into_iter().enumerate() {
        flip_bit(pool, PAGE + 40, 2);
        if pools == Pools::Memory {
            let leaf = slot_of(pool, frame_of(pool, 6)) / PAGE;
            flip_bit(pool, slot_of(pool, leaf) + 2, 4);
        }
        let found = scrub_pool(&cluster, n);
        assert_eq!(found["superblocks"], 1, "{found}");
        assert_eq!(found["slots"], u64::from(pools == Pools::Memory), "{found}");
        assert_eq!(found["damaged"], 0, "{found}");
        let log = cluster.brick(n).log();
        assert!(log.contains("scrub mended"), "{log}");
    }
    assert_eq!(
        scrub_export(&export)["scrub"]["last"]["found"]["pages_damaged"],
        0
    );
    (0..2).for_each(|_| drop(export.io(&reads)));

    // Both copies of one page: no source for a repair is left.
    for pool in [one, other] {
        flip_bit(pool, frame_of(pool, 5) * PAGE + 9, 1);
    }
    let told = scrub_export(&export);
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
fn scrub_repairs_mapped_memory_copies() {
    check_volume_scrub(Pools::Memory, "auto");
}

#[test]
fn scrub_repairs_memory_copies_over_tcp() {
    check_volume_scrub(Pools::Memory, "tcp");
}

#[test]
fn scrub_repairs_disk_copies() {
    check_volume_scrub(Pools::Disk, "auto");
}

/// On a disk a running brick holds the page tables in memory: damage on the disk takes effect at
/// the next start.
#[test]
fn scrub_repairs_page_tables_on_disk() {
    let mut cluster = Cluster::new(Pools::Disk, 2);
    cluster.create("disk", "8M", &[]);
    let place = cluster.dir().join("scrub.sock");
    let options = ["--scrub-every", "never", "--scrub-rate", "1G", "--socket"];
    let options = [&options[..], &[place.to_str().unwrap()]].concat();
    let export = cluster.export_at(&["disk"], "auto", &options);
    for n in 0..2 {
        let page = n as u64 + 1;
        export.io(&[&format!("write -P {page} {page}M 4k"), "flush"]);
        // Until then the write is in flight, and resync writes it to the returning copy.
        until("the connection has ended well", || {
            export.status()["channels"] == 0
        });
        cluster.stop_brick(n);
        let pool = cluster.pool(n);
        flip_bit(pool, slot_of(pool, frame_of(pool, page as u8)) + 1, 3);
        cluster.restart_brick(n);
        export.await_state("healthy");
        let told = scrub_export(&export);
        let found = &told["scrub"]["last"]["found"];
        assert_eq!(found["pages_repaired"], 1, "{told}");
        assert_eq!(found["damages"][0]["offset"], page * MIB, "{told}");
        assert_eq!(
            found["damages"][0]["bricks"][0],
            cluster.brick_id(n),
            "{told}"
        );
        let name = format!("brick-{n}");
        assert_eq!(found["damages"][0]["brick_names"][0], name, "{told}");
    }
    (0..2).for_each(|_| drop(export.io(&["read -P 1 1M 4k", "read -P 2 2M 4k"])));
    export.stop();
    cluster.check_identical("disk");
}

#[test]
fn scrub_repairs_mounted_file_system() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "map");
    mount.sh(
        "for byte in 1 2; do head -c 20000 /dev/zero | tr '\\0' \"\\\\$byte\" > $byte; done; sync",
    );
    for (pool, byte) in [(cluster.pool(0), 1), (cluster.pool(1), 2)] {
        flip_bit(pool, find_frames(pool, byte)[0] as usize * PAGE + 7, 1);
    }
    let told = scrub_volume(mount.daemon.as_ref().unwrap());
    let found = &told["scrub"]["last"]["found"];
    assert_eq!(found["pages_repaired"], 2, "{told}");
    assert_eq!(found["pages_differing"], 0, "{told}");
    mount.sh("test $(tr -d '\\1' < 1 | wc -c) = 0; test $(tr -d '\\2' < 2 | wc -c) = 0");
    mount.stop(&cluster);
}

/// A client that stays connected.
struct NbdClient(Child);

impl NbdClient {
    fn new(export: &Export) -> NbdClient {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", &export.uri]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        NbdClient(command.spawn().unwrap())
    }

    /// Writes a page full of this byte at offset `pattern` MiB, and waits until both pools have it.
    fn write(&mut self, pattern: u8, pools: [&Path; 2]) {
        let command = format!("write -P {pattern} {pattern}M 4k\n");
        let stdin = self.0.stdin.as_mut().unwrap();
        stdin.write_all(command.as_bytes()).unwrap();
        stdin.flush().unwrap();
        until("both copies have the page", || {
            let has = |pool: &&Path| find_frames(pool, pattern).len() == 1;
            pools.iter().all(has)
        });
    }
}

impl Drop for NbdClient {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The offset of the record that allocates this frame.
fn record_of(pool: &Path, frame: usize) -> usize {
    let bytes = std::fs::read(pool).unwrap();
    let geometry = Geometry::plan(64 * MIB).unwrap();
    let lanes = geometry.journal_region.start as usize;
    let end = lanes + geometry.journal_region.len as usize;
    let is_it = |at: &usize| {
        // Both kinds of map records: with check bits, and with a second checksum in their place.
        let is_map = matches!(bytes[*at + 4], 1 | 4);
        let word = u64::from_le_bytes(bytes[*at + 40..][..8].try_into().unwrap());
        is_map && word & (FRAMES_MAX - 1) == frame as u64
    };
    let found: Vec<usize> = (lanes..end).step_by(64).filter(is_it).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0]
}

/// Entries of the in-flight table that are in use.
fn in_flight(pool: &Path) -> Vec<usize> {
    let bytes = std::fs::read(pool).unwrap();
    let region = Geometry::plan(64 * MIB).unwrap().in_flight;
    let (start, len) = (region.start as usize, region.len as usize);
    let is_used = |at: &usize| bytes[*at..][..32].iter().any(|byte| *byte != 0);
    (start..start + len).step_by(32).filter(is_used).collect()
}

/// A scrub corrects records that recovery would need, while the pool is in use; then all processes
/// die.
fn check_journal_scrub(pools: Pools, transport: &str) {
    let mut cluster = Cluster::new(pools, 2);
    cluster.create("disk", "128M", &[]);
    let export = cluster.export(&["disk"], transport);
    let both = || [cluster.pool(0), cluster.pool(1)];
    let bytes_at = |n: usize, at: usize, len: usize| {
        std::fs::read(cluster.pool(n)).unwrap()[at..][..len].to_vec()
    };
    let mut client = NbdClient::new(&export);
    client.write(0x61, both());
    for n in 0..2 {
        let pool = cluster.pool(n);
        let record = record_of(pool, frame_of(pool, 0x61));
        let before = bytes_at(n, record, 64);
        // Once before a checkpoint has read the record, and once after.
        for byte in [9, 57] {
            flip_bit(pool, record + byte, 4);
            let found = scrub_pool(&cluster, n);
            assert_eq!(found["records"], 1, "{found}");
            assert_eq!(found["corrected"], 1, "{found}");
            assert_eq!(bytes_at(n, record, 64), before);
        }
        let log = cluster.brick(n).log();
        assert!(log.contains("mended"), "{log}");
        assert_eq!(in_flight(pool), [0usize; 0]);
    }
    // Killed: a client that ends normally leaves nothing in flight.
    export.kill();
    drop(client);
    for n in 0..2 {
        let pool = cluster.pool(n);
        until("the client's last write is listed", || {
            in_flight(pool).len() == 1
        });
        let entry = in_flight(pool)[0];
        let before = bytes_at(n, entry, 32);
        flip_bit(pool, entry + 17, 2);
        let found = scrub_pool(&cluster, n);
        assert_eq!(found["in_flight"], 1, "{found}");
        assert_eq!(found["corrected"], 1, "{found}");
        assert_eq!(bytes_at(n, entry, 32), before);
    }

    let export = cluster.export(&["disk"], transport);
    let mut client = NbdClient::new(&export);
    client.write(0x62, both());
    for (n, pool) in both().into_iter().enumerate() {
        flip_bit(pool, record_of(pool, frame_of(pool, 0x62)) + 30, 1);
        assert_eq!(scrub_pool(&cluster, n)["records"], 1);
    }
    drop(client);
    export.kill();
    cluster.kill_manager();
    (0..2).for_each(|n| cluster.kill_brick(n));
    cluster.start_manager();
    (0..2).for_each(|n| cluster.restart_brick(n));
    cluster.await_bricks(2);
    let export = cluster.export(&["disk"], transport);
    for _ in 0..2 {
        export.io(&["read -P 0x61 97M 4k", "read -P 0x62 98M 4k"]);
    }
    export.stop();
    cluster.check_identical("disk");
    for n in 0..2 {
        assert_eq!(scrub_pool(&cluster, n)["corrected"], 0);
    }
}

#[test]
fn corrected_memory_journal_survives_kills() {
    check_journal_scrub(Pools::Memory, "auto");
}

#[test]
fn corrected_disk_journal_survives_kills() {
    check_journal_scrub(Pools::Disk, "tcp");
}

/// A brick as the manager lists it.
fn listed_brick(cluster: &Cluster, id: &str) -> Value {
    let bricks = cluster.json(&["brick", "list"]);
    let mut bricks = bricks.as_array().unwrap().iter();
    bricks.find(|brick| brick["brick"] == id).unwrap().clone()
}

#[test]
fn manager_requests_brick_scrubs() {
    let mut cluster = Cluster::new(Pools::Memory, 2);
    let (one, other) = (cluster.brick_id(0), cluster.brick_id(1));
    let await_passes = |id: &str, passes: u64| {
        let mut last = Value::Null;
        until("the manager hears of the scrub", || {
            last = listed_brick(&cluster, id);
            last["scrub"]["passes"] == passes && last["scrub_request"].is_null()
        });
        last["scrub"].clone()
    };
    let idle = listed_brick(&cluster, &one);
    assert_eq!(idle["scrub"]["state"], "waiting", "{idle}");
    assert_eq!(idle["scrub"]["passes"], 0, "{idle}");
    flip_bit(cluster.pool(0), PAGE + 40, 2);
    let asked = cluster.json(&["brick", "scrub", &one]);
    assert_eq!(asked[0]["brick"], one, "{asked}");
    assert_eq!(asked[0]["scrub_request"]["stop"], false, "{asked}");
    let told = await_passes(&one, 1);
    assert_eq!(told["last"]["superblocks"], 1, "{told}");
    assert_eq!(told["last"]["damaged"], 0, "{told}");
    assert_eq!(told["state"], "waiting", "{told}");
    assert_eq!(listed_brick(&cluster, &other)["scrub"]["passes"], 0);
    let status = cluster.json(&["status"]);
    assert_eq!(status["status"]["scrubs_corrected"], 1, "{status}");
    assert_eq!(status["status"]["scrubs_damaged"], 0, "{status}");
    let table = cluster.ok(&["brick", "list"]);
    for part in ["SCRUB", "in 23h", "1 corrected", "none"] {
        assert!(table.contains(part), "no {part} in {table}");
    }
    let said = cluster.ok(&["status"]);
    assert!(said.contains("corrected 1 places"), "{said}");
    // All bricks at once; a finished scrub is not repeated.
    let asked = cluster.json(&["brick", "scrub", "--all"]);
    assert_eq!(asked.as_array().unwrap().len(), 2, "{asked}");
    await_passes(&one, 2);
    await_passes(&other, 1);
    let said = cluster.ok(&["brick", "scrub", "--stop", "--all"]);
    assert!(said.contains("2 asked to end"), "{said}");
    await_passes(&one, 2);
    await_passes(&other, 1);
    let unknown = uuid::Uuid::from_u128(9).to_string();
    cluster.refused(&["brick", "scrub", &unknown], &["no brick", &unknown]);
    cluster.kill_brick(1);
    cluster.await_bricks(1);
    cluster.refused(&["brick", "scrub", &other], &["brick-1", "is dead"]);
    assert_eq!(
        cluster
            .json(&["brick", "scrub", "--all"])
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn invalid_scrub_intervals_are_refused() {
    for wrong in ["7", "d", "-1d", "0s", "1w", "99999999999999d", "Never"] {
        let mut command = Command::new(PAGEMESH);
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
