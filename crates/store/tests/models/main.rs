//! Models of concurrent operations of sessions and the owner of a pool: every interleaving of a few
//! operations, up to a bound, on the production code ([`pagemesh_models`],
//! docs/rfd/008-concurrency-models.md).
//!
//! Each model must fail on deliberate defects of the code that it tests.

mod checkpoint;
mod correction;
mod grants;
mod locks;
mod medium;
mod model_pool;
mod patches;
mod scrub;
mod session_ends;
mod slots;
mod transactions;
