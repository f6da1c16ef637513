//! The owner's side of a pool: it grants frames, applies records, retires dead sessions, and
//! changes objects.

pub(crate) mod checkpoint;
pub(crate) mod frame_allocator;
mod partial_checkpoint;
pub mod pool;
pub mod scrub;
pub(crate) mod session_table;
