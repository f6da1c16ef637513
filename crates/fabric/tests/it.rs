//! The tests of the fabric are one program, because each program links the crate and its dependencies again.

mod hostile;
mod local_socket;
mod lost_bricks;
mod round_trips;
mod snapshots;
mod support;
