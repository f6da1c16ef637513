//! Mounting: the scan for what is in use, and what a crash left.

pub(crate) mod damage_log;
pub(crate) mod mount;
pub(crate) mod replay;
pub(crate) mod scan;
