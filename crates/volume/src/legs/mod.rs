//! The way from an engine or the controller to a slice on a brick: the interface that makes
//! connections, the transports behind it, and the leg in a pool that is mapped in this process.

pub(crate) mod connector;
pub(crate) mod mapped;
mod snapshot_reads;
pub(crate) mod transport;
