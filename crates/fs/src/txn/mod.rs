//! Operations under the lock, and how their changes become transactions of the space.

pub(crate) mod cache;
pub(crate) mod core;
pub(crate) mod reserve;
