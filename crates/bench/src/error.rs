//! Why a benchmark did not run to its end.

use pagemesh_base::space::SpaceError;
use pagemesh_pmem::MapError;
use std::io;
use std::path::PathBuf;

/// Why a benchmark did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An option makes no sense.
    #[error("{0}")]
    Option(String),
    /// The space failed a request or refused a channel.
    #[error("the space failed during {during}: {cause}")]
    Space {
        /// What was done.
        during: String,
        /// Its word.
        cause: SpaceError,
    },
    /// A reply that no such request has.
    #[error("{0} was answered with something else; this is a defect of the space")]
    WrongReply(&'static str),
    /// A request did not complete in time.
    #[error("no request completed for {0} s; is a brick down? see `pagemesh status`")]
    Stalled(u64),
    /// The memory for the raw figure could not be mapped.
    #[error("cannot map {path}: {cause}")]
    Map {
        /// Which file.
        path: PathBuf,
        /// The mapper's word.
        cause: MapError,
    },
    /// The system refused.
    #[error("cannot {action}: {cause}")]
    System {
        /// What was attempted.
        action: String,
        /// The system's word.
        cause: io::Error,
    },
    /// A recovery was not made.
    #[error("recovery {round} of a pool of {size_bytes} bytes failed: {cause}")]
    Recovery {
        /// The pool.
        size_bytes: u64,
        /// Which, from 1.
        round: usize,
        /// The word of who makes them.
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A mount was not made, or is not as it should be.
    #[error("the mount failed: {0}")]
    Mount(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A program is not installed.
    #[error("{program} is not installed; `apt-get install {package}` provides it")]
    Missing {
        /// The program.
        program: String,
        /// The Debian package.
        package: &'static str,
    },
    /// A program failed.
    #[error("{program} failed: {cause}")]
    Program {
        /// The program.
        program: String,
        /// What it said.
        cause: String,
    },
}

impl BenchError {
    pub(crate) fn space(during: impl Into<String>) -> impl FnOnce(SpaceError) -> BenchError {
        let during = during.into();
        move |cause| BenchError::Space { during, cause }
    }

    pub(crate) fn system(action: impl Into<String>) -> impl FnOnce(io::Error) -> BenchError {
        let action = action.into();
        move |cause| BenchError::System { action, cause }
    }
}
