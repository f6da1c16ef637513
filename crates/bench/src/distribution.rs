//! Distributions of pages over a working set: uniform, or by Zipf's law.

use pagemesh_base::rng::SplitMix64;
use std::fmt;

/// A multiplier that scatters neighbouring ranks over the set. It is a prime, so it meets each page once.
const SCATTER: u64 = 2_654_435_761;

/// The law of a distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PageLaw {
    /// Every page is as likely as any other.
    Uniform,
    /// The page of rank `n` has the weight `n` to the power of minus this.
    Zipf(f64),
}

impl fmt::Display for PageLaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PageLaw::Uniform => f.write_str("uniform"),
            PageLaw::Zipf(exponent) => write!(f, "zipf {exponent}"),
        }
    }
}

/// Draws pages of a set.
#[derive(Clone, Debug)]
pub struct PageDistribution {
    pages: u64,
    /// The share of the ranks up to each; empty if all are alike.
    shares: Vec<f64>,
}

impl PageDistribution {
    /// A distribution over so many pages, at least one.
    #[must_use]
    pub fn new(law: PageLaw, pages: u64) -> PageDistribution {
        let pages = pages.max(1);
        let mut shares = Vec::new();
        if let PageLaw::Zipf(exponent) = law {
            let mut sum = 0.0;
            shares.extend((1..=pages).map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            }));
            shares.iter_mut().for_each(|share| *share /= sum);
        }
        PageDistribution { pages, shares }
    }

    /// A page.
    pub fn draw(&self, rng: &mut SplitMix64) -> u64 {
        if self.shares.is_empty() {
            return rng.next_u64() % self.pages;
        }
        let at = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let rank = self.shares.partition_point(|&share| share < at) as u64;
        rank.min(self.pages - 1).wrapping_mul(SCATTER) % self.pages
    }

    /// The hit ratio of a memory that always has the likeliest `pages` pages.
    #[must_use]
    pub fn best_hit_ratio(&self, pages: u64) -> f64 {
        match pages {
            0 => 0.0,
            pages if pages >= self.pages => 1.0,
            pages if self.shares.is_empty() => pages as f64 / self.pages as f64,
            pages => self.shares[pages as usize - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likeliest_pages_are_drawn_as_often_as_their_share() {
        for (law, least) in [(PageLaw::Uniform, 0.09), (PageLaw::Zipf(1.1), 0.7)] {
            let pages = PageDistribution::new(law, 1000);
            let mut rng = SplitMix64::new(5);
            let mut counts = vec![0u64; 1000];
            for _ in 0..100_000 {
                counts[pages.draw(&mut rng) as usize] += 1;
            }
            counts.sort_unstable_by(|a, b| b.cmp(a));
            let drawn = counts[..100].iter().sum::<u64>() as f64 / 100_000.0;
            let best = pages.best_hit_ratio(100);
            assert!(best >= least, "{law}: {best}");
            assert!((drawn - best).abs() < 0.05, "{law}: {drawn} of {best}");
        }
    }
}
