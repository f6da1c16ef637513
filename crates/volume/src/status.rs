//! What a volume tells about itself.

use pagemesh_base::layout::{BrickId, LegState, Name, SliceId};
use serde::{Deserialize, Serialize};
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
    pub name: Name,
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
}
