//! The functions that this library's exports replace.
//!
//! Each is looked up once, behind this library in load order, so that other preloaded libraries
//! keep their place in the chain. All are looked up when the library is loaded, since a lookup is
//! not safe in a signal handler. No lock of this library is held in these calls: a thread may be
//! cancelled in them.

use super::elf::SymbolName;
use super::{binding, symbols};
use crate::kernel::sys;
use libc::{c_char, c_int, c_long, c_uint, c_void, iovec, mode_t, msghdr, off64_t, pid_t};
use libc::{sigaction as action, siginfo_t, size_t, ssize_t};
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

/// Called in place of a function that this C library does not have.
extern "C" fn missing() -> isize {
    sys::returned(-(libc::ENOSYS as isize))
}

#[cold]
#[inline(never)]
fn find(cell: &AtomicPtr<c_void>, name: &'static CStr) -> *mut c_void {
    binding::begin();
    let found = symbols::next_definition(SymbolName::of(name));
    let found = found.unwrap_or(missing as *const () as usize) as *mut c_void;
    cell.store(found, Relaxed);
    found
}

macro_rules! real {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {
        #[allow(non_upper_case_globals)]
        mod cells {
            use super::{AtomicPtr, c_void, ptr};
            $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());)*
        }

        $(
            /// # Safety
            /// As the C library's.
            #[inline(always)]
            #[allow(clippy::too_many_arguments, non_snake_case, dead_code)]
            pub unsafe fn $name($($arg: $kind),*) -> $result {
                let mut found = cells::$name.load(Relaxed);
                if found.is_null() {
                    found = find(&cells::$name, const { name(concat!(stringify!($name), "\0")) });
                }
                type Function = unsafe extern "C" fn($($kind),*) -> $result;
                // SAFETY: the function of this name has this signature.
                let function = unsafe { std::mem::transmute::<*mut c_void, Function>(found) };
                // SAFETY: the caller's.
                unsafe { function($($arg),*) }
            }
        )*

        /// Addresses of the functions, for code that passes on arguments without knowing them.
        #[allow(non_snake_case)]
        pub mod addresses {
            use super::{Relaxed, c_void, cells, find, name};
            $(
                #[allow(dead_code)]
                pub fn $name() -> *mut c_void {
                    match cells::$name.load(Relaxed) {
                        found if found.is_null() => find(&cells::$name, const { name(concat!(stringify!($name), "\0")) }),
                        found => found,
                    }
                }
            )*
        }

        pub fn find_all() {
            $(find(&cells::$name, const { name(concat!(stringify!($name), "\0")) });)*
        }
    };
}

const fn name(with_zero: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_zero.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

type Path = *const c_char;
type Strings = *const *const c_char;
type Buffer = *mut c_void;
type Parts = *const iovec;

real! {
    open(path: Path, flags: c_int, mode: mode_t) -> c_int;
    open64(path: Path, flags: c_int, mode: mode_t) -> c_int;
    openat(at: c_int, path: Path, flags: c_int, mode: mode_t) -> c_int;
    openat64(at: c_int, path: Path, flags: c_int, mode: mode_t) -> c_int;
    __open_2(path: Path, flags: c_int) -> c_int;
    __open64_2(path: Path, flags: c_int) -> c_int;
    __openat_2(at: c_int, path: Path, flags: c_int) -> c_int;
    __openat64_2(at: c_int, path: Path, flags: c_int) -> c_int;

    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom(first: c_int) -> ();
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int;
    fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int;
    syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int;
    accept(socket: c_int, address: Buffer, len: Buffer) -> c_int;
    accept4(socket: c_int, address: Buffer, len: Buffer, flags: c_int) -> c_int;
    recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int, limit: Buffer) -> c_int;
    pipe(ends: *mut c_int) -> c_int;
    pipe2(ends: *mut c_int, flags: c_int) -> c_int;
    eventfd(count: c_uint, flags: c_int) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    memfd_create(name: Path, flags: c_uint) -> c_int;
    timerfd_create(clock: c_int, flags: c_int) -> c_int;
    signalfd(fd: c_int, signals: *const c_void, flags: c_int) -> c_int;
    inotify_init() -> c_int;
    inotify_init1(flags: c_int) -> c_int;
    fdopen(fd: c_int, mode: Path) -> *mut c_void;
    fclose(stream: *mut c_void) -> c_int;
    fcloseall() -> c_int;
    freopen(path: Path, mode: Path, stream: *mut c_void) -> *mut c_void;
    freopen64(path: Path, mode: Path, stream: *mut c_void) -> *mut c_void;
    daemon(stay: c_int, keep: c_int) -> c_int;
    login_tty(fd: c_int) -> c_int;
    forkpty(control: *mut c_int, name: *mut c_char, settings: *mut c_void, size: *mut c_void) -> pid_t;

    read(fd: c_int, into: Buffer, len: size_t) -> ssize_t;
    write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t;
    pread(fd: c_int, into: Buffer, len: size_t, offset: off64_t) -> ssize_t;
    pread64(fd: c_int, into: Buffer, len: size_t, offset: off64_t) -> ssize_t;
    pwrite(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> ssize_t;
    pwrite64(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> ssize_t;
    __read_chk(fd: c_int, into: Buffer, len: size_t, room: size_t) -> ssize_t;
    __pread_chk(fd: c_int, into: Buffer, len: size_t, offset: off64_t, room: size_t) -> ssize_t;
    __pread64_chk(fd: c_int, into: Buffer, len: size_t, offset: off64_t, room: size_t) -> ssize_t;
    readv(fd: c_int, parts: Parts, count: c_int) -> ssize_t;
    writev(fd: c_int, parts: Parts, count: c_int) -> ssize_t;
    preadv(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t;
    preadv64(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t;
    pwritev(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t;
    pwritev64(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t;
    preadv2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    preadv64v2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    pwritev2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    pwritev64v2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t;
    lseek64(fd: c_int, offset: off64_t, whence: c_int) -> off64_t;
    mmap(at: Buffer, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t) -> Buffer;
    mmap64(at: Buffer, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t) -> Buffer;
    fsync(fd: c_int) -> c_int;
    copy_file_range(from: c_int, at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t;
    splice(from: c_int, at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t;
    sendfile(to: c_int, from: c_int, at: *mut off64_t, len: size_t) -> ssize_t;
    sendfile64(to: c_int, from: c_int, at: *mut off64_t, len: size_t) -> ssize_t;
    fdatasync(fd: c_int) -> c_int;
    posix_fadvise(fd: c_int, offset: off64_t, len: off64_t, advice: c_int) -> c_int;
    posix_fadvise64(fd: c_int, offset: off64_t, len: off64_t, advice: c_int) -> c_int;
    readahead(fd: c_int, offset: off64_t, len: size_t) -> ssize_t;

    posix_spawn(pid: *mut c_int, path: Path, actions: *const c_void, attributes: *const c_void, argv: Strings, environment: Strings) -> c_int;
    posix_spawnp(pid: *mut c_int, path: Path, actions: *const c_void, attributes: *const c_void, argv: Strings, environment: Strings) -> c_int;
    execve(path: Path, argv: Strings, environment: Strings) -> c_int;
    execv(path: Path, argv: Strings) -> c_int;
    execvp(file: Path, argv: Strings) -> c_int;
    execvpe(file: Path, argv: Strings, environment: Strings) -> c_int;
    execveat(directory: c_int, path: Path, argv: Strings, environment: Strings, flags: c_int) -> c_int;
    fexecve(fd: c_int, argv: Strings, environment: Strings) -> c_int;
    execl() -> c_int;
    execlp() -> c_int;
    execle() -> c_int;
    system(command: *const c_void) -> c_int;
    popen(command: *const c_void, kind: *const c_void) -> *mut c_void;
    _Fork() -> pid_t;
    clone(run: *const c_void, stack: Buffer, flags: c_int, argument: Buffer, parent: Buffer, local: Buffer, child: c_long) -> c_int;
    setrlimit(what: c_int, limit: *const c_void) -> c_int;
    setrlimit64(what: c_int, limit: *const c_void) -> c_int;
    prlimit(pid: pid_t, what: c_int, new: *const c_void, old: Buffer) -> c_int;
    prlimit64(pid: pid_t, what: c_int, new: *const c_void, old: Buffer) -> c_int;
    prctl(option: c_int, a: c_long, b: c_long, c: c_long, d: c_long) -> c_int;
    mlockall(flags: c_int) -> c_int;
    ulimit(command: c_int, argument: c_long) -> c_long;
    vlimit(what: c_int, limit: c_int) -> c_int;

    sigaction(signal: c_int, new: *const action, old: *mut action) -> c_int;
    sigset(signal: c_int, handler: size_t) -> size_t;
    siginterrupt(signal: c_int, interrupts: c_int) -> c_int;
    pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    pthread_testcancel() -> ();
}

/// The type of a handler with all arguments.
pub type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
