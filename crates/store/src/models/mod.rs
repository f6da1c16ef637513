//! Models of what sessions and the owner of a pool do at the same time: every
//! interleaving of a few operations, up to a bound, on the code that ships
//! ([`pagemesh_models`], docs/rfd/008-concurrency-models.md).
//!
//! Each model is shown to fail on deliberate defects of what it is about.

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
