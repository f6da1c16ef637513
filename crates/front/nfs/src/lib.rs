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
//! Server ── connection (thread) ── Service ── procedures ── Fs
//!                               │     └─ Exports ── rules of the client ── PinCache
//!                               └─ ReplyCache
//! ```
//!
//! A [`Server`] has a thread for each connection. It answers one call after the other. A procedure
//! is one call of the file-system crate, which checks the permissions and collects the attributes.
//!
//! Bytes of a client never make a thread panic, and hold no more memory than the [`limits`] allow:
//! a connection has one record and one reply. A file system that another host has taken over gets no
//! reply: its connections are closed, so that clients ask the new owner.

#![deny(unsafe_code)]
#![warn(missing_docs)]

mod client_pattern;
mod connection;
mod counters;
mod export;
mod export_table;
pub mod exports_file;
mod groups;
pub mod handle;
pub mod limits;
pub mod mount3;
mod mount_list;
pub mod nfs3;
pub mod nfs4;
mod peer;
mod pin_cache;
pub mod record;
mod reply_cache;
pub mod rpc;
pub mod rpcbind;
mod server;
mod service;
mod stop_signal;
#[cfg(test)]
mod testing;
pub mod xdr;

pub use client_pattern::{ClientPattern, ClientPatternError};
pub use counters::{Counters, PROCEDURES};
pub use export::{
    ANONYMOUS_ID, ErrorHook, Export, ExportError, ExportOptions, FreeSpaceFn, Squash,
};
pub use export_table::Exports;
pub use groups::{GroupLookup, system_groups};
pub use server::{Server, ServerError, StopReport};
pub use service::is_fenced;
pub use service::nfs4::{Clock, Nfs4Options};
