//! The wait for the time at which a call is due: a sleep, and polls through its last part.
//!
//! A sleep ends late, by timers and by the scheduler. [`Pacing`] learns by how much, and ends sleeps earlier by that time. It
//! is pure: its caller sleeps, polls and reads the clock. Times are nanoseconds after the start of a run.
//!
//! Server and generator share processors, so polling has a budget while sleeps alone are precise enough.
//!
//! The caller also rests after [`AWAKE_MAX_NS`] without a sleep. A thread with SCHED_RR keeps the kernel's threads of its processor
//! from running, and these end writes of disks and handle packets of all processes.

use super::point::LATENESS_MAX;

/// The time before a call in which polling begins, until sleeps are known.
const LEAD_START_NS: u64 = 200_000;
/// The least lead: a sleep below it takes as long as the polls.
const LEAD_MIN_NS: u64 = 20_000;
/// The longest lead.
const LEAD_MAX_NS: u64 = 1_500_000;
/// A sleep that ends this late is precise enough.
const PRECISE_NS: u64 = LATENESS_MAX.as_nanos() as u64 / 2;
/// The longest part of a run that is polled while sleeps are precise enough: a quarter.
const BUDGET_DIVISOR: u64 = 4;
/// A shorter delay than the learned one lowers it by one part in so many.
const DECAY: u64 = 128;
/// The longest time without a sleep.
const AWAKE_MAX_NS: u64 = 1_000_000;
/// The length of a rest.
const REST_NS: u64 = 50_000;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacing {
    /// The delay that nearly all sleeps stay below.
    delay_ns: u64,
    polled_ns: u64,
    /// The end of the last sleep.
    awake_since_ns: u64,
}

impl Pacing {
    pub(crate) fn new() -> Pacing {
        Pacing {
            delay_ns: LEAD_START_NS,
            polled_ns: 0,
            awake_since_ns: 0,
        }
    }

    /// The end of a rest that the caller begins now; none: it has slept lately.
    pub(crate) fn rest_until(&self, now_ns: u64) -> Option<u64> {
        let awake_ns = now_ns.saturating_sub(self.awake_since_ns);
        (awake_ns >= AWAKE_MAX_NS).then_some(now_ns + REST_NS)
    }

    /// The time until which the caller sleeps before a call is due; none: it polls now.
    pub(crate) fn sleep_until(&self, now_ns: u64, due_ns: u64) -> Option<u64> {
        let is_precise = self.delay_ns < PRECISE_NS;
        let lead_ns = match is_precise && self.polled_ns > now_ns / BUDGET_DIVISOR {
            true => 0,
            false => self.delay_ns.max(LEAD_MIN_NS),
        };
        let until_ns = due_ns.saturating_sub(lead_ns);
        (until_ns > now_ns).then_some(until_ns)
    }

    /// A sleep until `planned_ns` ended by itself.
    pub(crate) fn slept(&mut self, planned_ns: u64, woke_ns: u64) {
        self.awake_since_ns = woke_ns;
        let delay_ns = woke_ns.saturating_sub(planned_ns);
        self.delay_ns = match delay_ns > self.delay_ns {
            true => delay_ns.min(LEAD_MAX_NS),
            false => self.delay_ns - (self.delay_ns - delay_ns) / DECAY,
        };
    }

    /// A poll found no answer.
    pub(crate) fn polled(&mut self, took_ns: u64) {
        self.polled_ns += took_ns;
    }

    /// The time of all polls that found no answer.
    pub(crate) fn polled_ns(&self) -> u64 {
        self.polled_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;
    const MS: u64 = 1000 * US;

    #[test]
    fn far_call_is_slept_for_and_near_one_polled() {
        let pacing = Pacing::new();
        assert_eq!(pacing.sleep_until(0, 5 * MS), Some(5 * MS - LEAD_START_NS));
        assert_eq!(pacing.sleep_until(5 * MS - 100 * US, 5 * MS), None);
        assert_eq!(pacing.sleep_until(6 * MS, 5 * MS), None, "it is due");
    }

    #[test]
    fn late_sleep_lengthens_the_lead_at_once() {
        let mut pacing = Pacing::new();
        pacing.slept(MS, MS + 900 * US);
        assert_eq!(pacing.sleep_until(0, 5 * MS), Some(5 * MS - 900 * US));
        pacing.slept(MS, 50 * MS);
        assert_eq!(pacing.sleep_until(0, 5 * MS), Some(5 * MS - LEAD_MAX_NS));
    }

    #[test]
    fn precise_sleeps_shorten_the_lead_slowly() {
        let mut pacing = Pacing::new();
        pacing.slept(MS, MS + 900 * US);
        (0..DECAY).for_each(|_| pacing.slept(MS, MS + 60 * US));
        let until = pacing.sleep_until(0, 5 * MS).expect("a sleep");
        assert!((300 * US..500 * US).contains(&(5 * MS - until)), "{until}");
        (0..20 * DECAY).for_each(|_| pacing.slept(MS, MS));
        let until = pacing.sleep_until(0, 5 * MS).expect("a sleep");
        assert_eq!(5 * MS - until, LEAD_MIN_NS);
    }

    #[test]
    fn caller_rests_after_a_while_without_a_sleep() {
        let mut pacing = Pacing::new();
        assert_eq!(pacing.rest_until(AWAKE_MAX_NS - 1), None);
        assert_eq!(pacing.rest_until(MS), Some(MS + REST_NS));
        pacing.slept(MS + REST_NS, 2 * MS);
        assert_eq!(pacing.rest_until(2 * MS + 900 * US), None);
        assert_eq!(pacing.rest_until(3 * MS), Some(3 * MS + REST_NS));
    }

    #[test]
    fn polling_ends_at_its_budget_if_sleeps_are_precise() {
        let mut pacing = Pacing::new();
        pacing.polled(30 * MS);
        let (now, due) = (100 * MS, 100 * MS + 50 * US);
        assert_eq!(pacing.sleep_until(now, due), Some(due));
        pacing.slept(due, due + 900 * US);
        assert_eq!(pacing.sleep_until(now, due), None, "sleeps are too late");
        assert_eq!(pacing.polled_ns(), 30 * MS);
    }
}
