//! The instructions of this processor, detected once.
//!
//! Flush instructions are chosen by CPUID leaf 7, EBX bits 24 (CLWB) and 23
//! (CLFLUSHOPT), Intel SDM volume 2A, CPUID. CLFLUSH is part of x86-64.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// The instruction that writes a line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushInstruction {
    /// Writes back, may keep the line cached.
    Clwb,
    /// Writes back and evicts, weakly ordered.
    Clflushopt,
    /// Writes back and evicts, serialised with other CLFLUSH.
    Clflush,
}

/// The widest non-temporal copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKernel {
    /// 64-byte stores with CRC32C folded by VPCLMULQDQ.
    Avx512,
    /// 32-byte stores with CRC32C folded by PCLMULQDQ.
    Avx2,
    /// 16-byte stores with the CRC32 instruction.
    Sse42,
    /// 16-byte stores with a software CRC.
    Sse2,
}

/// The instructions chosen for this processor.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    /// How lines are flushed.
    pub flush: FlushInstruction,
    /// How pages are copied.
    pub copy: CopyKernel,
}

/// The instructions chosen for this processor, detected once.
pub fn cpu() -> Cpu {
    static CPU: OnceLock<Cpu> = OnceLock::new();
    *CPU.get_or_init(|| Cpu {
        flush: detect_flush(),
        copy: detect_copy(),
    })
}

fn detect_flush() -> FlushInstruction {
    if __cpuid(0).eax < 7 {
        return FlushInstruction::Clflush;
    }
    let features = __cpuid_count(7, 0).ebx;
    if features & (1 << 24) != 0 {
        FlushInstruction::Clwb
    } else if features & (1 << 23) != 0 {
        FlushInstruction::Clflushopt
    } else {
        FlushInstruction::Clflush
    }
}

fn detect_copy() -> CopyKernel {
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("sse4.2")
    {
        CopyKernel::Avx512
    } else if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("sse4.2")
    {
        CopyKernel::Avx2
    } else if is_x86_feature_detected!("sse4.2") {
        CopyKernel::Sse42
    } else {
        CopyKernel::Sse2
    }
}
