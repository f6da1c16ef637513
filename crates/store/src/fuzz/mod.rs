//! Fuzz targets: what a pool's medium holds, piece by piece and as a whole.
//!
//! See `pagemesh_fuzz` for how they run, `docs/rfd/004-fuzzing.md` for why.

mod entries;
mod image;
mod tampering;

use pagemesh_fuzz::FuzzTarget;

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}
