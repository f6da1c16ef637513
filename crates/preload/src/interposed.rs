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
//!
//! Each file exports the functions of one subject. `export!` and `before!` serve all of them.

use libc::{c_char, c_void};

type Path = *const c_char;
type Buffer = *mut c_void;

macro_rules! export {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty $body:block)*) => {
        $(
            /// # Safety
            /// As the C library's.
            pub(super) unsafe extern "C" fn $name($($arg: $kind),*) -> $result $body
            names! { $name: self::$name; }
        )*
    };
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

mod close;
mod exec;
mod fork;
mod limits;
mod open;
mod rings;
mod signals;
mod syscall;
mod transfer;
