//! NFSv4.1 (RFC 8881): the wire of COMPOUND and its operations, and the state of clients.
//!
//! ```text
//! record ── compound::CompoundHead ── operation::Operation ── arguments::Arguments ── …
//! ```
//!
//! Decoders are pure and borrow from their record. Operations are decoded one after the other, just
//! before each runs: a malformed one fails with NFS4ERR_BADXDR, and those before it have run.

mod aces;
pub mod arguments;
pub mod attributes;
pub mod bitmap;
pub mod compound;
pub mod identity;
pub mod named_identities;
pub mod operation;
pub mod state;
pub mod status;

/// The version of the program. The program is [`nfs3::PROGRAM`](crate::nfs3::PROGRAM).
pub const VERSION: u32 = 4;
/// The minor version.
pub const MINOR_VERSION: u32 = 1;
