//! Names and attributes. Every call is one transaction.

pub(crate) mod attrs;
pub(crate) mod create;
pub(crate) mod entry;
pub(crate) mod list;
pub(crate) mod lookup;
pub(crate) mod remove;
pub(crate) mod rename;
pub(crate) mod xattrs;
