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

mod authority;
mod channel;
mod connector;
mod controller;
pub mod direct_access;
mod driven;
mod engine;
mod hedge;
mod in_flight_window;
mod indeterminate;
pub mod limits;
mod locks;
mod lost_writes;
mod mapped;
#[cfg(test)]
mod models;
mod replication_queue;
pub mod replication_ring;
mod shared;
mod snapshot;
mod status;
mod steps;
#[cfg(test)]
mod testing;
mod transport;
mod volume;
mod wake;

pub use authority::{Authority, AuthorityError, BrickAddress, LegChange, ResolvedLayout};
pub use connector::Connector;
pub use controller::ScrubPlan;
pub use driven::{CallAnswer, DrivenVolume, PendingCall};
pub use mapped::{DirectLeg, MappedLeg, overwrite_all, overwrite_atomically};
pub use status::{
    CheckReport, ColumnStatus, CopyReport, Counters, Damage, Difference, Lag, LegStatus, Resync,
    ScrubPass, ScrubState, ScrubStatus, VolumeState, VolumeStatus,
};
pub use transport::{Transport, Transports};
pub use volume::{AttachError, CheckError, RefreshError, Volume};
