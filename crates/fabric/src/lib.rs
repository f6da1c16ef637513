//! Wire messages, and the transports that carry them.

#![forbid(unsafe_code)]

pub mod auth;
pub mod limits;
pub mod message;
