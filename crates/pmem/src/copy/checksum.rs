//! CRC32C of words, of lines, and of a page whose part changes.
//!
//! A CRC is linear: moving it past bytes of zeroes is a multiplication by a power of x.

use super::fold::{BLOCK, CrcFold512};
use crate::cpu::{CopyKernel, cpu};
use pagemesh_base::checksum::crc32c_append;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::arch::x86_64::*;

/// The Castagnoli polynomial, bit-reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^n modulo the polynomial, reflected and shifted as a fold multiplier.
const fn multiplier(n: u32) -> i64 {
    (times_x(1 << 31, n) as i64) << 1
}

/// Multipliers that move 16 bytes forward by `bits`: low half, high half.
pub(super) const fn fold_by(bits: u32) -> (i64, i64) {
    (multiplier(bits + 32), multiplier(bits - 32))
}

/// Extends the CRC32C `seed` by these words. Loads each word by itself: a wider load of words that
/// were just stored would wait until the stores, and all streamed before them, have left the
/// processor.
#[must_use]
#[inline]
pub fn crc32c_words<const N: usize>(seed: u32, words: &[[u8; 8]; N]) -> u32 {
    if cpu().copy == CopyKernel::Sse2 {
        return crc32c_append(seed, words.as_flattened());
    }
    // SAFETY: every kernel but the plainest needs SSE4.2, which was detected.
    unsafe { crc32c_words_sse42(seed, words) }
}

/// The CRC32C of a page with checksum `crc` after `delta` was xored into the bytes in front of its
/// last `behind`.
///
/// A CRC is linear: the page's CRC is xored with the CRC that `delta` alone makes of a register of
/// zeroes, moved forward by the bytes behind it. That move is a multiplication by a power of x.
///
/// # Panics
/// When a page has no room for `delta` and `behind`.
#[must_use]
#[inline]
pub fn crc32c_patched(crc: u32, delta: &[u8], behind: usize) -> u32 {
    // SAFETY: `cpu` reports only kernels that the processor has.
    unsafe { crc32c_patched_by(cpu().copy, crc, delta, behind) }
}

/// As [`crc32c_patched`], with a kernel named by the caller.
///
/// # Safety
/// The processor has the kernel's instructions.
///
/// # Panics
/// As [`crc32c_patched`].
#[must_use]
#[inline]
pub unsafe fn crc32c_patched_by(kernel: CopyKernel, crc: u32, delta: &[u8], behind: usize) -> u32 {
    assert!(delta.len() + behind <= PAGE_BYTES, "a part of a page");
    // SAFETY: the caller's promise, forwarded.
    unsafe { crc ^ advance_crc_by(kernel, crc_from_zero_by(kernel, delta), behind) }
}

/// Extends the CRC32C `seed` by these lines.
#[must_use]
#[inline]
pub fn crc32c_lines(seed: u32, lines: &[[u8; LINE_BYTES]]) -> u32 {
    // SAFETY: `cpu` reports only kernels that the processor has.
    unsafe { crc32c_lines_by(cpu().copy, seed, lines) }
}

/// As [`crc32c_lines`], with a kernel named by the caller.
///
/// # Safety
/// The processor has the kernel's instructions.
#[must_use]
#[inline]
pub unsafe fn crc32c_lines_by(kernel: CopyKernel, seed: u32, lines: &[[u8; LINE_BYTES]]) -> u32 {
    if kernel != CopyKernel::Avx512 {
        return crc32c_append(seed, lines.as_flattened());
    }
    lines
        .chunks(PAGE_BYTES / LINE_BYTES)
        .fold(seed, |seed, lines| {
            let bytes = lines.as_flattened();
            // SAFETY: the caller's promise, forwarded.
            !unsafe { advance_crc_by(kernel, !seed, bytes.len()) ^ crc_from_zero_by(kernel, bytes) }
        })
}

/// The register that these bytes make of a register of zeroes.
///
/// # Safety
/// The processor has the kernel's instructions.
#[inline]
unsafe fn crc_from_zero_by(kernel: CopyKernel, bytes: &[u8]) -> u32 {
    match kernel {
        // SAFETY: as the caller promised.
        CopyKernel::Avx512 => unsafe { crc_from_zero_avx512(bytes) },
        // The function inverts the register at its start and at its end.
        _ => !crc32c_append(u32::MAX, bytes),
    }
}

/// A register moved forward by `bytes` bytes of zeroes, at most a page.
///
/// # Safety
/// The processor has the kernel's instructions.
#[inline]
unsafe fn advance_crc_by(kernel: CopyKernel, value: u32, bytes: usize) -> u32 {
    let multiplier = ADVANCE_MULTIPLIERS[bytes];
    match kernel {
        // SAFETY: both kernels need carry-less multiplication and SSE4.2.
        CopyKernel::Avx512 | CopyKernel::Avx2 => unsafe { advance_crc_pclmul(value, multiplier) },
        CopyKernel::Sse42 | CopyKernel::Sse2 => advance_crc(value, multiplier),
    }
}

/// Leading zeroes do not change the result, so the first block is padded with them.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
unsafe fn crc_from_zero_avx512(bytes: &[u8]) -> u32 {
    let (head, blocks) = bytes.split_at(bytes.len() % BLOCK);
    let mut folded = CrcFold512::from_zero();
    if !head.is_empty() {
        let mut block = [0; BLOCK];
        block[BLOCK - head.len()..].copy_from_slice(head);
        folded.add_block(&block);
    }
    let (blocks, _) = blocks.as_chunks::<BLOCK>();
    blocks.iter().for_each(|block| folded.add_block(block));
    folded.register()
}

/// x^(8n - 32) modulo the polynomial, reflected, for each n: the multiplier that moves a CRC
/// forward by n bytes, less the 32 bits by which the instruction moves it.
static ADVANCE_MULTIPLIERS: [u32; PAGE_BYTES + 1] = {
    let mut powers = [0; PAGE_BYTES + 1];
    let mut value = 1u32 << 31;
    let mut i = 0;
    while i < 32 {
        // One power less: a step of the division backwards.
        let carry = value >> 31 != 0;
        value = if carry {
            (value ^ POLYNOMIAL) << 1 | 1
        } else {
            value << 1
        };
        i += 1;
    }
    let mut n = 0;
    while n <= PAGE_BYTES {
        powers[n] = value;
        value = times_x(value, 8);
        n += 1;
    }
    powers
};

/// `value` times x^n modulo the polynomial, reflected.
const fn times_x(mut value: u32, n: u32) -> u32 {
    let mut i = 0;
    while i < n {
        let carry = value & 1 != 0;
        value >>= 1;
        if carry {
            value ^= POLYNOMIAL;
        }
        i += 1;
    }
    value
}

#[target_feature(enable = "pclmulqdq,sse4.2")]
fn advance_crc_pclmul(value: u32, multiplier: u32) -> u32 {
    let factors = _mm_set_epi64x(i64::from(multiplier), i64::from(value));
    let product = _mm_cvtsi128_si64(_mm_clmulepi64_si128::<0x10>(factors, factors));
    // The product of two reflected words is one bit short.
    _mm_crc32_u64(0, (product as u64) << 1) as u32
}

fn advance_crc(value: u32, multiplier: u32) -> u32 {
    let (mut sum, mut power) = (0, multiplier);
    for bit in (0..32).rev() {
        if value >> bit & 1 != 0 {
            sum ^= power;
        }
        power = times_x(power, 1);
    }
    times_x(sum, 32)
}

#[target_feature(enable = "sse4.2")]
fn crc32c_words_sse42<const N: usize>(seed: u32, words: &[[u8; 8]; N]) -> u32 {
    let crc = words.iter().fold(u64::from(!seed), |crc, word| {
        _mm_crc32_u64(crc, u64::from_le_bytes(*word))
    });
    !(crc as u32)
}
