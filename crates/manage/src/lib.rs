//! The manager: it records bricks and volumes, places the legs of volumes, and decides which legs
//! count.
//!
//! ```text
//!  client ── HTTP ── server ── api ── manager ─┬─ placement, shape   (pure)
//!                                 (volumes,    ├─ layout_state       (pure)
//!                                  bricks,     ├─ store              (redb)
//!                                  sweep)      ├─ events             (the ring of changes)
//!                                              └─ Bricks ── BrickControl
//! ```
//!
//! Invariants: a change is durable in the store before any client learns of it. The epoch of a
//! volume only rises. A slice exists on a brick only while the store names it, as part of a volume
//! or as a pending delete; the store names it before the brick creates it. Every column keeps an
//! in-sync leg.
//!
//! The manager is never in the path of an I/O request, and never calls a brick while it holds its
//! lock. It changes the state of a leg only at the request of an operator or a client. The loss of
//! a brick's heartbeats alone changes none. The attach of a client that reaches no in-sync copy may
//! promote an asynchronous replica, if the operator has allowed that (`auto_promote`).

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod access;
pub mod api;
mod api_counters;
mod attaching;
pub mod authority;
mod brick_names;
mod bricks;
mod call;
mod call_key;
pub mod client;
pub mod clock;
mod clones;
mod connection;
mod connection_slots;
mod device_book;
mod devices;
mod error_code;
mod event_commit;
mod event_stream;
pub mod events;
pub mod fault;
mod figure_history;
mod figures;
mod files;
mod holder_signs;
mod holders;
pub mod idempotency;
mod key_index;
mod label_text;
pub mod layout_state;
mod lists;
mod manager;
mod media_figures;
mod metrics;
mod nfs_book;
mod nfs_exports;
mod nfs_fault;
mod nfs_orders;
pub mod placement;
mod published;
mod publisher;
mod received;
pub mod records;
mod replica_snapshots;
mod replicas;
pub mod rollback;
mod rollback_checks;
mod rollbacks;
mod schedule_book;
mod schedule_runner;
pub mod server;
pub mod shape;
mod slices;
mod snapshot_bookmarks;
mod snapshot_check;
mod snapshot_copies;
mod snapshot_cut;
mod snapshot_drops;
mod snapshot_group;
mod snapshot_holds;
mod snapshot_lists;
mod snapshot_space;
pub mod snapshots;
pub mod store;
mod sweep;
mod tier_policy;
mod tiers;
pub mod token;
mod tokens;
mod volume_info;
mod volume_labels;
mod volume_table;
mod volumes;
pub mod wire;

pub use access::{Identity, PeerAddress, Role};
pub use authority::{ManagerAuthority, VolumeConnection};
pub use call::{CallContext, RecordTag};
pub use client::{HEARTBEAT_TIMEOUT, ManagerClient, ManagerError};
pub use event_stream::{EventStream, StreamMessage};
pub use holders::{SIGN_INTERVAL, SILENCE_LIMIT};
pub use label_text::{VolumeLabels, parse_label};
pub use manager::{
    BrickConnector, METRIC_VOLUMES, Manager, ManagerSettings, VOLUMES_MAX, WatchTimes,
};
pub use pagemesh_base::durability::{self, Durability};
pub use schedule_runner::SCHEDULE_INTERVAL;
pub use server::{ConnectionLimits, ManagerConfig, ManagerHandle, ServeError, serve};
pub use shape::LayoutKind;
pub use snapshot_cut::SnapshotCut;
pub use snapshots::schedules;
pub use tier_policy::{TierPolicy, digest_policies};
pub use tokens::{ADMIN_TOKEN_FILE, AdminTokenOutput};
