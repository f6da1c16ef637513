//! Access to the API: the identity behind a request, and its role.

mod identity;

pub use identity::{Identity, PeerAddress, Role};
