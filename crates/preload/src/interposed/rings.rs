//! Functions of liburing, for programs that create an `io_uring` by it: its system calls bypass the
//! C library.
//!
//! Each function is looked for when it is called: a plug-in may have loaded liburing for itself.

use crate::c_library::elf::SymbolName;
use crate::c_library::{binding, symbols};
use crate::process::withdraw;
use libc::{c_int, c_uint, c_void, size_t};
use std::ffi::CStr;

/// The function of a loaded library; none: the call fails as without `io_uring`.
fn find(name: &'static CStr) -> Option<usize> {
    binding::begin();
    symbols::next_definition(SymbolName::of(name))
}

macro_rules! making {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => {$(
        /// # Safety
        /// As liburing's.
        unsafe extern "C" fn $name($($arg: $kind),*) -> c_int {
            const NAME: &CStr = match CStr::from_bytes_with_nul(
                concat!(stringify!($name), "\0").as_bytes(),
            ) {
                Ok(name) => name,
                Err(_) => c"",
            };
            let Some(found) = find(NAME) else {
                return -libc::ENOSYS;
            };
            type Function = unsafe extern "C" fn($($kind),*) -> c_int;
            // SAFETY: the function of this name has this signature.
            let function = unsafe { std::mem::transmute::<usize, Function>(found) };
            // SAFETY: the caller's.
            let result = unsafe { function($($arg),*) };
            withdraw::io_uring_created(result.into());
            result
        }
        names! { $name: self::$name; }
    )*};
}

making! {
    io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint);
    io_uring_queue_init_params(entries: c_uint, ring: *mut c_void, params: *mut c_void);
    io_uring_queue_init_mem(entries: c_uint, ring: *mut c_void, params: *mut c_void, memory: *mut c_void, bytes: size_t);
    io_uring_setup(entries: c_uint, params: *mut c_void);
}
