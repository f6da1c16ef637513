//! Pseudorandom numbers from a seed (SplitMix64; Steele, Lea, Flood: Fast splittable pseudorandom
//! number generators, 2014). Equal seeds give equal sequences, which tests, simulations and
//! benchmarks store. The numbers are not secrets: keys come from the kernel.

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A sequence of pseudorandom numbers.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of a seed.
    #[must_use]
    pub const fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next number, any `u64`.
    #[inline]
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN_GAMMA);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The remainder of the next number by `bound`: a number below it. Small bounds are close
    /// enough to uniform.
    ///
    /// # Panics
    /// If `bound` is 0.
    #[inline]
    pub const fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// True once in `odds` numbers on average.
    ///
    /// # Panics
    /// If `odds` is 0.
    pub const fn one_in(&mut self, odds: u64) -> bool {
        self.below(odds) == 0
    }

    /// One element, or `None` if there is none; then the sequence does not advance.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        match from.len() {
            0 => None,
            len => Some(from[self.below(len as u64) as usize]),
        }
    }

    /// A sequence of its own; its use does not change this one.
    #[must_use]
    pub const fn split(&mut self) -> SplitMix64 {
        SplitMix64(self.next_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_gives_published_numbers() {
        // The first numbers of seed 1234567 in the reference implementation of Sebastiano Vigna.
        let mut numbers = SplitMix64::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(expected, [(); 3].map(|()| numbers.next_u64()));
    }
}
