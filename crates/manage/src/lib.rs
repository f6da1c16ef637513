//! The manager: which bricks there are, which volumes, where their legs lie,
//! and which of them count.
//!
//! ```text
//!  client ── HTTP ── server ── api ── manager ─┬─ placement, shape   (pure)
//!                                 (volumes,    ├─ ledger             (pure)
//!                                  bricks,     ├─ store              (redb)
//!                                  sweep)      └─ Bricks ── BrickControl
//! ```
//!
//! Invariants: a change is durable in the store before anyone hears of it.
//! The epoch of a volume only rises. A slice exists on a brick only while the
//! store names it, as part of a volume or as one to delete; it is written down
//! before it is made. Every column keeps an in-sync leg.
//!
//! The manager never touches the path of an I/O request, never changes the
//! state of a leg by itself, and never calls a brick while it holds its lock.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod api;
mod bricks;
pub mod client;
pub mod clock;
pub mod durability;
pub mod fault;
mod files;
#[cfg(test)]
mod fuzz;
pub mod ledger;
mod manager;
pub mod placement;
pub mod records;
mod replicas;
pub mod server;
pub mod shape;
pub mod store;
mod sweep;
pub mod token;
mod volumes;
pub mod wire;

pub use client::{Client, ManagerError};
pub use durability::Durability;
pub use manager::{Bricks, Manager, Settings};
pub use server::{Config, Handle, ServeError, serve};
pub use shape::Kind;
