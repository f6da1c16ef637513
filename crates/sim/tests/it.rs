//! The tests of the simulation are one program, because each program links the crate and its dependencies again.

mod defects;
mod direct_clients;
mod disks;
mod files;
mod histories;
mod snapshot_histories;
