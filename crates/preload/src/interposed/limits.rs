//! Functions that may set a limit which only the kernel enforces, or that the engine would break.

use super::Buffer;
use crate::c_library::real;
use crate::io::transfer;
use crate::process::withdraw;
use crate::state::{thread, withdrawal};
use libc::{c_int, c_long, c_void, pid_t};

/// Calls that may set a limit of file sizes, which only the kernel enforces, or a limit of memory.
macro_rules! limits {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty: $first:expr;)*) => {
        export! {
            $($name($($arg: $kind),*) -> $result {
                $first(());
                // SAFETY: the arguments are the caller's.
                let result = unsafe { real::$name($($arg),*) };
                if !thread::this().is_vforked() && !withdrawal::is_withdrawn() {
                    transfer::refresh_size_limit();
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

before! {
    prctl(option: c_int, a: c_long, b: c_long, c: c_long, d: c_long) -> c_int:
        withdraw::before_prctl(option);
    mlockall(flags: c_int) -> c_int: withdraw::withdraw();
}
