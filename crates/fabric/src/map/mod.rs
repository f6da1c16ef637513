//! The `map` transport: a client on the brick's machine gets the pool and the control segment as
//! descriptors and runs a session of its own. The same unix socket carries the few messages that
//! only the pool's owner can answer.
//!
//! ```text
//!  client                              brick
//!    │ hello                             │
//!    ├──────────────────────────────────▶│  same user? a session free?
//!    │      grant, pool fd, control fd   │
//!    │◀──────────────────────────────────┤
//!    │ attach, raise epoch, in flight …  │  messages, as over tcp
//!    ├──────────────────────────────────▶│
//! ```
//!
//! Invariants: a connection is one session. When the connection closes, on the death of either end
//! too, the brick cleans the session up. Only processes of the brick's user, or of root, are
//! accepted: the socket's mode enforces it, and the brick checks the peer credentials of the
//! kernel. The lock on the pool's file goes with its descriptor.

mod client;
mod server;
pub(crate) mod wire;

pub use client::{MapGrant, MapLink, connect};
pub use server::{MapPeer, MapServer, MapService, MapSession, MapSocketError};
