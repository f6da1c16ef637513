//! Behaviour of a cluster of real processes when parts of it die.
//!
//! Every test writes under a checked load, takes a part away, gives it back, and then knows the
//! contents that each block must hold. The variable PAGEMESH_TEST_ROUNDS sets the number of client
//! kills.

mod bricks;
mod clients;
mod clocks;
mod fio;
mod full;
mod load;
mod media;
pub mod nbd;
mod oracle;
mod overlap;
mod partitions;
mod power;
mod races;
mod replicas;
mod rig;
mod storm;
