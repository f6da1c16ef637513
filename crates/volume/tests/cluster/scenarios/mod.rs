//! Scenarios written by hand, by subject.

mod births;
mod direct_replication;
mod durability;
mod fencing;
mod group_cuts;
mod hedging;
mod idle;
mod indeterminate;
mod layouts;
mod losses;
mod replica_snapshots;
mod replication;
mod resyncs;
mod scrub;
mod sessions;
mod snapshots;
mod space;
mod transactions;
