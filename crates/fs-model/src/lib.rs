//! The simplest file system that can be right: everything in maps. Random operations
//! run on it and on the real one, and both must say the same; what a crash left of the
//! real one must be what the model was before the operation at hand, or after it.
//!
//! Only tests depend on this crate.

#![forbid(unsafe_code)]

mod model;
mod op;
mod real;

pub use model::{Body, Model, Node};
pub use op::{Dice, Op, Reach};
pub use real::{check_counts, read, run};

use pagemesh_fs::Caller;
use rustix::io::Errno;

/// Who makes what operations make.
pub const OWNER: Caller = Caller { uid: 7, gid: 8 };

/// What an operation comes to.
pub type Outcome<T> = Result<T, Errno>;
