//! Behaviour of a cluster of real processes when parts of it die.
//!
//! Every test writes under a checked load, takes a part away, gives it back, and then knows the
//! contents that each block must hold. The variable PAGEMESH_TEST_ROUNDS sets the number of client
//! kills.

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
