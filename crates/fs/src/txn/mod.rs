//! Operations under the lock, and how their changes become transactions of the space.
//!
//! # One create
//!
//! 1. `Fs::create` runs as one operation, [`TxManager::change`](manager::TxManager::change). Under
//!    the core's lock its [`Tx`](tx::Tx) reads and copies pages: the parent's inode, the leaf of
//!    its tree, and the inode table.
//! 2. [`Tx::join_batch`](tx::Tx::join_batch) adds the pages to the next batch.
//! 3. [`TxManager::advance_batch`](manager::TxManager::advance_batch) sends the batch as one
//!    transaction of the space, without the lock. If another thread sends a batch, it waits for
//!    that thread.
//! 4. When the transaction has succeeded, the core moves the pages into its cache. The kernel keeps
//!    the name and the attributes until it changes them itself.

pub(crate) mod batch;
pub(crate) mod cache;
pub(crate) mod core;
pub(crate) mod deferred_commit;
pub(crate) mod flush_group;
pub(crate) mod manager;
pub(crate) mod reserve;
pub(crate) mod tx;
