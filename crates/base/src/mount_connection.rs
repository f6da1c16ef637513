//! Connects a process to the process that serves a mount, by a file of the mount that it has open.
//!
//! The mount's socket has a name of the abstract namespace, which belongs to a network
//! namespace. A process in another one, or in a container that sees the mounted directory and
//! nothing else, makes a socket pair and sends an `ioctl` on its file. FUSE passes the bytes of
//! the argument, and the kernel adds the caller's thread. The mounting process copies the
//! descriptor out of the caller, pidfd_getfd(2).
//!
//! Invariants: the mounting process serves a descriptor only if it is the socket that the caller
//! offered. So the descriptor of another process that got the number of an ended one is refused.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io;

/// The request, as `_IOW('P', 'C', char[16])`.
pub const CONNECT_IOCTL: u32 =
    1 << 30 | (OFFER_BYTES as u32) << 16 | (b'P' as u32) << 8 | b'C' as u32;
/// Bytes of its argument: descriptor 4, zero 4, inode of the socket 8. Little endian.
const OFFER_BYTES: usize = 16;

/// Passes a socket to the process that serves the mount of a file on this device.
///
/// # Errors
/// `EBADF` if the descriptor refers to another device by now. `ENOTTY` from a file that is on no
/// mount of pagemesh, or on one without direct access. `EPERM` if the mounting process may not copy
/// the descriptor.
pub fn offer((file, device): (RawFd, u64), socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
    let mut argument = [0; OFFER_BYTES];
    argument[..4].copy_from_slice(&socket.as_raw_fd().to_le_bytes());
    argument[8..].copy_from_slice(&fstat(socket)?.st_ino.to_le_bytes());
    // SAFETY: it is neither kept nor closed. If the program closed it, the kernel reports that.
    #[allow(unsafe_code)]
    let file = unsafe { BorrowedFd::borrow_raw(file) };
    if fstat(file)?.st_dev != device {
        return Err(Errno::BADF.into());
    }
    // SAFETY: the kernel reads as many bytes of the argument as the request encodes, for any
    // descriptor.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            u64::from(CONNECT_IOCTL),
            argument.as_ptr(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes the socket that a thread offers. The thread waits in the `ioctl` meanwhile.
///
/// # Errors
/// When the thread is gone, or not visible from here, or offers another descriptor; or the error of
/// the kernel.
pub fn accept(thread: u32, argument: &[u8]) -> Result<OwnedFd, Errno> {
    let argument: [u8; OFFER_BYTES] = argument.try_into().map_err(|_| Errno::INVAL)?;
    let word = |at: usize| argument[at..at + 4].try_into().expect("four bytes");
    let (number, zero) = (i32::from_le_bytes(word(0)), i32::from_le_bytes(word(4)));
    let inode = u64::from_le_bytes(argument[8..].try_into().expect("eight bytes"));
    if zero != 0 {
        return Err(Errno::INVAL);
    }
    let process = pidfd_open(process_of(thread)?, PidfdFlags::empty())?;
    let socket = pidfd_getfd(process, number, PidfdGetfdFlags::empty())?;
    match fstat(&socket)?.st_ino == inode {
        true => Ok(socket),
        false => Err(Errno::STALE),
    }
}

/// The process of a thread, proc(5).
fn process_of(thread: u32) -> Result<Pid, Errno> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    let status = status.map_err(|_| Errno::SRCH)?;
    let number = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.and_then(Pid::from_raw).ok_or(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn argument(number: RawFd, inode: u64) -> Vec<u8> {
        let mut bytes = Vec::from(u64::from(number.cast_unsigned()).to_le_bytes());
        bytes.extend(inode.to_le_bytes());
        bytes
    }

    #[test]
    fn accepted_socket_is_the_one_offered() {
        let (socket, mut other) = UnixStream::pair().expect("a pair");
        let inode = fstat(&socket).expect("a socket").st_ino;
        // A thread other than the first of its process.
        let taken = std::thread::spawn({
            let number = socket.as_raw_fd();
            move || {
                let thread = rustix::thread::gettid().as_raw_pid().cast_unsigned();
                let strange = accept(thread, &argument(number, inode + 1));
                assert_eq!(strange.err(), Some(Errno::STALE));
                assert_eq!(accept(thread, &[0; 15]).err(), Some(Errno::INVAL));
                accept(thread, &argument(number, inode))
            }
        });
        let taken = taken.join().expect("no panic").expect("its own descriptor");
        drop(socket);
        io::Write::write_all(&mut other, b"x").expect("it is open");
        assert_eq!(rustix::io::read(&taken, &mut [0; 1]), Ok(1));
        assert_eq!(accept(u32::MAX, &argument(0, 0)).err(), Some(Errno::SRCH));
    }

    #[test]
    fn file_of_another_file_system_refuses_the_offer() {
        let file = tempfile::tempfile().expect("a file");
        let (socket, _other) = UnixStream::pair().expect("a pair");
        let device = fstat(&file).expect("a file").st_dev;
        let refused = |device| {
            let refused = offer((file.as_raw_fd(), device), &socket);
            refused.expect_err("no mount").raw_os_error()
        };
        assert_eq!(refused(device), Some(libc::ENOTTY));
        assert_eq!(refused(device + 1), Some(libc::EBADF));
    }
}
