//! The NFS server: the wire of NFSv3 (RFC 1813) and MOUNT v3 over ONC RPC (RFC 5531).
//!
//! ```text
//! stream ── RecordAssembler ── rpc::Call ── mount3::MountCall ── Answer ── rpc::Reply ── stream
//!                                   └────── nfs3::Nfs3Call ─────┘
//!                                                └─ HandleBytes ── HandleKey ── FileHandle
//! ```
//!
//! All modules are pure: bytes in, values out, and back. A decoder borrows from its record and
//! takes no memory. It compares each length with a limit and with the bytes that are there before
//! it goes on. The bytes of a READ, and the entries of a listing, go into a reply without a copy.
//!
//! Bytes of a client never make a thread panic, and hold no more memory than the [`limits`] allow.
//! This crate opens no socket and no file system.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod handle;
pub mod limits;
pub mod mount3;
pub mod nfs3;
pub mod record;
pub mod rpc;
#[cfg(test)]
mod testing;
pub mod xdr;
