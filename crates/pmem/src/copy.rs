//! Page copies that compute the checksums from the same registers: past the caches into pools, and
//! out of them.
//!
//! Every kernel loads each source byte exactly once, so a source that changes during the copy
//! cannot make the checksums differ from the stored bytes. No kernel fences.
//!
//! The AVX-512 and AVX2 CRCs fold 256 and 128 bytes at a time by carry-less
//! multiplication:
//! V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
//! PCLMULQDQ Instruction", Intel 2009, in its bit-reflected form.

use crate::cpu::{CopyKernel, cpu};
use pagemesh_base::checksum::{PageChecksums, WordSums, crc32c_append};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::arch::x86_64::*;

/// The most targets of one copy: a mirror has at most three legs.
pub const TARGETS_MAX: usize = 3;

/// The Castagnoli polynomial, bit-reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^n modulo the polynomial, reflected and shifted as a fold multiplier.
const fn multiplier(n: u32) -> i64 {
    (times_x(1 << 31, n) as i64) << 1
}

/// Multipliers that move 16 bytes forward by `bits`: low half, high half.
const fn fold_by(bits: u32) -> (i64, i64) {
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

#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(accumulator: __m512i, multipliers: __m512i, data: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(accumulator, multipliers);
    let high = _mm512_clmulepi64_epi128::<0x11>(accumulator, multipliers);
    // 0x96 is the truth table of a three-way xor.
    _mm512_ternarylogic_epi64::<0x96>(low, high, data)
}

#[target_feature(enable = "avx512f")]
fn broadcast_pair((low, high): (i64, i64)) -> __m512i {
    _mm512_set_epi64(high, low, high, low, high, low, high, low)
}

const LINES_PER_BLOCK: usize = 4;
const BLOCK: usize = LINES_PER_BLOCK * 64;

/// The state of a page's CRC32C.
struct CrcFold512 {
    lanes: [__m512i; LINES_PER_BLOCK],
    by_block: __m512i,
    start: __m512i,
}

impl CrcFold512 {
    #[target_feature(enable = "avx512f")]
    fn new() -> CrcFold512 {
        CrcFold512 {
            lanes: [_mm512_setzero_si512(); LINES_PER_BLOCK],
            by_block: broadcast_pair(const { fold_by(BLOCK as u32 * 8) }),
            // The initial value of all ones enters with the first four bytes. Before
            // it nothing is accumulated, and a fold of zero is zero.
            start: _mm512_maskz_set1_epi32(1, -1),
        }
    }

    /// The same from a register of zeroes.
    #[target_feature(enable = "avx512f")]
    fn from_zero() -> CrcFold512 {
        CrcFold512 {
            start: _mm512_setzero_si512(),
            ..CrcFold512::new()
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add_block(&mut self, block: &[u8; BLOCK]) {
        for line in 0..LINES_PER_BLOCK {
            // SAFETY: a line of the block.
            let data = unsafe { _mm512_loadu_si512(block.as_ptr().add(line * 64).cast()) };
            self.add(line, data);
        }
    }

    /// Adds the line `line` of the next block.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add(&mut self, line: usize, data: __m512i) {
        let lane = &mut self.lanes[line];
        *lane = fold(*lane, self.by_block, _mm512_xor_si512(data, self.start));
        self.start = _mm512_setzero_si512();
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn finish(self) -> u32 {
        !self.register()
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    fn register(self) -> u32 {
        let by_lane = broadcast_pair(const { fold_by(512) });
        let [first, rest @ ..] = self.lanes;
        let folded = rest
            .into_iter()
            .fold(first, |sum, lane| fold(sum, by_lane, lane));
        let mut words = [0u64; 8];
        // SAFETY: `words` has 64 bytes.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), folded) };
        let crc = words
            .into_iter()
            .fold(0, |crc, word| _mm_crc32_u64(crc, word));
        crc as u32
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::checksum::crc32c;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    #[repr(align(64))]
    struct AlignedPage([u8; PAGE_BYTES]);

    fn kernels() -> impl Iterator<Item = CopyKernel> {
        [
            CopyKernel::Avx512,
            CopyKernel::Avx2,
            CopyKernel::Sse42,
            CopyKernel::Sse2,
        ]
        .into_iter()
        .skip_while(|&kernel| kernel != cpu().copy)
    }

    fn check(page: &[u8; PAGE_BYTES]) {
        for kernel in kernels() {
            for count in 1..=TARGETS_MAX {
                let mut pages: Vec<AlignedPage> = (0..count)
                    .map(|_| AlignedPage([0xee; PAGE_BYTES]))
                    .collect();
                let targets: Vec<*mut u8> = pages.iter_mut().map(|p| p.0.as_mut_ptr()).collect();
                // SAFETY: aligned pages of our own, a kernel this CPU has.
                let sums = unsafe { stream_page_by(kernel, &targets, page) };
                // SAFETY: SSE is part of x86-64.
                unsafe { _mm_sfence() };
                assert_eq!(
                    sums,
                    PageChecksums::of(page),
                    "{kernel:?} to {count} targets"
                );
                assert!(pages.iter().all(|p| p.0 == *page), "{kernel:?}");
            }
            let mut copy = [0xee; PAGE_BYTES];
            // SAFETY: a page of our own, a kernel this CPU has.
            let crc = unsafe { read_page_by(kernel, page.as_ptr(), &mut copy) };
            assert_eq!(crc, crc32c(page), "{kernel:?}");
            assert!(copy == *page, "{kernel:?}");
        }
    }

    /// Changes a part of a page, and compares its patched checksum with a full one.
    fn check_patched(page: &[u8; PAGE_BYTES], within: usize, bytes: &[u8]) {
        let old = &page[within..][..bytes.len()];
        let delta: Vec<u8> = old.iter().zip(bytes).map(|(old, new)| old ^ new).collect();
        let mut patched = *page;
        patched[within..][..bytes.len()].copy_from_slice(bytes);
        let behind = PAGE_BYTES - within - bytes.len();
        for kernel in kernels() {
            // SAFETY: a kernel this CPU has.
            let found = unsafe { crc32c_patched_by(kernel, crc32c(page), &delta, behind) };
            let place = format!("{kernel:?}: {} bytes at {within}", bytes.len());
            assert_eq!(found, crc32c(&patched), "{place}");
        }
    }

    #[test]
    fn patched_crc_equals_crc_of_whole_page() {
        let page = std::array::from_fn(|at| (at * 7 % 251) as u8);
        for at in 0..PAGE_BYTES {
            check_patched(&page, at, &[0x5a]);
            check_patched(&page, at, &[0x5a; 70][..70.min(PAGE_BYTES - at)]);
        }
        check_patched(&page, 0, &[0x11; PAGE_BYTES]);
        check_patched(&page, 17, &[]);
    }

    #[test]
    fn crc_of_lines_continues_from_any_seed() {
        let line = |at: usize| std::array::from_fn(|i| (at * 31 + i * 7) as u8);
        let lines: Vec<[u8; LINE_BYTES]> = (0..150).map(line).collect();
        for kernel in kernels() {
            for count in 0..lines.len() {
                let (lines, seed) = (&lines[..count], 0x1234_5678 ^ count as u32);
                // SAFETY: a kernel this CPU has.
                let found = unsafe { crc32c_lines_by(kernel, seed, lines) };
                let expected = crc32c_append(seed, lines.as_flattened());
                assert_eq!(found, expected, "{kernel:?}: {count} lines");
            }
        }
    }

    /// Another thread stores to the source all the time.
    #[test]
    fn checksums_match_copy_while_source_changes() {
        let words: Vec<AtomicU64> = (0..PAGE_BYTES as u64 / 8).map(AtomicU64::new).collect();
        let is_over = AtomicBool::new(false);
        struct SetOnDrop<'a>(&'a AtomicBool);
        impl Drop for SetOnDrop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let from: *const u8 = words.as_ptr().cast();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 1u64;
                while !is_over.load(Ordering::Relaxed) {
                    for word in words.iter().rev() {
                        value = value
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1);
                        word.store(value, Ordering::Relaxed);
                    }
                }
            });
            let _over = SetOnDrop(&is_over);
            let mut copy = [0; PAGE_BYTES];
            let mut pages = [0; TARGETS_MAX].map(|byte| AlignedPage([byte; PAGE_BYTES]));
            let targets = pages.each_mut().map(|page| page.0.as_mut_ptr());
            for kernel in kernels() {
                for _ in 0..3000 {
                    // SAFETY: the words outlive this, and the processor has the kernel.
                    let found = unsafe { read_page_by(kernel, from, &mut copy) };
                    assert_eq!(found, crc32c(&copy), "{kernel:?}");
                    // SAFETY: the same, and pages of our own. A program that stores to a buffer
                    // after it passed it to write does the same.
                    let sums = unsafe { stream_page_by(kernel, &targets, &*from.cast()) };
                    // SAFETY: SSE is part of x86-64.
                    unsafe { _mm_sfence() };
                    for (target, page) in pages.iter().enumerate() {
                        assert_eq!(sums, PageChecksums::of(&page.0), "{kernel:?} {target}");
                    }
                }
            }
        });
    }

    #[test]
    fn stream_writes_exactly_given_bytes() {
        let page: [u8; PAGE_BYTES] = std::array::from_fn(|at| (at * 7 % 251) as u8);
        for kernel in kernels() {
            for (shift, len) in [
                (0, 0),
                (1, 1),
                (0, 63),
                (5, 64),
                (0, 65),
                (7, 512),
                (3, 4093),
            ] {
                let mut target = AlignedPage([0xee; PAGE_BYTES]);
                let from = &page[shift..][..len];
                // SAFETY: an aligned page of our own, a kernel this CPU has.
                unsafe { stream_shared_by(kernel, from.as_ptr(), target.0.as_mut_ptr(), len) };
                store_fence();
                assert_eq!(&target.0[..len], from, "{kernel:?}: {len} bytes");
                assert!(
                    target.0[len..].iter().all(|&byte| byte == 0xee),
                    "{kernel:?}"
                );
            }
        }
    }

    #[test]
    fn copies_and_sums_plain_pages() {
        check(&[0; PAGE_BYTES]);
        check(&[0xff; PAGE_BYTES]);
    }

    #[test]
    fn checksums_depend_on_every_byte() {
        for at in 0..PAGE_BYTES {
            let mut page = [0; PAGE_BYTES];
            page[at] = 1;
            check(&page);
        }
    }

    proptest! {
        #[test]
        fn patched_crc_is_right_for_any_part(
            bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES),
            new in prop::collection::vec(any::<u8>(), 0..=PAGE_BYTES),
            place in 0usize..=PAGE_BYTES,
        ) {
            let page = bytes.as_slice().try_into().expect("a page");
            check_patched(page, place.min(PAGE_BYTES - new.len()), &new);
        }

        #[test]
        fn page_copy_is_right_for_any_alignment(
            bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES + 64),
            shift in 0usize..64,
        ) {
            check(bytes[shift..][..PAGE_BYTES].try_into().expect("a page"));
        }
    }
}
