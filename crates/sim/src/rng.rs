//! Random numbers from a seed (SplitMix64, Steele et al. 2014): equal seeds give equal sequences.

use std::time::Duration;

/// A random number generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number, any `u64`.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    pub(crate) fn one_in(&mut self, odds: u64) -> bool {
        self.below(odds) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        match from.len() {
            0 => None,
            len => Some(from[self.below(len as u64) as usize]),
        }
    }

    pub(crate) fn micros_below(&mut self, below: u64) -> Duration {
        Duration::from_micros(self.below(below))
    }

    /// A generator for features newer than stored seeds: this one continues as if there were no
    /// other.
    pub(crate) fn derive(&self) -> Rng {
        Rng(self.clone().next_u64() ^ 0x5bd1_e995_7f4a_7c15)
    }

    /// A separate generator; its use does not change this one's sequence.
    pub(crate) fn split(&mut self) -> Rng {
        Rng(self.next_u64())
    }
}
