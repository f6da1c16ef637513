//! Functions that close, duplicate or control descriptors.

use crate::c_library::real;
use crate::descriptors::table;
use crate::engine;
use crate::io::transfer::BY_KERNEL;
use crate::kernel::sys;
use crate::state::thread;
use crate::tracking::{close, duplicate, open};
use libc::{c_int, c_long, c_uint};

/// Closes a descriptor that is in the table or the engine's own. Returns the kernel's result.
pub(super) fn close_ours(fd: c_int) -> isize {
    if thread::this().is_inside() {
        // The engine closes it; there no thread is cancelled.
        return sys::close(fd);
    }
    if engine::is_internal_fd(fd) {
        return -(libc::EBADF as isize);
    }
    close::close_tracked(fd)
}

export! {
    // The program must not close the engine's own descriptors, though it finds them open.
    close(fd: c_int) -> c_int {
        // SAFETY: it touches no memory; here and below. Nothing is held.
        unsafe {
            if table::is_ours(fd) && !thread::this().is_inside() {
                real::pthread_testcancel();
            }
            match close_ours(fd) {
                BY_KERNEL => real::close(fd),
                result => sys::returned(result) as c_int,
            }
        }
    }

    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        if flags as c_uint & libc::CLOSE_RANGE_CLOEXEC != 0 {
            // SAFETY: as above. The engine's descriptors are close-on-exec anyway.
            return unsafe { real::close_range(first, last, flags) };
        }
        if flags == 0 {
            close::close_range(first, last);
        } else {
            // They belong to a descriptor table that will be this thread's alone, or the flags are
            // unknown.
            close::forget_range(first, last);
        }
        // SAFETY: as above.
        close::close_between(first, last, |from, to| unsafe {
            real::close_range(from, to, flags)
        })
    }

    closefrom(first: c_int) -> () {
        let first = first.max(0) as c_uint;
        close::close_range(first, c_uint::MAX);
        // SAFETY: as above.
        let result = close::close_between(first, c_uint::MAX, |from, to| unsafe {
            real::close_range(from, to, 0)
        });
        // The fallback of the C library would also close the engine's descriptors.
        if result != 0 && !close::close_each_from(first as c_int) {
            // SAFETY: as above. It ends the process.
            unsafe { real::closefrom(first as c_int) };
        }
    }

    dup(fd: c_int) -> c_int {
        // SAFETY: it touches no memory; here and below.
        duplicate::duplicate(fd, || unsafe { real::dup(fd) })
    }

    dup2(fd: c_int, to: c_int) -> c_int {
        if engine::is_internal_fd(to) {
            return sys::returned(-(libc::EBUSY as isize)) as c_int;
        }
        match duplicate::duplicate_onto(fd, to, || sys::dup2(fd, to)) {
            // SAFETY: as above.
            BY_KERNEL => unsafe { real::dup2(fd, to) },
            result => sys::returned(result) as c_int,
        }
    }

    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        if engine::is_internal_fd(to) {
            return sys::returned(-(libc::EBUSY as isize)) as c_int;
        }
        match duplicate::duplicate_onto(fd, to, || sys::dup3(fd, to, flags)) {
            // SAFETY: as above.
            BY_KERNEL => unsafe { real::dup3(fd, to, flags) },
            result => sys::returned(result) as c_int,
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
                    libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicate::duplicate(fd, control),
                    libc::F_SETFL => duplicate::status_flags_set(fd, argument, control()),
                    libc::F_GETFL => open::visible_flags(fd, control()),
                    // It may wait for a lock, and be cancelled.
                    _ => control(),
                }
            })*
        }
    };
}

controlling! { fcntl fcntl64 }

// Other names of the C library for these functions, which some programs call.
names! {
    __close: self::close;
    __dup2: self::dup2;
    __fcntl: self::fcntl;
}
