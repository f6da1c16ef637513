//! Histories of bricks with disks; `cargo xtask sim --disks` runs many.

use pagemesh_sim::{HistoryReport, run_disks};

/// Histories of each of the two tests, which run in parallel. Other histories have disks, too.
const SEEDS: u64 = 150;

#[track_caller]
fn check(seeds: impl Iterator<Item = u64>) {
    let mut all = HistoryReport::default();
    for seed in seeds {
        match run_disks(seed, false) {
            Ok(outcome) => all.add(outcome),
            Err(broken) => {
                panic!(
                    "seed {seed}: {broken}\nrerun it with: cargo xtask sim --disks --seed {seed}"
                )
            }
        }
    }
    assert_eq!(
        all.missing_events(),
        [""; 0],
        "expected events are missing: {all:#?}"
    );
}

#[test]
fn disk_histories_converge_1() {
    check(0..SEEDS);
}

#[test]
fn disk_histories_converge_2() {
    check(1_000_000..1_000_000 + SEEDS);
}

#[test]
fn same_seed_gives_same_disk_history() {
    for seed in 0..20 {
        let digest = || run_disks(seed, false).expect("a whole history").digest;
        assert_eq!(digest(), digest(), "seed {seed}");
    }
}
