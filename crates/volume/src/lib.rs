//! Volumes: the client side that combines slices on many bricks into one space.
//!
//! ```text
//! Volume ── Channel (one per front thread) ──── Engine (pure) ──────── legs
//!    └──── Controller (one thread: epochs, lost legs, resyncs)  ──── legs, Authority
//! ```
//!
//! Invariants:
//! - A write completes only when every in-sync and syncing leg of the present epoch has it.
//!   Overlapping writes are never in flight together.
//! - A stale or syncing leg never serves a read.
//! - A leg is left out only after the authority said so.
//! - No lock is held over I/O other than the range lock of a write. No channel ever blocks or
//!   calls the authority.
//! - Every queue and retry has a limit, named in [`limits`].

#![forbid(unsafe_code)]

mod client;
mod controller;
pub mod direct_access;
mod engine;
mod legs;
pub mod limits;
mod replication;
mod shared;
mod snapshot;
mod stamp_epoch;
mod status;
mod steps;
#[cfg(feature = "test-api")]
pub mod test_api;
mod wake;

pub use client::driven::{CallAnswer, DrivenVolume, FlushState, PendingCall};
pub use client::snapshot_space::SnapshotSpace;
pub use client::volume::{AttachError, CheckError, RefreshError, Volume};
pub use controller::{CutError, CutStep, ScrubPlan, StepResult};
pub use legs::connector::Connector;
pub use legs::mapped::{DirectLeg, MappedLeg, overwrite_all, overwrite_atomically};
pub use legs::transport::{Transport, Transports};
pub use pagemesh_base::authority::{
    Authority, AuthorityError, BrickAddress, CopyReport, Lag, LegChange, ResolvedLayout, Resync,
};
pub use status::{
    CheckReport, ColumnStatus, Counters, Damage, Difference, LegStatus, ScrubPass, ScrubState,
    ScrubStatus, VolumeState, VolumeStatus,
};

/// The ring through which the changes of direct clients reach an asynchronous replica.
pub mod replication_ring {
    pub use crate::replication::ring::{
        RECORD_BYTES_MAX, RECORD_SLOTS_MAX, RING_SLOTS, ReplicationRing, record_len, slots_of,
    };
}
