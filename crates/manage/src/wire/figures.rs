//! JSON bodies of figures: operations, bytes and latencies.

use pagemesh_base::layout::EpochNumber;
use pagemesh_telemetry::{MediaBytes, OpKind, Report};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

/// The operations of a volume since the last report that the manager took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportFigures {
    /// The epoch that the attach returned.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// The counters of its meter.
    #[schema(value_type = crate::api::document::FigureReport)]
    pub report: Report,
    /// Without it, a report whose answer was lost counts twice when it is sent again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<ReportDelivery>,
}

/// The operations of a brick's connections since the last report that the manager took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportBrickFigures {
    /// As in the report of a volume, and `media`: the bytes that the brick and the clients that map its pool
    /// wrote to its medium.
    #[schema(value_type = crate::api::document::FigureReport)]
    pub report: Report,
    /// As in the report of a volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<ReportDelivery>,
}

/// The sender of a report, and its place among the reports of this sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportDelivery {
    /// The sender; a process has a new one after each start.
    pub reporter: Uuid,
    /// Rises with each report. A report that is sent again keeps its number.
    pub number: u64,
    /// Milliseconds from the first operation that the report may contain until it is sent. The histories leave
    /// out reports above 25 s: their operations do not belong to the present step.
    pub covers_ms: u64,
}

/// The span of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum FigureSpan {
    /// An hour in steps of 10 s.
    #[default]
    #[serde(rename = "1h")]
    Hour,
    /// A day in steps of 5 min.
    #[serde(rename = "24h")]
    Day,
}

/// The span of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SpanParam {
    /// `1h` if missing: an hour in steps of 10 s. `24h`: a day in steps of 5 min.
    #[serde(default)]
    #[param(inline)]
    pub span: FigureSpan,
}

/// A history. All arrays have one entry for each step in which anything was reported, in ascending order of
/// time; other steps have none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FigureSeries {
    /// The length of a step in seconds.
    pub step_s: u64,
    /// The age of the last report, in microseconds; null if there was none since the manager started.
    pub last_reported_us_ago: Option<u64>,
    /// Whether samples were dropped early, because the memory for all histories ran out.
    pub is_shortened: bool,
    /// The beginnings of the steps, in seconds since 1970 by the manager's clock.
    pub time_unix_s: Vec<u64>,
    /// Reads.
    pub read: FigureValues,
    /// Writes, transactions and deallocations.
    pub write: FigureValues,
    /// Flushes.
    pub flush: FigureValues,
}

impl FigureSeries {
    /// A series without reports.
    pub(crate) fn empty(step_s: u64) -> FigureSeries {
        FigureSeries {
            step_s,
            last_reported_us_ago: None,
            is_shortened: false,
            time_unix_s: Vec::new(),
            read: FigureValues::default(),
            write: FigureValues::default(),
            flush: FigureValues::default(),
        }
    }
}

/// The values of one kind of operation, by step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FigureValues {
    /// Operations in the step.
    pub operations: Vec<u32>,
    /// KiB in the step.
    pub kib: Vec<u32>,
    /// The median latency in nanoseconds; null without a timed operation.
    pub p50_ns: Vec<Option<u64>>,
    /// The 99th percentile of the latency in nanoseconds.
    pub p99_ns: Vec<Option<u64>>,
}

/// The last minute of everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RecentFigures {
    /// The seconds that the sums cover: 50 to 60.
    pub window_s: u64,
    /// The sum of all volumes; null before the first report.
    pub cluster: Option<SubjectFigures>,
    /// Volumes with a report since the manager started.
    pub volumes: Vec<SubjectFigures>,
    /// Bricks with a report since the manager started.
    pub bricks: Vec<SubjectFigures>,
    /// The bytes that all bricks wrote to their media; null if none has reported any.
    #[serde(default)]
    pub media: Option<ClusterMediaFigures>,
}

/// The bytes that all bricks wrote to their media in the last minute, and their ratio to the bytes that users wrote.
/// A volume with two copies writes each byte twice, so its ratio is at least 2.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClusterMediaFigures {
    /// The bytes by their use.
    pub written: MediaFigures,
    /// All of these bytes, for each byte that users wrote to volumes. Null if users wrote none, or if a report of a
    /// living brick or of an attached volume is missing.
    pub per_user_byte: Option<f64>,
    /// The bytes of journals and tables among them.
    pub metadata_per_user_byte: Option<f64>,
}

/// Bytes written to a medium in the last minute, by the brick and by the clients that map its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MediaFigures {
    /// Pages, and parts of pages that were changed in place.
    pub data_bytes: u64,
    /// Journals.
    pub journal_bytes: u64,
    /// Page tables, checksums, the bitmap and superblocks.
    pub table_bytes: u64,
}

impl MediaFigures {
    /// All bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let metadata = self.journal_bytes.saturating_add(self.table_bytes);
        self.data_bytes.saturating_add(metadata)
    }
}

impl From<MediaBytes> for MediaFigures {
    fn from(bytes: MediaBytes) -> MediaFigures {
        MediaFigures {
            data_bytes: bytes.data,
            journal_bytes: bytes.journal,
            table_bytes: bytes.tables,
        }
    }
}

/// The last minute of a volume or brick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SubjectFigures {
    /// The name of the volume or the brick.
    pub name: String,
    /// The age of the last report, in microseconds.
    pub last_reported_us_ago: u64,
    /// Reads, writes and flushes.
    pub kinds: Vec<FigureKind>,
    /// The bytes written to the brick's medium; null for a volume, and for a brick that has reported none.
    #[serde(default)]
    pub media: Option<MediaFigures>,
}

/// The operations of one kind in the last minute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FigureKind {
    /// `read`, `write` or `flush`.
    pub kind: String,
    /// Operations.
    pub operations: u64,
    /// Bytes.
    pub bytes: u64,
    /// The median latency in nanoseconds; null without a timed operation.
    pub p50_ns: Option<u64>,
    /// The 99th percentile of the latency in nanoseconds.
    pub p99_ns: Option<u64>,
}

/// The operations whose stages are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StageParams {
    /// `write` if missing.
    #[serde(default = "default_kind")]
    #[param(value_type = crate::api::document::OpKind, required = false, inline)]
    pub kind: OpKind,
    /// The quantile of the latency, 0 to 1; 0.99 if missing.
    #[serde(default = "default_quantile")]
    #[param(value_type = Option<f64>, minimum = 0.0, maximum = 1.0)]
    pub quantile: f64,
}

fn default_kind() -> OpKind {
    OpKind::Write
}

fn default_quantile() -> f64 {
    0.99
}

/// Where the time of a volume's operations went in the last minute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StageFigures {
    /// `read`, `write` or `flush`.
    pub kind: String,
    /// The quantile of the latency.
    pub quantile: f64,
    /// The age of the last report, in microseconds; null if there was none.
    pub last_reported_us_ago: Option<u64>,
    /// Operations in the last minute.
    pub operations: u64,
    /// The operations among them that were timed.
    pub timed: u64,
    /// The latency at the quantile, in nanoseconds.
    pub latency_ns: Option<u64>,
    /// The timed operations within the same power of two as this latency.
    pub around: u64,
    /// The mean nanoseconds of each stage of those operations. They add up to their mean latency. Stages: `queue`
    /// (waiting in the client), `lock` (range locks), `fabric` (the network and both sockets), `brick` (the
    /// brick, without its store), `media` (the store), `finish` (after the last answer).
    pub stages_ns: Option<BTreeMap<String, u64>>,
    /// The same of all timed operations.
    pub mean_stages_ns: Option<BTreeMap<String, u64>>,
    /// The timed operations by their latency, in powers of two; those without an operation are left out.
    #[serde(default)]
    pub latency: Vec<LatencyBand>,
}

/// The operations with a latency in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBand {
    /// The shortest latency in nanoseconds.
    pub from_ns: u64,
    /// The end of the range, which is not in it.
    pub to_ns: u64,
    /// Operations.
    pub operations: u64,
}
