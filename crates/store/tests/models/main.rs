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

use pagemesh_models::{Access, sleep, step};
use pagemesh_store::test_api::{Explorer, set_explorer};

const CONTROL: &str = "control segment";

/// Makes the product's accesses to the control segment the steps of the models of this process.
fn explore_product() {
    set_explorer(Explorer {
        step: |at| step(CONTROL, at..at + 1, Access::Change),
        sleep: |at, is_expected| sleep(CONTROL, at, is_expected),
        wake: |at| pagemesh_models::wake(CONTROL, at),
        pause: pagemesh_models::pause,
        is_time_over: pagemesh_models::is_time_over,
    });
}
