//! The buckets of a latency histogram: 8 of equal width for each power of two, from 64 ns to 137 s.
//! The middle of a bucket differs from each of its values by at most 6.25 %.
//!
//! Source of the form: Tene, HdrHistogram (log-linear buckets).

use std::ops::Range;

/// Buckets for each power of two, as a power of two.
const SPLIT_BITS: u32 = 3;
/// Latencies below 2 to this power are in bucket 0.
const FIRST_BITS: u32 = 6;
/// Latencies from 2 to this power on are in the last bucket.
const END_BITS: u32 = 37;

/// The number of groups of buckets: one for latencies below 64 ns, and one for each power of two.
pub const OCTAVES: usize = 1 + (END_BITS - FIRST_BITS) as usize;
/// The number of buckets.
pub const BUCKETS: usize = 1 + ((OCTAVES - 1) << SPLIT_BITS);

/// The bucket of a latency in nanoseconds.
#[inline]
#[must_use]
pub fn bucket_of(ns: u64) -> usize {
    if ns < 1 << FIRST_BITS {
        return 0;
    }
    let ns = ns.min((1 << END_BITS) - 1);
    let bits = ns.ilog2();
    let within = (ns >> (bits - SPLIT_BITS)) as usize & ((1 << SPLIT_BITS) - 1);
    1 + (((bits - FIRST_BITS) as usize) << SPLIT_BITS) + within
}

/// The latencies of a bucket, in nanoseconds.
///
/// # Panics
/// If there is no such bucket.
#[must_use]
pub fn bucket_range(bucket: usize) -> Range<u64> {
    assert!(bucket < BUCKETS, "a bucket of the histogram");
    if bucket == 0 {
        return 0..1 << FIRST_BITS;
    }
    let (octave, within) = (
        (bucket - 1) >> SPLIT_BITS,
        (bucket - 1) & ((1 << SPLIT_BITS) - 1),
    );
    let width = 1u64 << (octave as u32 + FIRST_BITS - SPLIT_BITS);
    let start = (within as u64 + (1 << SPLIT_BITS)) * width;
    start..start + width
}

/// The group of a bucket: its power of two.
#[inline]
#[must_use]
pub fn octave_of(bucket: usize) -> usize {
    bucket.div_ceil(1 << SPLIT_BITS)
}

/// The latencies of a group of buckets, in nanoseconds.
#[must_use]
pub fn octave_range(octave: usize) -> Range<u64> {
    match octave {
        0 => bucket_range(0),
        _ => {
            let first = 1 + ((octave - 1) << SPLIT_BITS);
            let last = first + (1 << SPLIT_BITS) - 1;
            bucket_range(first).start..bucket_range(last).end
        }
    }
}

/// The bucket that this share of the counted latencies does not exceed. None without a count.
pub(crate) fn quantile_bucket(counts: &[u64; BUCKETS], share: f64) -> Option<usize> {
    let all = counts.iter().fold(0u64, |sum, it| sum.saturating_add(*it));
    if all == 0 {
        return None;
    }
    let rank = ((all as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(1);
    let mut seen = 0u64;
    counts.iter().position(|count| {
        seen = seen.saturating_add(*count);
        seen >= rank
    })
}

/// A latency in nanoseconds that this share of the counted latencies does not exceed: the middle of
/// the bucket. None without a count.
pub(crate) fn quantile_ns(counts: &[u64; BUCKETS], share: f64) -> Option<u64> {
    let range = bucket_range(quantile_bucket(counts, share)?);
    Some((range.start + range.end) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other_without_gaps() {
        let mut end = 0;
        for bucket in 0..BUCKETS {
            let range = bucket_range(bucket);
            assert_eq!(range.start, end, "bucket {bucket}");
            assert_eq!(bucket_of(range.start), bucket);
            assert_eq!(bucket_of(range.end - 1), bucket);
            assert!(octave_range(octave_of(bucket)).contains(&range.start));
            end = range.end;
        }
        assert_eq!(end, 1 << END_BITS);
        assert_eq!(octave_of(BUCKETS - 1), OCTAVES - 1);
    }

    proptest! {
        #[test]
        fn latency_is_near_the_middle_of_its_bucket(ns in 64u64..1 << 37) {
            let range = bucket_range(bucket_of(ns));
            prop_assert!(range.contains(&ns));
            let middle = (range.start + range.end) / 2;
            prop_assert!(ns.abs_diff(middle) * 16 <= ns + 16);
        }

        #[test]
        fn latency_beyond_the_end_is_in_the_last_bucket(ns in 1u64 << 37..) {
            prop_assert_eq!(bucket_of(ns), BUCKETS - 1);
        }
    }
}
