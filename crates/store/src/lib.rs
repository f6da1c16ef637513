//! Pools: a persistent page store with a journal, shared by the sessions of
//! several processes.
//!
//! [`pool::Pool`] is the owner's side, [`session`] the data path, and [`pool_mapping::PoolMapping`]
//! the part that owner and sessions share. The format: [`geometry`], [`superblock`], [`object`],
//! [`table`], [`slot`], [`record`], [`journal`].
//!
//! Invariants: decoding accepts any bytes without a panic. It accepts bytes as valid only if their
//! checksum is right and every number in them lies within the pool. Everything is little endian;
//! `docs/formats.md` draws every byte. This crate opens no files and no connections. It waits only
//! for locks, for the owner's answer and for fdatasync.

#![forbid(unsafe_code)]

mod bitmap;
pub mod check;
mod checkpoint;
pub mod consistent_read;
pub mod control;
mod defect;
#[cfg(test)]
mod enumerate;
mod frame_allocator;
mod frame_set;
#[cfg(test)]
mod fuzz;
pub mod geometry;
mod grants;
mod in_flight;
#[cfg(test)]
mod in_place_patches;
pub mod journal;
mod leaf_cache;
#[cfg(test)]
mod models;
mod multi_pool_op;
pub mod object;
mod partial_checkpoint;
mod partial_pages;
pub mod patch;
pub mod pool;
pub mod pool_mapping;
pub mod record;
pub mod recovery;
pub mod requests;
pub mod scrub;
pub mod session;
#[cfg(test)]
mod session_retirement;
pub mod slot;
#[cfg(test)]
mod slot_flush;
mod slot_repair;
#[cfg(test)]
mod stalled_sessions;
pub mod superblock;
pub mod table;
pub mod transaction;
pub mod wait;
