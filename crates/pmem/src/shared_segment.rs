//! Volatile memory that several processes map: control segments.
//!
//! Words are atomics; waiting is the kernel's futex. The file is sealed
//! against resizing, so that an access is never a SIGBUS.

use crate::copy::{copy_shared, prefetch, stream_shared};
use crate::map_error::MapError;
use crate::mapped_media::exclude_from_core_dumps;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::Duration;

/// A memfd mapped shared and writable. It is not inherited by fork.
pub struct SharedSegment {
    base: NonNull<u8>,
    len: usize,
    file: Option<File>,
}

// SAFETY: plain shared memory that is accessed by atomics, and by copies opaque to the compiler.
unsafe impl Send for SharedSegment {}
// SAFETY: as above.
unsafe impl Sync for SharedSegment {}

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

impl SharedSegment {
    /// Makes zeroed memory of `len` bytes, whole pages.
    ///
    /// # Errors
    /// When the length is not whole pages, or the system refuses.
    pub fn create(len: usize) -> Result<SharedSegment, MapError> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a constant name that ends in a zero.
        let fd = unsafe { libc::memfd_create(c"pagemesh-control".as_ptr(), flags) };
        if fd < 0 {
            return Err(system("make a control segment"));
        }
        // SAFETY: a new descriptor that this function owns.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len as u64).map_err(|cause| MapError::System {
            action: "size the control segment",
            cause,
        })?;
        // SAFETY: an open descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(system("seal the control segment"));
        }
        SharedSegment::open(file, len)
    }

    /// Maps a segment that another process made.
    ///
    /// # Errors
    /// When it is not sealed or not of this length, or the system refuses.
    pub fn open(file: File, len: usize) -> Result<SharedSegment, MapError> {
        if len == 0 || !len.is_multiple_of(PAGE_BYTES) {
            return Err(MapError::BadLength(len));
        }
        let found = file
            .metadata()
            .map_err(|cause| MapError::System {
                action: "read the segment's size",
                cause,
            })?
            .len();
        if found != len as u64 {
            return Err(MapError::TooShort {
                wanted: len as u64,
                found,
            });
        }
        // SAFETY: an open descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(MapError::System {
                action: "trust a control segment that can change its size",
                cause: io::Error::from(io::ErrorKind::PermissionDenied),
            });
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address the kernel chooses.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(system("map the control segment"));
        }
        // SAFETY: our own mapping; the advice changes no bytes.
        unsafe { libc::madvise(base, len, libc::MADV_DONTFORK) };
        exclude_from_core_dumps(base, len);
        let base = NonNull::new(base.cast()).ok_or(MapError::BadLength(len))?;
        Ok(SharedSegment {
            base,
            len,
            file: Some(file),
        })
    }

    /// The memory's file, to be passed to other processes.
    ///
    /// # Panics
    /// When [`SharedSegment::without_file`] has closed it.
    pub fn file(&self) -> &File {
        self.file.as_ref().expect("the file was not closed")
    }

    /// The same without a descriptor, for a process that does not pass it on.
    #[must_use]
    pub fn without_file(mut self) -> SharedSegment {
        self.file = None;
        self
    }

    /// Bytes.
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// Tells the processor that the word's line will be stored to soon.
    #[inline]
    pub fn prefetch(&self, at: usize) {
        prefetch(self.word(at / 8 * 8).as_ptr().cast());
    }

    /// An aligned word.
    ///
    /// # Panics
    /// When it does not lie within the segment.
    #[inline]
    pub fn word(&self, at: usize) -> &AtomicU64 {
        assert!(
            at.is_multiple_of(8) && at < self.len,
            "word {at} of {}",
            self.len
        );
        // SAFETY: aligned, and in range since the length is whole pages.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// An aligned half word.
    ///
    /// # Panics
    /// When it does not lie within the segment.
    #[inline]
    pub fn half_word(&self, at: usize) -> &AtomicU32 {
        assert!(
            at.is_multiple_of(4) && at < self.len,
            "half word {at} of {}",
            self.len
        );
        // SAFETY: aligned, and in range since the length is whole pages.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// A byte.
    ///
    /// # Panics
    /// When it does not lie within the segment.
    #[inline]
    pub fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.len, "byte {at} of {}", self.len);
        // SAFETY: in range; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(self.base.as_ptr().add(at)) }
    }

    /// Copies bytes to an offset, in no order: the caller publishes to readers when they are
    /// complete.
    ///
    /// # Panics
    /// When they do not lie within the segment.
    #[inline]
    pub fn put(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: in range, as just checked.
        unsafe { copy_shared(bytes.as_ptr(), self.base.as_ptr().add(at), bytes.len()) }
    }

    /// Streams bytes past the caches to an offset where a line begins: the store does not take
    /// lines from the cache of the previous writer or the next reader. In no order: the caller
    /// publishes them to readers after a [`store_fence`](crate::copy::store_fence).
    ///
    /// # Panics
    /// When they do not lie within the segment, or begin within a line.
    #[inline]
    pub fn stream(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        assert!(at.is_multiple_of(LINE_BYTES), "{at} is within a line");
        // SAFETY: in range and aligned, as just checked.
        unsafe { stream_shared(bytes.as_ptr(), self.base.as_ptr().add(at), bytes.len()) }
    }

    /// Copies bytes from an offset; see [`SharedSegment::put`].
    ///
    /// # Panics
    /// When they do not lie within the segment.
    #[inline]
    pub fn get(&self, at: usize, into: &mut [u8]) {
        self.check(at, into.len());
        // SAFETY: in range, as just checked.
        unsafe { copy_shared(self.base.as_ptr().add(at), into.as_mut_ptr(), into.len()) }
    }

    #[inline]
    fn check(&self, at: usize, len: usize) {
        let is_within = at <= self.len && len <= self.len - at;
        assert!(is_within, "{len} bytes at {at} of {}", self.len);
    }

    /// Sleeps while the half word is `expected`, at most for `limit`. May
    /// return early.
    pub fn wait(&self, at: usize, expected: u32, limit: Option<Duration>) {
        let timeout = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(limit.subsec_nanos()),
        });
        let timeout = timeout
            .as_ref()
            .map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: a live, aligned half word and a timeout that outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.half_word(at).as_ptr(),
                libc::FUTEX_WAIT,
                expected,
                timeout,
            );
        }
    }

    /// Wakes every process that sleeps on the half word.
    pub fn wake(&self, at: usize) {
        // SAFETY: a live, aligned half word.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.half_word(at).as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            );
        }
    }
}

impl AsFd for SharedSegment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file().as_fd()
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn system(action: &'static str) -> MapError {
    MapError::System {
        action,
        cause: io::Error::last_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn get_returns_bytes_that_were_put() {
        let shared = SharedSegment::create(PAGE_BYTES).expect("a segment");
        for len in [0, 1, 7, 8, 9, 100] {
            let bytes: Vec<u8> = (0..len).map(|byte| byte + 1).collect();
            shared.put(PAGE_BYTES - 104, &bytes);
            let mut found = vec![0; bytes.len()];
            shared.get(PAGE_BYTES - 104, &mut found);
            assert_eq!(found, bytes);
        }
        let beyond = std::panic::catch_unwind(|| shared.put(PAGE_BYTES - 8, &[0; 16]));
        assert!(beyond.is_err());
    }

    #[test]
    fn two_mappings_share_words_and_wake_each_other() {
        let one = SharedSegment::create(PAGE_BYTES).expect("a segment");
        let file = File::from(one.as_fd().try_clone_to_owned().expect("a descriptor"));
        let two = SharedSegment::open(file, PAGE_BYTES).expect("the same segment");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while two.half_word(64).load(Ordering::Acquire) == 0 {
                    two.wait(64, 0, None);
                }
                two.word(8).store(7, Ordering::Release);
            });
            one.half_word(64).store(1, Ordering::Release);
            one.wake(64);
        });
        assert_eq!(one.word(8).load(Ordering::Acquire), 7);
    }

    #[test]
    fn unsealed_or_wrongly_sized_segment_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(PAGE_BYTES as u64).expect("a size");
        assert!(SharedSegment::open(file, PAGE_BYTES).is_err());
        let segment = SharedSegment::create(PAGE_BYTES).expect("a segment");
        let file = File::from(segment.as_fd().try_clone_to_owned().expect("a descriptor"));
        assert!(SharedSegment::open(file, 2 * PAGE_BYTES).is_err());
    }
}
