//! The status report of a volume.

use crate::limits::{DAMAGES_MAX, DIFFERENCES_MAX};
use pagemesh_base::authority::{Lag, Resync};
use pagemesh_base::brick_name::BrickName;
use pagemesh_base::layout::{BrickId, LegState, SliceId, VolumeName};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// The state of a volume: the worst that applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeState {
    /// All legs are in-sync.
    #[default]
    Healthy,
    /// A leg is in resync.
    Resyncing,
    /// A leg is stale.
    Degraded,
    /// A leg is lost, and writes wait until the manager has confirmed it.
    AwaitingManager,
    /// A column has no in-sync leg. Its requests wait, or fail.
    Unavailable,
    /// Another client attached the volume.
    Fenced,
}

/// The status of a leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegStatus {
    /// The brick of the leg.
    pub brick: BrickId,
    /// The name of the brick, if it has one.
    #[serde(default)]
    pub name: Option<BrickName>,
    /// The slice of the leg.
    pub slice: SliceId,
    /// The state that the manager gave it.
    #[serde(serialize_with = "LegState::serialize_shown")]
    pub state: LegState,
    /// The reason for which it is not reachable, or was lost.
    #[serde(alias = "trouble")]
    pub last_error: Option<String>,
    /// The progress of its resync, if one is running.
    pub resync: Option<Resync>,
    /// Whether it is an asynchronous replica, or will be one once it is up to date.
    #[serde(default)]
    pub asynchronous: bool,
    /// Its lag, while changes are sent to it in order.
    #[serde(default)]
    pub lag: Option<Lag>,
}

/// The status of a column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnStatus {
    /// The index of the segment.
    pub segment: usize,
    /// The index of the column in the segment.
    pub column: usize,
    /// The epoch of the oldest loss of a leg that is still behind; 0 if none is.
    pub lost_since: u32,
    /// The legs of the column.
    pub legs: Vec<LegStatus>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident $field:ident,)*) => {
        /// The events that are counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Count { $($variant,)* }

        /// Sums since the attach.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Counters { $($(#[$doc])* pub $field: u64,)* }

        #[derive(Default)]
        pub struct Tally { $($field: AtomicU64,)* }

        impl Tally {
            pub fn add(&self, what: Count, by: u64) {
                match what { $(Count::$variant => self.$field.fetch_add(by, Ordering::Relaxed),)* };
            }

            pub fn sums(&self) -> Counters {
                Counters { $($field: self.$field.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Legs lost.
    LegsLost legs_lost,
    /// Legs that completed a resync.
    LegsReturned legs_returned,
    /// Times the epoch was raised.
    EpochsRaised epochs_raised,
    /// Reads that went to another leg after an error.
    ReadsRedirected reads_redirected,
    /// Reads that waited for a change in flight before they returned data.
    ReadsDelayed reads_delayed,
    /// Late reads that were asked of a second leg.
    ReadsHedged reads_hedged,
    /// Damaged pages rewritten from another leg.
    PagesRepaired pages_repaired,
    /// Pages that scrubs have read on all in-sync legs.
    PagesScrubbed pages_scrubbed,
    /// Repairs that did not work out.
    RepairsFailed repairs_failed,
    /// Requests that were answered with an error. No other figure counts them.
    #[serde(default)]
    RequestsFailed requests_failed,
    /// Flushes started because too much was unflushed.
    BackgroundFlushes background_flushes,
    /// Bytes copied by resynchronisation.
    BytesResynced bytes_resynced,
    /// Bytes copied to make legs equal after a crash.
    #[serde(alias = "bytes_settled")]
    BytesRecovered bytes_recovered,
}

/// A volume, as its client sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Its name.
    pub name: VolumeName,
    /// The epoch that the client holds.
    pub epoch: u32,
    /// The state of the volume.
    pub state: VolumeState,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The number of open channels.
    pub channels: usize,
    /// The columns of all segments.
    pub columns: Vec<ColumnStatus>,
    /// Sums since the attach.
    pub counters: Counters,
    /// The scrubs of the copies.
    pub scrub: ScrubStatus,
}

/// The state of scrubbing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScrubState {
    /// No scrub is planned.
    #[default]
    Off,
    /// The next scrub is scheduled.
    Waiting,
    /// A scrub is running.
    Running,
    /// A scrub was stopped, and resumes there on request.
    Stopped,
}

/// One scrub of the whole volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubPass {
    /// Bytes of the volume, once for all copies.
    pub bytes_todo: u64,
    /// Bytes read so far.
    pub bytes_done: u64,
    /// Bytes skipped, because their bricks did not return them.
    pub bytes_skipped: u64,
    /// Milliseconds since the scrub began, or until it ended.
    pub elapsed_ms: u64,
    /// Milliseconds since the scrub ended, if it has.
    pub ended_ms_ago: u64,
    /// The findings.
    pub found: CheckReport,
}

/// The scrubs of a volume since the attach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// The state of scrubbing.
    pub state: ScrubState,
    /// The number of scrubs that were completed.
    pub passes: u64,
    /// Milliseconds until the next scrub begins, if none is running.
    pub next_in_ms: Option<u64>,
    /// The running scrub.
    pub pass: Option<ScrubPass>,
    /// The last completed scrub.
    pub last: Option<ScrubPass>,
}

impl VolumeStatus {
    /// Advances the times by the age of the report.
    pub fn age(&mut self, by: std::time::Duration) {
        let by = by.as_millis() as u64;
        let legs = self.columns.iter_mut().flat_map(|column| &mut column.legs);
        for resync in legs.filter_map(|leg| leg.resync.as_mut()) {
            resync.elapsed_ms += by;
        }
        let scrub = &mut self.scrub;
        scrub.next_in_ms = scrub.next_in_ms.map(|left| left.saturating_sub(by));
        if let Some(pass) = &mut scrub.pass {
            pass.elapsed_ms += by;
        }
        if let Some(last) = &mut scrub.last {
            last.ended_ms_ago += by;
        }
    }
}

/// A page that some legs cannot read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// Its first byte in the volume.
    pub offset: u64,
    /// The bricks with the copies that cannot be read.
    pub bricks: Vec<BrickId>,
    /// The names of these bricks, in the same order.
    #[serde(default)]
    pub brick_names: Vec<String>,
    /// Whether the copies were repaired.
    pub repaired: bool,
    /// The reason for which they were not; empty if they were.
    pub cause: String,
}

/// A run of pages that differ between legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The index of the segment.
    pub segment: usize,
    /// The index of the column in the segment.
    pub column: usize,
    /// The first page in the column's slices.
    pub page: u64,
    /// The number of pages.
    pub count: u64,
}

/// The findings of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Pages compared, holes included.
    pub pages_compared: u64,
    /// Pages that differ.
    pub pages_differing: u64,
    /// Pages that some leg cannot read.
    pub pages_damaged: u64,
    /// Pages made equal.
    pub pages_repaired: u64,
    /// The first runs of differing pages.
    pub differences: Vec<Difference>,
    /// The first damaged pages.
    pub damages: Vec<Damage>,
}

impl CheckReport {
    /// The report of this many pages without any finding.
    pub fn of_pages(pages: u64) -> CheckReport {
        CheckReport {
            pages_compared: pages,
            ..CheckReport::default()
        }
    }

    /// Adds the findings of another report.
    pub fn add(&mut self, other: CheckReport) {
        self.pages_compared += other.pages_compared;
        self.pages_differing += other.pages_differing;
        self.pages_damaged += other.pages_damaged;
        self.pages_repaired += other.pages_repaired;
        let room = DIFFERENCES_MAX.saturating_sub(self.differences.len());
        self.differences
            .extend(other.differences.into_iter().take(room));
        let room = DAMAGES_MAX.saturating_sub(self.damages.len());
        self.damages.extend(other.damages.into_iter().take(room));
    }
}
