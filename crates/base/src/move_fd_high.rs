//! Descriptors of a library inside a foreign program.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};
use std::os::fd::OwnedFd;

/// Above the numbers that programs use, and far enough below the usual limit of 1024.
const HIGH_FD_MIN: u64 = 700;

/// Moves a descriptor to a number that the program does not use. Shells and others replace low
/// numbers, which would close a descriptor of the library, and closed standard streams free the
/// lowest. Returns the descriptor unchanged if no high number is available.
#[must_use]
pub fn move_fd_high(fd: OwnedFd) -> OwnedFd {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let first = HIGH_FD_MIN.min(limit / 4 * 3);
    match fcntl_dupfd_cloexec(&fd, first as i32) {
        Ok(moved) => moved,
        Err(_) => fd,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn moved_fd_is_same_file_with_high_number() {
        let (file, mut other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let low = file.as_raw_fd();
        let moved = move_fd_high(file.into());
        assert!(moved.as_raw_fd() > low && moved.as_raw_fd() >= 100);
        other.write_all(b"x").expect("room");
        assert_eq!(rustix::io::read(&moved, &mut [0; 1]), Ok(1));
        let flags = rustix::io::fcntl_getfd(&moved).expect("open");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
