//! Fuzz targets: the structures on a pool's medium, one by one and as a whole.
//!
//! `pagemesh_fuzz` describes how the targets run, `docs/rfd/004-fuzzing.md` why.

mod entries;
mod image;
mod tampering;

use pagemesh_fuzz::FuzzTarget;

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}
