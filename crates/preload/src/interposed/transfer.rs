//! Reading, writing, seeking and syncing.

use super::Buffer;
use crate::c_library::real;
use crate::descriptors::table;
use crate::io::transfer::{self, BY_KERNEL};
use crate::io::{offset, vector};
use crate::report;
use crate::state::thread;
use libc::{c_int, c_void, iovec, off64_t, size_t, ssize_t};

type Parts = *const iovec;

/// Calls `io` if the descriptor is in the table, otherwise the real function.
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
    read(fd: c_int, into: Buffer, len: size_t) -> ssize_t = offset::read(fd, into, len);
    write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t = offset::write(fd, from, len);
    pread(fd: c_int, into: Buffer, len: size_t, offset: off64_t) -> ssize_t
        = transfer::pread(fd, into, len, offset);
    pread64(fd: c_int, into: Buffer, len: size_t, offset: off64_t) -> ssize_t
        = transfer::pread(fd, into, len, offset);
    pwrite(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> ssize_t
        = transfer::pwrite(fd, from, len, offset);
    pwrite64(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> ssize_t
        = transfer::pwrite(fd, from, len, offset);
    // If the buffer is too small, the real function reports it.
    __read_chk(fd: c_int, into: Buffer, len: size_t, room: size_t) -> ssize_t
        = if len > room { BY_KERNEL } else { offset::read(fd, into, len) };
    __pread_chk(fd: c_int, into: Buffer, len: size_t, offset: off64_t, room: size_t) -> ssize_t
        = if len > room { BY_KERNEL } else { transfer::pread(fd, into, len, offset) };
    __pread64_chk(fd: c_int, into: Buffer, len: size_t, offset: off64_t, room: size_t) -> ssize_t
        = if len > room { BY_KERNEL } else { transfer::pread(fd, into, len, offset) };
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
    fsync(fd: c_int) -> c_int = transfer::sync(fd);
    fdatasync(fd: c_int) -> c_int = transfer::sync(fd);
}

/// These are no cancellation points.
macro_rules! seek {
    ($($name:ident)*) => {
        export! {
            $($name(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
                if table::is_ours(fd) {
                    let result = offset::lseek(fd, offset, whence);
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

/// Ignores requests to read ahead. The kernel would read pages into its cache, where no call uses
/// them, and the mount would disable direct access to the file until they are dropped.
macro_rules! advising {
    ($($name:ident($fd:ident: c_int, $($arg:ident: $kind:ty),*) -> $result:ty: $reads:expr;)*) => {
        export! {
            $($name($fd: c_int, $($arg: $kind),*) -> $result {
                if table::is_ours($fd) && $reads {
                    return 0;
                }
                // SAFETY: the arguments are the caller's.
                unsafe { real::$name($fd, $($arg),*) }
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
