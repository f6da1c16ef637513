//! Two kernel calls that no library makes safe: opening an inode of the mount by its file handle,
//! and a working directory for one thread alone.

#![allow(unsafe_code)]

use rustix::io::Errno;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::os::fd::{FromRawFd, OwnedFd};

/// `FILEID_INO64_GEN`: the handles of FUSE (Linux, `fuse_encode_fh`).
const HANDLE_TYPE: i32 = 0x81;
const HANDLE_WORDS: usize = 3;

/// `struct file_handle` with the contents of FUSE: the halves of the node's number, the upper one
/// first, and its generation.
#[repr(C)]
struct FileHandle {
    bytes: u32,
    kind: i32,
    words: [u32; HANDLE_WORDS],
}

/// Gives this thread a root and working directory that no other thread shares.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn unshare_directories() -> Result<(), Errno> {
    // SAFETY: it changes nothing about descriptors or memory, only the base of this thread's paths.
    unsafe { unshare_unsafe(UnshareFlags::FS) }
}

/// Opens an inode of the working directory's file system, without access to its content.
///
/// # Errors
/// `ESTALE`: the kernel has no such inode any more; `EPERM` without `CAP_DAC_READ_SEARCH`.
pub(crate) fn open_node(node: u64, generation: u32) -> Result<OwnedFd, Errno> {
    let mut handle = FileHandle {
        bytes: size_of::<[u32; HANDLE_WORDS]>() as u32,
        kind: HANDLE_TYPE,
        words: [(node >> 32) as u32, node as u32, generation],
    };
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let handle: *mut libc::file_handle = (&raw mut handle).cast();
    // SAFETY: the kernel reads the header and the number of bytes that it gives, which `FileHandle`
    // has.
    let opened = unsafe { libc::open_by_handle_at(libc::AT_FDCWD, handle, flags) };
    match opened {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        // SAFETY: the kernel has just opened it, and no other code has the number.
        opened => Ok(unsafe { OwnedFd::from_raw_fd(opened) }),
    }
}
