//! The simplest file system that can be right: everything in maps. Random operations
//! run on it and on the real one, and both must say the same; what a crash left of the
//! real one must be what the model was before the operation at hand, or after it.
//!
//! Only tests depend on this crate.

#![forbid(unsafe_code)]

mod model;
mod op;
mod real;

pub use model::{FsModel, Node, NodeContent};
pub use op::{Op, OpGenerator, OpScale};
pub use real::{check_page_counts, read, run_op};

use pagemesh_fs::Credentials;
use rustix::io::Errno;

/// Who makes what operations make.
pub const OWNER: Credentials = Credentials { uid: 7, gid: 8 };

/// What an operation comes to.
pub type OpResult<T> = Result<T, Errno>;
