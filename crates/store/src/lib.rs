//! Pools: a persistent page store with a journal, shared by the sessions of
//! several processes.
//!
//! [`pool::Pool`] is the owner's side, [`session`] the data path,
//! [`view::View`] what both see. The format: [`geometry`], [`superblock`],
//! [`object`], [`table`], [`slot`], [`record`], [`lane`].
//!
//! Invariants: decoding accepts any bytes without a panic, and accepts as
//! valid only what carries a right checksum and keeps within the pool.
//! Everything is little endian; `docs/formats.md` draws every byte. This crate
//! opens no files, talks to nobody and never waits except for locks, the
//! owner's answer and fdatasync.

#![forbid(unsafe_code)]

mod bitmap;
#[cfg(test)]
mod buried;
mod bypass;
pub mod check;
mod checkpoint;
pub mod control;
mod defect;
#[cfg(test)]
mod enumerate;
mod frames;
#[cfg(test)]
mod fuzz;
pub mod geometry;
mod grants;
mod in_flight;
mod kept;
pub mod lane;
mod leaves;
#[cfg(test)]
mod models;
pub mod moment;
pub mod object;
pub mod patch;
#[cfg(test)]
mod patched;
pub mod pool;
pub mod record;
pub mod recovery;
pub mod requests;
pub mod scrub;
mod seen;
pub mod session;
#[cfg(test)]
mod settled;
pub mod slot;
#[cfg(test)]
mod stopped;
pub mod superblock;
pub mod table;
pub mod transaction;
pub mod view;
pub mod wait;
mod ways;
mod window;
