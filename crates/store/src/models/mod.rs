//! Models of what sessions and the owner of a pool do at the same time: every
//! interleaving of a few operations, up to a bound, on the code that ships
//! ([`pagemesh_models`], docs/rfd/008-concurrency-models.md).
//!
//! Each model is shown to fail on deliberate defects of what it is about.

mod checkpoint;
mod endings;
mod grants;
mod locks;
mod medium;
mod scrub;
mod slots;
mod world;

use crate::defect::{self, Defect};
use pagemesh_models::{Failed, Model};

/// Asserts that a model finds each of these defects.
#[track_caller]
fn finds(defects: &[Defect], model: Model, run: impl Fn() + Clone + Send + Sync + 'static) {
    for &defect in defects {
        defect::set(Some(defect));
        let outcome = model.explore(run.clone());
        defect::set(None);
        match outcome {
            Err(failed) => println!("{defect:?}: {}", Failed::to_string(&failed)),
            Ok(explored) => panic!("{defect:?} is not found: {explored:?}"),
        }
    }
}
