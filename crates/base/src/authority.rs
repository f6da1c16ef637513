//! The interface of a volume to the manager. The manager owns layouts and decides which legs count.
//! `volume` calls it, and `manage` implements it.
//!
//! Calls block for a bounded time. They run on threads of their own, never on the path of a
//! request.

use crate::brick_name::BrickName;
use crate::ids::Epoch;
use crate::layout::{BrickId, Layout, LegState, SliceId, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The addresses of a brick.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrickAddress {
    /// The name of the brick, if it has one.
    #[serde(default)]
    pub name: Option<BrickName>,
    /// `host:port` of its tcp transport.
    pub tcp: String,
    /// The unix socket of its `map` transport, if the brick has one.
    pub map_socket: Option<String>,
    /// The pool's durability class, as in `BrickStatus`; empty if unknown.
    #[serde(default)]
    pub durability: String,
}

impl BrickAddress {
    /// Whether an acknowledged write becomes durable only with a flush. True for every class
    /// that is not known to be durable at once.
    #[must_use]
    pub fn buffers(&self) -> bool {
        !matches!(self.durability.as_str(), "pmem" | "eadr" | "process")
    }
}

/// The result of an attach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolvedLayout {
    /// The layout, with the epoch that the attach raised. That epoch also names the attachment
    /// in later calls.
    pub layout: Layout,
    /// The addresses of its bricks.
    pub bricks: BTreeMap<BrickId, BrickAddress>,
}

/// The progress of a leg's resync.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resync {
    /// Bytes to copy, as far as known by now.
    pub bytes_todo: u64,
    /// Bytes copied or cleared.
    pub bytes_done: u64,
    /// Milliseconds since the resync began.
    pub elapsed_ms: u64,
}

/// The changes that an asynchronous replica has yet to get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lag {
    /// The number of changes.
    pub changes: u64,
    /// The bytes of these changes.
    pub bytes: u64,
    /// Microseconds since the oldest of them was acknowledged, or could have been.
    pub age_us: u64,
}

/// A snapshot that an asynchronous replica has as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaSnapshot {
    /// The slice of the replica.
    pub slice: SliceId,
    /// The epoch of the snapshot.
    pub snapshot: Epoch,
}

/// The report of a client to the manager about its copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// The lag of the replica, if there is one.
    pub lag: Option<Lag>,
    /// The progress of copies in resync, by copy number, over all columns.
    pub resyncs: BTreeMap<usize, Resync>,
    /// Snapshots that the replica has got since the last report.
    pub replica_snapshots: Vec<ReplicaSnapshot>,
}

impl CopyReport {
    /// Whether the report is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lag.is_none() && self.resyncs.is_empty() && self.replica_snapshots.is_empty()
    }
}

/// A request to change the state of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegChange {
    /// The index of the segment in the layout.
    pub segment: usize,
    /// The index of the column in the segment.
    pub column: usize,
    /// The index of the leg in the column.
    pub leg: usize,
    /// The new state.
    pub to: LegState,
}

/// The reason for which the manager did not do a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// The layout has changed, but the attachment is still valid. Read the layout and try
    /// again.
    #[error("the layout is at epoch {current}, not the expected one")]
    Conflict {
        /// The layout's epoch.
        current: Epoch,
    },
    /// Another client has attached.
    #[error("another client attached the volume")]
    Fenced,
    /// No answer came. The manager may or may not have done the call.
    #[error("the manager cannot be reached: {0}")]
    Unreachable(String),
    /// The manager will not do the call at any epoch.
    #[error("the manager refused: {0}")]
    Refused(String),
}

/// The manager, as a volume sees it. Calls block for a bounded time.
pub trait Authority: Send + Sync {
    /// Attaches the volume to this client. It raises the epoch, which fences the previous
    /// client.
    ///
    /// # Errors
    /// When there is no such volume, or the manager does not answer.
    fn attach(&self, name: &VolumeName, client: &str) -> Result<ResolvedLayout, AuthorityError>;

    /// Changes leg states by compare-and-swap. The epoch rises, and rounds follow the rules of
    /// the layout. `attachment` is the epoch that the attach returned.
    ///
    /// # Errors
    /// When the epoch is not the expected one, another client has attached, or the manager does
    /// not answer.
    fn change_legs(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError>;

    /// Returns the present layout and the addresses of its bricks, but only to the holder of
    /// `attachment`.
    ///
    /// **Lost update:** A client must not take over a layout that another client has made
    /// since. Its epoch would give this client the right to write.
    ///
    /// The call also passes `report` on to the manager: the progress of replicas and of legs in
    /// resync, for people, and the snapshots that a replica has got.
    ///
    /// # Errors
    /// When the attachment is over, or the manager does not answer.
    fn layout(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        report: &CopyReport,
    ) -> Result<ResolvedLayout, AuthorityError>;

    /// Detaches the volume. The call does nothing if `attachment` is not the present one.
    ///
    /// # Errors
    /// When the manager does not answer.
    fn detach(&self, name: &VolumeName, attachment: Epoch) -> Result<(), AuthorityError>;
}
