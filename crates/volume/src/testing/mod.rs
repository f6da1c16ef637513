//! A small cluster in memory, stepped by hand: bricks, a manager, clients. A test or a seed
//! decides the order of all events.

mod brick;
mod client;
mod cluster;
mod direct_clients;
mod direct_replication;
mod hedging;
mod idle;
mod indeterminate;
mod manager;
mod mapped_sessions;
mod oracle;
mod replication;
mod scenarios;
mod scrub;
mod sessions;
mod simulation;

use brick::Fabric;
use client::Client;
use pagemesh_base::poison;
use std::time::Duration;

/// Seeded random numbers (SplitMix64). The same seed gives the same run.
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % sides
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Makes one step without a request: a brick answers, the client is polled, one of its calls is
/// made, or time passes.
fn step_background(dice: &mut Rng, fabric: &Fabric, client: &mut Client) {
    match dice.below(10) {
        0..=5 => {
            let mut bricks = poison::lock(&fabric.0);
            let busy = bricks.busy();
            if !busy.is_empty() {
                let at = dice.below(busy.len() as u64) as usize;
                bricks.step(busy[at], dice);
            }
        }
        6 | 7 => client.poll(),
        8 => {
            client.run_call();
        }
        _ => client.now += Duration::from_millis(dice.below(20)),
    }
}

/// The number of seeds in PAGEMESH_SEEDS, if it is set.
fn seeds_from_env() -> Option<u64> {
    std::env::var("PAGEMESH_SEEDS").ok()?.parse().ok()
}

/// Prints the seed of a history that ends in a panic, and the test that repeats it.
struct SeedReporter(u64, &'static str);

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
