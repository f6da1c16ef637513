//! The tests of the FUSE front are one program, because each program links the crate and its dependencies again.

#![allow(clippy::unwrap_used)]

mod acls;
mod kernel;
#[allow(dead_code)]
#[path = "../../../fs/tests/support/memory.rs"]
mod memory;
mod shared;
#[path = "../../../brick/tests/support/skip.rs"]
mod skip;
#[path = "support/mount.rs"]
mod support_mount;
#[path = "support/switch.rs"]
mod switch;
