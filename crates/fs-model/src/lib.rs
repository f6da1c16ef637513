//! The simplest correct file system: all state in maps. Random operations run on it and on the real
//! one, and both must give the same results. After a crash the real one must match the model before
//! or after the operation in progress.
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

/// Credentials of all operations.
pub const OWNER: Credentials = Credentials { uid: 7, gid: 8 };

/// The result of an operation.
pub type OpResult<T> = Result<T, Errno>;
