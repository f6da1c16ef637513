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
//! | `table`, `open_description` | which descriptors are on the direct path |
//! | `process` | forking |
//! | `execs`, `programs` | programs that cannot have this library |
//! | `threads` | threads of the engine, which keep no process alive |
//! | `withdraw` | limits and filters that the engine would break |
//! | `signals`, `thread` | no handler inside an engine call |
//! | `buffer` | bad pointers |
//! | `report` | what went directly, and what by the kernel |
//! | `engine_stack` | the engine does not run on stacks of the program |
//! | `real`, `sys` | the way to the C library, and past it |
//! | `binding`, `elf` | what this library itself calls is not the program's |
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

/// Exports functions under names of the C library: `name = path;` or `name;` for a function of
/// this module. What stands under an exported name only jumps to a function that has none, so that
/// no call within this library goes by a name that the program may define, too.
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
                    // With all that the caller passes, wherever it lies.
                    std::arch::naked_asm!("jmp {function}", function = sym $function)
                }
            };
        )*
    };
}

mod binding;
mod buffer;
mod calls;
mod data;
mod descriptors;
mod elf;
pub mod engine;
mod execs;
mod lock;
mod messages;
mod mounts;
mod open_description;
#[cfg(any(debug_assertions, feature = "probe"))]
mod probe;
mod process;
mod programs;
mod real;
mod report;
mod rings;
mod signals;
mod stack;
mod sys;
mod table;
mod thread;
mod threads;
mod vector;
mod withdraw;

/// Runs before the program, but perhaps after other libraries: their files stay on the
/// kernel's path.
extern "C" fn begin() {
    binding::begin();
    withdraw::begin();
    threads::begin();
    real::find_all();
    data::refresh_size_limit();
    engine::begin();
    #[cfg(any(debug_assertions, feature = "probe"))]
    probe::begin();
    process::begin();
    execs::begin();
    stack::begin();
    report::begin();
}

/// Runs when the program returns or calls `exit`, behind its own functions for that.
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
