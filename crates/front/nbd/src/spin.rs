//! Whether to try receiving for a moment before going to sleep.
//!
//! A spin saves a sleep and a wake-up when the next request comes at once,
//! and takes the processor from the client when it does not. So this counts
//! what spins brought: after a few in a row that found nothing, or lost the
//! processor meanwhile, none is tried for a number of waits that doubles with
//! each such series. It is asked only after requests were served, so an idle
//! connection never spins. It reads no clock.

use crate::limits::{SPIN_HITS_TRUSTED, SPIN_MISSES_MAX, SPIN_PAUSE_MAX, SPIN_PAUSE_MIN};

/// See the module.
#[derive(Debug)]
pub(crate) struct Spin {
    misses: u32,
    hits: u32,
    /// Waits still to go without a spin.
    paused: u32,
    /// The length of the next pause.
    pause: u32,
}

impl Spin {
    pub(crate) fn new() -> Self {
        Self {
            misses: 0,
            hits: 0,
            paused: 0,
            pause: SPIN_PAUSE_MIN,
        }
    }

    /// Whether to spin before the wait that comes now.
    pub(crate) fn is_worth_it(&mut self) -> bool {
        let now = self.paused == 0;
        self.paused = self.paused.saturating_sub(1);
        now
    }

    /// A spin found something, and kept the processor all the time.
    pub(crate) fn hit(&mut self) {
        self.misses = 0;
        self.hits = self.hits.saturating_add(1);
        if self.hits >= SPIN_HITS_TRUSTED {
            self.pause = SPIN_PAUSE_MIN;
        }
    }

    /// A spin was in vain, or somebody else needed the processor.
    pub(crate) fn miss(&mut self) {
        self.hits = 0;
        self.misses += 1;
        if self.misses >= SPIN_MISSES_MAX {
            self.misses = 0;
            self.paused = self.pause;
            self.pause = (self.pause * 2).min(SPIN_PAUSE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spins_of(waits: u32, spin: &mut Spin, pays: bool) -> u32 {
        let mut spins = 0;
        for _ in 0..waits {
            if spin.is_worth_it() {
                spins += 1;
                if pays { spin.hit() } else { spin.miss() }
            }
        }
        spins
    }

    #[test]
    fn spinning_that_pays_goes_on() {
        assert_eq!(spins_of(1000, &mut Spin::new(), true), 1000);
    }

    #[test]
    fn spinning_in_vain_fades_to_almost_nothing() {
        let mut spin = Spin::new();
        spins_of(20_000, &mut spin, false);
        let spins = spins_of(100_000, &mut spin, false);
        assert!(spins <= 100_000 / SPIN_PAUSE_MAX * SPIN_MISSES_MAX + SPIN_MISSES_MAX);
        assert!(spins > 0, "it must notice when spinning pays again");
    }

    #[test]
    fn a_long_pause_is_forgotten_after_spins_that_paid() {
        let mut spin = Spin::new();
        spins_of(20_000, &mut spin, false);
        spins_of(20_000, &mut spin, true);
        assert_eq!(
            spins_of(SPIN_MISSES_MAX + SPIN_PAUSE_MIN, &mut spin, false),
            SPIN_MISSES_MAX
        );
    }
}
