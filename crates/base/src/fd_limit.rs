//! The limit of this process's descriptors.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit to the most that the system allows: connections and file maps take more than the default of 1024.
///
/// # Errors
/// When the system refuses; the limit is then unchanged.
pub fn raise_fd_limit() -> std::io::Result<()> {
    let limits = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limits.maximum,
        ..limits
    };
    Ok(setrlimit(Resource::Nofile, wanted)?)
}
