//! Names and attributes.

pub(crate) mod namespace;
pub(crate) mod xattrs;
