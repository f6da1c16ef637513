//! Histories of volumes that hold a file system; `cargo xtask sim --files` runs many.

use pagemesh_sim::{HistoryReport, run_files};

/// Histories of each of the two tests, which run in parallel.
const SEEDS: u64 = 500;

#[track_caller]
fn check(seeds: impl Iterator<Item = u64>) {
    let mut all = HistoryReport::default();
    for seed in seeds {
        match run_files(seed, false) {
            Ok(outcome) => all.add(outcome),
            Err(broken) => {
                panic!(
                    "seed {seed}: {broken}\nrerun it with: cargo xtask sim --files --seed {seed}"
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
fn file_histories_keep_files_1() {
    check(0..SEEDS);
}

#[test]
fn file_histories_keep_files_2() {
    check(1_000_000..1_000_000 + SEEDS);
}

#[test]
fn same_seed_gives_same_file_history() {
    for seed in 0..20 {
        let digest = || run_files(seed, false).expect("a whole history").digest;
        assert_eq!(digest(), digest(), "seed {seed}");
    }
}
