//! The brick: the daemon that owns a pool.
//!
//! [`mod@file`] finds and locks the pool, [`brick`] keeps house, [`worker`] is one
//! connection's session, [`service`] joins them to the fabric. Nothing here
//! knows of volumes.

#![forbid(unsafe_code)]

mod advice;
pub mod brick;
pub mod file;
mod fresh;
mod process;
pub mod room;
pub mod scrub;
pub mod service;
mod still;
pub mod worker;
