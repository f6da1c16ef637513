//! The library that programs are started with (`LD_PRELOAD`) to reach files on a pagemesh
//! mount without system calls.
//!
//! A program's descriptors stay the kernel's, of the mount. So whatever this library does
//! not know, or is not sure of, is left to the kernel, and is right there, only slower.
//! What it knows it hands to the [`engine`]: reads, writes and syncs of regular files that
//! were opened by a call that it saw.
//!
//! A program that never opens such a file pays for one load per call, an `fstat` per opened
//! file, and nothing for its signals but one more function.
//!
//! | | |
//! |---|---|
//! | `calls` | what programs call in place of the C library's |
//! | `data`, `vector` | reading and writing, and the offset |
//! | `descriptors`, `messages` | opening, closing, duplicating, sending |
//! | `table`, `entry` | which descriptors are on the direct path |
//! | `process` | forking |
//! | `signals`, `thread` | no handler inside an engine call |
//! | `buffer` | bad pointers |
//! | `real`, `sys` | the way to the C library, and past it |
//!
//! It is for x86-64 and the GNU C library. What stays with the kernel, and why:
//! `docs/rfd/014-preload.md`.
//!
//! Everything here may run in a signal handler of the program and in a child of `vfork`.
//! Nothing allocates but the engine, where it says so, and who gathers parts for it; nothing
//! panics, and no lock is held while a handler of the program runs.

#![allow(unsafe_code)]
#![cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
#![cfg_attr(test, allow(dead_code))]

/// Other names that the C library has for functions of ours, and some programs call.
macro_rules! other_names {
    ($($other:ident: $name:ident;)*) => {
        $(
            /// # Safety
            /// As the C library's.
            #[cfg(not(test))]
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $other() {
                // With all that the caller passes, wherever it lies.
                std::arch::naked_asm!("jmp {name}", name = sym $name)
            }
        )*
    };
}

mod buffer;
mod calls;
mod data;
mod descriptors;
pub mod engine;
mod entry;
mod lock;
mod messages;
mod mounts;
#[cfg(any(debug_assertions, feature = "probe"))]
mod probe;
mod process;
mod real;
mod signals;
mod sys;
mod table;
mod thread;
mod vector;

/// Runs before the program, but perhaps after other libraries: their files stay on the
/// kernel's path.
extern "C" fn begin() {
    real::find_all();
    data::look_at_limits();
    engine::begin();
    #[cfg(any(debug_assertions, feature = "probe"))]
    probe::begin();
    process::begin();
}

#[cfg(not(test))]
#[used]
// SAFETY: the section lists functions that the loader calls once, without arguments that
// `begin` would miss.
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
