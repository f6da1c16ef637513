//! Pools. So far their format: where everything lies ([`geometry`]), the
//! superblock, the page-table slot, the journal record and the lane.
//!
//! Invariants: decoding accepts any bytes without a panic, and accepts as
//! valid only what carries a right checksum and keeps within the pool.
//! Everything is little endian; `docs/formats.md` draws every byte.

#![forbid(unsafe_code)]

mod bytes;
pub mod geometry;
pub mod lane;
pub mod record;
pub mod slot;
pub mod superblock;
pub mod table;
