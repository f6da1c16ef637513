//! The preload library (`LD_PRELOAD`): programs reach files on a pagemesh mount without system
//! calls.
//!
//! A program's descriptors remain descriptors of the kernel, on the mount. So each call that this
//! library does not know, or is not sure of, goes to the kernel; it is correct there, only slower.
//! The [`engine`] gets reads, writes and syncs of regular files that the program opened by a call
//! that this library intercepts.
//!
//! A program that never opens such a file pays one load per call, an `fstat` per opened file, and
//! one more function call per signal.
//!
//! | folder | contents |
//! |---|---|
//! | `interposed` | the functions that replace the C library's, by subject |
//! | `tracking` | opening, closing, duplicating, sending descriptors |
//! | `io` | the data path: reading and writing, and the offset |
//! | `report` | operations that went directly or by the kernel |
//! | `process` | forking, programs that cannot have this library, signals, withdrawal |
//! | `descriptors` | which descriptors are on the direct path |
//! | `engine` | the direct path, on stacks of its own |
//! | `c_library` | the loader, the functions behind this library's, threads of the engine |
//! | `state` | the calling thread; whether the process has withdrawn; messages |
//! | `kernel` | system calls without the C library, a lock, bad pointers |
//!
//! A folder uses only folders below it in this table.
//!
//! It is for x86-64 and the GNU C library. `docs/rfd/014-preload.md` lists the calls that stay with
//! the kernel, and the reasons.
//!
//! Everything here may run in a signal handler of the program and in a child of `vfork`. Only the
//! engine, where its documentation says so, and the gathering of several parts for it allocate.
//! This code does not panic, and holds no lock while a handler of the program runs.

#![allow(unsafe_code)]
#![cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
#![cfg_attr(test, allow(dead_code))]

/// Exports functions under names of the C library: `name: path;`. The code under an exported name
/// only jumps to a function with an internal name. So no call within this library uses a name that
/// the program may define, too.
macro_rules! names {
    ($($name:ident: $function:path;)*) => {
        $(
            const _: () = {
                /// # Safety
                /// As the C library's.
                #[cfg(not(test))]
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                unsafe extern "C" fn $name() {
                    // All arguments pass through unchanged, in registers and on the stack.
                    std::arch::naked_asm!("jmp {function}", function = sym $function)
                }
            };
        )*
    };
}

mod c_library;
mod descriptors;
pub mod engine;
mod interposed;
mod io;
mod kernel;
mod process;
mod report;
mod state;
mod tracking;

use c_library::{binding, engine_threads, real};
use process::{exec_environment, fork, withdraw};

/// Runs before the program, but perhaps after the initializers of other libraries: their files stay
/// on the kernel's path.
extern "C" fn begin() {
    binding::begin();
    withdraw::begin();
    engine_threads::begin();
    real::find_all();
    io::transfer::refresh_size_limit();
    engine::begin();
    #[cfg(any(debug_assertions, feature = "probe"))]
    engine::probe::begin();
    fork::begin();
    exec_environment::begin();
    engine::stack::begin();
    report::begin();
}

/// Runs when the program returns or calls `exit`, after the program's own exit functions.
extern "C" fn end() {
    report::end();
}

#[cfg(not(test))]
#[used]
// SAFETY: the section lists functions that the loader calls once, without arguments that
// `begin` would miss.
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[cfg(not(test))]
#[used]
// SAFETY: as above, at the end.
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
