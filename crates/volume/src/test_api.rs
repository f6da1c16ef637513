//! Internals for the integration tests of this crate. Nothing else may use them.

pub use crate::client::channel::{ChannelCore, VolumeChannel, open as open_channel};
pub use crate::controller::{CheckJob, ControllerEvent, Mailbox, ScrubOrder, StepOrder};
pub use crate::direct_access::access::DirectAccess;
pub use crate::engine::locks::{CONTROLLER, LockHolder, LockRange, RangeLocks};
pub use crate::limits::lowered::{
    LOWERED_CHANGES_MAX as LOWERED_REPLICATION_CHANGES_MAX, lower_replication_limits,
};
pub use crate::replication::queue::ReplicationQueue;
pub use crate::replication::ring::{CLAIM_PENDING, RingEntry, UnfilledClaim};
pub use crate::shared::{IndeterminateWrites, LegLink, Member, MemberMessage, VolumeShared};
pub use crate::snapshot::{
    ColumnGate, ColumnSnapshot, LayoutSnapshot, LegSnapshot, SegmentSnapshot,
};
pub use crate::steps::explored::{Explorer, set_explorer};
pub use crate::wake::Wake;

use crate::DrivenVolume;
use std::sync::Arc;

/// The state that a volume's channels and controller share, and the controller's mailbox.
#[must_use]
pub fn parts_of(volume: &DrivenVolume) -> (Arc<VolumeShared>, Arc<Mailbox>) {
    (Arc::clone(&volume.shared), Arc::clone(&volume.mailbox))
}
