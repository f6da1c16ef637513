//! I/O channels of the space.

pub(crate) mod channel;
pub(crate) mod channel_pool;
pub(crate) mod overlay;
pub(crate) mod write_queue;
