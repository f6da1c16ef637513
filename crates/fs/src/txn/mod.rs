//! Operations under the lock, and how their changes become transactions of the space.

pub(crate) mod batch;
pub(crate) mod cache;
pub(crate) mod core;
pub(crate) mod manager;
pub(crate) mod reserve;
pub(crate) mod tx;
