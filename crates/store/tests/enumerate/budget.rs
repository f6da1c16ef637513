//! The number of images that each crash point checks: all up to a bound, samples above it.

use std::collections::BTreeMap;
use std::env;
use std::fmt;

/// How many images of a crash point are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// A point with at most this many legal images has all of them checked.
    pub(super) all_max: u64,
    /// Images checked at any other point: no uncertain write, all of them, and random subsets.
    pub(super) sampled: u64,
}

/// Counts points and their legal images; checks no image.
pub(super) const COUNT_ONLY: Budget = Budget {
    all_max: 0,
    sampled: 0,
};

/// For points that other sequences check as well.
pub(super) const EXTREMES: Budget = Budget {
    all_max: 2,
    sampled: 2,
};

/// Points and their images by the number of legal images. The key is the smallest power of two that
/// is at least that number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ImageHistogram(BTreeMap<u64, (u64, u64)>);

impl ImageHistogram {
    pub(super) fn record(&mut self, images: u64) {
        let bound = images.checked_next_power_of_two().unwrap_or(u64::MAX);
        let (points, sum) = self.0.entry(bound).or_default();
        *points += 1;
        *sum = sum.saturating_add(images);
    }

    pub(super) fn add(&mut self, other: &ImageHistogram) {
        for (bound, (points, images)) in &other.0 {
            let own = self.0.entry(*bound).or_default();
            *own = (own.0 + points, own.1.saturating_add(*images));
        }
    }

    /// Points with more legal images than the bound.
    fn points_above(&self, bound: u64) -> u64 {
        let above = self.0.range(bound.saturating_add(1)..);
        above.map(|(_, (points, _))| points).sum()
    }

    /// Images that a budget checks.
    fn cost(&self, budget: Budget) -> u64 {
        let all = self.0.range(..=budget.all_max);
        let all = all.map(|(_, (_, images))| *images);
        let sampled = self.points_above(budget.all_max) * budget.sampled;
        all.fold(sampled, u64::saturating_add)
    }

    /// The highest `all_max` that costs at most `images`; never below `least`.
    pub(super) fn highest_bound(&self, images: u64, least: Budget) -> Budget {
        let with = |&all_max: &u64| Budget { all_max, ..least };
        let bounds = self.0.keys().filter(|bound| **bound > least.all_max);
        let mut bounds = bounds.map(with).filter(|it| self.cost(*it) <= images);
        bounds.next_back().unwrap_or(least)
    }

    /// Like `highest_bound`, then spends the remaining images on samples.
    pub(super) fn with_samples(&self, images: u64, least: Budget) -> Budget {
        let mut budget = self.highest_bound(images, least);
        let rest = images.saturating_sub(self.cost(budget));
        budget.sampled += rest / self.points_above(budget.all_max).max(1);
        budget
    }
}

/// A workload's share of the enumeration.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkloadShare {
    /// Budget of an ordinary test run.
    pub(super) budget: Budget,
    /// Images that an ordinary test run checks at least.
    pub(super) images_min: u64,
    /// Percentage of a campaign's images.
    pub(super) percent: u64,
}

impl WorkloadShare {
    /// Images of this workload in a campaign (`cargo xtask enumerate`), if one runs.
    pub(super) fn campaign_images(&self) -> Option<u64> {
        env_number("PAGEMESH_IMAGES").map(|images| (images * self.percent).div_ceil(100))
    }
}

/// A number from an environment variable.
pub(super) fn env_number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budget { all_max, sampled } = self;
        write!(f, "all images up to {all_max} a point, else {sampled}")
    }
}

#[test]
fn larger_budget_exhausts_first_and_then_samples() {
    let mut legal = ImageHistogram::default();
    for images in [1, 3, 4, 30, 200, u64::MAX] {
        legal.record(images);
    }
    let least = Budget {
        all_max: 4,
        sampled: 2,
    };
    assert_eq!(legal.cost(least), 1 + 3 + 4 + 3 * 2);
    let spent = |images| {
        let Budget { all_max, sampled } = legal.with_samples(images, least);
        (all_max, sampled)
    };
    assert_eq!(spent(0), (4, 2), "never less");
    assert_eq!(spent(41), (4, 11), "too few for the next bound");
    assert_eq!(spent(42), (32, 2));
    assert_eq!(spent(239), (32, 100));
    assert_eq!(spent(240), (256, 2));
    assert_eq!(spent(1240), (256, 1002));
}
