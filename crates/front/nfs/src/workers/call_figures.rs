//! The figures of calls: cells that one thread writes, and their sum, which a reader makes.
//!
//! Invariant: a cell has one writer at a time, so counting shares no cache line with other threads
//! but while the figures are read. Shared cells have several writers: the workers of other exports, for
//! a COMPOUND that ended in this one.

use crate::counters::PROCEDURES;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The number of buckets of a latency histogram.
pub const LATENCY_BUCKETS: usize = 25;

/// The upper bound of a bucket: 1 µs doubled for each further one. The last bucket has no bound.
#[must_use]
pub fn latency_bound(bucket: usize) -> Option<Duration> {
    let is_bounded = bucket + 1 < LATENCY_BUCKETS;
    is_bounded.then(|| Duration::from_micros(1 << bucket))
}

fn bucket_of(latency: Duration) -> usize {
    let micros = latency.as_nanos().div_ceil(1000).max(1);
    let bucket = micros.next_power_of_two().ilog2() as usize;
    bucket.min(LATENCY_BUCKETS - 1)
}

/// The figures of one procedure since the start of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFigures {
    /// Calls that ended with a reply.
    pub calls: u64,
    /// Those among them with an error.
    pub errors: u64,
    /// Bytes of the calls.
    pub bytes_received: u64,
    /// Bytes of the replies.
    pub bytes_sent: u64,
    /// The time from the whole call to its reply, without the time in the socket.
    pub time: Duration,
    /// The part of it in the queue of the export.
    pub queue_time: Duration,
    /// Calls by their time; see [`latency_bound`].
    pub latency: [u64; LATENCY_BUCKETS],
}

impl CallFigures {
    /// Adds the figures of another procedure, export or thread.
    pub fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.errors += other.errors;
        self.bytes_received += other.bytes_received;
        self.bytes_sent += other.bytes_sent;
        self.time += other.time;
        self.queue_time += other.queue_time;
        for (sum, count) in self.latency.iter_mut().zip(other.latency) {
            *sum += count;
        }
    }
}

/// A call that has ended.
pub(crate) struct EndedCall {
    /// The place in [`PROCEDURE_NAMES`](crate::counters::PROCEDURE_NAMES); none: no figures have it.
    pub(crate) procedure: Option<usize>,
    pub(crate) is_error: bool,
    pub(crate) received: usize,
    pub(crate) sent: usize,
    pub(crate) time: Duration,
    pub(crate) queue_time: Duration,
}

#[derive(Default)]
struct ProcedureCells {
    calls: AtomicU64,
    errors: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    time_ns: AtomicU64,
    queue_ns: AtomicU64,
    latency: [AtomicU64; LATENCY_BUCKETS],
}

/// The cells of one thread.
#[derive(Default)]
pub(crate) struct CallCells([ProcedureCells; PROCEDURES]);

/// Adds to a cell that has no other writer.
fn add_alone(cell: &AtomicU64, value: u64) {
    let sum = cell.load(Ordering::Relaxed).wrapping_add(value);
    cell.store(sum, Ordering::Relaxed);
}

/// Adds to a cell with other writers.
fn add_shared(cell: &AtomicU64, value: u64) {
    cell.fetch_add(value, Ordering::Relaxed);
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl CallCells {
    /// Counts a call. Calls without a procedure are not counted.
    pub(crate) fn count(&self, call: &EndedCall) {
        self.count_by(call, add_alone);
    }

    /// As [`count`](Self::count), in cells with several writers.
    pub(crate) fn count_shared(&self, call: &EndedCall) {
        self.count_by(call, add_shared);
    }

    fn count_by(&self, call: &EndedCall, add: impl Fn(&AtomicU64, u64)) {
        let Some(cells) = call.procedure.and_then(|number| self.0.get(number)) else {
            return;
        };
        add(&cells.calls, 1);
        add(&cells.errors, u64::from(call.is_error));
        add(&cells.received, call.received as u64);
        add(&cells.sent, call.sent as u64);
        add(&cells.time_ns, nanos(call.time));
        add(&cells.queue_ns, nanos(call.queue_time));
        if let Some(cell) = cells.latency.get(bucket_of(call.time)) {
            add(cell, 1);
        }
    }

    /// Adds the cells to the sums of procedures.
    pub(crate) fn add_to(&self, sums: &mut [CallFigures; PROCEDURES]) {
        let value = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        for (sum, cells) in sums.iter_mut().zip(&self.0) {
            sum.add(&CallFigures {
                calls: value(&cells.calls),
                errors: value(&cells.errors),
                bytes_received: value(&cells.received),
                bytes_sent: value(&cells.sent),
                time: Duration::from_nanos(value(&cells.time_ns)),
                queue_time: Duration::from_nanos(value(&cells.queue_ns)),
                latency: std::array::from_fn(|at| cells.latency.get(at).map_or(0, value)),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_is_in_the_bucket_below_its_bound() {
        for nanos in [
            0,
            1,
            1000,
            1001,
            2000,
            2001,
            1_000_000,
            8_000_000_000,
            99_000_000_000,
        ] {
            let latency = Duration::from_nanos(nanos);
            let bucket = bucket_of(latency);
            assert!(latency_bound(bucket).is_none_or(|bound| latency <= bound));
            let before = bucket.checked_sub(1).and_then(latency_bound);
            assert!(before.is_none_or(|bound| latency > bound), "{nanos}");
        }
        assert_eq!(latency_bound(LATENCY_BUCKETS - 1), None);
    }

    #[test]
    fn cells_of_threads_add_up() {
        let (first, second) = (CallCells::default(), CallCells::default());
        let call = |procedure, is_error| EndedCall {
            procedure,
            is_error,
            received: 10,
            sent: 20,
            time: Duration::from_micros(3),
            queue_time: Duration::from_micros(1),
        };
        first.count(&call(Some(1), false));
        second.count_shared(&call(Some(1), true));
        second.count(&call(Some(99), true));
        second.count(&call(None, true));
        let mut sums = [CallFigures::default(); PROCEDURES];
        first.add_to(&mut sums);
        second.add_to(&mut sums);
        let mut wanted = CallFigures {
            calls: 2,
            errors: 1,
            bytes_received: 20,
            bytes_sent: 40,
            time: Duration::from_micros(6),
            queue_time: Duration::from_micros(2),
            ..CallFigures::default()
        };
        wanted.latency[2] = 2;
        assert_eq!(sums[1], wanted);
        assert_eq!(sums[6], CallFigures::default());
    }
}
