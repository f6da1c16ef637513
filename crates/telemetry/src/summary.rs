//! The figures of a kind of operation without their stages.

use super::histogram::{BUCKETS, quantile_ns};
use super::report::Report;
use super::{KINDS, OpKind};
use pagemesh_base::media_bytes::MediaBytes;

/// Operations, bytes and latencies of one kind.
///
/// Its sums take 2 KiB on the stack, where [`KindTotals`](super::KindTotals) take two blocks of the
/// heap: answers about thousands of volumes need them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindSummary {
    /// All operations.
    pub ops: u64,
    /// Bytes of all operations.
    pub bytes: u64,
    /// The median latency in nanoseconds; none without a timed operation.
    pub p50_ns: Option<u64>,
    /// The 99th percentile.
    pub p99_ns: Option<u64>,
}

/// The sums of the last minute of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentSummary {
    /// By [`OpKind`].
    pub kinds: [KindSummary; KINDS],
    /// Bytes that a brick wrote to its medium. None: no report has them.
    pub media: Option<MediaBytes>,
}

impl KindSummary {
    /// The sums of one kind over reports that were [checked](Report::check).
    pub(crate) fn of<'r>(kind: OpKind, reports: impl Iterator<Item = &'r Report>) -> KindSummary {
        let mut summary = KindSummary::default();
        let mut latency = [0u64; BUCKETS];
        for report in reports {
            let report = &report.kinds[kind as usize];
            summary.ops = summary.ops.saturating_add(report.ops);
            summary.bytes = summary.bytes.saturating_add(report.bytes);
            for (bucket, count) in &report.latency {
                let to = &mut latency[usize::from(*bucket)];
                *to = to.saturating_add(*count);
            }
        }
        summary.p50_ns = quantile_ns(&latency, 0.5);
        summary.p99_ns = quantile_ns(&latency, 0.99);
        summary
    }
}
