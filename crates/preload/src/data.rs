//! Reading, writing and syncing.
//!
//! Each call here is done by the engine, or else by the kernel: then it gives [`BY_KERNEL`]
//! and the caller calls the real function, holding nothing.
//!
//! **Offsets.** The kernel's offset is the truth, since other descriptors, children and
//! `lseek` know only that. A call at the offset moves it first, by one `lseek`, which says
//! where it was, and moves it back by what was not read or written. Meanwhile the
//! description's lock is held, by everything in this process that uses its offset: also by
//! what the kernel does in the end, by a bare system call, since a thread that was cancelled
//! there would keep the lock. A busy lock is waited for: passing its holder, a call would
//! see an offset that never was. Where another process may have the description, the
//! kernel does all of it. The offset is moved by number; so under the lock it is looked at
//! whether the number still leads to the description (`table`).

use crate::engine::{EngineFile, Why};
use crate::lock::LockGuard;
use crate::open_description::IoMode;
use crate::table::{self, DescriptionUse};
use crate::thread::{self, EngineGuard};
use crate::{buffer, descriptors, engine, process, sys};
use libc::{c_int, c_void, off64_t, size_t};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// No result of a system call.
pub const BY_KERNEL: isize = isize::MIN;

/// What is longer is done by the kernel: there the call into it costs least, and signals and
/// other threads wait for the engine no longer than for this much.
pub const DIRECT_BYTES_MAX: usize = 1 << 20;

/// The process has a limit of file sizes, which the kernel has to see to.
pub static IS_SIZE_LIMITED: AtomicBool = AtomicBool::new(false);

/// Where to write.
#[derive(Clone, Copy)]
pub enum WritePosition {
    At(u64),
    /// At the end of the file.
    End,
}

/// What was read or written.
#[derive(Clone, Copy)]
pub struct TransferResult {
    pub bytes: usize,
    /// Where the offset is behind it, if not as many bytes further.
    pub end: Option<u64>,
}

impl TransferResult {
    #[inline]
    pub fn at_offset(bytes: usize) -> TransferResult {
        TransferResult { bytes, end: None }
    }
}

/// A call that is under way on an entry. What it uses ends before it is no longer inside.
pub struct DirectCall {
    pub entry: DescriptionUse,
    inside: EngineGuard,
}

impl DirectCall {
    /// None: the kernel's.
    #[inline]
    pub fn begin(fd: c_int) -> Option<DirectCall> {
        let inside = thread::this().enter()?;
        if !process::is_ours() {
            return None;
        }
        let entry = table::enter(fd)?;
        Some(DirectCall { entry, inside })
    }

    /// In a handler of the program the engine is not for reading and writing: it takes more
    /// stack than a handler's own may have left.
    #[inline]
    pub fn is_handling(&self) -> bool {
        self.inside.thread().is_in_handler()
    }

    /// The file, if the engine has it now and may do this with it, and the number still leads to
    /// it.
    #[inline]
    pub fn file(&self, fd: c_int, is_write: bool) -> Option<&EngineFile> {
        if self.entry.mode() != IoMode::Direct {
            return self.by_kernel(Why::Flags);
        }
        if self.is_handling() {
            return self.by_kernel(Why::Handler);
        }
        if is_write && IS_SIZE_LIMITED.load(Relaxed) {
            return self.by_kernel(Why::SizeLimit);
        }
        let attributes = self.entry.attributes();
        let may = match is_write {
            true => attributes.is_writable,
            false => attributes.is_readable,
        };
        if !may {
            return None;
        }
        // SAFETY: it is used, and the mode was looked at.
        let file = unsafe { self.entry.file() };
        let changes = file.prepare()?;
        self.refers_to_file(fd, changes).then_some(file)
    }

    /// The file, for what neither a right to read nor one to write is needed.
    #[inline]
    fn any_file(&self) -> Option<&EngineFile> {
        let is_direct = self.entry.mode() == IoMode::Direct && !self.is_handling();
        // SAFETY: it is used, and the mode was looked at.
        is_direct.then(|| unsafe { self.entry.file() })
    }

    /// The same, if it is on the direct path and the number still leads to it.
    fn any_checked_file(&self, fd: c_int) -> Option<&EngineFile> {
        let file = self.any_file()?;
        let changes = file.change_count()?;
        self.refers_to_file(fd, changes).then_some(file)
    }

    /// Whether the number is known to lead elsewhere: it was closed past this library.
    #[inline]
    fn is_fd_reused(&self, fd: c_int) -> bool {
        let changes = self.any_file().and_then(EngineFile::change_count);
        changes.is_some_and(|changes| !self.refers_to_file(fd, changes))
    }

    /// Whether the number leads to the file, by what was seen since the last change.
    #[inline]
    fn refers_to_file(&self, fd: c_int, changes: u64) -> bool {
        self.entry.is_checked(fd, changes) || self.check_fd(fd, changes)
    }

    /// Asks the kernel where the number leads. The count was read before. A number that leads
    /// elsewhere is the kernel's from now on.
    #[cold]
    fn check_fd(&self, fd: c_int, changes: u64) -> bool {
        let leads = descriptors::refers_to(fd, &self.entry.attributes());
        match leads {
            true => self.entry.record_checked(fd, changes),
            false => self.entry.remove_stale(fd),
        }
        leads
    }

    /// The kernel gets this operation.
    #[cold]
    pub fn by_kernel<T>(&self, why: Why) -> Option<T> {
        if let Some(file) = self.entry.any_file() {
            file.count_kernel(why);
        }
        None
    }

    /// Where a write to a given place goes. None: the kernel writes to the end instead.
    #[inline]
    pub fn place(&self, at: u64) -> Option<WritePosition> {
        match self.entry.attributes().appends {
            true => self.by_kernel(Why::AppendAt),
            false => Some(WritePosition::At(at)),
        }
    }

    /// Where a call begins that is not too long. None: the kernel's.
    #[inline]
    fn start(&self, len: usize, offset: off64_t) -> Option<u64> {
        match is_direct(len) {
            true => start_offset(len, offset),
            false => self.too_long(len),
        }
    }

    #[cold]
    fn too_long<T>(&self, len: usize) -> Option<T> {
        match len {
            0 => None,
            _ => self.by_kernel(Why::Long),
        }
    }

    /// Asks the engine for a file of the parent.
    #[inline]
    pub fn reopen_if_inherited(&self, fd: c_int) {
        if self.entry.mode() == IoMode::Inherited {
            self.reopen_inherited(fd);
        }
    }

    #[cold]
    fn reopen_inherited(&self, fd: c_int) {
        if !self.is_handling() && self.entry.begin_reopen() {
            let attributes = self.entry.attributes();
            let (may_read, may_write) = (attributes.is_readable, attributes.is_writable);
            let file = engine::open(fd, attributes.dev, attributes.ino, may_read, may_write);
            self.entry.end_reopen(file);
        }
    }
}

#[inline]
fn is_direct(len: usize) -> bool {
    (1..=DIRECT_BYTES_MAX).contains(&len)
}

/// None where the kernel has an error to tell: a negative offset, or an end past all.
#[inline]
pub fn start_offset(len: usize, offset: off64_t) -> Option<u64> {
    offset.checked_add(off64_t::try_from(len).ok()?)?;
    u64::try_from(offset).ok()
}

/// The engine reads into a program's memory. None: the kernel has to. What stack that takes,
/// it takes from here on.
#[inline(never)]
pub fn read_into(file: &EngineFile, into: *mut c_void, len: usize, at: u64) -> Option<usize> {
    if !buffer::is_writable(into, len) {
        return None;
    }
    // SAFETY: each page was just written to. That nobody else uses the memory meanwhile is
    // the program's business, as it is with the kernel.
    let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
    file.read(into, at)
}

/// The engine writes from a program's memory. None: the kernel has to.
#[inline]
pub fn write_from(
    call: &DirectCall,
    fd: c_int,
    from: *const c_void,
    len: usize,
    place: WritePosition,
) -> Option<TransferResult> {
    let file = call.file(fd, true)?;
    if !buffer::is_readable(from, len) {
        return None;
    }
    // SAFETY: as in `read_into`, read.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
    write_bytes(file, fd, from, place)
}

/// The same of memory that is this library's. What stack that takes, it takes from here on.
#[inline(never)]
pub fn write_bytes(
    file: &EngineFile,
    fd: c_int,
    from: &[u8],
    place: WritePosition,
) -> Option<TransferResult> {
    let bytes = from.len();
    match place {
        WritePosition::At(at) => {
            let done = file.write(from, at)?;
            let rest = match done < bytes {
                true => write_rest(fd, &from[done..], at + done as u64),
                false => 0,
            };
            Some(TransferResult::at_offset(done + rest))
        }
        WritePosition::End => Some(TransferResult {
            bytes,
            end: Some(file.append(from)?),
        }),
    }
}

/// What the engine left of a write. Who writes less than he wanted takes the medium for full.
#[cold]
fn write_rest(fd: c_int, from: &[u8], at: u64) -> usize {
    let mut done = 0;
    while done < from.len() {
        let (rest, at) = (&from[done..], at + done as u64);
        // SAFETY: the slice can be read.
        match unsafe { sys::pwrite(fd, rest.as_ptr().cast(), rest.len(), at) } {
            more @ 1.. => done += more as usize,
            error if error == -(libc::EINTR as isize) => {}
            // The next write is told.
            _ => break,
        }
    }
    done
}

/// Makes what was just written durable, if that is wanted. An error is the call's.
pub fn make_durable(call: &DirectCall, fd: c_int, is_durable: bool, written: usize) -> isize {
    if !is_durable && !call.entry.attributes().is_durable {
        return written as isize;
    }
    if call.file(fd, true).is_some_and(is_synced) {
        return written as isize;
    }
    match sys::fdatasync(fd) {
        0 => written as isize,
        error => sys::returned(error),
    }
}

#[inline(never)]
pub extern "C" fn pread(fd: c_int, into: *mut c_void, len: size_t, offset: off64_t) -> isize {
    let read = || {
        let call = DirectCall::begin(fd)?;
        let at = call.start(len, offset)?;
        call.reopen_if_inherited(fd);
        read_into(call.file(fd, false)?, into, len, at)
    };
    read().map_or(BY_KERNEL, |n| n as isize)
}

#[inline(never)]
pub extern "C" fn pwrite(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> isize {
    let write = || {
        let call = DirectCall::begin(fd)?;
        let at = call.start(len, offset)?;
        call.reopen_if_inherited(fd);
        let written = write_from(&call, fd, from, len, call.place(at)?)?;
        Some(make_durable(&call, fd, false, written.bytes))
    };
    write().unwrap_or(BY_KERNEL)
}

/// Does `direct` at the offset and moves it, or else `by_kernel_in_turn`, which moves it itself.
pub fn at_offset(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(&DirectCall, u64) -> Option<TransferResult>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    with_offset_locked(fd, len, direct, |_| kernel())
}

/// A call that has the offset of its entry, to which the number leads meanwhile.
struct LockedOffset {
    held: LockGuard<'static>,
    call: DirectCall,
}

impl LockedOffset {
    /// None: the kernel's.
    fn begin(fd: c_int) -> Option<LockedOffset> {
        loop {
            let call = DirectCall::begin(fd)?;
            let held = call.entry.lock_offset();
            if call.entry.is_entry_of(fd) {
                return Some(LockedOffset { held, call });
            }
        }
    }
}

fn with_offset_locked(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(&DirectCall, u64) -> Option<TransferResult>,
    kernel: impl FnOnce(&DirectCall) -> isize,
) -> isize {
    let Some(LockedOffset { call, held }) = LockedOffset::begin(fd) else {
        return BY_KERNEL;
    };
    // Looked at behind whoever was here before it was so: his offset may not be settled yet.
    if call.entry.is_shared() || call.entry.mode() != IoMode::Direct {
        count_kernel_offset(&call, len);
        return BY_KERNEL;
    }
    // Before the offset is moved by number.
    if call.is_fd_reused(fd) {
        return BY_KERNEL;
    }
    let done = if is_direct(len) && !call.is_handling() {
        move_offset(fd, len, |at| direct(&call, at))
    } else if is_direct(len) {
        call.by_kernel(Why::Handler)
    } else {
        call.too_long(len)
    };
    let result = done.map_or_else(
        || {
            held.mark_kernel_call();
            kernel(&call)
        },
        |done| done.bytes as isize,
    );
    drop(held);
    sys::returned(result)
}

/// Why the kernel alone moves the offset.
#[cold]
fn count_kernel_offset(call: &DirectCall, len: usize) {
    let _: Option<()> = match (len, call.entry.is_shared()) {
        // A seek.
        (0, _) => None,
        (_, true) => call.by_kernel(Why::Forked),
        (_, false) => call.by_kernel(Why::Flags),
    };
}

/// Moves the offset by what `direct` did, or behind what it appended.
fn move_offset(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(u64) -> Option<TransferResult>,
) -> Option<TransferResult> {
    let len = len as off64_t;
    let end = sys::lseek(fd, len, libc::SEEK_CUR) as off64_t;
    if end < 0 {
        return None;
    }
    let done = u64::try_from(end - len).ok().and_then(direct);
    if let Some(end) = done.and_then(|done| done.end) {
        sys::lseek(fd, end as off64_t, libc::SEEK_SET);
        return done;
    }
    let back = len - done.map_or(0, |done| done.bytes as off64_t);
    if back != 0 {
        sys::lseek(fd, -back, libc::SEEK_CUR);
    }
    done
}

#[inline(never)]
pub extern "C" fn read(fd: c_int, into: *mut c_void, len: size_t) -> isize {
    let direct = |call: &DirectCall, at| {
        read_into(call.file(fd, false)?, into, len, at).map(TransferResult::at_offset)
    };
    // SAFETY: the arguments are the caller's.
    at_offset(fd, len, direct, || unsafe { sys::read(fd, into, len) })
}

#[inline(never)]
pub extern "C" fn write(fd: c_int, from: *const c_void, len: size_t) -> isize {
    // SAFETY: the arguments are the caller's.
    let kernel = || unsafe { sys::write(fd, from, len) };
    let direct = |call: &DirectCall, place| write_from(call, fd, from, len, place);
    write_at_offset(fd, len, false, direct, kernel)
}

/// `at_offset` for writing.
pub fn write_at_offset(
    fd: c_int,
    len: usize,
    is_durable: bool,
    direct: impl FnOnce(&DirectCall, WritePosition) -> Option<TransferResult>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let mut settled = 0;
    let direct = |call: &DirectCall, at| {
        let place = match call.entry.attributes().appends {
            true => WritePosition::End,
            false => WritePosition::At(at),
        };
        let written = direct(call, place)?;
        settled = make_durable(call, fd, is_durable, written.bytes);
        Some(written)
    };
    let result = with_offset_locked(fd, len, direct, |call| {
        // It moves the offset by the end that it knows, which guests may have moved since.
        if call.entry.attributes().appends {
            sys::fstat(fd);
        }
        kernel()
    });
    if settled < 0 { settled } else { result }
}

/// In its turn among the calls that move the offset.
#[inline(never)]
pub extern "C" fn lseek(fd: c_int, offset: off64_t, whence: c_int) -> isize {
    let from_end = match whence {
        libc::SEEK_END => seek_from_end(fd, offset),
        _ => None,
    };
    match from_end {
        Some(result) => sys::returned(result),
        None => at_offset(fd, 0, |_, _| None, || sys::lseek(fd, offset, whence)),
    }
}

/// By the end that the engine knows: the kernel goes by what it was told last, and others may
/// have made the file longer since. One call sets the offset, so that it may be shared with
/// other processes. None: the kernel's.
fn seek_from_end(fd: c_int, offset: off64_t) -> Option<isize> {
    let turn = LockedOffset::begin(fd)?;
    let Some(file) = turn.call.any_checked_file(fd) else {
        // Has the kernel look.
        sys::fstat(fd);
        return None;
    };
    let end = off64_t::try_from(size_of(file)?).ok()?;
    Some(sys::lseek(fd, end.checked_add(offset)?, libc::SEEK_SET))
}

#[inline(never)]
pub extern "C" fn sync(fd: c_int) -> isize {
    let sync = || Some(is_synced(DirectCall::begin(fd)?.any_checked_file(fd)?));
    if sync() == Some(true) { 0 } else { BY_KERNEL }
}

// What stack these take, they take from here on.

#[inline(never)]
fn is_synced(file: &EngineFile) -> bool {
    file.sync()
}

#[inline(never)]
fn size_of(file: &EngineFile) -> Option<u64> {
    file.size()
}

/// The limit of file sizes may have changed.
#[inline(never)]
pub extern "C" fn refresh_size_limit() {
    IS_SIZE_LIMITED.store(sys::is_file_size_limited(), Relaxed);
}
