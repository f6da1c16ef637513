//! The bytes of a pool on its medium: encoding, decoding, and the walks that need nothing else.
//!
//! Invariant: this code knows neither owner nor sessions nor shared memory, so that a check of a
//! medium needs none of them.

pub(crate) mod bitmap;
pub(crate) mod bitmap_ends;
pub mod device_paths;
pub mod devices;
pub(crate) mod frame_set;
pub mod frame_word;
pub mod geometry;
pub(crate) mod in_flight;
pub mod journal;
pub(crate) mod node_verifier;
pub mod object;
pub mod record;
pub(crate) mod regions;
pub mod slot;
pub mod superblock;
pub mod table;
pub mod version_log;
pub mod version_pages;
