//! The way to a file's pages without the kernel: the seam to whoever knows it.
//!
//! What it has to keep: `open`, `forked` and the end of a [`File`] are never called in a
//! signal handler of the program, and may allocate; `read`, `write` and `sync` may be
//! called in one, though never inside another call of the same thread, and so neither
//! allocate nor wait for what a thread outside the engine may hold. All are called with the
//! thread *inside*: no handler of the program runs until they return, so that they should
//! not wait long. Calls of the C library that the engine makes reach the kernel.
//!
//! A buffer's pages were touched just before, but another thread may unmap them.

use std::os::fd::RawFd;

#[cfg(not(any(debug_assertions, feature = "probe")))]
use self::none as inner;
#[cfg(any(debug_assertions, feature = "probe"))]
use crate::probe as inner;

/// An open description that is on the direct path.
pub struct File(inner::File);

/// None: not on such a mount, or not now.
pub fn open(fd: RawFd, dev: u64, ino: u64, is_readable: bool, is_writable: bool) -> Option<File> {
    inner::open(fd, dev, ino, is_readable, is_writable).map(File)
}

/// Whether a file system of this kind (`f_type`) may be such a mount. What is not is not
/// asked about again.
pub fn may_be_on(fs_type: i64) -> bool {
    /// `FUSE_SUPER_MAGIC`
    const FUSE: i64 = 0x6573_5546;
    fs_type == FUSE || inner::is_on_all()
}

impl File {
    /// Short at the end of the file. None: by the kernel.
    #[inline]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        self.0.read(into, offset)
    }

    /// None: by the kernel.
    #[inline]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        self.0.write(data, offset)
    }

    /// True: nothing is to be done, everything acknowledged is durable.
    #[inline]
    pub fn sync(&self) -> bool {
        self.0.sync()
    }
}

/// In the child, before anything else: forget everything of the parent.
pub fn forked() {
    inner::forked();
}

/// No engine: every file is the kernel's.
#[cfg(not(any(debug_assertions, feature = "probe")))]
mod none {
    use std::os::fd::RawFd;

    pub enum File {}

    pub fn open(_: RawFd, _dev: u64, _ino: u64, _reads: bool, _writes: bool) -> Option<File> {
        None
    }

    pub fn is_on_all() -> bool {
        false
    }

    impl File {
        pub fn read(&self, _into: &mut [u8], _offset: u64) -> Option<usize> {
            match *self {}
        }

        pub fn write(&self, _data: &[u8], _offset: u64) -> Option<usize> {
            match *self {}
        }

        pub fn sync(&self) -> bool {
            match *self {}
        }
    }

    pub fn forked() {}
}
