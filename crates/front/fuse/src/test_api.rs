//! Parts that this crate's own tests reach and no other crate needs.

pub use crate::request::{RawRequest, Request};

/// The kernel's protocol.
pub mod abi {
    pub use crate::abi::*;
}
