//! Why a call failed.

use std::io;

/// Why a call failed. [`Error::errno`] is the number that C gets, negative.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system, or the mount, refused.
    #[error("cannot {action}: {cause}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// Its word.
        cause: io::Error,
    },
    /// An argument is not as it must be; nothing was done.
    #[error("{0}")]
    Invalid(&'static str),
    /// Nobody here can change several places as a whole; nothing was changed.
    #[error(
        "nothing keeps several pages of this file whole: it is on no pagemesh mount of this \
         user, is mapped by a program, or has set-id bits or extended attributes; nothing was \
         changed"
    )]
    NotAtomic,
    /// The mount or its volume failed meanwhile: the parts are changed, all of them or none.
    #[error(
        "the mount or its volume failed meanwhile, and it is not known whether the parts were changed; all \
         of them were or none: read one when it is back"
    )]
    Indeterminate,
    /// What was read through a guard may be torn.
    #[error("the bytes were changed while they were shown; what was read of them is void")]
    Changed,
    /// There are too many guards.
    #[error("this process has {GUARDS_MAX} guards; finish some", GUARDS_MAX = crate::GUARDS_MAX)]
    TooManyGuards,
    /// The call came from a signal handler that interrupted another call of its thread.
    #[error("a signal handler interrupted a call of this thread, which has to end first")]
    NestedCall,
}

impl Error {
    pub(crate) fn system(action: &'static str) -> impl Fn(io::Error) -> Error {
        move |cause| Error::System { action, cause }
    }

    pub(crate) fn last_os_error(action: &'static str) -> Error {
        Error::system(action)(io::Error::last_os_error())
    }

    /// The number of the system that is nearest.
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
