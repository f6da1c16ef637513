//! The seam to the manager: who owns layouts and says which leg counts.
//!
//! Calls block for a bounded time and are made on threads of their own,
//! never on the path of a request.

use crate::status::CopyReport;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, Layout, LegState, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How to reach a brick.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrickAddress {
    /// `host:port` of its tcp transport.
    pub tcp: String,
    /// The unix socket of its `map` transport, where it has one.
    pub map_socket: Option<String>,
    /// The pool's durability class, as in `BrickStatus`; empty if unknown.
    #[serde(default)]
    pub durability: String,
}

impl BrickAddress {
    /// Whether an acknowledged write becomes durable only with a flush. True
    /// for what is not known to be otherwise.
    #[must_use]
    pub fn buffers(&self) -> bool {
        !matches!(self.durability.as_str(), "pmem" | "eadr" | "process")
    }
}

/// What an attach gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolvedLayout {
    /// The layout, its epoch risen by the attach. That epoch also names the
    /// attachment in later calls.
    pub layout: Layout,
    /// Where its bricks are.
    pub bricks: BTreeMap<BrickId, BrickAddress>,
}

/// A wish to change what a leg may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegChange {
    /// Which segment of the layout.
    pub segment: usize,
    /// Which of its columns.
    pub column: usize,
    /// Which of its legs.
    pub leg: usize,
    /// What it becomes.
    pub to: LegState,
}

/// Why the manager did not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// The layout changed since, but the attachment still stands: read it and
    /// try again.
    #[error("the layout is at epoch {current}, not the expected one")]
    Conflict {
        /// The layout's epoch.
        current: Epoch,
    },
    /// Another client has attached.
    #[error("another client attached the volume")]
    Fenced,
    /// No answer; it may or may not have been done.
    #[error("the manager cannot be reached: {0}")]
    Unreachable(String),
    /// It will not be done, whatever the epoch.
    #[error("the manager refused: {0}")]
    Refused(String),
}

/// The manager, as a volume sees it. Calls block for a bounded time.
pub trait Authority: Send + Sync {
    /// Takes the volume for this client: raises its epoch, which fences the
    /// client before.
    ///
    /// # Errors
    /// When there is no such volume, or the manager does not answer.
    fn attach(&self, name: &VolumeName, client: &str) -> Result<ResolvedLayout, AuthorityError>;

    /// Compare-and-swap of leg states; the epoch rises and rounds follow the
    /// rules of the layout. `attachment` is the epoch that the attach gave.
    ///
    /// # Errors
    /// When the epoch is not the expected one, another client has attached,
    /// or the manager does not answer.
    fn change_legs(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError>;

    /// The present layout, and where its bricks are now, for who has this
    /// attachment. A layout that another client made since must not be taken
    /// for one's own: its epoch would be the right to write.
    ///
    /// Tells on the way how copies are that follow or return, for people.
    ///
    /// # Errors
    /// When the attachment is over, or the manager does not answer.
    fn layout(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        report: &CopyReport,
    ) -> Result<ResolvedLayout, AuthorityError>;

    /// Gives the volume back. An attachment that is not the present one is
    /// left alone.
    ///
    /// # Errors
    /// When the manager does not answer.
    fn detach(&self, name: &VolumeName, attachment: Epoch) -> Result<(), AuthorityError>;
}
