//! Copies from and to memory that other processes map, the hints to load its lines early, and the
//! store fence.

use crate::cpu::{CopyKernel, cpu};
use pagemesh_base::units::LINE_BYTES;
use std::arch::x86_64::*;

/// Tells the processor that this byte's line will be stored to soon.
#[inline]
pub fn prefetch(byte: *const u8) {
    // SAFETY: it changes nothing, for any pointer (Intel SDM, PREFETCHW); processors that do not
    // support it treat it as a no-op.
    unsafe {
        std::arch::asm!(
            "prefetchw [{}]",
            in(reg) byte,
            options(nostack, preserves_flags, readonly)
        );
    }
}

/// The same for every line of `len` bytes.
#[inline]
pub fn prefetch_all(first: *const u8, len: usize) {
    let within = first.addr() % LINE_BYTES;
    for line in (0..within + len).step_by(LINE_BYTES) {
        prefetch(first.wrapping_sub(within).wrapping_add(line));
    }
}

/// Tells the processor that this byte's line will be loaded soon.
#[inline]
pub fn prefetch_load(byte: *const u8) {
    // SAFETY: it changes nothing, for any pointer (Intel SDM, PREFETCHh).
    unsafe {
        std::arch::asm!(
            "prefetcht0 [{}]",
            in(reg) byte,
            options(nostack, preserves_flags, readonly)
        );
    }
}

/// Copies bytes from or to memory that other processes map, by one instruction that is opaque to
/// the compiler. A concurrent reader may get any part of them.
///
/// # Safety
/// `len` bytes can be read at `from` and written at `to`, and the ranges do not overlap.
#[inline]
pub unsafe fn copy_shared(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promised; the direction flag is clear between functions.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Streams bytes past the caches to memory that other processes map; the rest after the last whole
/// line goes through the caches. Publish their location to readers only after [`store_fence`].
///
/// # Safety
/// `len` bytes can be read at `from` and written at `to`, and the ranges do not overlap; `to` is
/// 64-byte aligned.
pub unsafe fn stream_shared(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: forwarded, and `cpu` reports only kernels that the processor has.
    unsafe { stream_shared_by(cpu().copy, from, to, len) }
}

/// As [`stream_shared`], with a kernel named by the caller.
///
/// # Safety
/// As [`stream_shared`], and the processor has the kernel's instructions.
pub unsafe fn stream_shared_by(kernel: CopyKernel, from: *const u8, to: *mut u8, len: usize) {
    let whole = len / LINE_BYTES * LINE_BYTES;
    // SAFETY: as the caller promised.
    unsafe {
        match kernel {
            CopyKernel::Avx512 => stream_lines_avx512(from, to, whole),
            CopyKernel::Avx2 | CopyKernel::Sse42 | CopyKernel::Sse2 => {
                stream_lines_sse2(from, to, whole)
            }
        }
        copy_shared(from.add(whole), to.add(whole), len - whole);
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn stream_lines_avx512(from: *const u8, to: *mut u8, len: usize) {
    for at in (0..len).step_by(LINE_BYTES) {
        // SAFETY: as the caller promised, for whole lines.
        unsafe { _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast())) };
    }
}

unsafe fn stream_lines_sse2(from: *const u8, to: *mut u8, len: usize) {
    for at in (0..len).step_by(16) {
        // SAFETY: as the caller promised, for whole lines; SSE2 is part of x86-64.
        unsafe { _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast())) };
    }
}

/// Makes the streamed stores before it visible to all threads before any later store.
#[inline]
pub fn store_fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() };
}
