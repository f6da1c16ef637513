//! Pools: a persistent page store with a journal, shared by the sessions of
//! several processes.
//!
//! Each folder imports only folders above it in this list, and none imports a folder below:
//!
//! - `format`: the bytes of a pool on its medium;
//! - `shared`: the part that owner and sessions share, [`pool_mapping::PoolMapping`];
//! - [`session`]: the data path;
//! - [`recovery`]: from a medium after a crash to a usable pool;
//! - `owner`: the owner's side, [`pool::Pool`];
//! - [`check`]: the offline check.
//!
//! Invariants: decoding accepts any bytes without a panic. It accepts bytes as valid only if their
//! checksum is right and every number in them lies within the pool. Everything is little endian;
//! `docs/formats.md` draws every byte. This crate opens no files and no connections. It waits only
//! for locks, for the owner's answer and for fdatasync.

#![forbid(unsafe_code)]

pub mod check;
mod defect;
mod format;
mod owner;
pub mod recovery;
pub mod session;
mod shared;
#[cfg(feature = "test-api")]
pub mod test_api;

pub use format::{
    device_paths, devices, frame_word, geometry, journal, object, record, slot, superblock, table,
    version_log, version_pages,
};
pub use owner::{clones, drain, pool, scrub, versions};
pub use session::{consistent_read, patch, requests, transaction, version_frames};
pub use shared::{control, pool_mapping, wait};
