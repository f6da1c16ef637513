//! How many operations a client made, and where their time went (RFD 025).
//!
//! A [`ChannelMeter`] belongs to the thread that makes the operations. Another thread reads
//! [`Totals`] from it, sums the totals of all channels, and sends the difference to the last report as
//! a [`Report`]. The receiver adds reports up again, and keeps the last day of each series in a
//! [`History`].
//!
//! Invariants:
//! - one thread writes a meter, with plain stores; no operation takes a lock or a locked instruction;
//! - the stages of an operation add up to its latency, so the mean stages of any group of operations
//!   add up to the mean latency of the group;
//! - a report from outside is checked before it is used, and sums saturate.

mod histogram;
mod history;
mod meter;
mod meter_set;
mod report;
mod summary;
mod totals;

pub use histogram::{BUCKETS, OCTAVES, bucket_of, bucket_range, octave_of, octave_range};
pub use history::{History, LATENCY_UNIT_NS, LONG_STEP, SHORT_STEP, Sample, Series};
pub use meter::{ChannelMeter, SAMPLE_INTERVAL, Sampler};
pub use meter_set::{MeterSet, OpenMeter, ReadTotals};
pub use pagemesh_base::media_bytes::MediaBytes;
pub use report::{KindReport, Report, ReportError};
pub use summary::{KindSummary, RecentSummary};
pub use totals::{KindTotals, StageMeans, Totals};

use serde::{Deserialize, Serialize};

/// The kinds of operations that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpKind {
    /// A read.
    Read,
    /// A write, a transaction, or a deallocation.
    Write,
    /// A flush.
    Flush,
}

/// The number of [`OpKind`]s.
pub const KINDS: usize = 3;

impl OpKind {
    /// Every kind, in the order of their declaration.
    pub const ALL: [OpKind; KINDS] = [OpKind::Read, OpKind::Write, OpKind::Flush];

    /// The name in reports, metrics and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["read", "write", "flush"][self as usize]
    }
}

/// The parts of an operation's latency, in the order in which they pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// From the submission until the client starts the operation.
    Queue,
    /// Until the operation holds its range locks.
    Lock,
    /// The time of the last leg that answered, without the brick's.
    Fabric,
    /// The time in the brick of this leg, without the store's.
    Brick,
    /// The time in the store of this leg.
    Media,
    /// From the last answer until the completion.
    Finish,
}

/// The number of [`Stage`]s.
pub const STAGES: usize = 6;

impl Stage {
    /// Every stage, in order.
    pub const ALL: [Stage; STAGES] = [
        Stage::Queue,
        Stage::Lock,
        Stage::Fabric,
        Stage::Brick,
        Stage::Media,
        Stage::Finish,
    ];

    /// The name in reports, metrics and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["queue", "lock", "fabric", "brick", "media", "finish"][self as usize]
    }
}

/// Adds stages to sums of stages.
fn add_stages(to: &mut [u64; STAGES], from: &[u64; STAGES]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = to.saturating_add(*from);
    }
}

/// Adds bytes written to media to a sum.
fn add_media(to: &mut Option<MediaBytes>, from: Option<MediaBytes>) {
    if let Some(from) = from {
        to.get_or_insert_default().add(from);
    }
}

/// The stages of one operation, in nanoseconds, by [`Stage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes(pub [u64; STAGES]);

impl StageTimes {
    /// The latency of the operation, in nanoseconds.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.0.iter().fold(0, |sum, part| sum.saturating_add(*part))
    }
}
