//! Two thousand histories in every run of the tests; `cargo xtask sim` runs many.

use pagemesh_sim::{HistoryReport, run};

/// Histories of each of the two tests, which run in parallel.
const SEEDS: u64 = 1000;

#[track_caller]
fn check(seeds: impl Iterator<Item = u64>) {
    let mut all = HistoryReport::default();
    for seed in seeds {
        match run(seed, false) {
            Ok(outcome) => all.add(outcome),
            Err(broken) => {
                panic!("seed {seed}: {broken}\nrerun it with: cargo xtask sim --seed {seed}")
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
fn block_histories_converge_1() {
    check(0..SEEDS);
}

#[test]
fn block_histories_converge_2() {
    check(1_000_000..1_000_000 + SEEDS);
}

/// Further seeds that found bugs which are fixed now, see RFD 003.
#[test]
fn seeds_of_fixed_bugs_converge() {
    check([47_859, 100_333, 2_008_514, 2_011_265, 20_022_597].into_iter());
}

#[test]
fn same_seed_gives_same_block_history() {
    for seed in 0..20 {
        let digest = || run(seed, false).expect("a whole history").digest;
        assert_eq!(digest(), digest(), "seed {seed}");
    }
}
