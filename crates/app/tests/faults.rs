//! What a cluster of real processes does when parts of it die.
//!
//! Every test writes under a checked load, takes something away, gives it
//! back, and then knows for each block what it must hold. The variable
//! PAGEMESH_TEST_ROUNDS says how often the client is killed.

#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests.

#[path = "faults/bricks.rs"]
mod bricks;
#[path = "faults/clients.rs"]
mod clients;
#[path = "faults/clocks.rs"]
mod clocks;
#[path = "faults/fio.rs"]
mod fio;
#[path = "faults/full.rs"]
mod full;
#[path = "faults/load.rs"]
mod load;
#[path = "faults/media.rs"]
mod media;
#[path = "faults/nbd.rs"]
mod nbd;
#[path = "faults/oracle.rs"]
mod oracle;
#[path = "faults/overlap.rs"]
mod overlap;
#[path = "faults/partitions.rs"]
mod partitions;
#[path = "faults/power.rs"]
mod power;
#[path = "faults/races.rs"]
mod races;
#[path = "faults/replicas.rs"]
mod replicas;
#[path = "faults/rig.rs"]
mod rig;
#[path = "faults/storm.rs"]
mod storm;
mod support;
