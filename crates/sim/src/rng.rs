//! Random numbers of a simulation, besides [`SplitMix64`].

use pagemesh_base::rng::SplitMix64;
use std::time::Duration;

pub(crate) trait SimRng {
    fn micros_below(&mut self, below: u64) -> Duration;

    /// A generator for features newer than stored seeds: this one continues as if there were no
    /// other.
    fn derive(&self) -> SplitMix64;
}

impl SimRng for SplitMix64 {
    fn micros_below(&mut self, below: u64) -> Duration {
        Duration::from_micros(self.below(below))
    }

    fn derive(&self) -> SplitMix64 {
        SplitMix64::new(self.clone().next_u64() ^ 0x5bd1_e995_7f4a_7c15)
    }
}
