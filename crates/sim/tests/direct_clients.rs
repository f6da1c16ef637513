//! Histories of volumes with a file system that direct clients use, too; `cargo xtask sim --direct-clients`
//! runs many.

use pagemesh_sim::{HistoryReport, run_direct_clients};

/// Histories of each of the two tests, which run in parallel.
const SEEDS: u64 = 100;

#[track_caller]
fn check(seeds: impl Iterator<Item = u64>) {
    let mut all = HistoryReport::default();
    for seed in seeds {
        match run_direct_clients(seed, false) {
            Ok(outcome) => all.add(outcome),
            Err(broken) => {
                panic!(
                    "seed {seed}: {broken}\nrerun it with: cargo xtask sim --direct-clients --seed {seed}"
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
fn direct_clients_and_mount_agree_1() {
    check(0..SEEDS);
}

#[test]
fn direct_clients_and_mount_agree_2() {
    check(1_000_000..1_000_000 + SEEDS);
}

#[test]
fn same_seed_gives_same_direct_client_history() {
    for seed in 0..20 {
        let digest = || {
            run_direct_clients(seed, false)
                .expect("a whole history")
                .digest
        };
        assert_eq!(digest(), digest(), "seed {seed}");
    }
}

#[test]
#[ignore = "repeats the seed in PAGEMESH_SEED, and prints it"]
fn replay_direct_client_seed() {
    let seed = std::env::var("PAGEMESH_SEED").expect("PAGEMESH_SEED");
    let told = run_direct_clients(seed.parse().expect("a number"), true);
    println!("{told:?}");
    assert!(told.is_ok());
}
