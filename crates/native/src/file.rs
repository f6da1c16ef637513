//! A file: on the direct path if it is open, else by the descriptor.
//!
//! Invariants: a write on the direct path is durable when it is confirmed, as the pool's class
//! promises. [`File::persist`] syncs writes by the descriptor. Flags and limits that apply to the
//! descriptor apply to the direct path, too.

use crate::error::Error;
use crate::guard::Guard;
use crate::process::{self, CallGuard};
use pagemesh_base::proc_maps::PRELOAD_OPEN_FLAG;
use pagemesh_direct::client::{self, DirectFile as Direct};
use std::fs;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most pages of [`File::write_atomic`], and of a read that is atomic with respect to it.
pub const ATOMIC_PAGES_MAX: usize = pagemesh_fs::ATOMIC_PAGES_MAX as usize;
/// Bytes of these pages.
pub const ATOMIC_BYTES_MAX: usize = ATOMIC_PAGES_MAX * crate::PAGE_BYTES;
/// Most bytes of one step: the largest request of the direct path, and of the kernel to the mount.
const STEP_BYTES: usize = 1 << 20;

/// Options to open a file: [`std::fs::OpenOptions`].
pub type OpenOptions = fs::OpenOptions;

/// One range of an atomic write.
#[derive(Clone, Copy, Debug)]
pub struct Part<'b> {
    offset: u64,
    data: &'b [u8],
}

impl<'b> Part<'b> {
    /// The bytes to write from this offset on.
    #[must_use]
    pub fn new(offset: u64, data: &'b [u8]) -> Part<'b> {
        Part { offset, data }
    }
}

/// A regular file, on a mount or not.
pub struct File {
    file: fs::File,
    device: u64,
    ino: u64,
    /// `None`: only the descriptor serves the file. Not dropped in a child of fork, where it is the
    /// parent's.
    direct: ManuallyDrop<Option<Direct>>,
    /// The process that opened it, as [`process::generation`].
    generation: u64,
    can_read: bool,
    can_write: bool,
    /// Whether a write waits until it is durable (`O_SYNC`, `O_DSYNC`).
    is_durable: bool,
    /// Number of changes by the descriptor, and how many of them are synced.
    changes: AtomicU64,
    synced_changes: AtomicU64,
}

/// [`PRELOAD_OPEN_FLAG`]
pub(crate) const TRACKING_FLAG: i32 = PRELOAD_OPEN_FLAG as i32;

/// Opens a file of a mount once more, so that the mount knows that it may be on the direct path.
/// `None` if the file is on no mount, or the system refuses.
fn reopen_tracked(file: &fs::File, flags: i32) -> Option<fs::File> {
    /// `FUSE_SUPER_MAGIC`
    const FUSE: i64 = 0x6573_5546;
    if process::fs_type(file.as_raw_fd()) != Some(FUSE) {
        return None;
    }
    let access = flags & libc::O_ACCMODE;
    let mut options = OpenOptions::new();
    options.read(access != libc::O_WRONLY);
    options.write(access != libc::O_RDONLY);
    let kept = libc::O_SYNC | libc::O_DIRECT | libc::O_NOATIME | libc::O_NONBLOCK;
    options.custom_flags(flags & kept | TRACKING_FLAG);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    options.open(path).ok()
}

impl File {
    /// Opens an existing file for reading and writing.
    ///
    /// # Errors
    /// As [`File::new`], and errors of the system.
    pub fn open(path: impl AsRef<Path>) -> Result<File, Error> {
        let _inside = CallGuard::enter()?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(TRACKING_FLAG);
        let opened = options.open(path);
        File::from_std(opened.map_err(Error::system("open the file"))?)
    }

    /// Takes an open file, which must not be open for appending. If its mount accepts this process,
    /// it will be on the direct path. If it is open with `O_SYNC` or `O_DSYNC`, every write is as
    /// after [`File::persist`].
    ///
    /// The file is opened once more, past the kernel's page cache, and the given one is closed:
    /// locks that it holds end. That does not happen if it was opened with `O_ASYNC`, or is on no
    /// mount.
    ///
    /// # Errors
    /// If it is not a regular file, or is open for appending.
    pub fn new(file: fs::File) -> Result<File, Error> {
        let _inside = CallGuard::enter()?;
        File::from_std(file)
    }

    /// As [`File::new`], in a call.
    pub(crate) fn from_std(file: fs::File) -> Result<File, Error> {
        let found = file.metadata().map_err(Error::system("look at the file"))?;
        if !found.is_file() {
            return Err(Error::Invalid("the file is not a regular file"));
        }
        let flags = process::status_flags(file.as_raw_fd());
        let flags = flags.ok_or_else(|| Error::last_os_error("look at the descriptor"))?;
        if flags & libc::O_APPEND != 0 {
            return Err(Error::Invalid(
                "the file is open for appending; open it without O_APPEND",
            ));
        }
        if flags & libc::O_PATH != 0 {
            return Err(Error::Invalid(
                "the file is open with O_PATH; open it to read or write",
            ));
        }
        let file = match flags & TRACKING_FLAG {
            0 => reopen_tracked(&file, flags).unwrap_or(file),
            _ => file,
        };
        let access = flags & libc::O_ACCMODE;
        let (device, ino) = (found.dev(), found.ino());
        // Overwrites are checked against this limit.
        process::refresh_size_limit();
        let direct = process::direct_client()
            .map(|guest| guest.open_waiting_for_forks(device, ino, file.as_raw_fd()));
        Ok(File {
            device,
            ino,
            direct: ManuallyDrop::new(direct),
            generation: process::generation(),
            can_read: access != libc::O_WRONLY,
            can_write: access != libc::O_RDONLY,
            // `O_SYNC` contains all bits of `O_DSYNC`.
            is_durable: flags & libc::O_DSYNC != 0,
            changes: AtomicU64::new(0),
            synced_changes: AtomicU64::new(0),
            file,
        })
    }

    /// The file on the direct path. `None` in a child of the process that opened it.
    #[inline]
    fn direct(&self) -> Option<&Direct> {
        let is_own = self.generation == process::generation();
        self.direct.as_ref().filter(|_| is_own)
    }

    /// Whether the file is on a mount of which this process is a direct client. A call may use the
    /// descriptor nevertheless.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct().is_some_and(Direct::is_direct_allowed)
    }

    /// Size of the file in bytes.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn size(&self) -> Result<u64, Error> {
        let _inside = CallGuard::enter()?;
        let found = self
            .file
            .metadata()
            .map_err(Error::system("ask for the size"))?;
        Ok(found.len())
    }

    /// Truncates the file, or extends it by a hole.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn set_size(&self, bytes: u64) -> Result<(), Error> {
        let _inside = CallGuard::enter()?;
        let set = self.file.set_len(bytes);
        self.record_change();
        set.map_err(Error::system("set the size"))
    }

    /// Records a change by the descriptor, or an attempt. Called after it, so that a concurrent
    /// sync does not count it as synced.
    fn record_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Reads bytes, fewer only at the end of the file. Each page is read as a whole. A read of up
    /// to [`ATOMIC_PAGES_MAX`] pages is atomic with respect to [`File::write_atomic`].
    ///
    /// # Errors
    /// Errors of the system; `EIO` if every copy of a page is damaged.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize, Error> {
        self.read_in_call(into, offset, &CallGuard::enter()?)
    }

    fn read_in_call(
        &self,
        into: &mut [u8],
        offset: u64,
        _inside: &CallGuard,
    ) -> Result<usize, Error> {
        if !self.can_read {
            return Err(bad_descriptor("read"));
        }
        let is_moment = pages_spanned(offset, into.len()) <= ATOMIC_PAGES_MAX;
        read_in_steps(into, |part, done| {
            let at = offset.saturating_add(done as u64);
            // It reads up to the end of the file at one point in time.
            if let Some(bytes) = self.direct().and_then(|direct| direct.read(part, at)) {
                return Ok(StepRead {
                    bytes,
                    can_be_short: false,
                });
            }
            let read = retry_interrupted(|| self.file.read_at(part, at));
            Ok(StepRead {
                bytes: read.map_err(Error::system("read"))?,
                can_be_short: !is_moment,
            })
        })
    }

    /// Reads exactly `into.len()` bytes.
    ///
    /// # Errors
    /// As [`File::read_at`], and if the file ends before.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Error> {
        if self.read_at(into, offset)? == into.len() {
            Ok(())
        } else {
            Err(Error::system("read")(io::ErrorKind::UnexpectedEof.into()))
        }
    }

    /// Writes all bytes, and extends the file if necessary. Each page changes as a whole.
    ///
    /// # Errors
    /// Errors of the system. Bytes before the page that failed may be written.
    pub fn write_all_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        self.check_writable()?;
        let inside = CallGuard::enter()?;
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Error::Invalid("the range ends beyond the longest file"));
        }
        let (mut at, mut has_gone_directly) = (offset, false);
        for part in data.chunks(STEP_BYTES) {
            has_gone_directly |= self.write_step(part, at)?;
            at += part.len() as u64;
        }
        // The kernel has synced the writes by the descriptor.
        if has_gone_directly && self.is_durable {
            self.sync_in_call(&inside)
        } else {
            Ok(())
        }
    }

    /// Writes all bytes; returns whether the direct path did it.
    fn write_step(&self, part: &[u8], at: u64) -> Result<bool, Error> {
        let end = at + part.len() as u64;
        let direct = self.direct().filter(|direct| may_extend_to(direct, end));
        let done = direct.and_then(|direct| direct.write(part, at));
        let done = done.unwrap_or(0);
        if done == part.len() {
            return Ok(true);
        }
        // Bytes that readers may have seen already are not written again.
        let written = self.file.write_all_at(&part[done..], at + done as u64);
        self.record_change();
        written.map_err(Error::system("write"))?;
        Ok(false)
    }

    /// Overwrites parts of the file atomically, for readers of at most [`ATOMIC_PAGES_MAX`] pages
    /// in one call, and after a crash of any component. The parts are as durable as the pools when
    /// it returns. They lie within the file, in at most [`ATOMIC_PAGES_MAX`] pages, and do not
    /// overlap. Whole pages are faster.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotAtomic`], and errors of the system and the mount: nothing
    /// changed. [`Error::Indeterminate`]: all parts changed, or none.
    pub fn write_atomic(&self, parts: &[Part<'_>]) -> Result<(), Error> {
        self.write_atomic_in_call(parts, &CallGuard::enter()?)
    }

    pub(crate) fn write_atomic_in_call(
        &self,
        parts: &[Part<'_>],
        _inside: &CallGuard,
    ) -> Result<(), Error> {
        self.check_writable()?;
        check_parts(parts)?;
        let pairs = parts.iter().map(|part| (part.offset, part.data));
        let mut pairs: Vec<(u64, &[u8])> = pairs.filter(|(_, data)| !data.is_empty()).collect();
        pairs.sort_unstable_by_key(|&(offset, _)| offset);
        if pairs.is_empty() {
            return Ok(());
        }
        let written = self.direct().and_then(|direct| direct.write_atomic(&pairs));
        if written.is_some() {
            return Ok(());
        }
        // The mount waits for an asynchronous replica; a volume that has one takes no direct writes
        // here.
        client::write_by_mount((self.device, self.ino, self.file.as_raw_fd()), &pairs)
            .map_err(atomic_error)
    }

    /// Returns when all bytes written through this file are on all copies, and as durable as the
    /// pools. Direct writes are so already, except on an asynchronous replica.
    ///
    /// # Errors
    /// Errors of the system.
    ///
    /// **Data loss:** after an error, earlier writes may be lost.
    pub fn persist(&self) -> Result<(), Error> {
        self.sync_in_call(&CallGuard::enter()?)
    }

    fn sync_in_call(&self, _inside: &CallGuard) -> Result<(), Error> {
        // In a child of fork, writes of the parent may be on their way to a replica, too.
        let is_childs = self.direct.is_some() && self.direct().is_none();
        let is_followed = is_childs || self.direct().is_some_and(Direct::has_async_replica);
        let changed = self.changes.load(Ordering::Acquire);
        if self.synced_changes.load(Ordering::Acquire) >= changed && !is_followed {
            return Ok(());
        }
        let synced = self.file.sync_data();
        synced.map_err(Error::system("sync the file"))?;
        // Only after the sync: otherwise another thread would take its changes for synced.
        self.synced_changes.fetch_max(changed, Ordering::AcqRel);
        Ok(())
    }

    /// Maps a consistent snapshot of bytes in the pool's memory, fewer at the end of the file. If
    /// that is impossible, the guard holds a copy. At most [`crate::GUARD_PAGES_MAX`] pages.
    ///
    /// # Errors
    /// As [`File::read_at`]; [`Error::Invalid`] for too many pages,
    /// [`Error::TooManyGuards`].
    pub fn guard(&self, offset: u64, len: usize) -> Result<Guard<'_>, Error> {
        self.begin_guard(offset, len, &CallGuard::enter()?)
    }

    pub(crate) fn begin_guard(
        &self,
        offset: u64,
        len: usize,
        inside: &CallGuard,
    ) -> Result<Guard<'_>, Error> {
        if !self.can_read {
            return Err(bad_descriptor("read"));
        }
        if pages_spanned(offset, len) > crate::GUARD_PAGES_MAX {
            return Err(Error::Invalid(
                "a guard holds at most 48 pages; split the range",
            ));
        }
        if let Some(shown) = self
            .direct()
            .and_then(|direct| direct.map_consistent(offset, len))
        {
            return Guard::from_mapping(shown);
        }
        let mut bytes = vec![0; len];
        let read = self.read_in_call(&mut bytes, offset, inside)?;
        bytes.truncate(read);
        Guard::from_copy(bytes)
    }

    fn check_writable(&self) -> Result<(), Error> {
        if self.can_write {
            Ok(())
        } else {
            Err(bad_descriptor("write"))
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for File {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if self.generation == process::generation() {
            drop(self.direct.take());
        }
    }
}

fn bad_descriptor(action: &'static str) -> Error {
    Error::system(action)(io::Error::from_raw_os_error(libc::EBADF))
}

fn atomic_error(cause: io::Error) -> Error {
    match cause.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Error::NotAtomic,
        Some(libc::EINVAL) => Error::Invalid("a part ends beyond the file; extend the file first"),
        Some(libc::EIO) => Error::Indeterminate,
        _ => Error::system("write parts as a whole")(cause),
    }
}

/// Whether the process may write up to `end`. If not, the kernel writes as much as it may, and
/// sends the signal. Overwrites check the limit of the last refresh, no older than the opening of
/// this file: a refresh each time would cost a system call.
#[inline]
fn may_extend_to(direct: &Direct, end: u64) -> bool {
    let is_longer = direct.size().is_none_or(|size| end > size);
    if is_longer {
        end <= process::refresh_size_limit()
    } else {
        end <= process::size_limit()
    }
}

/// Number of pages that overlap these bytes.
fn pages_spanned(offset: u64, len: usize) -> usize {
    let within = offset as usize % crate::PAGE_BYTES;
    within.saturating_add(len).div_ceil(crate::PAGE_BYTES)
}

/// The result of one step.
#[derive(Clone, Copy)]
struct StepRead {
    bytes: usize,
    /// Whether a short step may be followed by more bytes. If not, it ends at the end of the file;
    /// reading on would mix in later changes of the file.
    can_be_short: bool,
}

/// Reads step by step, up to the end of the file. `step` gets the buffer and the bytes read before.
fn read_in_steps(
    into: &mut [u8],
    mut step: impl FnMut(&mut [u8], usize) -> Result<StepRead, Error>,
) -> Result<usize, Error> {
    let mut done = 0;
    while done < into.len() {
        // The direct path takes at most this many bytes; the kernel may read fewer.
        let end = into.len().min(done + STEP_BYTES);
        let read = step(&mut into[done..end], done)?;
        done += read.bytes;
        let is_end = done < end && !read.can_be_short;
        if is_end || read.bytes == 0 {
            break;
        }
    }
    Ok(done)
}

/// Repeats a call that a signal interrupted.
fn retry_interrupted<T>(mut run: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match run() {
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn check_parts(parts: &[Part<'_>]) -> Result<(), Error> {
    let page = crate::PAGE_BYTES as u64;
    let mut ranges = Vec::with_capacity(parts.len().min(ATOMIC_PAGES_MAX));
    let mut pages = 0u64;
    for part in parts.iter().filter(|part| !part.data.is_empty()) {
        let end = part.offset.checked_add(part.data.len() as u64);
        let end = end.ok_or(Error::Invalid("the range ends beyond the longest file"))?;
        pages = pages.saturating_add(end.div_ceil(page) - part.offset / page);
        if pages > ATOMIC_PAGES_MAX as u64 {
            return Err(Error::Invalid(
                "the parts have more than 48 pages; split them",
            ));
        }
        ranges.push(part.offset..end);
    }
    ranges.sort_unstable_by_key(|range| range.start);
    if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
        Err(Error::Invalid("the parts overlap; merge them"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // Tests.

    use super::*;

    /// Steps with these numbers of bytes, and whether each may be short.
    fn check_steps(len: usize, steps: &[(usize, bool)], expected: usize) {
        let mut into = vec![0; len];
        let mut rest = steps.iter();
        let gathered = read_in_steps(&mut into, |_, _| {
            let &(bytes, can_be_short) = rest.next().expect("no further step is asked for");
            Ok(StepRead {
                bytes,
                can_be_short,
            })
        });
        assert_eq!(gathered.unwrap(), expected);
        assert_eq!(rest.len(), 0, "of {steps:?}");
    }

    #[test]
    fn short_consistent_read_ends_the_read() {
        check_steps(100, &[(100, false)], 100);
        check_steps(100, &[(99, false)], 99);
        check_steps(100, &[(0, false)], 0);
        check_steps(0, &[], 0);
        check_steps(
            STEP_BYTES + 2,
            &[(STEP_BYTES, false), (1, false)],
            STEP_BYTES + 1,
        );
        check_steps(100, &[(60, true), (40, true)], 100);
        check_steps(100, &[(60, true), (0, true)], 60);
        check_steps(100, &[(60, true), (30, false)], 90);
    }
}
