//! Pools: a persistent page store with a journal, shared by the sessions of
//! several processes.
//!
//! [`pool::Pool`] is the owner's side, [`session`] the data path,
//! [`view::PoolMapping`] what both see. The format: [`geometry`], [`superblock`],
//! [`visit_object`], [`table`], [`add_table`], [`record`], [`journal`].
//!
//! Invariants: decoding accepts any bytes without a panic, and accepts as
//! valid only what carries a right checksum and keeps within the pool.
//! Everything is little endian; `docs/formats.md` draws every byte. This crate
//! opens no files, talks to nobody and never waits except for locks, the
//! owner's answer and fdatasync.

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
