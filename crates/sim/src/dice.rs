//! Seeded numbers (SplitMix64, Steele et al. 2014): the same seed, the same
//! rolls.

use std::time::Duration;

/// A source of numbers.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Any number.
    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `sides`.
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.word() % sides
    }

    pub(crate) fn one_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        match from.len() {
            0 => None,
            len => Some(from[self.roll(len as u64) as usize]),
        }
    }

    pub(crate) fn micros(&mut self, below: u64) -> Duration {
        Duration::from_micros(self.roll(below))
    }

    /// Dice for what came later than seeds that are kept: these roll on as if
    /// there were none.
    pub(crate) fn beside(&self) -> Dice {
        Dice(self.clone().word() ^ 0x5bd1_e995_7f4a_7c15)
    }

    /// Other dice, so that who rolls there does not change the rolls here.
    pub(crate) fn split(&mut self) -> Dice {
        Dice(self.word())
    }
}
