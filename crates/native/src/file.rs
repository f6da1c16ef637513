//! A file: the direct path where it is open, the descriptor where not.
//!
//! Invariants: what the path does is durable when it is confirmed, as the pool's class
//! says; what the descriptor did is synced by [`File::persist`]. What its user wants of the
//! kernel by flags and limits it gets by the path, too.

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

/// Pages that [`File::write_atomic`] changes, and that a read shows as of one moment.
pub const ATOMIC_PAGES_MAX: usize = pagemesh_fs::ATOMIC_PAGES_MAX as usize;
/// Bytes of as many whole pages.
pub const ATOMIC_BYTES_MAX: usize = ATOMIC_PAGES_MAX * crate::PAGE_BYTES;
/// Bytes that are read or written at once: the most that the path takes, and a request
/// of the kernel to the mount.
const STEP_BYTES: usize = 1 << 20;

/// How a file is opened: as with [`std::fs::OpenOptions`].
pub type OpenOptions = fs::OpenOptions;

/// A part of what is written as a whole.
#[derive(Clone, Copy, Debug)]
pub struct Part<'b> {
    offset: u64,
    data: &'b [u8],
}

impl<'b> Part<'b> {
    /// These bytes from this one on.
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
    /// None: nothing but the descriptor serves it. Not dropped in a child of fork, where it
    /// is the parent's.
    direct: ManuallyDrop<Option<Direct>>,
    /// In which process it was opened.
    generation: u64,
    can_read: bool,
    can_write: bool,
    /// Who writes waits until it is synced (`O_SYNC`, `O_DSYNC`).
    is_durable: bool,
    /// Changes that the descriptor has made, and how many of them are synced.
    changes: AtomicU64,
    synced_changes: AtomicU64,
}

/// [`PRELOAD_OPEN_FLAG`]
pub(crate) const TRACKING_FLAG: i32 = PRELOAD_OPEN_FLAG as i32;

/// Opens a file of a mount once more, so that the mount knows that it may be on the direct path. None:
/// it is on none, or the system refuses.
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
    /// Opens a file that is there, to be read and written.
    ///
    /// # Errors
    /// As [`File::new`], and what the system says.
    pub fn open(path: impl AsRef<Path>) -> Result<File, Error> {
        let _inside = CallGuard::enter()?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(TRACKING_FLAG);
        let opened = options.open(path);
        File::from_std(opened.map_err(Error::system("open the file"))?)
    }

    /// Takes an open file, not one to append to. Where its mount lets this process in, it
    /// will be on the direct path. If it is open with `O_SYNC` or `O_DSYNC`, all that is
    /// written to it is as after [`File::persist`].
    ///
    /// The file is opened once more, past the kernel's page cache, and the given one is closed: locks
    /// that it holds end. That does not happen if it was opened with `O_ASYNC`, or is on no mount.
    ///
    /// # Errors
    /// When it is not a regular file, or is open to append.
    pub fn new(file: fs::File) -> Result<File, Error> {
        let _inside = CallGuard::enter()?;
        File::from_std(file)
    }

    /// The same, inside.
    pub(crate) fn from_std(file: fs::File) -> Result<File, Error> {
        let found = file.metadata().map_err(Error::system("look at the file"))?;
        if !found.is_file() {
            return Err(Error::Invalid("it is not a regular file"));
        }
        let flags = process::status_flags(file.as_raw_fd());
        let flags = flags.ok_or_else(|| Error::last_os_error("look at the descriptor"))?;
        if flags & libc::O_APPEND != 0 {
            return Err(Error::Invalid(
                "it is open to append, and so has no offsets",
            ));
        }
        if flags & libc::O_PATH != 0 {
            return Err(Error::Invalid("it is open as a name only"));
        }
        let file = match flags & TRACKING_FLAG {
            0 => reopen_tracked(&file, flags).unwrap_or(file),
            _ => file,
        };
        let access = flags & libc::O_ACCMODE;
        let (device, ino) = (found.dev(), found.ino());
        // What is overwritten is held against it.
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
            // All bits of the one are in the other.
            is_durable: flags & libc::O_DSYNC != 0,
            changes: AtomicU64::new(0),
            synced_changes: AtomicU64::new(0),
            file,
        })
    }

    /// Its way past the kernel. None in a child of the process that opened it.
    #[inline]
    fn direct(&self) -> Option<&Direct> {
        let is_own = self.generation == process::generation();
        self.direct.as_ref().filter(|_| is_own)
    }

    /// Whether it is on a mount that this process is a guest of. A call may go by the
    /// descriptor nevertheless.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct().is_some_and(Direct::is_direct_allowed)
    }

    /// Bytes of it.
    ///
    /// # Errors
    /// What the system says.
    pub fn size(&self) -> Result<u64, Error> {
        let _inside = CallGuard::enter()?;
        let found = self
            .file
            .metadata()
            .map_err(Error::system("ask for the size"))?;
        Ok(found.len())
    }

    /// Cuts it, or makes it longer by a hole.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_size(&self, bytes: u64) -> Result<(), Error> {
        let _inside = CallGuard::enter()?;
        let set = self.file.set_len(bytes);
        self.record_change();
        set.map_err(Error::system("set the size"))
    }

    /// The descriptor has changed something, or tried to: behind that, so that who syncs
    /// before does not count it.
    fn record_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Reads bytes, fewer only at the end. Pages are read one by one, each as a whole; up to
    /// [`ATOMIC_PAGES_MAX`] of them at one moment, as far as [`File::write_atomic`] goes.
    ///
    /// # Errors
    /// What the system says: `EIO` when every copy of a page is damaged.
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
            // It reads up to the end that the file has at one moment.
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

    /// Reads exactly so many bytes.
    ///
    /// # Errors
    /// As [`File::read_at`]; that the file ends before.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Error> {
        match self.read_at(into, offset)? == into.len() {
            true => Ok(()),
            false => Err(Error::system("read")(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Writes all bytes; the file gets longer if need be. Each page changes as a whole.
    ///
    /// # Errors
    /// What the system says; what came before the failing page may be there.
    pub fn write_all_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        self.check_writable()?;
        let inside = CallGuard::enter()?;
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Error::Invalid("no file is so long"));
        }
        let (mut at, mut has_gone_directly) = (offset, false);
        for part in data.chunks(STEP_BYTES) {
            has_gone_directly |= self.write_step(part, at)?;
            at += part.len() as u64;
        }
        // What the descriptor wrote the kernel has synced.
        match has_gone_directly && self.is_durable {
            true => self.sync_in_call(&inside),
            false => Ok(()),
        }
    }

    /// Writes all bytes; whether by the path.
    fn write_step(&self, part: &[u8], at: u64) -> Result<bool, Error> {
        let end = at + part.len() as u64;
        let direct = self.direct().filter(|direct| may_extend_to(direct, end));
        let done = direct.and_then(|direct| direct.write(part, at));
        let done = done.unwrap_or(0);
        if done == part.len() {
            return Ok(true);
        }
        // What others may have seen is not written once more.
        let written = self.file.write_all_at(&part[done..], at + done as u64);
        self.record_change();
        written.map_err(Error::system("write"))?;
        Ok(false)
    }

    /// Overwrites parts of the file, all of them or none: for everybody who reads at most
    /// [`ATOMIC_PAGES_MAX`] pages in one call, and after the crash of everything. It is as
    /// durable as the pools are when it returns. Parts lie within the file, in at most
    /// [`ATOMIC_PAGES_MAX`] pages, and do not overlap; whole pages are faster.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::NotAtomic`] with nothing changed,
    /// [`Error::Indeterminate`] with all or nothing changed; what the system and the mount say,
    /// with nothing changed.
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
        // It waits for a copy that follows; by the path nothing goes where there is one.
        client::write_by_mount((self.device, self.ino, self.file.as_raw_fd()), &pairs)
            .map_err(atomic_error)
    }

    /// Returns when all that was written through this is on all copies, and as durable as
    /// the pools are: what went by the direct path is already, but for a copy that follows.
    ///
    /// # Errors
    /// What the system says; what was written before may be lost then.
    pub fn persist(&self) -> Result<(), Error> {
        self.sync_in_call(&CallGuard::enter()?)
    }

    fn sync_in_call(&self, _inside: &CallGuard) -> Result<(), Error> {
        // What the parent of this child of fork wrote may be on its way to a copy, too.
        let is_childs = self.direct.is_some() && self.direct().is_none();
        let is_followed = is_childs || self.direct().is_some_and(Direct::has_async_replica);
        let changed = self.changes.load(Ordering::Acquire);
        if self.synced_changes.load(Ordering::Acquire) >= changed && !is_followed {
            return Ok(());
        }
        let synced = self.file.sync_data();
        synced.map_err(Error::system("sync the file"))?;
        // Not before: somebody else would be told that his changes are synced, too.
        self.synced_changes.fetch_max(changed, Ordering::AcqRel);
        Ok(())
    }

    /// Shows bytes as they are at one moment, fewer at the end of the file: where they lie
    /// in the pool, if that can be had, else a copy. At most [`crate::GUARD_PAGES_MAX`]
    /// pages.
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
            return Err(Error::Invalid("a guard has 48 pages at most"));
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
        match self.can_write {
            true => Ok(()),
            false => Err(bad_descriptor("write")),
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
        Some(libc::EINVAL) => Error::Invalid("a part lies beyond the end of the file"),
        Some(libc::EIO) => Error::Indeterminate,
        _ => Error::system("write parts as a whole")(cause),
    }
}

/// Whether the process may write up to there; if not, the kernel writes what it may and
/// sends the signal. What is overwritten is held against the limit that was seen last, at the
/// earliest when a file was opened: to look each time would cost a system call.
#[inline]
fn may_extend_to(direct: &Direct, end: u64) -> bool {
    let is_longer = direct.size().is_none_or(|size| end > size);
    match is_longer {
        true => end <= process::refresh_size_limit(),
        false => end <= process::size_limit(),
    }
}

/// How many pages have some of these bytes.
fn pages_spanned(offset: u64, len: usize) -> usize {
    let within = offset as usize % crate::PAGE_BYTES;
    within.saturating_add(len).div_ceil(crate::PAGE_BYTES)
}

/// What one step has read.
#[derive(Clone, Copy)]
struct StepRead {
    bytes: usize,
    /// There may be more behind it though it is less than was asked for; if not, that is the
    /// end of the file. Reading on would mix in what the file became meanwhile.
    can_be_short: bool,
}

/// Reads step by step, up to the end of the file. Each step is told how much there is.
fn read_in_steps(
    into: &mut [u8],
    mut step: impl FnMut(&mut [u8], usize) -> Result<StepRead, Error>,
) -> Result<usize, Error> {
    let mut done = 0;
    while done < into.len() {
        // The path reads what the mount's file is; the kernel asks for less of it.
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

/// Asks again if a signal came.
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
        let end = end.ok_or(Error::Invalid("no file is so long"))?;
        pages = pages.saturating_add(end.div_ceil(page) - part.offset / page);
        if pages > ATOMIC_PAGES_MAX as u64 {
            return Err(Error::Invalid("parts have more than 48 pages; split them"));
        }
        ranges.push(part.offset..end);
    }
    ranges.sort_unstable_by_key(|range| range.start);
    match ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
        true => Err(Error::Invalid("parts overlap")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // Tests.

    use super::*;

    /// Steps that have so many bytes each, and whether they may be short.
    fn check_steps(len: usize, steps: &[(usize, bool)], expected: usize) {
        let mut into = vec![0; len];
        let mut rest = steps.iter();
        let gathered = read_in_steps(&mut into, |_, _| {
            let &(bytes, can_be_short) = rest.next().expect("it is asked for no more");
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
