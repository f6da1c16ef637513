//! The owner's side of a pool: it grants frames, applies records, retires dead sessions, and
//! changes objects.

mod apply;
pub(crate) mod checkpoint;
pub mod clones;
pub(crate) mod defects;
mod devices;
pub mod drain;
mod error;
pub(crate) mod frame_allocator;
mod in_flight;
mod maintenance;
mod media_bytes;
mod node_moves;
mod objects;
mod partial_checkpoint;
pub mod pool;
mod reclaim;
pub mod scrub;
mod session_retirement;
pub(crate) mod session_table;
mod version_store;
pub mod versions;
