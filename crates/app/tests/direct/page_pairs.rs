//! Writes of two pages in one span, as databases without full page writes (8 KiB) rely on. Each
//! write is atomic, even if any of the processes dies.

use super::support::mounted::{self, TestMount};
use super::support::{Cluster, until};
use super::{AcknowledgedWrites, ChildGuard, Random, acknowledged_path, open_file, run_child};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The number of times that all processes are killed; see `make direct-clients`.
const ROUNDS_ENV: &str = "PAGEMESH_TEST_ROUNDS";
const BYTES: u64 = 8192;
/// Pairs of the file, and writers.
const PAIRS: u64 = 48;
const WRITERS: u64 = 3;

fn filled(pair: u64, seq: u64) -> Vec<u8> {
    (pair << 48 | seq).to_le_bytes().repeat(BYTES as usize / 8)
}

/// The number of the write that a pair holds. Panics if the pair is torn.
fn seq_of(file: &File, pair: u64) -> u64 {
    let mut bytes = vec![0; BYTES as usize];
    file.read_exact_at(&mut bytes, pair * BYTES).unwrap();
    let mut words = bytes.chunks(8);
    let first = words.next().unwrap();
    let torn = words.position(|word| word != first);
    assert!(torn.is_none(), "pair {pair} is torn at word {torn:?}");
    let word = u64::from_le_bytes(first.try_into().unwrap());
    assert!(word == 0 || word >> 48 == pair, "pair {pair} is another's");
    word & ((1 << 48) - 1)
}

/// The job of a child: writes its own pairs as fast as it can.
pub fn write_pairs(file: &File, acknowledged: &AcknowledgedWrites, own: u64) {
    let mut random = Random::new(own + u64::from(std::process::id()));
    loop {
        let pair = own + random.below((PAIRS - own).div_ceil(WRITERS)) * WRITERS;
        // A pair has a single writer. A killed predecessor may have written one number more than it
        // acknowledged.
        let seq = acknowledged.get(pair) + 2;
        file.write_all_at(&filled(pair, seq), pair * BYTES).unwrap();
        acknowledged.set(pair, seq);
    }
}

fn start_all(cluster: &Cluster, mount: &TestMount) -> Vec<ChildGuard> {
    let start = |own: u64| run_child(cluster, mount, &format!("pairs{own}"), own != 2);
    (0..WRITERS).map(start).collect()
}

/// Asserts that no pair is torn and that every acknowledged write is there.
fn check_pairs(file: &File, acknowledged: &AcknowledgedWrites) {
    for pair in 0..PAIRS {
        let (found, least) = (seq_of(file, pair), acknowledged.get(pair));
        assert!(found >= least, "pair {pair}: {found} of {least}");
    }
}

#[test]
fn two_page_write_is_atomic_under_kills() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let rounds = std::env::var(ROUNDS_ENV).ok();
    let rounds: u64 = rounds.map_or(4, |rounds| rounds.parse().unwrap());
    let mut mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "file");
    file.write_all_at(&vec![0; (PAIRS * BYTES) as usize], 0)
        .unwrap();
    drop(file);
    let memory = File::create_new(acknowledged_path(&cluster)).unwrap();
    memory.set_len(PAIRS * 8).unwrap();
    let memory = File::open(acknowledged_path(&cluster)).unwrap();
    let acknowledged = AcknowledgedWrites(memory);
    let sum = || (0..PAIRS).map(|pair| acknowledged.get(pair)).sum::<u64>();
    let mut random = Random::new(11);
    for round in 0..rounds {
        let mut writers = start_all(&cluster, &mount);
        let (before, more) = (sum(), 100 + random.below(2000));
        until("more is written", || sum() >= before + more);
        // The order changes in each round.
        let kill_bricks = |cluster: &mut Cluster| (0..2).for_each(|n| cluster.kill_brick(n));
        if round % 2 == 0 {
            kill_bricks(&mut cluster);
        }
        // One of the writers ends only with the mount, since it waits for the kernel.
        writers.iter_mut().for_each(|it| it.0.kill().unwrap());
        mount.daemon.take().unwrap().kill();
        drop(writers);
        if round % 2 == 1 {
            kill_bricks(&mut cluster);
        }
        for brick in 0..2 {
            cluster.restart_brick(brick);
        }
        cluster.await_bricks(2);
        mount.remount(&cluster, "files", "auto");
        check_pairs(&open_file(&mount, "file"), &acknowledged);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
