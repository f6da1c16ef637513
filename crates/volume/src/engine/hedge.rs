//! Decides when a read of a column is late. A late read goes to another leg, too, and the first
//! answer counts ("hedged requests": Dean and Barroso, The Tail at Scale, CACM 56(2), 2013).
//! Without this a stalled leg would delay its readers until it is declared lost.
//!
//! A read is late after twice the time within which the column's fastest leg answers 99 of 100
//! reads. Every answer counts for that time, late ones too, so the limit rises when all legs
//! slow down.
//!
//! Invariants: a read is hedged once. Hedges are at most [`HEDGES_MAX`], and one for
//! [`HEDGE_READS`] answered reads. There is no clock: callers pass the times.

use crate::limits::{HEDGE_DELAY_MAX, HEDGE_DELAY_MIN, HEDGE_READS, HEDGES_MAX};
use pagemesh_base::layout::LEGS_MAX;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

struct SentRead {
    tag: u64,
    leg: usize,
    sent_at: Instant,
}

/// The latencies and the pending reads of one column; see the module.
pub(crate) struct HedgeTracker {
    /// Reads without an answer, in order of sending.
    sent: VecDeque<SentRead>,
    /// Reads that were late and have no answer.
    late: Vec<SentRead>,
    /// By leg: the time within which 99 of 100 reads are answered.
    latency_p99: [Option<Duration>; LEGS_MAX],
    /// Answered reads that no hedge has used up.
    credit: usize,
}

impl HedgeTracker {
    pub(crate) fn new() -> HedgeTracker {
        HedgeTracker {
            sent: VecDeque::new(),
            late: Vec::new(),
            latency_p99: [None; LEGS_MAX],
            credit: HEDGES_MAX * HEDGE_READS,
        }
    }

    pub(crate) fn record_sent(&mut self, tag: u64, leg: usize, at: Instant) {
        self.sent.push_back(SentRead {
            tag,
            leg,
            sent_at: at,
        });
    }

    /// Whether any read has no answer. Only then the caller needs to read the clock.
    pub(crate) fn has_pending(&self) -> bool {
        !self.sent.is_empty() || !self.late.is_empty()
    }

    pub(crate) fn record_answer(&mut self, tag: u64, leg: usize, now: Instant) {
        let is_it = |sent: &SentRead| sent.tag == tag && sent.leg == leg;
        let sent = match self.sent.iter().position(is_it) {
            Some(at) => self.sent.remove(at),
            None => {
                let late = self.late.iter().position(is_it);
                late.map(|at| self.late.swap_remove(at))
            }
        };
        if let Some(sent) = sent {
            self.credit = (self.credit + 1).min(HEDGES_MAX * HEDGE_READS);
            self.update_latency(leg, now.saturating_duration_since(sent.sent_at));
        }
    }

    /// Moves the estimate of the leg's 99th percentile: up by 99 steps for a slower answer,
    /// down by one step for any other.
    fn update_latency(&mut self, leg: usize, took: Duration) {
        let usual = self.latency_p99[leg].get_or_insert(took);
        let step = *usual / 2048;
        *usual = match took > *usual {
            true => (*usual + step * 99).min(took),
            false => usual.saturating_sub(step),
        };
    }

    /// Drops the pending reads of a leg, because no answers come from it any more.
    pub(crate) fn reset_leg(&mut self, leg: usize) {
        self.sent.retain(|sent| sent.leg != leg);
        self.late.retain(|sent| sent.leg != leg);
        self.latency_p99[leg] = None;
    }

    /// The time at which the oldest pending read becomes late; none if it may not be hedged
    /// now.
    pub(crate) fn next_hedge_at(&self) -> Option<Instant> {
        let first = self.sent.front()?;
        let may = self.credit >= HEDGE_READS && self.late.len() < HEDGES_MAX;
        may.then(|| first.sent_at + self.hedge_delay())
    }

    fn hedge_delay(&self) -> Duration {
        let quickest = self.latency_p99.iter().flatten().min();
        let delay = quickest.map_or(HEDGE_DELAY_MAX, |usual| *usual * 2);
        delay.clamp(HEDGE_DELAY_MIN, HEDGE_DELAY_MAX)
    }

    /// Takes the oldest read if it is late. Returns the tag of the read to hedge.
    pub(crate) fn take_late(&mut self, now: Instant) -> Option<u64> {
        if self.next_hedge_at()? > now {
            return None;
        }
        let sent = self.sent.pop_front()?;
        let tag = sent.tag;
        self.credit -= HEDGE_READS;
        self.late.push(sent);
        Some(tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Records `reads` answers of a leg, each after `took`.
    fn answers(hedge: &mut HedgeTracker, leg: usize, reads: usize, took: Duration) {
        let start = Instant::now();
        for _ in 0..reads {
            hedge.record_sent(7, leg, start);
            hedge.record_answer(7, leg, start + took);
        }
    }

    #[test]
    fn read_is_late_relative_to_fastest_leg() {
        let mut hedge = HedgeTracker::new();
        answers(&mut hedge, 0, 1000, MS * 30);
        answers(&mut hedge, 1, 1000, MS * 2);
        let start = Instant::now();
        hedge.record_sent(1, 0, start);
        assert_eq!(hedge.take_late(start + MS * 3), None);
        assert_eq!(hedge.take_late(start + MS * 5), Some(1));
        assert_eq!(hedge.take_late(start + MS * 50), None, "only once");
    }

    #[test]
    fn slowed_column_stops_hedging() {
        let mut hedge = HedgeTracker::new();
        let start = Instant::now();
        answers(&mut hedge, 0, 1000, MS);
        answers(&mut hedge, 1, 1000, MS);
        let mut hedged = 0;
        for tag in 0..10_000 {
            let leg = tag as usize % 2;
            hedge.record_sent(tag, leg, start);
            hedged += usize::from(hedge.take_late(start + MS * 10).is_some());
            hedge.record_answer(tag, leg, start + MS * 10);
        }
        assert!((1..200).contains(&hedged), "{hedged}");
    }

    #[test]
    fn silent_leg_causes_bounded_hedges() {
        let mut hedge = HedgeTracker::new();
        let start = Instant::now();
        let tags = 0..4 * HEDGES_MAX as u64;
        tags.for_each(|tag| hedge.record_sent(tag, 0, start));
        let late = std::iter::from_fn(|| hedge.take_late(start + MS * 1000)).count();
        assert_eq!(late, HEDGES_MAX);
        assert_eq!(hedge.next_hedge_at(), None, "nothing to wake up for");
        hedge.reset_leg(0);
        assert!(hedge.sent.is_empty() && hedge.late.is_empty());
    }

    #[test]
    fn rare_slow_answer_barely_moves_delay() {
        let mut hedge = HedgeTracker::new();
        for _ in 0..100 {
            answers(&mut hedge, 0, 150, MS * 2);
            answers(&mut hedge, 0, 1, MS * 900);
        }
        assert!(hedge.hedge_delay() < MS * 5, "{:?}", hedge.hedge_delay());
    }
}
