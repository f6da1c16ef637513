//! How a connection waits for its next request.
//!
//! It may sleep at once; or try receiving for a moment first, which saves a
//! sleep and a wake-up when the request comes soon, and takes the processor
//! from others when it does not; or, beyond that, keep idle processors from
//! sleeping, so that its client is woken fast, which costs power. Which is best
//! depends on the machine and its load, so it is measured: short trials of each
//! way, in turns, then a longer run with the best. Of each way the median
//! trial counts: one may be disturbed, another happen to find client and server
//! on one processor. The dearer way must be clearly better. This is asked only after requests were served, so an idle
//! connection costs nothing. It reads no clock.

use crate::limits::{
    AWAKE_GAIN_PERCENT, GAP_MAX, RUN_MAX, RUN_MIN, SPIN_GAIN_PERCENT, TRIAL_WAITS, TRIALS,
};
use std::time::{Duration, Instant};

/// A way to wait, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// At once.
    Sleep,
    /// After trying to receive for a moment.
    Spin,
    /// Spins, and keeps idle processors awake.
    SpinAwake,
}

const WAYS: [Way; 3] = [Way::Sleep, Way::Spin, Way::SpinAwake];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// By number: the ways take turns.
    Trial(u32),
    Run,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Patience {
    /// How many of the ways there are here.
    ways: usize,
    phase: Phase,
    /// Waits left in the phase.
    left: u32,
    /// Requests served, and the time that took, in the phase.
    served: u64,
    took: Duration,
    last: Option<Instant>,
    /// Nanoseconds per request, by way and trial.
    each_ns: [[u64; TRIALS]; WAYS.len()],
    /// What the last trials found.
    best: Way,
    /// Waits of the next run.
    run: u32,
}

impl Patience {
    /// `may_wake`: whether idle processors may be kept awake.
    pub(crate) fn new(may_wake: bool) -> Self {
        Self {
            ways: WAYS.len() - usize::from(!may_wake),
            phase: Phase::Trial(0),
            left: TRIAL_WAITS,
            served: 0,
            took: Duration::ZERO,
            last: None,
            each_ns: [[u64::MAX; TRIALS]; WAYS.len()],
            best: Way::Sleep,
            run: RUN_MIN,
        }
    }

    /// Keeping processors awake is not possible here.
    pub(crate) fn cannot_wake(&mut self) {
        *self = Self::new(false);
    }

    /// How to do the wait that comes now, after so many requests were served
    /// since the last one.
    pub(crate) fn way(&mut self, now: Instant, served: u64) -> Way {
        if let Some(last) = self.last.replace(now) {
            self.took += now.duration_since(last).min(GAP_MAX);
            self.served += served;
            self.left -= 1;
            if self.left == 0 {
                self.turn();
            }
        }
        match self.phase {
            Phase::Trial(number) => WAYS[self.tried(number)],
            Phase::Run => self.best,
        }
    }

    fn tried(&self, number: u32) -> usize {
        number as usize % self.ways
    }

    /// Ends a phase.
    fn turn(&mut self) {
        let nanoseconds = u64::try_from(self.took.as_nanos()).unwrap_or(u64::MAX);
        let each_ns = nanoseconds / self.served.max(1);
        (self.served, self.took) = (0, Duration::ZERO);
        (self.phase, self.left) = match self.phase {
            Phase::Trial(number) => {
                self.each_ns[self.tried(number)][number as usize / self.ways] = each_ns;
                if number as usize + 1 < TRIALS * self.ways {
                    (Phase::Trial(number + 1), TRIAL_WAITS)
                } else {
                    self.judge();
                    (Phase::Run, self.run)
                }
            }
            Phase::Run => (Phase::Trial(0), TRIAL_WAITS),
        };
    }

    fn judge(&mut self) {
        let [sleeping_ns, spinning_ns, awake_ns] = self.each_ns.map(|mut trials| {
            trials.sort_unstable();
            trials[TRIALS / 2]
        });
        let mut best = Way::Sleep;
        if is_gain(spinning_ns, sleeping_ns, SPIN_GAIN_PERCENT) {
            best = Way::Spin;
        }
        if is_gain(awake_ns, sleeping_ns.min(spinning_ns), AWAKE_GAIN_PERCENT) {
            best = Way::SpinAwake;
        }
        // The same answer again makes the next question less urgent.
        self.run = match best == self.best {
            true => (self.run * 2).min(RUN_MAX),
            false => RUN_MIN,
        };
        self.best = best;
    }
}

/// Whether a request takes so many percent less than it did.
fn is_gain(ns: u64, before_ns: u64, percent: u64) -> bool {
    u128::from(ns) * u128::from(100 + percent) < u128::from(before_ns) * 100
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each way is taken among so many waits, if a request takes so
    /// many microseconds with each.
    fn taken(patience: &mut Patience, waits: u32, us: [u64; 3]) -> [u32; 3] {
        let mut now = patience.last.unwrap_or_else(Instant::now);
        let mut taken = [0; 3];
        for _ in 0..waits {
            let way = patience.way(now, 1) as usize;
            taken[way] += 1;
            now += Duration::from_micros(us[way]);
        }
        taken
    }

    /// Waits within which a change must have been noticed.
    const ROUND: u32 = RUN_MAX + TRIAL_WAITS * (TRIALS * WAYS.len()) as u32;

    #[test]
    fn spinning_that_pays_goes_on() {
        let [_, spins, _] = taken(&mut Patience::new(true), 200_000, [16, 9, 8]);
        assert!(spins > 194_000, "{spins}");
    }

    #[test]
    fn spinning_that_does_not_pay_is_only_tried_now_and_then() {
        for us in [[6, 9, 9], [16, 16, 16], [1000, 1000, 1000], [16, 56, 56]] {
            let [_, spins, awake] = taken(&mut Patience::new(true), 200_000, us);
            assert!((1..4000).contains(&spins), "{spins}");
            assert!((1..4000).contains(&awake), "{awake}");
        }
    }

    #[test]
    fn processors_are_kept_awake_where_that_is_much_faster() {
        let [_, _, awake] = taken(&mut Patience::new(true), 200_000, [30, 26, 11]);
        assert!(awake > 194_000, "{awake}");
        let [_, _, awake] = taken(&mut Patience::new(true), 200_000, [9, 26, 11]);
        assert!(awake < 4000, "{awake}");
    }

    #[test]
    fn what_is_not_possible_is_not_tried() {
        let [_, spins, awake] = taken(&mut Patience::new(false), 200_000, [30, 26, 1]);
        assert!(spins > 194_000, "{spins}");
        assert_eq!(awake, 0);
    }

    #[test]
    fn few_odd_trials_do_not_mislead() {
        let mut patience = Patience::new(true);
        let mut now = Instant::now();
        let mut spins = 0;
        for wait in 0..200_000u32 {
            let spun = patience.way(now, 1) != Way::Sleep;
            spins += u32::from(spun);
            // Of a hundred trials, some twenty are disturbed and some twenty
            // lucky.
            let stall = if spun && wait % 151 == 150 { 180 } else { 0 };
            let lucky = !spun && wait / 32 % 5 == 4;
            now += Duration::from_micros(stall + if spun { 9 } else { 12 - 6 * u64::from(lucky) });
        }
        assert!(spins > 190_000, "{spins}");
    }

    #[test]
    fn it_follows_a_change() {
        let mut patience = Patience::new(true);
        taken(&mut patience, 200_000, [16, 9, 9]);
        taken(&mut patience, ROUND, [6, 9, 9]);
        let [sleeps, ..] = taken(&mut patience, RUN_MAX, [6, 9, 9]);
        assert!(sleeps > RUN_MAX / 4 * 3, "{sleeps}");
        taken(&mut patience, ROUND, [16, 9, 9]);
        let [_, spins, _] = taken(&mut patience, RUN_MAX, [16, 9, 9]);
        assert!(spins > RUN_MAX / 4 * 3, "{spins}");
    }
}
