//! Binds the imports of this library to the libraries that it was linked with.
//!
//! The loader binds a name to its first definition: the program's, then another preloaded
//! library's, then the C library's. A program may define `close`, `sigaction` or `malloc` itself,
//! and its definition may call the next one, which is here. Then this library would call itself, or
//! run code of the program that takes the program's locks. So this library rewrites all addresses
//! that the loader wrote for imported functions, before it calls any of them.
//!
//! Calls of the program go on to the next definition behind this library (`real`).

use super::elf::{self, LoadedObject, SymbolName};
use super::engine_threads;
use super::symbols::find_in_needed;
use crate::kernel::sys;
use libc::{Elf64_Ehdr, Elf64_Phdr, c_char, c_int};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

const PAGE: usize = 4096;

static IS_BOUND: AtomicBool = AtomicBool::new(false);

/// Runs once, before an imported function is called.
pub fn begin() {
    if IS_BOUND.load(Acquire) || IS_BOUND.swap(true, AcqRel) {
        return;
    }
    let Some(own) = elf::own_object() else { return };
    let sealed = relro_pages(own);
    if !sealed.is_empty() && !sys::protect(&sealed, libc::PROT_READ | libc::PROT_WRITE) {
        return;
    }
    for relocation in own.relocations().filter(|it| it.is_address()) {
        let number = relocation.symbol();
        let bound = own.name_of(number).and_then(|name| {
            let found = find_in_needed(own, name, own.version_wanted(number));
            found.map(|found| replacement_for(name).unwrap_or(found))
        });
        if let Some(address) = bound {
            // SAFETY: a word that the loader wrote when it bound this name.
            unsafe { own.slot(relocation).write(address) };
        }
    }
    if !sealed.is_empty() {
        sys::protect(&sealed, libc::PROT_READ);
    }
}

/// The pages that the loader made read-only after relocation.
fn relro_pages(own: LoadedObject) -> Range<usize> {
    let header = own.base() as *const Elf64_Ehdr;
    // SAFETY: a library is mapped from its first byte on, where its header is.
    let header = unsafe { &*header };
    let parts = (own.base() + header.e_phoff as usize) as *const Elf64_Phdr;
    // SAFETY: as the header says.
    let parts = unsafe { std::slice::from_raw_parts(parts, header.e_phnum.into()) };
    let part = parts.iter().find(|part| part.p_type == libc::PT_GNU_RELRO);
    part.map_or(0..0, |part| {
        let start = own.base() + part.p_vaddr as usize;
        let end = start + part.p_memsz as usize;
        start / PAGE * PAGE..end / PAGE * PAGE
    })
}

/// The function to call in place of a C library function.
fn replacement_for(name: SymbolName) -> Option<usize> {
    let others = [
        (c"close", close as *const () as usize),
        (
            c"pthread_create",
            engine_threads::create as *const () as usize,
        ),
        (c"realpath", realpath as *const () as usize),
        // It allocates by the program's functions, also on threads of the engine. The standard
        // library works without it.
        (c"__cxa_thread_atexit_impl", 0),
    ];
    let found = others
        .iter()
        .find(|(other, _)| name.is(SymbolName::of(other)));
    found.map(|(_, address)| *address)
}

/// Replaces the C library's `close`, which is a cancellation point.
extern "C" fn close(fd: c_int) -> c_int {
    sys::returned(sys::close(fd)) as c_int
}

/// Replaces the C library's `realpath`, which allocates by the program's functions, while this
/// library frees by the C library's. This library does not need it.
extern "C" fn realpath(_path: *const c_char, _into: *mut c_char) -> *mut c_char {
    sys::returned(-(libc::ENOSYS as isize));
    ptr::null_mut()
}
