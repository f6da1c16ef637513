//! The counters of one channel.

use super::histogram::{BUCKETS, OCTAVES, bucket_of, octave_of};
use super::totals::Totals;
use super::{KINDS, OpKind, STAGES, StageTimes};
use pagemesh_base::slice::IS_MEASURED;
use std::sync::atomic::{AtomicU64, Ordering};

/// On a path on which a clock would cost more than one percent, one of this many operations is
/// timed.
pub const SAMPLE_INTERVAL: u32 = 64;

/// The counters of one channel. The thread of the channel writes them, other threads read.
///
/// A reader may see an operation in some counters and not in others yet.
#[derive(Default)]
pub struct ChannelMeter {
    kinds: [KindMeter; KINDS],
}

/// Aligned to two cache lines, so that no other data shares a line with the counters, and the
/// processor's adjacent-line prefetch takes no line of another thread.
#[repr(align(128))]
struct KindMeter {
    ops: AtomicU64,
    bytes: AtomicU64,
    latency: Box<[AtomicU64; BUCKETS]>,
    stages: Box<[[AtomicU64; STAGES]; OCTAVES]>,
}

impl Default for KindMeter {
    fn default() -> KindMeter {
        KindMeter {
            ops: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            latency: Box::new([const { AtomicU64::new(0) }; BUCKETS]),
            stages: Box::new([const { [const { AtomicU64::new(0) }; STAGES] }; OCTAVES]),
        }
    }
}

/// Adds to a counter that no other thread writes.
#[inline]
fn add(counter: &AtomicU64, by: u64) {
    let sum = counter.load(Ordering::Relaxed).saturating_add(by);
    counter.store(sum, Ordering::Relaxed);
}

impl ChannelMeter {
    /// Counts an operation. Only the thread of the channel may call this.
    #[inline]
    pub fn count(&self, kind: OpKind, bytes: u64) {
        if !IS_MEASURED {
            return;
        }
        let meter = &self.kinds[kind as usize];
        add(&meter.ops, 1);
        add(&meter.bytes, bytes);
    }

    /// Records the stages of an operation that was timed. Only the thread of the channel may call
    /// this.
    pub fn record(&self, kind: OpKind, times: &StageTimes) {
        if !IS_MEASURED {
            return;
        }
        let meter = &self.kinds[kind as usize];
        let bucket = bucket_of(times.total_ns());
        add(&meter.latency[bucket], 1);
        let sums = &meter.stages[octave_of(bucket)];
        for (sum, time) in sums.iter().zip(times.0) {
            add(sum, time);
        }
    }

    /// The counters so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for (meter, kind) in self.kinds.iter().zip(&mut totals.kinds) {
            kind.ops = meter.ops.load(Ordering::Relaxed);
            kind.bytes = meter.bytes.load(Ordering::Relaxed);
            for (to, from) in kind.latency.iter_mut().zip(&*meter.latency) {
                *to = from.load(Ordering::Relaxed);
            }
            for (to, from) in kind.stages.iter_mut().zip(&*meter.stages) {
                *to = from.each_ref().map(|sum| sum.load(Ordering::Relaxed));
            }
        }
        totals
    }
}

/// Chooses the operations that are timed: the first, and each [`SAMPLE_INTERVAL`]th after it.
#[derive(Debug, Default)]
pub struct Sampler {
    left: u32,
}

impl Sampler {
    /// Whether the next operation is timed.
    #[inline]
    pub fn is_due(&mut self) -> bool {
        if !IS_MEASURED {
            return false;
        }
        if self.left == 0 {
            self.left = SAMPLE_INTERVAL - 1;
            return true;
        }
        self.left -= 1;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampler_times_one_of_64_operations() {
        let mut sampler = Sampler::default();
        let due: Vec<usize> = (0..130).filter(|_| sampler.is_due()).collect();
        assert_eq!(due, [0, 64, 128]);
    }
}
