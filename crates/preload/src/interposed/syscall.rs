//! `syscall`: system calls by number that have a function here.

use super::{Buffer, close, limits};
use crate::c_library::real;
use crate::io::transfer::BY_KERNEL;
use crate::kernel::sys;
use crate::process::{fork, withdraw};
use crate::tracking::duplicate::is_tracked_command;
use crate::tracking::{close as tracked, messages, open};
use libc::{c_int, c_long, c_uint, c_void};

export! {
    syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long)
        -> c_long {
        let (fd, to) = (a as c_int, b as c_int);
        // System calls that have a function here and are no cancellation points. Limits have the
        // layout of the C library's.
        // SAFETY: the arguments are the caller's.
        unsafe {
            match number {
                libc::SYS_dup => return close::dup(fd).into(),
                libc::SYS_dup2 => return close::dup2(fd, to).into(),
                libc::SYS_dup3 => return close::dup3(fd, to, c as c_int).into(),
                libc::SYS_fcntl if is_tracked_command(to) => return close::fcntl(fd, to, c).into(),
                libc::SYS_close_range => {
                    return close::close_range(a as c_uint, b as c_uint, c as c_int).into();
                }
                libc::SYS_setrlimit => return limits::setrlimit(fd, b as *const c_void).into(),
                libc::SYS_prlimit64 => {
                    return limits::prlimit(fd, to, c as *const c_void, d as Buffer).into();
                }
                libc::SYS_close => {
                    let result = close::close_ours(fd);
                    if result != BY_KERNEL {
                        return sys::returned(result) as c_long;
                    }
                }
                _ => {}
            }
        }
        withdraw::before_syscall(number, a, c);
        before_syscall(number, a, b, c, d, e);
        // SAFETY: as above.
        let result = unsafe { real::syscall(number, a, b, c, d, e, f) };
        after_syscall(number, a, b, d, result)
    }
}

/// Runs before a system call by number: those that copy descriptors, map a file, or send
/// descriptors.
#[inline(never)]
extern "C" fn before_syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
) {
    match number {
        libc::SYS_mmap => open::before_mmap(e as c_int, d as c_int),
        // The child is unknown to this library, so offsets go to the kernel.
        libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
            fork::before_clone_syscall(number, a);
        }
        libc::SYS_sendmsg => messages::before_sendmsg(b as *const _),
        libc::SYS_sendmmsg => messages::before_sendmmsg(b as *const _, c as c_uint),
        _ => {}
    }
}

/// Runs after a system call by number: those that create a descriptor.
#[inline(never)]
extern "C" fn after_syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    d: c_long,
    result: c_long,
) -> c_long {
    match number {
        libc::SYS_open
        | libc::SYS_openat
        | libc::SYS_openat2
        | libc::SYS_creat
        | libc::SYS_socket
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_eventfd
        | libc::SYS_eventfd2
        | libc::SYS_epoll_create
        | libc::SYS_epoll_create1
        | libc::SYS_memfd_create
        | libc::SYS_timerfd_create
        | libc::SYS_signalfd
        | libc::SYS_signalfd4
        | libc::SYS_inotify_init
        | libc::SYS_inotify_init1
        | libc::SYS_pidfd_open
        | libc::SYS_pidfd_getfd => {
            tracked::fd_created(result as c_int);
        }
        libc::SYS_pipe | libc::SYS_pipe2 => {
            tracked::fd_pair_created(a as *const _, result as isize)
        }
        libc::SYS_socketpair => tracked::fd_pair_created(d as *const _, result as isize),
        libc::SYS_io_uring_setup => withdraw::io_uring_created(result),
        libc::SYS_recvmsg => messages::after_recvmsg(b as *const _, result as isize),
        libc::SYS_recvmmsg => messages::after_recvmmsg(b as *const _, result as isize),
        _ => {}
    }
    result
}
