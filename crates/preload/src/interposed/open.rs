//! Functions that make descriptors, and that use files in ways which the engine does not do.

use super::{Buffer, Path};
use crate::c_library::real;
use crate::descriptors::attributes::with_tracking_flag;
use crate::process::fork::ForkStamp;
use crate::tracking::{close, duplicate, messages, open};
use libc::{c_char, c_int, c_uint, c_void, mode_t, msghdr, off64_t, pid_t, size_t, ssize_t};

/// Passes the flags with which the library opens files to the real function.
macro_rules! opening {
    ($($name:ident($($arg:ident: $kind:ty),*) with $flags:expr => $real:expr;)*) => {
        export! {
            $($name($($arg: $kind),*) -> c_int {
                let since = ForkStamp::now();
                // SAFETY: the arguments are the caller's.
                let fd = unsafe { $real };
                open::file_opened(fd, $flags, &since)
            })*
        }
    };
}

/// `creat` as `open`.
const CREATES: c_int = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;

opening! {
    open(path: Path, flags: c_int, mode: mode_t) with flags
        => real::open(path, with_tracking_flag(flags), mode);
    open64(path: Path, flags: c_int, mode: mode_t) with flags
        => real::open64(path, with_tracking_flag(flags), mode);
    openat(at: c_int, path: Path, flags: c_int, mode: mode_t) with flags
        => real::openat(at, path, with_tracking_flag(flags), mode);
    openat64(at: c_int, path: Path, flags: c_int, mode: mode_t) with flags
        => real::openat64(at, path, with_tracking_flag(flags), mode);
    creat(path: Path, mode: mode_t) with CREATES => real::open(path, with_tracking_flag(CREATES), mode);
    creat64(path: Path, mode: mode_t) with CREATES => real::open64(path, with_tracking_flag(CREATES), mode);
    __open_2(path: Path, flags: c_int) with flags => real::__open_2(path, with_tracking_flag(flags));
    __open64_2(path: Path, flags: c_int) with flags => real::__open64_2(path, with_tracking_flag(flags));
    __openat_2(at: c_int, path: Path, flags: c_int) with flags
        => real::__openat_2(at, path, with_tracking_flag(flags));
    __openat64_2(at: c_int, path: Path, flags: c_int) with flags
        => real::__openat64_2(at, path, with_tracking_flag(flags));
}

/// Handles a new descriptor: its number is no longer in the table.
macro_rules! making {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => {
        export! {
            $($name($($arg: $kind),*) -> c_int {
                // SAFETY: the arguments are the caller's.
                close::fd_created(unsafe { real::$name($($arg),*) })
            })*
        }
    };
}

making! {
    socket(domain: c_int, kind: c_int, protocol: c_int);
    accept(socket: c_int, address: Buffer, len: Buffer);
    accept4(socket: c_int, address: Buffer, len: Buffer, flags: c_int);
    eventfd(count: c_uint, flags: c_int);
    epoll_create(size: c_int);
    epoll_create1(flags: c_int);
    memfd_create(name: Path, flags: c_uint);
    timerfd_create(clock: c_int, flags: c_int);
    signalfd(fd: c_int, signals: *const c_void, flags: c_int);
    inotify_init();
    inotify_init1(flags: c_int);
}

/// Handles descriptors that the real function created, after the call.
macro_rules! behind {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty: $came:expr;)*) => {
        export! {
            $($name($($arg: $kind),*) -> $result {
                // SAFETY: the arguments are the caller's.
                let result = unsafe { real::$name($($arg),*) };
                $came(result as isize);
                result
            })*
        }
    };
}

behind! {
    pipe(ends: *mut c_int) -> c_int: |result| close::fd_pair_created(ends, result);
    pipe2(ends: *mut c_int, flags: c_int) -> c_int: |result| close::fd_pair_created(ends, result);
    socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int:
        |result| close::fd_pair_created(ends, result);
    recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t:
        |result| messages::after_recvmsg(message, result);
    recvmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int, limit: Buffer)
        -> c_int: |result| messages::after_recvmmsg(messages, result);
}

before! {
    mmap(at: Buffer, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t)
        -> Buffer: open::before_mmap(fd, flags);
    mmap64(at: Buffer, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t)
        -> Buffer: open::before_mmap(fd, flags);
    copy_file_range(from: c_int, at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint)
        -> ssize_t: open::before_copy_from(from);
    splice(from: c_int, at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint)
        -> ssize_t: open::before_copy_from(from);
    sendfile(to: c_int, from: c_int, at: *mut off64_t, len: size_t) -> ssize_t:
        open::before_copy_from(from);
    sendfile64(to: c_int, from: c_int, at: *mut off64_t, len: size_t) -> ssize_t:
        open::before_copy_from(from);
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t:
        messages::before_sendmsg(message);
    sendmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int:
        messages::before_sendmmsg(messages, count);
    fdopen(fd: c_int, mode: Path) -> Buffer: duplicate::before_fdopen(fd);
    fclose(stream: Buffer) -> c_int: close::before_fclose(stream);
    freopen(path: Path, mode: Path, stream: Buffer) -> Buffer: close::before_fclose(stream);
    freopen64(path: Path, mode: Path, stream: Buffer) -> Buffer: close::before_fclose(stream);
    // Of open streams only these may have a descriptor that is in the table.
    fcloseall() -> c_int: close::forget_range(0, 2);
}

export! {
    // It takes the terminal's other descriptor from the caller.
    login_tty(fd: c_int) -> c_int {
        close::forget(fd);
        close::forget_range(0, 2);
        // SAFETY: it touches no memory.
        unsafe { real::login_tty(fd) }
    }

    forkpty(control: *mut c_int, name: *mut c_char, settings: Buffer, size: Buffer) -> pid_t {
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::forkpty(control, name, settings, size) };
        if result == 0 {
            close::forget_range(0, 2);
        }
        result
    }

    daemon(stay: c_int, keep: c_int) -> c_int {
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::daemon(stay, keep) };
        // In the child these numbers lead to other files now.
        close::forget_range(0, 2);
        result
    }
}
