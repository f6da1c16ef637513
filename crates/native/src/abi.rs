//! The C interface: `include/pagemesh.h` documents each function.
//!
//! Invariants: only `pm_*` is exported. A panic ends the process at this boundary, and does not
//! unwind into C.

#![allow(unsafe_code)]

use crate::error::Error;
use crate::file::{File, Part, TRACKING_FLAG};
use crate::guard::Guard;
use crate::process::CallGuard;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::fmt::{self, Write};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::slice;

const ABI_VERSION: c_int = 1;
/// The flags of `open(2)` that a file with offsets can have.
const FLAGS: c_int = libc::O_ACCMODE
    | libc::O_CREAT
    | libc::O_EXCL
    | libc::O_TRUNC
    | libc::O_NOFOLLOW
    | libc::O_CLOEXEC;

/// As in the header.
#[repr(C)]
pub struct CPart {
    offset: u64,
    data: *const c_void,
    len: usize,
}

/// As in the header.
#[repr(C)]
pub struct CSlice {
    data: *const c_void,
    len: usize,
}

/// A guard, and its slices in the form for C.
pub struct CGuard {
    guard: Guard<'static>,
    slices: Vec<CSlice>,
}

/// Bytes of a message with its final zero: more than twice the longest one. A longer one is
/// truncated.
const MESSAGE_BYTES: usize = 512;

thread_local! {
    /// Bytes without a destructor, because destructors of ending threads may call in, in any order.
    static MESSAGE: Cell<[u8; MESSAGE_BYTES]> = const { Cell::new([0; MESSAGE_BYTES]) };
}

/// A message in the making. The last byte stays zero.
struct MessageBuffer {
    bytes: [u8; MESSAGE_BYTES],
    len: usize,
}

impl Write for MessageBuffer {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..MESSAGE_BYTES - 1];
        let count = part.len().min(room.len());
        room[..count].copy_from_slice(&part.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}

fn set_message(error: &Error) {
    // Formatting a system error allocates memory, and handlers must not call in meanwhile.
    let _inside = CallGuard::enter();
    let mut text = MessageBuffer {
        bytes: [0; MESSAGE_BYTES],
        len: 0,
    };
    // The writer never fails. If formatting the error failed, the text before would stay.
    let _ = write!(text, "{error}");
    MESSAGE.set(text.bytes);
}

/// The result of a call in the form for C.
fn to_c_result<T>(result: Result<T, Error>, value: impl FnOnce(T) -> i64) -> i64 {
    match result {
        Ok(done) => value(done),
        Err(error) => {
            set_message(&error);
            -i64::from(error.errno())
        }
    }
}

fn to_c_status(result: Result<(), Error>) -> c_int {
    to_c_result(result, |()| 0) as c_int
}

/// # Safety
/// The pointer is null, or points to a live object.
unsafe fn ref_from_c<'a, T>(pointer: *const T) -> Result<&'a T, Error> {
    // SAFETY: as the caller promised.
    unsafe { pointer.as_ref() }.ok_or(Error::Invalid("an argument is NULL"))
}

/// # Safety
/// The pointer is null, or points to `count` objects that stay readable while the slice is used.
unsafe fn slice_from_c<'a, T>(first: *const T, count: usize) -> Result<&'a [T], Error> {
    check_len(first.is_null(), count.saturating_mul(size_of::<T>()))?;
    match count {
        0 => Ok(&[]),
        // SAFETY: as the caller promised.
        _ => Ok(unsafe { slice::from_raw_parts(first, count) }),
    }
}

fn check_len(is_null: bool, bytes: usize) -> Result<(), Error> {
    match (is_null, bytes) {
        (true, 1..) => Err(Error::Invalid("a buffer is NULL")),
        (_, bytes) if isize::try_from(bytes).is_err() => {
            Err(Error::Invalid("a buffer is longer than the address space"))
        }
        _ => Ok(()),
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn pm_abi_version() -> c_int {
    ABI_VERSION
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn pm_message() -> *const c_char {
    MESSAGE.with(|message| message.as_ptr().cast())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_open(
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
    file: *mut *mut File,
) -> c_int {
    // SAFETY: as the caller promised.
    to_c_status(unsafe { open(path, flags, mode, file) })
}

/// # Safety
/// As the header says.
unsafe fn open(
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
    file: *mut *mut File,
) -> Result<(), Error> {
    if path.is_null() || file.is_null() {
        return Err(Error::Invalid("an argument is NULL"));
    }
    if flags & !FLAGS != 0 {
        return Err(Error::Invalid(
            "a flag is not supported; use those that pagemesh.h names",
        ));
    }
    let _inside = CallGuard::enter()?;
    // SAFETY: the caller's string; the kernel checks the path.
    let descriptor = unsafe { libc::open(path, flags | libc::O_CLOEXEC | TRACKING_FLAG, mode) };
    if descriptor < 0 {
        return Err(Error::last_os_error("open the file"));
    }
    // SAFETY: it was just opened, and no other code has it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let opened = Box::new(File::from_std(fs::File::from(descriptor))?);
    // SAFETY: the caller's pointer to a variable.
    unsafe { file.write(Box::into_raw(opened)) };
    Ok(())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_close(file: *mut File) {
    if !file.is_null() {
        // SAFETY: it came from `pm_open`, and is closed once.
        drop(unsafe { Box::from_raw(file) });
    }
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_descriptor(file: *const File) -> c_int {
    // SAFETY: as the caller promised.
    let file = unsafe { ref_from_c(file) };
    to_c_result(file.map(AsRawFd::as_raw_fd), i64::from) as c_int
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_is_direct(file: *const File) -> c_int {
    // SAFETY: as the caller promised.
    let file = unsafe { ref_from_c(file) };
    to_c_result(file.map(File::is_direct), i64::from) as c_int
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_size(file: *const File) -> i64 {
    // SAFETY: as the caller promised.
    let file = unsafe { ref_from_c(file) };
    // The kernel has no files beyond `i64`.
    to_c_result(file.and_then(File::size), |bytes| bytes as i64)
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_set_size(file: *mut File, bytes: u64) -> c_int {
    // SAFETY: as the caller promised.
    let file = unsafe { ref_from_c(file) };
    to_c_status(file.and_then(|file| file.set_size(bytes)))
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_read(
    file: *const File,
    into: *mut c_void,
    len: usize,
    offset: u64,
) -> i64 {
    let read = || {
        // SAFETY: as the caller promised.
        let file = unsafe { ref_from_c(file) }?;
        check_len(into.is_null(), len)?;
        if len == 0 {
            return Ok(0);
        }
        // SAFETY: the caller's buffer, which no other thread uses meanwhile.
        let into = unsafe { slice::from_raw_parts_mut(into.cast(), len) };
        file.read_at(into, offset)
    };
    to_c_result(read(), |bytes| bytes as i64)
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_write(
    file: *mut File,
    data: *const c_void,
    len: usize,
    offset: u64,
) -> c_int {
    let write = || {
        // SAFETY: as the caller promised.
        let (file, data) = unsafe { (ref_from_c(file)?, slice_from_c(data.cast(), len)?) };
        file.write_all_at(data, offset)
    };
    to_c_status(write())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_write_atomic(
    file: *mut File,
    parts: *const CPart,
    count: usize,
) -> c_int {
    let write = || {
        // SAFETY: as the caller promised.
        let (file, parts) = unsafe { (ref_from_c(file)?, slice_from_c(parts, count)?) };
        let part = |part: &CPart| {
            // SAFETY: as the caller promised.
            let data = unsafe { slice_from_c(part.data.cast(), part.len) };
            Ok(Part::new(part.offset, data?))
        };
        let inside = CallGuard::enter()?;
        let parts: Result<Vec<Part<'_>>, Error> = parts.iter().map(part).collect();
        file.write_atomic_in_call(&parts?, &inside)
    };
    to_c_status(write())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_persist(file: *mut File) -> c_int {
    // SAFETY: as the caller promised.
    let file = unsafe { ref_from_c(file) };
    to_c_status(file.and_then(File::persist))
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_guard_begin(
    file: *const File,
    offset: u64,
    len: usize,
    guard: *mut *mut CGuard,
) -> c_int {
    let begin = || {
        if guard.is_null() {
            return Err(Error::Invalid("an argument is NULL"));
        }
        let inside = CallGuard::enter()?;
        // SAFETY: as the caller promised, until the guard has ended.
        let file = unsafe { ref_from_c::<'static, File>(file) }?;
        let shown = file.begin_guard(offset, len, &inside)?;
        let slices = shown.slices();
        let slices = slices.iter().map(|slice| CSlice {
            data: slice.as_ptr().cast(),
            len: slice.len(),
        });
        let slices = slices.collect();
        let begun = Box::new(CGuard {
            guard: shown,
            slices,
        });
        // SAFETY: the caller's pointer to a variable.
        unsafe { guard.write(Box::into_raw(begun)) };
        Ok(())
    };
    to_c_status(begin())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_guard_slices(
    guard: *const CGuard,
    slices: *mut *const CSlice,
) -> usize {
    // SAFETY: as the caller promised.
    match unsafe { ref_from_c(guard) } {
        Ok(guard) if !slices.is_null() => {
            // SAFETY: the caller's pointer to a variable.
            unsafe { slices.write(guard.slices.as_ptr()) };
            guard.slices.len()
        }
        _ => 0,
    }
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_guard_valid(guard: *const CGuard) -> c_int {
    // SAFETY: as the caller promised.
    let guard = unsafe { ref_from_c(guard) };
    to_c_result(guard.map(|it| it.guard.is_valid()), i64::from) as c_int
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pm_guard_end(guard: *mut CGuard) -> c_int {
    if guard.is_null() {
        return 0;
    }
    let end = || {
        let _inside = CallGuard::enter()?;
        // SAFETY: it came from `pm_guard_begin`, and is ended once.
        let ended = unsafe { Box::from_raw(guard) };
        ended.guard.finish()
    };
    to_c_status(end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn long_message_is_truncated() {
        let check = |words: usize, expected: usize| {
            let text = "word ".repeat(words).leak();
            set_message(&Error::Invalid(text));
            // SAFETY: a string of this thread, and no call of it fails meanwhile.
            let told = unsafe { CStr::from_ptr(pm_message()) };
            assert_eq!(told.to_bytes(), &text.as_bytes()[..expected]);
        };
        check(102, 510);
        check(103, 511);
        check(1000, 511);
        check(0, 0);
    }

    #[test]
    fn header_constants_match() {
        let header = include_str!("../include/pagemesh.h");
        let check = |name: &str, number: usize| {
            let line = format!("#define {name} {number}\n");
            assert!(header.contains(&line), "{line}");
        };
        check("PM_ABI_VERSION", ABI_VERSION as usize);
        check("PM_PAGE_BYTES", crate::PAGE_BYTES);
        check("PM_ATOMIC_PAGES_MAX", crate::ATOMIC_PAGES_MAX);
        check("PM_GUARD_PAGES_MAX", crate::GUARD_PAGES_MAX);
        check("PM_GUARDS_MAX", crate::GUARDS_MAX);
    }
}
