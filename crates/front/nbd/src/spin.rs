//! Decides whether to spin before sleeping.
//!
//! A spin saves a sleep and a wake-up if the next request comes at once. Otherwise it takes the
//! processor from others. It also keeps client and server on two processors, where one processor,
//! switching between them, may be faster. The better choice depends on the machine and its load, so
//! it is measured: short trials with and without spinning, in turns, then a longer run with the
//! better.
//!
//! The median trial of each kind counts: one may be disturbed, and another may happen to find
//! client and server on one processor. Sleeping wins unless spinning is clearly better. The
//! decision is made only after requests were served, so an idle connection never spins. The module
//! reads no clock.

use crate::limits::{
    SPIN_GAIN_PERCENT, SPIN_GAP_MAX, SPIN_RUN_MAX, SPIN_RUN_MIN, SPIN_TRIAL_WAITS, SPIN_TRIALS,
};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpinPhase {
    /// By number: even trials spin.
    Trial(usize),
    Run,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct SpinPolicy {
    phase: SpinPhase,
    /// Waits left in the phase.
    waits_left: u32,
    /// Requests served in the phase, and their time.
    served: u64,
    elapsed: Duration,
    last_wait: Option<Instant>,
    /// Nanoseconds per request, by trial: spinning, sleeping.
    ns_per_request: [[u64; SPIN_TRIALS / 2]; 2],
    /// The result of the last trials.
    is_spinning_faster: bool,
    /// Waits of the next run.
    run_waits: u32,
}

impl SpinPolicy {
    pub(crate) fn new() -> Self {
        Self {
            phase: SpinPhase::Trial(0),
            waits_left: SPIN_TRIAL_WAITS,
            served: 0,
            elapsed: Duration::ZERO,
            last_wait: None,
            ns_per_request: [[u64::MAX; SPIN_TRIALS / 2]; 2],
            is_spinning_faster: false,
            run_waits: SPIN_RUN_MIN,
        }
    }

    /// Whether to spin before the wait that comes now, after so many requests since the last one.
    pub(crate) fn should_spin(&mut self, now: Instant, served: u64) -> bool {
        if let Some(last) = self.last_wait.replace(now) {
            self.elapsed += now.duration_since(last).min(SPIN_GAP_MAX);
            self.served += served;
            self.waits_left -= 1;
            if self.waits_left == 0 {
                self.end_phase();
            }
        }
        match self.phase {
            SpinPhase::Trial(number) => number.is_multiple_of(2),
            SpinPhase::Run => self.is_spinning_faster,
        }
    }

    /// Ends a phase.
    fn end_phase(&mut self) {
        let nanoseconds = u64::try_from(self.elapsed.as_nanos()).unwrap_or(u64::MAX);
        let each_ns = nanoseconds / self.served.max(1);
        (self.served, self.elapsed) = (0, Duration::ZERO);
        (self.phase, self.waits_left) = match self.phase {
            SpinPhase::Trial(number) => {
                self.ns_per_request[number % 2][number / 2] = each_ns;
                if number + 1 < SPIN_TRIALS {
                    (SpinPhase::Trial(number + 1), SPIN_TRIAL_WAITS)
                } else {
                    self.choose_mode();
                    (SpinPhase::Run, self.run_waits)
                }
            }
            SpinPhase::Run => (SpinPhase::Trial(0), SPIN_TRIAL_WAITS),
        };
    }

    fn choose_mode(&mut self) {
        let [spinning_ns, sleeping_ns] = self.ns_per_request.map(|mut trials| {
            trials.sort_unstable();
            trials[trials.len() / 2]
        });
        let gained = u128::from(spinning_ns) * u128::from(100 + SPIN_GAIN_PERCENT);
        let spins = gained < u128::from(sleeping_ns) * 100;
        // The same result again makes the next trials less urgent.
        self.run_waits = if spins == self.is_spinning_faster {
            (self.run_waits * 2).min(SPIN_RUN_MAX)
        } else {
            SPIN_RUN_MIN
        };
        self.is_spinning_faster = spins;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spins among so many waits, if a request takes so many microseconds.
    fn count_spins(spin: &mut SpinPolicy, waits: u32, spinning_us: u64, sleeping_us: u64) -> u32 {
        let mut now = spin.last_wait.unwrap_or_else(Instant::now);
        let mut spins = 0;
        for _ in 0..waits {
            let spun = spin.should_spin(now, 1);
            spins += u32::from(spun);
            now += Duration::from_micros(if spun { spinning_us } else { sleeping_us });
        }
        spins
    }

    #[test]
    fn worthwhile_spinning_continues() {
        let mut spin = SpinPolicy::new();
        let spins = count_spins(&mut spin, 200_000, 9, 16);
        assert!(spins > 196_000, "{spins}");
    }

    #[test]
    fn useless_spinning_is_rarely_tried() {
        for (spinning_us, sleeping_us) in [(9, 6), (16, 16), (1000, 1000), (56, 16)] {
            let mut spin = SpinPolicy::new();
            let spins = count_spins(&mut spin, 200_000, spinning_us, sleeping_us);
            assert!((1..4000).contains(&spins), "{spins}");
        }
    }

    #[test]
    fn few_outlier_trials_do_not_change_choice() {
        let mut spin = SpinPolicy::new();
        let mut now = Instant::now();
        let mut spins = 0;
        for wait in 0..200_000u32 {
            let spun = spin.should_spin(now, 1);
            spins += u32::from(spun);
            // Of five trials, one is disturbed or lucky.
            let stall = if spun && wait % 151 == 150 { 180 } else { 0 };
            let luck = if !spun && wait / 32 % 5 == 4 { 6 } else { 0 };
            now += Duration::from_micros(stall + if spun { 9 } else { 12 - luck });
        }
        assert!(spins > 190_000, "{spins}");
    }

    #[test]
    fn spin_choice_adapts_to_new_timing() {
        let mut spin = SpinPolicy::new();
        count_spins(&mut spin, 200_000, 9, 16);
        count_spins(
            &mut spin,
            SPIN_RUN_MAX + SPIN_TRIALS as u32 * SPIN_TRIAL_WAITS,
            9,
            6,
        );
        assert!(count_spins(&mut spin, SPIN_RUN_MAX, 9, 6) < SPIN_RUN_MAX / 4);
        count_spins(
            &mut spin,
            SPIN_RUN_MAX + SPIN_TRIALS as u32 * SPIN_TRIAL_WAITS,
            9,
            16,
        );
        assert!(count_spins(&mut spin, SPIN_RUN_MAX, 9, 16) > SPIN_RUN_MAX / 4 * 3);
    }
}
