//! The changes on their way to an asynchronous replica (RFD 018), in one order: the queue has
//! those of channels, the ring those of direct clients. The controller's task
//! `replication_sender` takes and sends them.

pub(crate) mod queue;
pub(crate) mod ring;
