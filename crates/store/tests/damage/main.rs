//! One flipped bit anywhere in a pool, closed in good order or left by a dead
//! brick: it is mended, found by the check, or lies where nothing is stored.
//! What is read afterwards is what was written, or an error; what the check
//! says it can mend, it mends.
//!
//! `PAGEMESH_FLIPS` is the number of flips per pool, `PAGEMESH_SEED` the first
//! pool's seed and `PAGEMESH_POOLS` how many follow it.

#![forbid(unsafe_code)]

mod bitmap;
mod entries;
mod findings;
mod flips;
mod pools;
