//! The functions that programs call.
//!
//! Each does as little as it can and ends by calling the real function. A thread may be cancelled
//! there, and then these functions are left without returning. So they hold no lock and own no
//! resource, and call only functions that do not unwind and are not inlined: otherwise the compiler
//! would insert code that ends the process when a thread is unwound through here. The engine is no
//! cancellation point. So each function tests for a cancellation first, as POSIX requires of these
//! functions.
//!
//! `open`, `fcntl`, `ulimit` and `syscall` are variadic in C. Here they always have their last
//! arguments. On x86-64 (System V ABI, 3.2.3 and 3.5.7) integers go to the same registers either
//! way. An argument that was not passed has the value that its register happens to hold, and the
//! real function reads it only if it was passed.

use crate::data::{self, BY_KERNEL};
use crate::descriptors::with_tracking_flag;
use crate::process::ForkStamp;
use crate::{
    descriptors, engine, messages, real, report, signals, table, thread, vector, withdraw,
};
use libc::{c_char, c_int, c_long, c_uint, c_void, iovec, mode_t, msghdr, off64_t, pid_t};
use libc::{sigaction as action, size_t, ssize_t};

/// `PTHREAD_CANCEL_ASYNCHRONOUS`
const CANCEL_ASYNCHRONOUS: c_int = 1;

type Path = *const c_char;
type Buffer = *mut c_void;
type Parts = *const iovec;

macro_rules! export {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty $body:block)*) => {
        $(
            /// # Safety
            /// As the C library's.
            unsafe extern "C" fn $name($($arg: $kind),*) -> $result $body
            names! { $name: crate::calls::$name; }
        )*
    };
}

/// Closes a descriptor that is in the table or the engine's own. Returns the kernel's result.
fn close_ours(fd: c_int) -> isize {
    if thread::this().is_inside() {
        // The engine closes it; there no thread is cancelled.
        return crate::sys::close(fd);
    }
    if engine::is_internal_fd(fd) {
        return -(libc::EBADF as isize);
    }
    descriptors::close_tracked(fd)
}

/// Calls `data` or `vector` if the descriptor is in the table, otherwise the real function.
macro_rules! transfer {
    ($($name:ident($fd:ident: c_int $(, $arg:ident: $kind:ty)*) -> $result:ty = $direct:expr;)*) => {
        export! {
            $($name($fd: c_int $(, $arg: $kind)*) -> $result {
                if table::is_ours($fd) && !thread::is_cancelled_anywhere() {
                    // SAFETY: nothing is held here.
                    unsafe { real::pthread_testcancel() };
                    let result = $direct;
                    if result != BY_KERNEL {
                        return result as $result;
                    }
                } else if report::is_on() {
                    report::count_unknown_fd($fd);
                }
                // SAFETY: the arguments are the caller's.
                unsafe { real::$name($fd $(, $arg)*) }
            })*
        }
    };
}

transfer! {
    read(fd: c_int, into: Buffer, len: size_t) -> ssize_t = data::read(fd, into, len);
    write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t = data::write(fd, from, len);
    pread(fd: c_int, into: Buffer, len: size_t, offset: off64_t) -> ssize_t
        = data::pread(fd, into, len, offset);
    pread64(fd: c_int, into: Buffer, len: size_t, offset: off64_t) -> ssize_t
        = data::pread(fd, into, len, offset);
    pwrite(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> ssize_t
        = data::pwrite(fd, from, len, offset);
    pwrite64(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> ssize_t
        = data::pwrite(fd, from, len, offset);
    // If the buffer is too small, the real function reports it.
    __read_chk(fd: c_int, into: Buffer, len: size_t, room: size_t) -> ssize_t
        = if len > room { BY_KERNEL } else { data::read(fd, into, len) };
    __pread_chk(fd: c_int, into: Buffer, len: size_t, offset: off64_t, room: size_t) -> ssize_t
        = if len > room { BY_KERNEL } else { data::pread(fd, into, len, offset) };
    __pread64_chk(fd: c_int, into: Buffer, len: size_t, offset: off64_t, room: size_t) -> ssize_t
        = if len > room { BY_KERNEL } else { data::pread(fd, into, len, offset) };
    readv(fd: c_int, parts: Parts, count: c_int) -> ssize_t = vector::readv(fd, parts, count, 0);
    writev(fd: c_int, parts: Parts, count: c_int) -> ssize_t = vector::writev(fd, parts, count, 0);
    preadv(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t
        = vector::preadv(fd, parts, count, offset);
    preadv64(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t
        = vector::preadv(fd, parts, count, offset);
    pwritev(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t
        = vector::pwritev(fd, parts, count, offset);
    pwritev64(fd: c_int, parts: Parts, count: c_int, offset: off64_t) -> ssize_t
        = vector::pwritev(fd, parts, count, offset);
    preadv2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t
        = vector::preadv2(fd, parts, count, offset, flags);
    preadv64v2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t
        = vector::preadv2(fd, parts, count, offset, flags);
    pwritev2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t
        = vector::pwritev2(fd, parts, count, offset, flags);
    pwritev64v2(fd: c_int, parts: Parts, count: c_int, offset: off64_t, flags: c_int) -> ssize_t
        = vector::pwritev2(fd, parts, count, offset, flags);
    fsync(fd: c_int) -> c_int = data::sync(fd);
    fdatasync(fd: c_int) -> c_int = data::sync(fd);
}

/// These are no cancellation points.
macro_rules! seek {
    ($($name:ident)*) => {
        export! {
            $($name(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
                if table::is_ours(fd) {
                    let result = data::lseek(fd, offset, whence);
                    if result != BY_KERNEL {
                        return result as off64_t;
                    }
                }
                // SAFETY: the arguments are the caller's.
                unsafe { real::$name(fd, offset, whence) }
            })*
        }
    };
}

seek! { lseek lseek64 }

/// Passes the flags with which the library opens files to the real function.
macro_rules! opening {
    ($($name:ident($($arg:ident: $kind:ty),*) with $flags:expr => $real:expr;)*) => {
        export! {
            $($name($($arg: $kind),*) -> c_int {
                let since = ForkStamp::now();
                // SAFETY: the arguments are the caller's.
                let fd = unsafe { $real };
                descriptors::file_opened(fd, $flags, &since)
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
                descriptors::fd_created(unsafe { real::$name($($arg),*) })
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
    pipe(ends: *mut c_int) -> c_int: |result| descriptors::fd_pair_created(ends, result);
    pipe2(ends: *mut c_int, flags: c_int) -> c_int: |result| descriptors::fd_pair_created(ends, result);
    socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int:
        |result| descriptors::fd_pair_created(ends, result);
    recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t:
        |result| messages::after_recvmsg(message, result);
    recvmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int, limit: Buffer)
        -> c_int: |result| messages::after_recvmmsg(messages, result);
}

/// Handles descriptors before the real function is called.
macro_rules! before {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty: $first:expr;)*) => {
        export! {
            $($name($($arg: $kind),*) -> $result {
                // SAFETY: the arguments are the caller's.
                #[allow(unused_unsafe)]
                unsafe { $first };
                // SAFETY: as above.
                unsafe { real::$name($($arg),*) }
            })*
        }
    };
}

before! {
    mmap(at: Buffer, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t)
        -> Buffer: descriptors::before_mmap(fd, flags);
    mmap64(at: Buffer, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t)
        -> Buffer: descriptors::before_mmap(fd, flags);
    copy_file_range(from: c_int, at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint)
        -> ssize_t: descriptors::before_copy_from(from);
    splice(from: c_int, at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint)
        -> ssize_t: descriptors::before_copy_from(from);
    sendfile(to: c_int, from: c_int, at: *mut off64_t, len: size_t) -> ssize_t:
        descriptors::before_copy_from(from);
    sendfile64(to: c_int, from: c_int, at: *mut off64_t, len: size_t) -> ssize_t:
        descriptors::before_copy_from(from);
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t:
        messages::before_sendmsg(message);
    sendmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int:
        messages::before_sendmmsg(messages, count);
    fdopen(fd: c_int, mode: Path) -> Buffer: descriptors::before_fdopen(fd);
    fclose(stream: Buffer) -> c_int: descriptors::before_fclose(stream);
    freopen(path: Path, mode: Path, stream: Buffer) -> Buffer: descriptors::before_fclose(stream);
    freopen64(path: Path, mode: Path, stream: Buffer) -> Buffer: descriptors::before_fclose(stream);
    // Of open streams only these may have a descriptor that is in the table.
    fcloseall() -> c_int: descriptors::forget_range(0, 2);
}

export! {
    // It takes the terminal's other descriptor from the caller.
    login_tty(fd: c_int) -> c_int {
        descriptors::forget(fd);
        descriptors::forget_range(0, 2);
        // SAFETY: it touches no memory.
        unsafe { real::login_tty(fd) }
    }

    forkpty(control: *mut c_int, name: *mut c_char, settings: Buffer, size: Buffer) -> pid_t {
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::forkpty(control, name, settings, size) };
        if result == 0 {
            descriptors::forget_range(0, 2);
        }
        result
    }

    daemon(stay: c_int, keep: c_int) -> c_int {
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::daemon(stay, keep) };
        // In the child these numbers lead to other files now.
        descriptors::forget_range(0, 2);
        result
    }

    // The program must not close the engine's own descriptors, though it finds them open.
    close(fd: c_int) -> c_int {
        // SAFETY: it touches no memory; here and below. Nothing is held.
        unsafe {
            if table::is_ours(fd) && !thread::this().is_inside() {
                real::pthread_testcancel();
            }
            match close_ours(fd) {
                BY_KERNEL => real::close(fd),
                result => crate::sys::returned(result) as c_int,
            }
        }
    }

    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        if flags as c_uint & libc::CLOSE_RANGE_CLOEXEC != 0 {
            // SAFETY: as above. The engine's descriptors are close-on-exec anyway.
            return unsafe { real::close_range(first, last, flags) };
        }
        if flags == 0 {
            descriptors::close_range(first, last);
        } else {
            // They belong to a descriptor table that will be this thread's alone, or the flags are
            // unknown.
            descriptors::forget_range(first, last);
        }
        // SAFETY: as above.
        descriptors::close_between(first, last, |from, to| unsafe {
            real::close_range(from, to, flags)
        })
    }

    closefrom(first: c_int) -> () {
        let first = first.max(0) as c_uint;
        descriptors::close_range(first, c_uint::MAX);
        // SAFETY: as above.
        let result = descriptors::close_between(first, c_uint::MAX, |from, to| unsafe {
            real::close_range(from, to, 0)
        });
        // The fallback of the C library would also close the engine's descriptors.
        if result != 0 && !descriptors::close_each_from(first as c_int) {
            // SAFETY: as above. It ends the process.
            unsafe { real::closefrom(first as c_int) };
        }
    }

    dup(fd: c_int) -> c_int {
        // SAFETY: it touches no memory; here and below.
        descriptors::duplicate(fd, || unsafe { real::dup(fd) })
    }

    dup2(fd: c_int, to: c_int) -> c_int {
        if engine::is_internal_fd(to) {
            return crate::sys::returned(-(libc::EBUSY as isize)) as c_int;
        }
        match descriptors::duplicate_onto(fd, to, || crate::sys::dup2(fd, to)) {
            // SAFETY: as above.
            BY_KERNEL => unsafe { real::dup2(fd, to) },
            result => crate::sys::returned(result) as c_int,
        }
    }

    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        if engine::is_internal_fd(to) {
            return crate::sys::returned(-(libc::EBUSY as isize)) as c_int;
        }
        match descriptors::duplicate_onto(fd, to, || crate::sys::dup3(fd, to, flags)) {
            // SAFETY: as above.
            BY_KERNEL => unsafe { real::dup3(fd, to, flags) },
            result => crate::sys::returned(result) as c_int,
        }
    }
}

macro_rules! controlling {
    ($($name:ident)*) => {
        export! {
            $($name(fd: c_int, command: c_int, argument: c_long) -> c_int {
                // SAFETY: the arguments are the caller's.
                let control = || unsafe { real::$name(fd, command, argument) };
                match command {
                    libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => descriptors::duplicate(fd, control),
                    libc::F_SETFL => descriptors::status_flags_set(fd, argument, control()),
                    libc::F_GETFL => descriptors::visible_flags(fd, control()),
                    // It may wait for a lock, and be cancelled.
                    _ => control(),
                }
            })*
        }
    };
}

controlling! { fcntl fcntl64 }

export! {
    syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long)
        -> c_long {
        let (fd, to) = (a as c_int, b as c_int);
        // System calls that have a function here and are no cancellation points. Limits have the
        // layout of the C library's.
        // SAFETY: the arguments are the caller's.
        unsafe {
            match number {
                libc::SYS_dup => return dup(fd).into(),
                libc::SYS_dup2 => return dup2(fd, to).into(),
                libc::SYS_dup3 => return dup3(fd, to, c as c_int).into(),
                libc::SYS_fcntl if descriptors::is_tracked_command(to) => return fcntl(fd, to, c).into(),
                libc::SYS_close_range => {
                    return close_range(a as c_uint, b as c_uint, c as c_int).into();
                }
                libc::SYS_setrlimit => return setrlimit(fd, b as *const c_void).into(),
                libc::SYS_prlimit64 => {
                    return prlimit(fd, to, c as *const c_void, d as Buffer).into();
                }
                libc::SYS_close => {
                    let result = close_ours(fd);
                    if result != BY_KERNEL {
                        return crate::sys::returned(result) as c_long;
                    }
                }
                _ => {}
            }
        }
        withdraw::before_syscall(number, a, c);
        descriptors::before_syscall(number, a, b, c, d, e);
        // SAFETY: as above.
        let result = unsafe { real::syscall(number, a, b, c, d, e, f) };
        descriptors::after_syscall(number, a, b, d, result)
    }
}

/// Calls that may set a limit of file sizes, which only the kernel enforces, or a limit of memory.
macro_rules! limits {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty: $first:expr;)*) => {
        export! {
            $($name($($arg: $kind),*) -> $result {
                $first(());
                // SAFETY: the arguments are the caller's.
                let result = unsafe { real::$name($($arg),*) };
                if !thread::this().is_vforked() && !withdraw::is_withdrawn() {
                    data::refresh_size_limit();
                }
                result
            })*
        }
    };
}

limits! {
    setrlimit(what: c_int, limit: *const c_void) -> c_int: |()| withdraw::before_setrlimit(0, what, limit);
    setrlimit64(what: c_int, limit: *const c_void) -> c_int: |()| withdraw::before_setrlimit(0, what, limit);
    prlimit(pid: pid_t, what: c_int, new: *const c_void, old: Buffer) -> c_int:
        |()| withdraw::before_setrlimit(pid, what, new);
    prlimit64(pid: pid_t, what: c_int, new: *const c_void, old: Buffer) -> c_int:
        |()| withdraw::before_setrlimit(pid, what, new);
    // The C library sets these limits without the functions above.
    ulimit(command: c_int, argument: c_long) -> c_long: |()| ();
    vlimit(what: c_int, limit: c_int) -> c_int: |()| ();
}

/// Ignores requests to read ahead. The kernel would read pages into its cache, where no call uses
/// them, and the mount would disable direct access to the file until they are dropped.
macro_rules! advising {
    ($($name:ident($fd:ident: c_int, $($arg:ident: $kind:ty),*) -> $result:ty: $reads:expr;)*) => {
        export! {
            $($name($fd: c_int, $($arg: $kind),*) -> $result {
                match table::is_ours($fd) && $reads {
                    true => 0,
                    // SAFETY: the arguments are the caller's.
                    false => unsafe { real::$name($fd, $($arg),*) },
                }
            })*
        }
    };
}

advising! {
    posix_fadvise(fd: c_int, offset: off64_t, len: off64_t, advice: c_int) -> c_int:
        advice == libc::POSIX_FADV_WILLNEED && len >= 0;
    posix_fadvise64(fd: c_int, offset: off64_t, len: off64_t, advice: c_int) -> c_int:
        advice == libc::POSIX_FADV_WILLNEED && len >= 0;
    readahead(fd: c_int, offset: off64_t, len: size_t) -> ssize_t: true;
}

before! {
    prctl(option: c_int, a: c_long, b: c_long, c: c_long, d: c_long) -> c_int:
        withdraw::before_prctl(option);
    mlockall(flags: c_int) -> c_int: withdraw::withdraw();
}

export! {
    sigaction(signal: c_int, new: *const action, old: *mut action) -> c_int {
        // SAFETY: the arguments are the caller's.
        unsafe { signals::change(signal, new, old) }
    }

    signal(signal: c_int, handler: size_t) -> size_t {
        let flags = if signals::interrupts(signal) { 0 } else { libc::SA_RESTART };
        signals::set(signal, handler, flags, true)
    }

    __sysv_signal(signal: c_int, handler: size_t) -> size_t {
        signals::set(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER, false)
    }

    sigset(signal: c_int, handler: size_t) -> size_t {
        let known = signals::program_handler(signal);
        // SAFETY: the arguments are the caller's.
        let seen = unsafe { real::sigset(signal, handler) };
        signals::wrap_new_handler(signal, seen, known)
    }

    siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::siginterrupt(signal, interrupts) };
        if result == 0 {
            signals::set_interrupts(signal, interrupts != 0);
        }
        result
    }

    pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int {
        // Set before the call, if the thread may be cancelled at any instruction from then on.
        let is_anywhere = kind == CANCEL_ASYNCHRONOUS;
        if is_anywhere {
            thread::this().set_cancelled_anywhere(true);
        }
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::pthread_setcanceltype(kind, old) };
        if result == 0 {
            thread::this().set_cancelled_anywhere(is_anywhere);
        }
        result
    }
}

// Other names of the C library for these functions, which some programs call.
names! {
    __close: crate::calls::close;
    __dup2: crate::calls::dup2;
    __fcntl: crate::calls::fcntl;
    __sigaction: crate::calls::sigaction;
    bsd_signal: crate::calls::signal;
    ssignal: crate::calls::signal;
    sysv_signal: crate::calls::__sysv_signal;
}
