//! The data path: sessions, which change and read the objects of a pool.

pub mod consistent_read;
pub(crate) mod leaf_cache;
mod multi_pool_op;
mod partial_pages;
pub mod patch;
pub mod requests;
pub mod transaction;
mod write;

pub use write::{LegFailure, LegSession, RECORD_PAGES_MAX, Session, clear, write, write_numbered};
