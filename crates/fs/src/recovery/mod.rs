//! Mounting: the scan for pages in use, and the remains of a crash.

pub(crate) mod damage_log;
pub(crate) mod mount;
pub(crate) mod replay;
pub(crate) mod scan;
