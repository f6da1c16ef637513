//! The figures of a process's direct operations, in the memory of its
//! [`OpCounters`](super::op_counters::OpCounters) (RFD 025).
//!
//! ```text
//!  for each of 16 I/O slots, for reads and for writes, 2304 bytes:
//!      0  operations 8, bytes 8
//!     16  timed operations for each of 249 buckets of their latency 8
//!   2008  nanoseconds of these for each of 32 groups of buckets 8
//! ```
//!
//! Invariants: the holder of an I/O slot writes its figures, without a locked instruction. One of 64
//! operations is timed.

use super::op_counters::IO_SLOTS;
use pagemesh_base::slice::IS_MEASURED;
use pagemesh_pmem::SharedSegment;
use pagemesh_telemetry::{BUCKETS, OCTAVES, OpKind, Stage, Totals, bucket_of, octave_of};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const KINDS: [OpKind; 2] = [OpKind::Read, OpKind::Write];
const LATENCY_AT: usize = 16;
const NANOS_AT: usize = LATENCY_AT + BUCKETS * 8;
/// Whole cache lines, in pairs, so that no two slots share one.
const KIND_BYTES: usize = (NANOS_AT + OCTAVES * 8).next_multiple_of(128);
/// The largest number that a slot counts for: 2^48 operations are 9 years at a million a second. A process that writes
/// other numbers must not exhaust the sums of its volume and of the cluster.
const COUNT_MAX: u64 = 1 << 48;
/// The same for bytes and nanoseconds.
const SUM_MAX: u64 = 1 << 58;
/// Bytes of all figures.
pub(super) const METER_BYTES: usize = IO_SLOTS * KINDS.len() * KIND_BYTES;

/// The figures in a segment, from this byte on.
pub(super) struct OpMeter<'a> {
    pub segment: &'a SharedSegment,
    pub start: usize,
}

impl OpMeter<'_> {
    fn kind_at(&self, io_slot: usize, kind: usize) -> usize {
        self.start + (io_slot * KINDS.len() + kind) * KIND_BYTES
    }

    /// Counts an operation. The caller holds the slot.
    #[inline]
    pub fn record(&self, io_slot: usize, is_write: bool, bytes: u64, took: Option<Duration>) {
        if !IS_MEASURED {
            return;
        }
        let at = self.kind_at(io_slot, usize::from(is_write));
        add(self.segment.word(at), 1);
        add(self.segment.word(at + 8), bytes);
        if let Some(took) = took {
            self.record_latency(at, took);
        }
    }

    #[cold]
    fn record_latency(&self, at: usize, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = bucket_of(ns);
        add(self.segment.word(at + LATENCY_AT + bucket * 8), 1);
        add(self.segment.word(at + NANOS_AT + octave_of(bucket) * 8), ns);
    }

    /// The sums of all slots. The process writes them, so they may be any numbers.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for (kind, of) in KINDS.into_iter().enumerate() {
            for io_slot in 0..IO_SLOTS {
                self.add_slot(&mut totals, of, self.kind_at(io_slot, kind));
            }
        }
        totals
    }

    fn add_slot(&self, totals: &mut Totals, kind: OpKind, at: usize) {
        let word = |at: usize, most: u64| self.segment.word(at).load(Relaxed).min(most);
        let ops = word(at, COUNT_MAX);
        if ops == 0 {
            return;
        }
        let sum = &mut totals.kinds[kind as usize];
        sum.ops = sum.ops.saturating_add(ops);
        sum.bytes = sum.bytes.saturating_add(word(at + 8, SUM_MAX));
        for (bucket, count) in sum.latency.iter_mut().enumerate() {
            *count = count.saturating_add(word(at + LATENCY_AT + bucket * 8, COUNT_MAX));
        }
        for (octave, stages) in sum.stages.iter_mut().enumerate() {
            let media = &mut stages[Stage::Media as usize];
            *media = media.saturating_add(word(at + NANOS_AT + octave * 8, SUM_MAX));
        }
    }
}

/// Adds to a counter that no other thread writes.
#[inline]
fn add(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}
