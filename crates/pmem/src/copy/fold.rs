//! CRC32C by carry-less multiplication of 512-bit lanes, 256 bytes at a time:
//! V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
//! PCLMULQDQ Instruction", Intel 2009, in its bit-reflected form.

use super::checksum::fold_by;
use std::arch::x86_64::*;

pub(super) const LINES_PER_BLOCK: usize = 4;
pub(super) const BLOCK: usize = LINES_PER_BLOCK * 64;

#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(accumulator: __m512i, multipliers: __m512i, data: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(accumulator, multipliers);
    let high = _mm512_clmulepi64_epi128::<0x11>(accumulator, multipliers);
    // 0x96 is the truth table of a three-way xor.
    _mm512_ternarylogic_epi64::<0x96>(low, high, data)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn broadcast_pair((low, high): (i64, i64)) -> __m512i {
    _mm512_set_epi64(high, low, high, low, high, low, high, low)
}

/// The state of a page's CRC32C.
pub(super) struct CrcFold512 {
    lanes: [__m512i; LINES_PER_BLOCK],
    by_block: __m512i,
    start: __m512i,
}

impl CrcFold512 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new() -> CrcFold512 {
        CrcFold512 {
            lanes: [_mm512_setzero_si512(); LINES_PER_BLOCK],
            by_block: broadcast_pair(const { fold_by(BLOCK as u32 * 8) }),
            // The initial value of all ones enters with the first four bytes. Before
            // it nothing is accumulated, and a fold of zero is zero.
            start: _mm512_maskz_set1_epi32(1, -1),
        }
    }

    /// The same from a register of zeroes.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn from_zero() -> CrcFold512 {
        CrcFold512 {
            start: _mm512_setzero_si512(),
            ..CrcFold512::new()
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) fn add_block(&mut self, block: &[u8; BLOCK]) {
        for line in 0..LINES_PER_BLOCK {
            // SAFETY: a line of the block.
            let data = unsafe { _mm512_loadu_si512(block.as_ptr().add(line * 64).cast()) };
            self.add(line, data);
        }
    }

    /// Adds the line `line` of the next block.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) fn add(&mut self, line: usize, data: __m512i) {
        let lane = &mut self.lanes[line];
        *lane = fold(*lane, self.by_block, _mm512_xor_si512(data, self.start));
        self.start = _mm512_setzero_si512();
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    pub(super) fn finish(self) -> u32 {
        !self.register()
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    pub(super) fn register(self) -> u32 {
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
