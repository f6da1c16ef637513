//! Errors of calls.

use std::io;

/// Error of a call. [`Error::errno`] is the number that C gets, negative.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system or the mount refused.
    #[error("cannot {action}: {cause}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The error of the system.
        cause: io::Error,
    },
    /// An argument is invalid; nothing was done.
    #[error("{0}")]
    Invalid(&'static str),
    /// The file has no atomic writes; nothing was changed.
    #[error(
        "this file has no atomic writes of several pages: it is on no pagemesh mount of this \
         user, is mapped by a program, or has set-id bits or extended attributes; nothing was \
         changed"
    )]
    NotAtomic,
    /// The mount or its volume failed during an atomic write: all parts are changed, or none.
    #[error(
        "the mount or its volume failed during the write: either all parts were changed, or \
         none; read one part when the mount is back"
    )]
    Indeterminate,
    /// Bytes that were read through a guard may be torn.
    #[error("the guard became invalid: its bytes were overwritten; discard them and read again")]
    Changed,
    /// The process has too many guards.
    #[error("this process has {GUARDS_MAX} guards; finish some", GUARDS_MAX = crate::GUARDS_MAX)]
    TooManyGuards,
    /// The call came from a signal handler that interrupted another call of its thread.
    #[error("a signal handler interrupted a call of this thread; return from the handler first")]
    NestedCall,
}

impl Error {
    pub(crate) fn system(action: &'static str) -> impl Fn(io::Error) -> Error {
        move |cause| Error::System { action, cause }
    }

    pub(crate) fn last_os_error(action: &'static str) -> Error {
        Error::system(action)(io::Error::last_os_error())
    }

    /// The nearest number of errno.h.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Error::System { cause, .. } => cause.raw_os_error().unwrap_or(libc::EIO),
            Error::Invalid(_) => libc::EINVAL,
            Error::NotAtomic => libc::EOPNOTSUPP,
            Error::Indeterminate => libc::EIO,
            Error::Changed => libc::ESTALE,
            Error::TooManyGuards => libc::EMFILE,
            Error::NestedCall => libc::EDEADLK,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        io::Error::from_raw_os_error(error.errno())
    }
}
