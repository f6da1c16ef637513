//! The tests of the NFS conformance checks are one program, because each program links the crate and its dependencies again.

#![allow(clippy::unwrap_used)]

mod lossy_network;
mod lossy_sessions;
mod lost_data;
#[allow(dead_code)]
#[path = "../../fs/tests/support/memory.rs"]
mod memory;
mod own_server;
mod random_file;
mod support;
