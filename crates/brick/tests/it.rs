//! The tests of the brick are one program, because each program links the crate and its dependencies again.

mod brick;
mod devices;
mod disk;
mod failing_medium;
mod lock_holders;
mod record_per_write;
mod scrub;
#[path = "support/skip.rs"]
mod skip;
mod snapshots;
mod stalled_sessions;
mod tier;
