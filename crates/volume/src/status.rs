//! What a volume tells about itself.

use crate::limits::{DAMAGES_MAX, DIFFERENCES_MAX};
use pagemesh_base::layout::{BrickId, LegState, SliceId, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a volume is, the worst that applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeState {
    /// All legs are in-sync.
    #[default]
    Healthy,
    /// A leg is being brought up to date.
    Resyncing,
    /// A leg is stale.
    Degraded,
    /// A leg is lost, and writes wait until the manager says so.
    AwaitingManager,
    /// A column has no in-sync leg; its requests wait, or fail.
    Unavailable,
    /// Another client attached the volume.
    Fenced,
}

/// How far a leg's return has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resync {
    /// Bytes to copy, as known by now.
    pub bytes_todo: u64,
    /// Bytes copied, or cleared.
    pub bytes_done: u64,
    /// Since it began.
    pub elapsed_ms: u64,
}

/// What a leg that follows has yet to get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lag {
    /// Changes.
    pub changes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Since the oldest of them was acknowledged, or could have been.
    pub age_us: u64,
}

/// What a client tells the manager of its copies, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// What the copy that follows has yet to get, if one does.
    pub lag: Option<Lag>,
    /// Copies that return, in their order, over all columns.
    pub resyncs: BTreeMap<usize, Resync>,
}

impl CopyReport {
    /// Whether there is nothing to tell.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lag.is_none() && self.resyncs.is_empty()
    }
}

/// One leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegStatus {
    /// Where.
    pub brick: BrickId,
    /// Which slice.
    pub slice: SliceId,
    /// What the manager lets it be used for.
    pub state: LegState,
    /// Why it is not reachable, or why it left.
    pub trouble: Option<String>,
    /// Its return, while there is one.
    pub resync: Option<Resync>,
    /// Whether it follows, or will once it is up to date.
    #[serde(default)]
    pub asynchronous: bool,
    /// What it has yet to get, while changes are sent to it in their order.
    #[serde(default)]
    pub lag: Option<Lag>,
}

/// One column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnStatus {
    /// Which segment.
    pub segment: usize,
    /// Which of its columns.
    pub column: usize,
    /// The degraded round, 0 if all legs are in-sync.
    pub round: u8,
    /// Its copies.
    pub legs: Vec<LegStatus>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident $field:ident,)*) => {
        /// What can be counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Count { $($variant,)* }

        /// Sums since the attach.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Counters { $($(#[$doc])* pub $field: u64,)* }

        #[derive(Default)]
        pub(crate) struct Tally { $($field: AtomicU64,)* }

        impl Tally {
            pub(crate) fn add(&self, what: Count, by: u64) {
                match what { $(Count::$variant => self.$field.fetch_add(by, Ordering::Relaxed),)* };
            }

            pub(crate) fn sums(&self) -> Counters {
                Counters { $($field: self.$field.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Legs lost.
    LegsLost legs_lost,
    /// Legs that came back.
    LegsReturned legs_returned,
    /// Times the epoch was raised.
    EpochsRaised epochs_raised,
    /// Reads that went to another leg after an error.
    ReadsRedirected reads_redirected,
    /// Reads whose answer waited for a change in flight.
    ReadsDelayed reads_delayed,
    /// Late reads that were asked of a second leg.
    ReadsHedged reads_hedged,
    /// Damaged pages rewritten from another leg.
    PagesRepaired pages_repaired,
    /// Pages that scrubs have read on all in-sync legs.
    PagesScrubbed pages_scrubbed,
    /// Repairs that did not work out.
    RepairsFailed repairs_failed,
    /// Flushes started because too much was unflushed.
    BackgroundFlushes background_flushes,
    /// Bytes copied by resynchronisation.
    BytesResynced bytes_resynced,
    /// Bytes copied to make legs equal after a crash.
    BytesSettled bytes_settled,
}

/// A volume, as its client sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Its name.
    pub name: VolumeName,
    /// The epoch held.
    pub epoch: u32,
    /// How it is.
    pub state: VolumeState,
    /// Its size.
    pub size_bytes: u64,
    /// Channels open.
    pub channels: usize,
    /// Its columns, over all segments.
    pub columns: Vec<ColumnStatus>,
    /// Sums since the attach.
    pub counters: Counters,
    /// The scrub of its copies.
    pub scrub: ScrubStatus,
}

/// Whether the copies are being scrubbed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScrubState {
    /// None is planned.
    #[default]
    Off,
    /// The next one has its time.
    Waiting,
    /// One is under way.
    Running,
    /// One was stopped, and goes on from there when it is told to.
    Stopped,
}

/// One scrub of the whole volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubPass {
    /// Bytes of a copy of the volume.
    pub bytes_todo: u64,
    /// Bytes looked at.
    pub bytes_done: u64,
    /// Bytes passed over, as their bricks did not give them.
    pub bytes_skipped: u64,
    /// Since it began; until its end, if it has ended.
    pub elapsed_ms: u64,
    /// Since it ended, if it has.
    pub ended_ms_ago: u64,
    /// What it found.
    pub found: CheckReport,
}

/// The scrubs of a volume since the attach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// What is going on.
    pub state: ScrubState,
    /// Scrubs that came to their end.
    pub passes: u64,
    /// When the next one begins, if none is under way.
    pub next_in_ms: Option<u64>,
    /// The one under way.
    pub pass: Option<ScrubPass>,
    /// The last one that ended.
    pub last: Option<ScrubPass>,
}

impl VolumeStatus {
    /// Lets time pass since it was told.
    pub(crate) fn age(&mut self, by: std::time::Duration) {
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
    /// Its first byte, in the volume.
    pub offset: u64,
    /// Where the copies lie that cannot be read.
    pub bricks: Vec<BrickId>,
    /// Whether they can again.
    pub repaired: bool,
    /// Why not.
    pub cause: String,
}

/// A run of pages that differ between legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// Which segment.
    pub segment: usize,
    /// Which of its columns.
    pub column: usize,
    /// The first page in the column's slices.
    pub page: u64,
    /// Pages.
    pub count: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Pages compared, holes included.
    pub pages_compared: u64,
    /// Pages that differ.
    pub pages_differing: u64,
    /// Pages that cannot be read from some leg.
    pub pages_damaged: u64,
    /// Pages made equal.
    pub pages_repaired: u64,
    /// Where they differ; the first of them.
    pub differences: Vec<Difference>,
    /// What is damaged; the first of it.
    pub damages: Vec<Damage>,
}

impl CheckReport {
    /// Nothing wrong with so many pages.
    pub(crate) fn of_pages(pages: u64) -> CheckReport {
        CheckReport {
            pages_compared: pages,
            ..CheckReport::default()
        }
    }

    /// Takes in what was found elsewhere.
    pub(crate) fn add(&mut self, other: CheckReport) {
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
