//! The tests of the NFS server are one program, because each program links the crate and its dependencies again.

#![allow(clippy::unwrap_used)]

mod access;
mod acls;
mod connections;
mod crash_times;
mod exports;
mod fenced;
mod files;
mod half_open;
mod nfs4;
mod nfs4_acls;
mod nfs4_exports;
mod nfs4_figures;
mod nfs4_limits;
mod nfs4_lists;
mod nfs4_names;
mod nfs4_restart;
mod nfs4_shares;
mod nfs4_snapshots;
mod repeated_calls;
mod round_trips;
mod snapshots;
mod stalled_sessions;
mod support;
mod workers;
