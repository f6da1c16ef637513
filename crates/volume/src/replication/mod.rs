//! The changes on their way to an asynchronous replica (RFD 018), in one order: the queue
//! has changes of channels, the ring changes of direct clients. The controller's task
//! `replication_sender` takes and sends them.
//!
//! 1. A change ends when all legs have it. While its range is still locked, it is appended to the
//!    queue.
//! 2. An acknowledgement may have to wait: a flush or a durable write waits for all changes before
//!    it, another change waits while the queue is over a limit.
//! 3. The sender takes changes in their order, stamps them, and sends them over one connection,
//!    after a `KeepOrder` request. It reports each answer to the queue.
//!
//! `resync::start_replication` starts a replica: first the queue, then a comparison behind it, then
//! the manager. Until the manager reports the leg as stale, its entry in the attached layout keeps
//! the queue's rules in force, connected or not.

pub(crate) mod queue;
pub(crate) mod ring;
