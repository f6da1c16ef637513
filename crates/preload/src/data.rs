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

use crate::engine::{File, Why};
use crate::entry::Mode;
use crate::lock::Held;
use crate::table::{self, Use};
use crate::thread::{self, Inside};
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
pub enum Place {
    At(u64),
    /// At the end of the file.
    End,
}

/// What was read or written.
#[derive(Clone, Copy)]
pub struct Done {
    pub bytes: usize,
    /// Where the offset is behind it, if not as many bytes further.
    pub end: Option<u64>,
}

impl Done {
    #[inline]
    pub fn at_offset(bytes: usize) -> Done {
        Done { bytes, end: None }
    }
}

/// A call that is under way on an entry. What it uses ends before it is no longer inside.
pub struct Call {
    pub entry: Use,
    inside: Inside,
}

impl Call {
    /// None: the kernel's.
    #[inline]
    pub fn begin(fd: c_int) -> Option<Call> {
        let inside = thread::this().enter()?;
        if !process::is_ours() {
            return None;
        }
        let entry = table::enter(fd)?;
        Some(Call { entry, inside })
    }

    /// In a handler of the program the engine is not for reading and writing: it takes more
    /// stack than a handler's own may have left.
    #[inline]
    pub fn is_handling(&self) -> bool {
        self.inside.thread().is_handling()
    }

    /// The file, if the engine has it now and may do this with it, and the number still leads to
    /// it.
    #[inline]
    pub fn file(&self, fd: c_int, is_write: bool) -> Option<&File> {
        if self.entry.mode() != Mode::Direct {
            return self.by_kernel(Why::Flags);
        }
        if self.is_handling() {
            return self.by_kernel(Why::Handler);
        }
        if is_write && IS_SIZE_LIMITED.load(Relaxed) {
            return self.by_kernel(Why::SizeLimit);
        }
        let facts = self.entry.facts();
        let may = match is_write {
            true => facts.is_writable,
            false => facts.is_readable,
        };
        if !may {
            return None;
        }
        // SAFETY: it is used, and the mode was looked at.
        let file = unsafe { self.entry.file() };
        let changes = file.prepare()?;
        self.leads(fd, changes).then_some(file)
    }

    /// The file, for what neither a right to read nor one to write is needed.
    #[inline]
    fn any_file(&self) -> Option<&File> {
        let is_direct = self.entry.mode() == Mode::Direct && !self.is_handling();
        // SAFETY: it is used, and the mode was looked at.
        is_direct.then(|| unsafe { self.entry.file() })
    }

    /// The same, if it is on the direct path and the number still leads to it.
    fn any_sure_file(&self, fd: c_int) -> Option<&File> {
        let file = self.any_file()?;
        let changes = file.changes()?;
        self.leads(fd, changes).then_some(file)
    }

    /// Whether the number is known to lead elsewhere: it was closed past this library.
    #[inline]
    fn is_lost(&self, fd: c_int) -> bool {
        let changes = self.any_file().and_then(File::changes);
        changes.is_some_and(|changes| !self.leads(fd, changes))
    }

    /// Whether the number leads to the file, by what was seen since the last change.
    #[inline]
    fn leads(&self, fd: c_int, changes: u64) -> bool {
        self.entry.is_seen(fd, changes) || self.look(fd, changes)
    }

    /// Asks the kernel where the number leads. The count was read before. A number that leads
    /// elsewhere is the kernel's from now on.
    #[cold]
    fn look(&self, fd: c_int, changes: u64) -> bool {
        let leads = descriptors::leads_to(fd, &self.entry.facts());
        match leads {
            true => self.entry.note_seen(fd, changes),
            false => self.entry.leave(fd),
        }
        leads
    }

    /// The kernel gets this operation.
    #[cold]
    pub fn by_kernel<T>(&self, why: Why) -> Option<T> {
        if let Some(file) = self.entry.any_file() {
            file.note(why);
        }
        None
    }

    /// Where a write to a given place goes. None: the kernel writes to the end instead.
    #[inline]
    pub fn place(&self, at: u64) -> Option<Place> {
        match self.entry.facts().appends {
            true => self.by_kernel(Why::AppendAt),
            false => Some(Place::At(at)),
        }
    }

    /// Where a call begins that is not too long. None: the kernel's.
    #[inline]
    fn start(&self, len: usize, offset: off64_t) -> Option<u64> {
        match is_direct(len) {
            true => start(len, offset),
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
    pub fn ask(&self, fd: c_int) {
        if self.entry.mode() == Mode::Inherited {
            self.ask_again(fd);
        }
    }

    #[cold]
    fn ask_again(&self, fd: c_int) {
        if !self.is_handling() && self.entry.begin_asking() {
            let facts = self.entry.facts();
            let (may_read, may_write) = (facts.is_readable, facts.is_writable);
            let file = engine::open(fd, facts.dev, facts.ino, may_read, may_write);
            self.entry.end_asking(file);
        }
    }
}

#[inline]
fn is_direct(len: usize) -> bool {
    (1..=DIRECT_BYTES_MAX).contains(&len)
}

/// None where the kernel has an error to tell: a negative offset, or an end past all.
#[inline]
pub fn start(len: usize, offset: off64_t) -> Option<u64> {
    offset.checked_add(off64_t::try_from(len).ok()?)?;
    u64::try_from(offset).ok()
}

/// The engine reads into a program's memory. None: the kernel has to. What stack that takes,
/// it takes from here on.
#[inline(never)]
pub fn fill(file: &File, into: *mut c_void, len: usize, at: u64) -> Option<usize> {
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
pub fn put(call: &Call, fd: c_int, from: *const c_void, len: usize, place: Place) -> Option<Done> {
    let file = call.file(fd, true)?;
    if !buffer::is_readable(from, len) {
        return None;
    }
    // SAFETY: as in `fill`, read.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
    put_bytes(file, fd, from, place)
}

/// The same of memory that is this library's. What stack that takes, it takes from here on.
#[inline(never)]
pub fn put_bytes(file: &File, fd: c_int, from: &[u8], place: Place) -> Option<Done> {
    let bytes = from.len();
    match place {
        Place::At(at) => {
            let done = file.write(from, at)?;
            let rest = match done < bytes {
                true => put_rest(fd, &from[done..], at + done as u64),
                false => 0,
            };
            Some(Done::at_offset(done + rest))
        }
        Place::End => Some(Done {
            bytes,
            end: Some(file.append(from)?),
        }),
    }
}

/// What the engine left of a write. Who writes less than he wanted takes the medium for full.
#[cold]
fn put_rest(fd: c_int, from: &[u8], at: u64) -> usize {
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
pub fn settle(call: &Call, fd: c_int, is_durable: bool, written: usize) -> isize {
    if !is_durable && !call.entry.facts().is_durable {
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
        let call = Call::begin(fd)?;
        let at = call.start(len, offset)?;
        call.ask(fd);
        fill(call.file(fd, false)?, into, len, at)
    };
    read().map_or(BY_KERNEL, |n| n as isize)
}

#[inline(never)]
pub extern "C" fn pwrite(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> isize {
    let write = || {
        let call = Call::begin(fd)?;
        let at = call.start(len, offset)?;
        call.ask(fd);
        let written = put(&call, fd, from, len, call.place(at)?)?;
        Some(settle(&call, fd, false, written.bytes))
    };
    write().unwrap_or(BY_KERNEL)
}

/// Does `direct` at the offset and moves it, or else `kernel`, which moves it itself.
pub fn at_offset(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(&Call, u64) -> Option<Done>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    in_turn(fd, len, direct, |_| kernel())
}

/// A call that has the offset of its entry, to which the number leads meanwhile.
struct Turn {
    held: Held<'static>,
    call: Call,
}

impl Turn {
    /// None: the kernel's.
    fn begin(fd: c_int) -> Option<Turn> {
        loop {
            let call = Call::begin(fd)?;
            let held = call.entry.hold();
            if call.entry.is_of(fd) {
                return Some(Turn { held, call });
            }
        }
    }
}

fn in_turn(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(&Call, u64) -> Option<Done>,
    kernel: impl FnOnce(&Call) -> isize,
) -> isize {
    let Some(Turn { call, held }) = Turn::begin(fd) else {
        return BY_KERNEL;
    };
    // Looked at behind whoever was here before it was so: his offset may not be settled yet.
    if call.entry.is_shared() || call.entry.mode() != Mode::Direct {
        note_turn(&call, len);
        return BY_KERNEL;
    }
    // Before the offset is moved by number.
    if call.is_lost(fd) {
        return BY_KERNEL;
    }
    let done = if is_direct(len) && !call.is_handling() {
        moved(fd, len, |at| direct(&call, at))
    } else if is_direct(len) {
        call.by_kernel(Why::Handler)
    } else {
        call.too_long(len)
    };
    let result = done.map_or_else(
        || {
            held.leave_to_kernel();
            kernel(&call)
        },
        |done| done.bytes as isize,
    );
    drop(held);
    sys::returned(result)
}

/// Why the kernel alone moves the offset.
#[cold]
fn note_turn(call: &Call, len: usize) {
    let _: Option<()> = match (len, call.entry.is_shared()) {
        // A seek.
        (0, _) => None,
        (_, true) => call.by_kernel(Why::Forked),
        (_, false) => call.by_kernel(Why::Flags),
    };
}

/// Moves the offset by what `direct` did, or behind what it appended.
fn moved(fd: c_int, len: usize, direct: impl FnOnce(u64) -> Option<Done>) -> Option<Done> {
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
    let direct = |call: &Call, at| fill(call.file(fd, false)?, into, len, at).map(Done::at_offset);
    // SAFETY: the arguments are the caller's.
    at_offset(fd, len, direct, || unsafe { sys::read(fd, into, len) })
}

#[inline(never)]
pub extern "C" fn write(fd: c_int, from: *const c_void, len: size_t) -> isize {
    // SAFETY: the arguments are the caller's.
    let kernel = || unsafe { sys::write(fd, from, len) };
    let direct = |call: &Call, place| put(call, fd, from, len, place);
    written(fd, len, false, direct, kernel)
}

/// `at_offset` for writing.
pub fn written(
    fd: c_int,
    len: usize,
    is_durable: bool,
    direct: impl FnOnce(&Call, Place) -> Option<Done>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let mut settled = 0;
    let direct = |call: &Call, at| {
        let place = match call.entry.facts().appends {
            true => Place::End,
            false => Place::At(at),
        };
        let written = direct(call, place)?;
        settled = settle(call, fd, is_durable, written.bytes);
        Some(written)
    };
    let result = in_turn(fd, len, direct, |call| {
        // It moves the offset by the end that it knows, which guests may have moved since.
        if call.entry.facts().appends {
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
    let turn = Turn::begin(fd)?;
    let Some(file) = turn.call.any_sure_file(fd) else {
        // Has the kernel look.
        sys::fstat(fd);
        return None;
    };
    let end = off64_t::try_from(size_of(file)?).ok()?;
    Some(sys::lseek(fd, end.checked_add(offset)?, libc::SEEK_SET))
}

#[inline(never)]
pub extern "C" fn sync(fd: c_int) -> isize {
    let sync = || Some(is_synced(Call::begin(fd)?.any_sure_file(fd)?));
    if sync() == Some(true) { 0 } else { BY_KERNEL }
}

// What stack these take, they take from here on.

#[inline(never)]
fn is_synced(file: &File) -> bool {
    file.sync()
}

#[inline(never)]
fn size_of(file: &File) -> Option<u64> {
    file.size()
}

/// The limit of file sizes may have changed.
#[inline(never)]
pub extern "C" fn look_at_limits() {
    IS_SIZE_LIMITED.store(sys::is_file_size_limited(), Relaxed);
}
