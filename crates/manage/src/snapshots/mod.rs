//! Snapshots of volumes: their names, records, limits and errors, and the orders to cut volumes. The operations are
//! in modules of the root:
//!
//! ```text
//!  POST snapshots ── snapshot_cut ─┬─ orders ── poll and answer of the client that has attached the volume
//!                                  └─ BrickControl, if no client has
//!  POST bookmarks ── snapshot_bookmarks, in the store alone
//!  DELETE snapshots ── snapshot_drops ── BrickControl; the sweep repeats it
//! ```
//!
//! Invariants: the store has a snapshot before any brick has it, and until no brick has it. A snapshot is visible once it
//! is committed, and not before: a restarted manager drops all others. Its epoch is reserved in the transaction of its
//! record, so no layout and no other snapshot of the volume has it. No call to a brick is made under the lock.

mod bookmark;
mod copies;
mod fault;
mod limits;
mod name;
mod orders;
mod record;
pub mod schedules;
mod space;
mod table;

pub use bookmark::{BOOKMARKS_MAX, BookmarkRecord, VOLUME_BOOKMARKS_MAX};
pub use fault::SnapshotFault;
pub use limits::{CUT_ATTEMPTS_MAX, CutTimes, GROUP_MAX, HOLDS_MAX};
pub use name::{HoldTag, SnapshotName};
pub use record::{SnapshotLayout, SnapshotRecord, SnapshotState};
pub use table::{SNAPSHOTS_MAX, VOLUME_SNAPSHOTS_MAX};

pub(crate) use copies::{VersionCopies, VersionCopy};
pub use orders::CutResult;
pub(crate) use orders::{CutOrders, CutOutcome, PollState};
pub(crate) use space::{PagesByRun, account, add_runs};
pub(crate) use table::{SnapshotEntry, SnapshotTable, VolumeSnapshots};
