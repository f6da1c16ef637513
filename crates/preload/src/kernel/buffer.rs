//! Finds out whether a program's memory may be touched, by touching it.
//!
//! The kernel answers a bad pointer with EFAULT; the engine would fault, holding locks. So this
//! module touches each page of a buffer before the engine is called, by the few instructions below.
//! A fault in them does not reach the program: `signals` is in front of its handlers for SIGSEGV
//! and SIGBUS, and makes these instructions return 0. The kernel then does the call. The cost is
//! about a nanosecond per page to be read, six per page to be written.
//!
//! If another thread unmaps the memory after the check, the engine faults, as `memcpy` does. So
//! does a bad pointer of a program that has blocked SIGSEGV, or that set its handler without the C
//! library.

use libc::{c_void, ucontext_t};
use std::arch::global_asm;

// rdi: first byte, rsi: last byte. One byte of each page in between is touched: by a load,
// or by a locked addition of nothing, which other threads' stores survive.
global_asm!(
    ".text",
    ".p2align 4",
    ".globl pagemesh_touch_read, pagemesh_touch_write, pagemesh_touch_end, pagemesh_touch_bad",
    ".hidden pagemesh_touch_read, pagemesh_touch_write, pagemesh_touch_end, pagemesh_touch_bad",
    "pagemesh_touch_read:",
    ".cfi_startproc",
    "2: mov al, byte ptr [rdi]",
    "or rdi, 4095",
    "inc rdi",
    "cmp rdi, rsi",
    "jbe 2b",
    "mov eax, 1",
    "ret",
    ".p2align 4",
    "pagemesh_touch_write:",
    "2: lock add byte ptr [rdi], 0",
    "or rdi, 4095",
    "inc rdi",
    "cmp rdi, rsi",
    "jbe 2b",
    "mov eax, 1",
    "ret",
    "pagemesh_touch_end:",
    "pagemesh_touch_bad:",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
);

unsafe extern "C" {
    fn pagemesh_touch_read(first: *const c_void, last: *const c_void) -> u32;
    fn pagemesh_touch_write(first: *mut c_void, last: *mut c_void) -> u32;
    fn pagemesh_touch_end();
    fn pagemesh_touch_bad();
}

/// The last byte of a buffer, if it has one and does not wrap around the end of memory or reach
/// into the kernel's half.
#[inline]
fn last_of(start: *const c_void, len: usize) -> Option<*const c_void> {
    const USER_MAX: usize = 1 << 56;
    let last = (start as usize).checked_add(len.checked_sub(1)?)?;
    (last < USER_MAX && !start.is_null()).then_some(last as *const c_void)
}

/// `len` is not 0.
#[inline]
pub fn is_readable(start: *const c_void, len: usize) -> bool {
    // SAFETY: it loads bytes; a fault is caught.
    last_of(start, len).is_some_and(|last| unsafe { pagemesh_touch_read(start, last) } != 0)
}

/// `len` is not 0.
#[inline]
pub fn is_writable(start: *mut c_void, len: usize) -> bool {
    // SAFETY: it changes no byte; a fault is caught.
    last_of(start, len)
        .is_some_and(|last| unsafe { pagemesh_touch_write(start, last.cast_mut()) } != 0)
}

/// The value at an address, if it is readable.
pub fn read_checked<T: Copy>(from: *const T) -> Option<T> {
    // SAFETY: readable, as was just seen; callers read plain numbers and pointers.
    is_readable(from.cast(), size_of::<T>()).then(|| unsafe { from.read_unaligned() })
}

/// Whether the interrupted instruction is one of these; then the check returns 0.
///
/// # Safety
/// The kernel gave the context to a handler, for a fault of that instruction.
pub unsafe fn catch_fault(context: *mut c_void) -> bool {
    let context = context.cast::<ucontext_t>();
    // SAFETY: the caller's.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let at = registers[libc::REG_RIP as usize] as usize;
    let touching =
        pagemesh_touch_read as *const () as usize..pagemesh_touch_end as *const () as usize;
    if !touching.contains(&at) {
        return false;
    }
    registers[libc::REG_RIP as usize] = pagemesh_touch_bad as *const () as i64;
    true
}
