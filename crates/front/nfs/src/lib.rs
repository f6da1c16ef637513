//! The NFS server: the wire of NFSv3 (RFC 1813) and MOUNT v3 over ONC RPC (RFC 5531).
//!
//! ```text
//! stream ── RecordAssembler ── rpc::Call ── mount3::MountCall ── Answer ── rpc::Reply ── stream
//!                                   └────── nfs3::Nfs3Call ─────┘
//!                                                └─ HandleBytes ── HandleKey ── FileHandle
//! ```
//!
//! These modules are pure: bytes in, values out, and back. A decoder borrows from its record and
//! takes no memory. It compares each length with a limit and with the bytes that are there before
//! it goes on. The bytes of a READ, and the entries of a listing, go into a reply without a copy.
//!
//! ```text
//! epoll ── Poller (threads) ── Connection ── Dispatcher ──┬── ExportWorkers (threads) ──┐
//!                                  ▲                      └── a lone call ──────────────┤
//!                                  └── reply ──────────────── procedures ── Fs ◀────────┘
//! ```
//!
//! A [`Server`] has a few threads that poll all connections, and workers for each export; their
//! number follows the load. A polling thread runs the one call of a client itself; further calls run
//! side by side in workers, and their replies leave in the order of their ends. A procedure is one
//! call of the file-system crate, which checks the permissions and collects the attributes.
//!
//! Bytes of a client never make a thread panic, and hold no more memory than the [`limits`] allow. A
//! stalled export stops no call of another one, and a client that takes no replies stops no other
//! client. A file system that another host has taken over gets no reply: its connections are closed,
//! so that clients ask the new owner.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod acl3;
pub mod acl4;
mod client_list;
mod client_pattern;
mod connection;
mod connections;
mod counters;
mod dispatcher;
mod export;
mod export_table;
pub mod exports_file;
mod groups;
pub mod handle;
pub mod limits;
mod listener;
pub mod mount3;
mod mount_list;
pub mod nfs3;
pub mod nfs4;
mod peer;
mod pin_cache;
mod poller;
mod pseudo_fs;
pub mod record;
mod reply_cache;
pub mod rpc;
pub mod rpcbind;
mod server;
mod service;
mod stop_signal;
mod supervisor;
#[cfg(test)]
mod testing;
mod workers;
pub mod xdr;

pub use client_list::{ClientList, ListIdentity, ServiceFileStore, StableStore, StoredList};
pub use client_pattern::{ClientPattern, ClientPatternError};
pub use connections::ClientFigures;
pub use counters::{COMPOUND, Counters, NFS3_PROCEDURES, PROCEDURE_NAMES, PROCEDURES};
pub use export::{
    ANONYMOUS_ID, ErrorHook, Export, ExportError, ExportOptions, FreeSpaceFn, Squash,
};
pub use export_table::{ExportedPath, Exports};
pub use groups::{GroupLookup, system_groups};
pub use listener::BoundAddress;
pub use server::{Server, ServerError, StopReport};
pub use service::is_fenced;
pub use service::nfs4::{
    Clock, ExpiryProgress, ListStatus, Nfs4ClientStatus, Nfs4Options, Nfs4Status,
};
pub use workers::call_figures::{CallFigures, LATENCY_BUCKETS, latency_bound};
pub use workers::figures::{ExportFigures, Figures};
pub use workers::sizing::SizingReason;
