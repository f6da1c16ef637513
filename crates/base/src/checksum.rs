//! CRC32C (the Castagnoli polynomial, RFC 3720 section 12.1), reflected,
//! initial value and final xor all ones.

/// The CRC32C of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// Extends the CRC32C `seed` by `bytes`.
#[must_use]
pub fn crc32c_append(seed: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(seed, bytes)
}

/// The bit of `len_bytes` bytes that was flipped, if one flipped bit explains that their CRC32C is
/// `found` and not `expected`. Bits count from the first byte's lowest bit.
///
/// CRC32C distinguishes two flipped bits from one, at any length used here (Koopman 2002: Hamming
/// distance 4 up to 2^31 bits). Other damage looks like a flipped bit with probability bits / 2^32.
#[must_use]
pub fn flipped_bit(len_bytes: usize, found: u32, expected: u32) -> Option<usize> {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let syndrome = found ^ expected;
    // The effect of a flip of the last bit on the sum; each bit earlier is one more step of the
    // division.
    let mut effect = POLYNOMIAL;
    for bit in (0..len_bytes * 8).rev() {
        if effect == syndrome {
            return Some(bit);
        }
        effect = (effect >> 1) ^ if effect & 1 != 0 { POLYNOMIAL } else { 0 };
    }
    None
}

/// The checksums of a page. The first locates a flipped bit; the second verifies that nothing else
/// differs.
/// no more than that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageChecksums {
    /// CRC32C.
    pub crc: u32,
    /// Its [`word_sum`].
    pub words: u16,
}

impl PageChecksums {
    /// The checksums of whole lines.
    #[must_use]
    pub fn of(bytes: &[u8]) -> PageChecksums {
        PageChecksums {
            crc: crc32c(bytes),
            words: word_sum(bytes),
        }
    }
}

/// The state of a word sum: for each word position in a line of 64 bytes the sum of all words
/// there, and the sum of these sums after each line, modulo 2^64 (after J. Fletcher, "An Arithmetic
/// Checksum for Serial Transmissions", IEEE Transactions on Communications 30 (1), 1982). It needs
/// additions only, which a processor vectorizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WordSums {
    /// The sums by word position.
    pub sums: [u64; 8],
    /// The sums of the sums.
    pub running_sums: [u64; 8],
}

impl WordSums {
    /// Adds a line.
    #[inline(always)]
    pub fn add(&mut self, line: &[u8; 64]) {
        for (place, word) in line.as_chunks::<8>().0.iter().enumerate() {
            self.add_word(place, u64::from_le_bytes(*word));
        }
    }

    /// Adds the word at a position of a line; the words of one position in their order.
    #[inline(always)]
    pub fn add_word(&mut self, place: usize, word: u64) {
        self.sums[place] = self.sums[place].wrapping_add(word);
        self.running_sums[place] = self.running_sums[place].wrapping_add(self.sums[place]);
    }

    /// Folds the sixteen sums into 16 bits. A change of one word always changes the 64-bit value
    /// before the last step, because its factor is odd.
    #[must_use]
    pub fn finish(&self) -> u16 {
        /// 2^64 divided by the golden ratio.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let factors = (0..8).map(|place| STEP.wrapping_mul(2 * place + 1));
        let places = self.sums.iter().zip(&self.running_sums).zip(factors);
        let sum = places.fold(0u64, |sum, ((first, second), factor)| {
            let first = first.wrapping_mul(factor);
            // An even factor: the factor of the first sum stays odd for any number of second sums.
            let second = second.wrapping_mul(factor.rotate_left(32) << 1);
            sum.wrapping_add(first).wrapping_add(second)
        });
        ((sum ^ sum >> 32).wrapping_mul(STEP) >> 48) as u16
    }
}

/// A second sum of 16 bits, independent of CRC32C. Bytes after the last whole line of 64 are
/// ignored.
#[must_use]
pub fn word_sum(bytes: &[u8]) -> u16 {
    let mut sums = WordSums::default();
    bytes.as_chunks().0.iter().for_each(|line| sums.add(line));
    sums.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_bit_flip_is_located_and_double_flip_is_not() {
        let sound: Vec<u8> = (0..96u8).map(|i| i.wrapping_mul(7)).collect();
        let sum = crc32c(&sound);
        assert_eq!(flipped_bit(96, sum, sum), None);
        for bit in 0..96 * 8 {
            let mut bytes = sound.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(flipped_bit(96, crc32c(&bytes), sum), Some(bit));
            let other = (bit * 31 + 5) % (96 * 8);
            bytes[other / 8] ^= 1 << (other % 8);
            assert_eq!(flipped_bit(96, crc32c(&bytes), sum), None);
        }
    }

    #[test]
    fn matches_the_vectors_of_rfc_3720_appendix_b4() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
    }

    /// Bytes that differ by a flipped bit and a multiple of the polynomial have the same CRC32C as
    /// those with only the flipped bit.
    #[test]
    fn word_sum_rejects_damage_that_looks_like_one_flip() {
        const LEN: usize = 64;
        const BIT: usize = 77;
        const POLYNOMIAL: u64 = 1 << 32 | 0x1edc_6f41;
        let sound: Vec<u8> = (0..LEN as u8).map(|i| i.wrapping_mul(29)).collect();
        let (sum, words) = (crc32c(&sound), word_sum(&sound));
        for first in 0..LEN * 8 - 32 {
            let mut bytes = sound.clone();
            bytes[BIT / 8] ^= 1 << (BIT % 8);
            for (bit, power) in (first..).zip((0..=32).rev()) {
                bytes[bit / 8] ^= ((POLYNOMIAL >> power & 1) as u8) << (bit % 8);
            }
            assert_eq!(flipped_bit(LEN, crc32c(&bytes), sum), Some(BIT));
            bytes[BIT / 8] ^= 1 << (BIT % 8);
            assert_ne!(word_sum(&bytes), words, "{first}");
        }
    }

    /// The sums are part of the pool format.
    #[test]
    fn word_sum_matches_format_vectors() {
        let ascending: Vec<u8> = (0..=255).cycle().take(4096).collect();
        assert_eq!(word_sum(&ascending), 0xa02f);
        assert_eq!(word_sum(&[0xff; 4096]), 0xd1cd);
        let mut one = [0; 4096];
        one[0] = 1;
        assert_eq!(word_sum(&one), 0x8d0b);
        assert_eq!(word_sum(&[0; 4096]), 0);
    }

    #[test]
    fn appending_equals_concatenating() {
        let bytes: Vec<u8> = (0..=255).collect();
        for cut in 0..bytes.len() {
            let (head, tail) = bytes.split_at(cut);
            assert_eq!(crc32c_append(crc32c(head), tail), crc32c(&bytes));
        }
    }
}
