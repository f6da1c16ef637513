//! Programs that this process executes or starts, and that cannot have this library.
//!
//! Children inherit `LD_PRELOAD`. The loader of a 32-bit program prints a message about this
//! library, as every loader does if it cannot find the library's path (`chroot`). A program with
//! another C library (musl) does not start. So such a program gets an environment without this
//! library in it; all else stays. `pagemesh exec` judges the first program by the same rules
//! (`app/src/commands/exec/obstacle.rs`).
//!
//! Invariants: this code does not allocate, take a lock, or change memory of the caller, because it
//! may run in a signal handler or a child of `vfork`. The environment is a mapping of its own, of
//! the needed length. If a path or file cannot be read, or the environment cannot be mapped, the
//! call stays as it is. A program that may have the library gets the call as the caller made it. So
//! does every program once this process is under a filter of system calls, which may forbid reading
//! the program's file.

use super::programs;
use crate::c_library::elf;
use crate::kernel::{buffer, sys};
use crate::state::{thread, withdrawal};
use libc::{c_char, c_int, c_void};
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

const VARIABLE: &[u8] = b"LD_PRELOAD=";
/// The search path if the environment has none (glibc, `execvpe`).
const DEFAULT_PATH: &CStr = c"/bin:/usr/bin";

/// The base of relative paths.
pub const HERE: c_int = libc::AT_FDCWD;

pub type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

/// The path of this library, as the loader got it.
static OWN_PATH: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// Runs once, when the library is loaded.
pub fn begin() {
    if let Some(own) = elf::own_object() {
        OWN_PATH.store(own.path().cast_mut(), Relaxed);
    }
}

pub fn current() -> Strings {
    // SAFETY: a word of the C library, which holds an array or null.
    unsafe { (&raw const environ).read_volatile() }
}

/// The bytes of a string.
///
/// # Safety
/// It is a string, and does not change while the bytes are used.
unsafe fn bytes<'s>(string: *const c_char) -> &'s [u8] {
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(string) }.to_bytes()
}

/// An element of an array that ends with a null; none: the array ends there, or cannot be read.
fn at(strings: Strings, index: usize) -> Option<*const c_char> {
    let place = strings.wrapping_add(index);
    let found = (!strings.is_null())
        .then(|| buffer::read_checked(place))
        .flatten()?;
    let is_there = !found.is_null() && buffer::is_readable(found.cast(), 1);
    is_there.then_some(found)
}

/// The entries of an array.
fn all(strings: Strings) -> impl Iterator<Item = *const c_char> {
    (0..).map_while(move |index| at(strings, index))
}

/// The value of a variable; `name` ends with `=`.
fn variable(strings: Strings, name: &[u8]) -> Option<*const c_char> {
    // SAFETY: strings of an environment, which the kernel or the C library reads as well.
    let mut found = all(strings).filter(|&it| unsafe { bytes(it) }.starts_with(name));
    Some(found.next()?.wrapping_add(name.len()))
}

/// The parts of `LD_PRELOAD` (ld.so(8)).
fn libraries(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    let parts = value.split(|byte| b": ".contains(byte));
    parts.filter(|part| !part.is_empty())
}

/// An environment without this library, unmapped when it is dropped. Behind its pointers is room
/// for other pointers of the caller, and behind these are new strings.
pub struct Environment {
    start: *mut c_void,
    len: usize,
    /// Pointers of the environment, including the null at the end.
    pointers: usize,
}

/// Appends strings to free memory.
struct StringArea {
    free: *mut u8,
    room: usize,
}

impl StringArea {
    fn add(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(self.room);
        // SAFETY: `room` bytes are free there, and only this area uses them.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.free, len) };
        self.free = self.free.wrapping_add(len);
        self.room -= len;
    }

    /// Adds the variable with all libraries except this one; none: there are no others.
    fn add_other_libraries(&mut self, own: &[u8], entry: &[u8]) -> Option<*const c_char> {
        let others = || libraries(&entry[VARIABLE.len()..]).filter(|it| *it != own);
        others().next()?;
        let start = self.free;
        self.add(VARIABLE);
        for (number, library) in others().enumerate() {
            self.add(if number == 0 { b"" } else { b":" });
            self.add(library);
        }
        // Unused memory is zero.
        self.add(b"\0");
        Some(start.cast::<c_char>().cast_const())
    }
}

impl Environment {
    pub fn strings(&self) -> Strings {
        self.start.cast::<*const c_char>().cast_const()
    }

    /// Room for as many pointers as the caller requested, all null.
    pub fn spare(&self) -> *mut *const c_char {
        let start: *mut *const c_char = self.start.cast();
        start.wrapping_add(self.pointers)
    }

    /// A copy of an environment that names this library, without it.
    fn without(own: &[u8], strings: Strings, spare: usize) -> Option<Environment> {
        let is_preload = |entry: &[u8]| entry.starts_with(VARIABLE);
        // SAFETY: as in `variable`.
        let entries = || all(strings).map(|it| (it, unsafe { bytes(it) }));
        let preloads = entries().filter(|(_, entry)| is_preload(entry));
        let text: usize = preloads.map(|(_, entry)| entry.len() + 1).sum();
        let count = all(strings).count();
        let words = (count + 1 + spare) * size_of::<*const c_char>();
        let len = words + text + 1;
        let new = Environment {
            start: sys::map(len)?,
            len,
            pointers: count + 1,
        };
        let mut text = StringArea {
            free: new.start.cast::<u8>().wrapping_add(words),
            room: text,
        };
        let mut place: *mut *const c_char = new.start.cast();
        // Another thread may have added entries since they were counted.
        for (it, entry) in entries().take(count) {
            let put = if is_preload(entry) {
                text.add_other_libraries(own, entry)
            } else {
                Some(it)
            };
            if let Some(put) = put {
                // SAFETY: one of the first `count` words of a fresh mapping, aligned to pages. A
                // null stays behind the last.
                unsafe { place.write(put) };
                place = place.wrapping_add(1);
            }
        }
        Some(new)
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        sys::unmap(self.start as usize, self.len);
    }
}

/// The environment for a program that cannot have this library, with room for so many other
/// pointers; none: the program gets the caller's environment.
pub fn environment_for(
    (directory, path): (c_int, *const c_char),
    strings: Strings,
    spare: usize,
) -> Option<Environment> {
    let own = OWN_PATH.load(Relaxed);
    if own.is_null() || path.is_null() || withdrawal::is_filtered() {
        return None;
    }
    // SAFETY: a string of the loader, which stays.
    let name = unsafe { bytes(own) };
    let value = variable(strings, VARIABLE)?;
    // SAFETY: as in `variable`.
    if !libraries(unsafe { bytes(value) }).any(|library| library == name) {
        return None;
    }
    let is_refused =
        !programs::is_library_visible(own) || programs::is_incompatible(directory, path);
    is_refused.then(|| Environment::without(name, strings, spare))?
}

/// As `environment_for`, for a program that is searched for as by `execvp`.
pub fn environment_for_found(
    file: *const c_char,
    strings: Strings,
    spare: usize,
) -> Option<Environment> {
    let may_look = !withdrawal::is_filtered();
    if !may_look || file.is_null() || !buffer::is_readable(file.cast(), 1) {
        return None;
    }
    // SAFETY: a string, which the C library reads as well.
    let name = unsafe { bytes(file) };
    if name.contains(&b'/') {
        return environment_for((HERE, file), strings, spare);
    }
    let path = variable(current(), b"PATH=").unwrap_or(DEFAULT_PATH.as_ptr());
    // SAFETY: as in `variable`.
    let path = unsafe { bytes(path) };
    let mut place = [0; libc::PATH_MAX as usize];
    for directory in path.split(|byte| *byte == b':') {
        let parts = [
            directory,
            if directory.is_empty() { b"" } else { b"/" },
            name,
            b"\0",
        ];
        let Some(()) = join(&parts, &mut place) else {
            continue;
        };
        let place = place.as_ptr().cast();
        if sys::is_executable(place) {
            return environment_for((HERE, place), strings, spare);
        }
    }
    None
}

/// Concatenates parts; none: there is no room.
fn join(parts: &[&[u8]], into: &mut [u8]) -> Option<()> {
    let mut at = 0;
    for part in parts {
        into.get_mut(at..at + part.len())?.copy_from_slice(part);
        at += part.len();
    }
    Some(())
}

pub fn environment_for_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    envp: Strings,
) -> Option<Environment> {
    let is_empty = buffer::read_checked(path)? == 0;
    if is_empty && flags & libc::AT_EMPTY_PATH != 0 {
        environment_for_fd(directory, envp)
    } else {
        environment_for((directory, path), envp, 0)
    }
}

/// The environment for an open file; the descriptor itself may not be readable (`O_PATH`).
pub fn environment_for_fd(fd: c_int, envp: Strings) -> Option<Environment> {
    let mut place = [0; 32];
    let at = b"/proc/self/fd/";
    let (front, digits) = place.split_at_mut(at.len());
    front.copy_from_slice(at);
    let mut rest = u32::try_from(fd).ok()?;
    let count = (1..10).find(|&count| rest < 10u32.pow(count)).unwrap_or(10) as usize;
    for digit in digits[..count].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    environment_for((HERE, place.as_ptr().cast()), envp, 0)
}

pub fn environment_for_path(
    path: *const c_char,
    strings: Strings,
    spare: usize,
) -> Option<Environment> {
    environment_for((HERE, path), strings, spare)
}

/// Executes with another environment. A child of `vfork` leaves it to its parent to unmap.
pub fn with(environment: &Environment, run: impl FnOnce(Strings) -> c_int) -> c_int {
    thread::this().set_exec_mapping(environment.start as usize, environment.len);
    let result = run(environment.strings());
    thread::this().set_exec_mapping(0, 0);
    result
}
