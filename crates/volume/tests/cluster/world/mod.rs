//! A small cluster in memory, stepped by hand: bricks, a manager, clients. A test or a seed
//! decides the order of all events.

pub(crate) mod bricks;
pub(crate) mod client;
pub(crate) mod cluster;
pub(crate) mod history;
pub(crate) mod manager;
pub(crate) mod mapped_sessions;
pub(crate) mod oracle;

/// The number of seeds in PAGEMESH_SEEDS, if it is set.
pub(crate) fn seeds_from_env() -> Option<u64> {
    std::env::var("PAGEMESH_SEEDS").ok()?.parse().ok()
}

/// Prints the seed of a history that ends in a panic, and the test that repeats it.
pub(crate) struct SeedReporter(pub u64, pub &'static str);

impl Drop for SeedReporter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let SeedReporter(seed, test) = self;
            eprintln!(
                "seed {seed}: PAGEMESH_SEED={seed} cargo test -p pagemesh-volume {test} -- --ignored"
            );
        }
    }
}
