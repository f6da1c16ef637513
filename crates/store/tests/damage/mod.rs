//! One flipped bit anywhere in a pool that was closed cleanly or left by a dead brick. The bit is
//! corrected, found by the check, or lies where nothing is stored. A later read returns the written
//! bytes or an error. The check repairs each finding that it calls repairable.
//!
//! `PAGEMESH_FLIPS` is the number of flips per pool, `PAGEMESH_SEED` the first pool's seed and
//! `PAGEMESH_POOLS` the number of pools.

#![forbid(unsafe_code)]

mod bitmap;
mod entries;
mod findings;
mod flips;
mod pools;
mod versions;
