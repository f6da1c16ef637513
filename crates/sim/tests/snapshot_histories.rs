//! Histories of volumes with snapshots; `cargo xtask sim --snapshots` runs many.

use pagemesh_sim::{HistoryReport, run_snapshots};

/// Histories of each of the two tests, which run in parallel.
const SEEDS: u64 = 150;

#[track_caller]
fn check(seeds: impl Iterator<Item = u64>) {
    let mut all = HistoryReport::default();
    for seed in seeds {
        match run_snapshots(seed, false) {
            Ok(outcome) => all.add(outcome),
            Err(broken) => {
                panic!(
                    "seed {seed}: {broken}\nrerun it with: cargo xtask sim --snapshots --seed {seed}"
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
fn snapshot_histories_converge_1() {
    check(0..SEEDS);
}

#[test]
fn snapshot_histories_converge_2() {
    check(1_000_000..1_000_000 + SEEDS);
}

#[test]
fn same_seed_gives_same_snapshot_history() {
    for seed in 0..20 {
        let digest = || run_snapshots(seed, false).expect("a whole history").digest;
        assert_eq!(digest(), digest(), "seed {seed}");
    }
}
