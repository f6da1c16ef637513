//! Copies of pages that compute the checksums from the same registers, one kernel per instruction
//! set.
//!
//! Every kernel loads each source byte exactly once, so a source that changes during the copy
//! cannot make the checksums differ from the stored bytes. No kernel fences.

use super::checksum::{crc32c_lines_by, fold_by};
use super::fold::{BLOCK, CrcFold512, LINES_PER_BLOCK};
use super::shared::copy_shared;
use crate::cpu::{CopyKernel, cpu};
use pagemesh_base::checksum::{PageChecksums, WordSums, crc32c_append};
use pagemesh_base::units::PAGE_BYTES;
use std::arch::x86_64::*;

/// The most targets of one copy: a mirror has at most three legs.
pub const TARGETS_MAX: usize = 3;

/// Streams `page` to each target and returns its checksums.
///
/// # Safety
/// Each target points to 4096 writable bytes, is 64-byte aligned and does not
/// overlap `page`.
///
/// # Panics
/// With no target or more than [`TARGETS_MAX`].
pub unsafe fn stream_page(targets: &[*mut u8], page: &[u8; PAGE_BYTES]) -> PageChecksums {
    // SAFETY: forwarded, and `cpu` reports only kernels that the processor has.
    unsafe { stream_page_by(cpu().copy, targets, page) }
}

/// As [`stream_page`], with a kernel named by the caller.
///
/// # Safety
/// As [`stream_page`], and the processor has the kernel's instructions.
pub unsafe fn stream_page_by(
    kernel: CopyKernel,
    targets: &[*mut u8],
    page: &[u8; PAGE_BYTES],
) -> PageChecksums {
    // SAFETY: the caller's promises, forwarded.
    unsafe {
        match *targets {
            [a] => stream_to(kernel, [a], page),
            [a, b] => stream_to(kernel, [a, b], page),
            [a, b, c] => stream_to(kernel, [a, b, c], page),
            _ => panic!("1 to {TARGETS_MAX} targets, not {}", targets.len()),
        }
    }
}

unsafe fn stream_to<const N: usize>(
    kernel: CopyKernel,
    targets: [*mut u8; N],
    page: &[u8; PAGE_BYTES],
) -> PageChecksums {
    // SAFETY: the caller's promises, forwarded.
    unsafe {
        match kernel {
            CopyKernel::Avx512 => stream_avx512(targets, page),
            CopyKernel::Avx2 => stream_avx2(targets, page),
            CopyKernel::Sse42 => stream_sse42(targets, page),
            CopyKernel::Sse2 => stream_sse2(targets, page),
        }
    }
}

/// Copies a page out to `page` and returns the CRC32C of the copy, even if the source changes
/// meanwhile. The checksum is taken from the copy, which no other thread changes: a compiler turns
/// a loop that loads the source once for both into a copy and a second load of the source.
///
/// # Safety
/// `from` points to 4096 readable bytes that do not overlap `page`.
pub unsafe fn read_page(from: *const u8, page: &mut [u8; PAGE_BYTES]) -> u32 {
    // SAFETY: forwarded, and `cpu` reports only kernels that the processor has.
    unsafe { read_page_by(cpu().copy, from, page) }
}

/// As [`read_page`], with a kernel named by the caller.
///
/// # Safety
/// As [`read_page`], and the processor has the kernel's instructions.
pub unsafe fn read_page_by(
    kernel: CopyKernel,
    from: *const u8,
    page: &mut [u8; PAGE_BYTES],
) -> u32 {
    // SAFETY: as the caller promised.
    unsafe { copy_shared(from, page.as_mut_ptr(), PAGE_BYTES) };
    // SAFETY: the caller's promise, forwarded.
    unsafe { crc32c_lines_by(kernel, 0, page.as_chunks().0) }
}

/// Loads bytes once that another thread may be storing to. A compiler may repeat a plain load for
/// each use, and the checksums would then be of other bytes than the copies.
macro_rules! load_once {
    ($name:ident, $feature:literal, $vector:ty, $register:ident, $instruction:literal) => {
        /// # Safety
        /// `from` points to as many readable bytes as the vector has.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $name(from: *const u8) -> $vector {
            let data;
            // SAFETY: as the caller promised.
            unsafe {
                std::arch::asm!(
                    concat!($instruction, " {}, [{}]"),
                    out($register) data,
                    in(reg) from,
                    options(nostack, preserves_flags, readonly)
                );
            }
            data
        }
    };
}

load_once!(load_512, "avx512f", __m512i, zmm_reg, "vmovdqu64");
load_once!(load_256, "avx2", __m256i, ymm_reg, "vmovdqu");
load_once!(load_128, "sse4.2", __m128i, xmm_reg, "movdqu");

#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
unsafe fn stream_avx512<const N: usize>(
    targets: [*mut u8; N],
    page: &[u8; PAGE_BYTES],
) -> PageChecksums {
    let mut folded = CrcFold512::new();
    let mut sums = [_mm512_setzero_si512(); 2];
    for block in (0..PAGE_BYTES).step_by(BLOCK) {
        for line in 0..LINES_PER_BLOCK {
            let at = block + line * 64;
            // SAFETY: `at + 64 <= PAGE_BYTES`; targets as the caller promised.
            let data = unsafe { load_512(page.as_ptr().add(at)) };
            for target in targets {
                // SAFETY: as above.
                unsafe { _mm512_stream_si512(target.add(at).cast(), data) };
            }
            folded.add(line, data);
            sums[0] = _mm512_add_epi64(sums[0], data);
            sums[1] = _mm512_add_epi64(sums[1], sums[0]);
        }
    }
    let mut found = WordSums::default();
    // SAFETY: both have 64 bytes.
    unsafe {
        _mm512_storeu_si512(found.sums.as_mut_ptr().cast(), sums[0]);
        _mm512_storeu_si512(found.running_sums.as_mut_ptr().cast(), sums[1]);
    }
    PageChecksums {
        crc: folded.finish(),
        words: found.finish(),
    }
}

#[target_feature(enable = "avx2,pclmulqdq")]
fn fold_half(accumulator: __m128i, multipliers: __m128i, data: __m128i) -> __m128i {
    let low = _mm_clmulepi64_si128::<0x00>(accumulator, multipliers);
    let high = _mm_clmulepi64_si128::<0x11>(accumulator, multipliers);
    _mm_xor_si128(_mm_xor_si128(low, high), data)
}

/// The same folding in 16-byte lanes, as there is no wider multiplication.
#[target_feature(enable = "avx2,pclmulqdq,sse4.2")]
unsafe fn stream_avx2<const N: usize>(
    targets: [*mut u8; N],
    page: &[u8; PAGE_BYTES],
) -> PageChecksums {
    const PAIRS: usize = 4;
    const BLOCK: usize = PAIRS * 32;
    let (low, high) = const { fold_by(BLOCK as u32 * 8) };
    let by_block = _mm_set_epi64x(high, low);
    let mut start = _mm_set_epi32(0, 0, 0, -1);
    let mut lanes = [[_mm_setzero_si128(); 2]; PAIRS];
    // The sums by the halves of lines.
    let mut sums = [[_mm256_setzero_si256(); 2]; 2];
    for block in (0..PAGE_BYTES).step_by(BLOCK) {
        for (i, [first, second]) in lanes.iter_mut().enumerate() {
            let at = block + i * 32;
            // SAFETY: `at + 32 <= PAGE_BYTES`; targets as the caller promised.
            let data = unsafe { load_256(page.as_ptr().add(at)) };
            for target in targets {
                // SAFETY: as above.
                unsafe { _mm256_stream_si256(target.add(at).cast(), data) };
            }
            let half = _mm_xor_si128(_mm256_castsi256_si128(data), start);
            *first = fold_half(*first, by_block, half);
            *second = fold_half(*second, by_block, _mm256_extracti128_si256::<1>(data));
            start = _mm_setzero_si128();
            let [first, second] = &mut sums[i % 2];
            *first = _mm256_add_epi64(*first, data);
            *second = _mm256_add_epi64(*second, *first);
        }
    }
    let mut found = WordSums::default();
    for (half, [first, second]) in sums.into_iter().enumerate() {
        let (sums, seconds) = (
            &mut found.sums[half * 4..],
            &mut found.running_sums[half * 4..],
        );
        // SAFETY: at least 32 bytes are left of each.
        unsafe {
            _mm256_storeu_si256(sums.as_mut_ptr().cast(), first);
            _mm256_storeu_si256(seconds.as_mut_ptr().cast(), second);
        }
    }
    let crc = lanes.into_iter().flatten().fold(0, |crc, lane| {
        let crc = _mm_crc32_u64(crc, _mm_cvtsi128_si64(lane) as u64);
        _mm_crc32_u64(crc, _mm_extract_epi64::<1>(lane) as u64)
    });
    PageChecksums {
        crc: !(crc as u32),
        words: found.finish(),
    }
}

#[target_feature(enable = "sse4.2")]
unsafe fn stream_sse42<const N: usize>(
    targets: [*mut u8; N],
    page: &[u8; PAGE_BYTES],
) -> PageChecksums {
    let mut crc = u64::from(u32::MAX);
    let mut found = WordSums::default();
    for at in (0..PAGE_BYTES).step_by(16) {
        // SAFETY: `at + 16 <= PAGE_BYTES`; targets as the caller promised.
        let data = unsafe { load_128(page.as_ptr().add(at)) };
        for target in targets {
            // SAFETY: as above.
            unsafe { _mm_stream_si128(target.add(at).cast(), data) };
        }
        let words = [
            _mm_cvtsi128_si64(data) as u64,
            _mm_extract_epi64::<1>(data) as u64,
        ];
        for (place, word) in (at / 8 % 8..).zip(words) {
            crc = _mm_crc32_u64(crc, word);
            found.add_word(place, word);
        }
    }
    PageChecksums {
        crc: !(crc as u32),
        words: found.finish(),
    }
}

unsafe fn stream_sse2<const N: usize>(
    targets: [*mut u8; N],
    page: &[u8; PAGE_BYTES],
) -> PageChecksums {
    let mut crc = 0;
    let mut found = WordSums::default();
    for at in (0..PAGE_BYTES).step_by(64) {
        let mut line = [0u8; 64];
        // A volatile copy: the compiler must not load the source again.
        // SAFETY: `at + 64 <= PAGE_BYTES`, and bytes need no alignment.
        line.copy_from_slice(&unsafe { page.as_ptr().add(at).cast::<[u8; 64]>().read_volatile() });
        for target in targets {
            for part in (0..64).step_by(16) {
                // SAFETY: targets as the caller promised; SSE2 is part of x86-64.
                unsafe {
                    let data = _mm_loadu_si128(line.as_ptr().add(part).cast());
                    _mm_stream_si128(target.add(at + part).cast(), data);
                }
            }
        }
        crc = crc32c_append(crc, &line);
        found.add(&line);
    }
    PageChecksums {
        crc,
        words: found.finish(),
    }
}
