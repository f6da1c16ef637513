//! Errors of benchmarks.

use pagemesh_base::space::SpaceError;
use pagemesh_pmem::MapError;
use std::io;
use std::path::PathBuf;

/// The reason that a benchmark ended early.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An option is invalid.
    #[error("{0}")]
    Option(String),
    /// The space failed a request or refused a channel.
    #[error("the space failed during {during}: {cause}")]
    Space {
        /// The operation.
        during: String,
        /// The error of the space.
        cause: SpaceError,
    },
    /// A reply of the wrong kind for its request.
    #[error("{0} was answered with something else; this is a defect of the space")]
    WrongReply(&'static str),
    /// A request did not complete in time.
    #[error("no request completed for {0} s; is a brick down? see `pagemesh status`")]
    Stalled(u64),
    /// The memory for the raw figure could not be mapped.
    #[error("cannot map {path}: {cause}")]
    Map {
        /// The file.
        path: PathBuf,
        /// The error of the mapper.
        cause: MapError,
    },
    /// The system refused.
    #[error("cannot {action}: {cause}")]
    System {
        /// The action that failed.
        action: String,
        /// The error of the system.
        cause: io::Error,
    },
    /// A recovery failed.
    #[error("recovery {round} of a pool of {size_bytes} bytes failed: {cause}")]
    Recovery {
        /// The size of the pool.
        size_bytes: u64,
        /// The round, from 1.
        round: usize,
        /// The error of the code that makes recoveries.
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A mount failed, or its content is wrong.
    #[error("the mount failed: {0}")]
    Mount(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A call to an NFS server failed.
    #[error("{during} failed: {cause}")]
    Nfs {
        /// The operation, and the server.
        during: String,
        /// The error of the client, or the status.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A program is not installed.
    #[error("{program} is not installed; `apt-get install {package}` provides it")]
    Missing {
        /// The program.
        program: String,
        /// The Debian package.
        package: &'static str,
    },
    /// A program did not end in time.
    #[error("{program} failed: {cause}")]
    Unended {
        /// The program.
        program: String,
        /// Its error output.
        cause: String,
    },
    /// A program failed.
    #[error("{program} failed: {cause}")]
    Program {
        /// The program.
        program: String,
        /// Its error output.
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
