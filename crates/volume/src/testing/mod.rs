//! A small cluster in memory, stepped by hand: bricks, a manager, clients.
//! Everything that could happen at any time happens when a test, or a seed,
//! says so.

mod brick;
mod client;
mod hedged;
mod manager;
mod oracle;
mod scenarios;
mod scrub;
mod simulation;
mod undecided;
mod world;

/// Seeded numbers (SplitMix64): the same seed, the same run.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % sides
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }
}
