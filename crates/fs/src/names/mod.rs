//! Names and attributes. Every call is one transaction, but for the pages behind a new size.

pub(crate) mod acls;
pub(crate) mod attrs;
pub(crate) mod by_id;
pub(crate) mod create;
pub(crate) mod entry;
pub(crate) mod list;
pub(crate) mod lookup;
pub(crate) mod remove;
pub(crate) mod rename;
pub(crate) mod set_attributes;
pub(crate) mod xattrs;
