//! Mapped persistent memory: the only code that flushes and fences.
//!
//! Invariants:
//! - Every store to persistent bytes goes through [`Media`], so that
//!   [`Recorder`] can stand in for [`Mapped`] and enumerate crash states.
//! - Ordering is a type: whatever may not be persistent yet is an
//!   [`Unfenced`], and only [`Media::fence`] turns it into a [`Fenced`].
//! - Every offset is checked against the length before it is used.
//!
//! This crate never allocates frames, knows no format and never blocks,
//! except in [`Mapped::sync`].

mod class;
pub mod copy;
pub mod cpu;
mod mapped;
mod media;
mod pane;
mod recorder;
mod shared;
pub mod unreadable;

pub use class::{Durability, Stated, UnknownClass};
pub use mapped::{MapError, Mapped};
pub use media::{Fenced, Media, Unfenced};
pub use pane::Pane;
pub use recorder::{CrashPoint, Image, Images, Recorder};
pub use shared::Shared;
