//! The times of a request on its way through the engine, for the channel's meter (RFD 025).
//!
//! The engine has no clock: the times come from the [`EngineBackend`](super::EngineBackend). The
//! stages of a request are those of the piece that ended last, so they add up to its latency.

use pagemesh_base::slice::ServiceTime;
use pagemesh_telemetry::{OpKind, StageTimes};
use std::time::{Duration, Instant};

/// The service time of a leg in this process: all of the leg's time.
pub(crate) const STORE_ONLY: ServiceTime = ServiceTime {
    brick_ns: u64::MAX,
    store_ns: u64::MAX,
};

/// A request as the meter counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpRecord {
    pub kind: OpKind,
    pub bytes: u64,
    /// None if it is only counted.
    pub times: Option<OpTimes>,
}

/// The times of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpTimes {
    pub submitted: Instant,
    /// The times of the piece that ended last.
    pub last_piece: Option<PieceTimes>,
}

/// The times of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceTimes {
    issued: Instant,
    /// When it was first sent, under its locks.
    sent: Option<Instant>,
    answered: Option<Instant>,
    /// The time that the bricks report for the answers that it waited for.
    service: ServiceTime,
}

impl PieceTimes {
    pub(crate) fn new(issued: Instant) -> PieceTimes {
        PieceTimes {
            issued,
            sent: None,
            answered: None,
            service: ServiceTime::default(),
        }
    }

    pub(crate) fn record_sent(&mut self, now: Instant) {
        self.sent.get_or_insert(now);
    }

    /// Records the answer that a round waited for. A durable write on `file-sync` has two rounds.
    pub(crate) fn record_answer(&mut self, now: Instant, service: ServiceTime) {
        self.answered = Some(now);
        self.service.brick_ns = self.service.brick_ns.saturating_add(service.brick_ns);
        self.service.store_ns = self.service.store_ns.saturating_add(service.store_ns);
    }
}

impl OpTimes {
    pub(crate) fn new(submitted: Instant) -> OpTimes {
        OpTimes {
            submitted,
            last_piece: None,
        }
    }

    /// The stages of a request that completes now. None if it was never sent.
    pub(crate) fn stages(&self, now: Instant) -> Option<StageTimes> {
        let piece = self.last_piece?;
        let (sent, answered) = (piece.sent?, piece.answered?);
        let leg_ns = nanos(answered.saturating_duration_since(sent));
        // A brick's clock differs from the client's: its times count as far as the leg's go.
        let brick_and_store = piece.service.brick_ns.min(leg_ns);
        let store = piece.service.store_ns.min(brick_and_store);
        Some(StageTimes([
            nanos(piece.issued.saturating_duration_since(self.submitted)),
            nanos(sent.saturating_duration_since(piece.issued)),
            leg_ns - brick_and_store,
            brick_and_store - store,
            store,
            nanos(now.saturating_duration_since(answered)),
        ]))
    }
}

/// A duration in nanoseconds; the longest that a meter distinguishes is far below the limit.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_latency() {
        let start = Instant::now();
        let at = |us: u64| start + Duration::from_micros(us);
        let mut piece = PieceTimes::new(at(3));
        piece.record_sent(at(10));
        piece.record_sent(at(40));
        let service = |brick_us: u64, store_us: u64| ServiceTime {
            brick_ns: brick_us * 1000,
            store_ns: store_us * 1000,
        };
        piece.record_answer(at(60), service(20, 5));
        piece.record_answer(at(90), service(10, 8));
        let times = OpTimes {
            submitted: at(0),
            last_piece: Some(piece),
        };
        let stages = times.stages(at(100)).expect("it was sent and answered");
        assert_eq!(stages.0, [3, 7, 50, 17, 13, 10].map(|us| us * 1000));
        assert_eq!(stages.total_ns(), 100_000);
    }

    #[test]
    fn brick_time_beyond_the_leg_time_is_cut() {
        let start = Instant::now();
        let mut piece = PieceTimes::new(start);
        piece.record_sent(start);
        let end = start + Duration::from_micros(1);
        piece.record_answer(end, STORE_ONLY);
        piece.record_answer(end, STORE_ONLY);
        let times = OpTimes {
            submitted: start,
            last_piece: Some(piece),
        };
        let stages = times.stages(end).expect("it was sent and answered");
        assert_eq!(stages.0, [0, 0, 0, 0, 1000, 0]);
    }
}
