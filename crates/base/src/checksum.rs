//! CRC32C (the Castagnoli polynomial, RFC 3720 section 12.1), reflected,
//! initial value and final xor all ones.

/// The CRC32C of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// The CRC32C of what `seed` is the CRC32C of, followed by `bytes`.
#[must_use]
pub fn crc32c_append(seed: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(seed, bytes)
}

/// Which bit of `len_bytes` summed bytes was flipped, if one flipped bit
/// explains that their CRC32C is `found` and not `expected`. Counted from the
/// first byte's lowest bit.
///
/// CRC32C tells every two flipped bits from one, at any length used here
/// (Koopman 2002: Hamming distance 4 up to 2^31 bits). Of other damage, it
/// takes one in 2^32 / bits for a flipped bit.
#[must_use]
pub fn flipped_bit(len_bytes: usize, found: u32, expected: u32) -> Option<usize> {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let syndrome = found ^ expected;
    // What a flip of the last bit does to the sum; one bit earlier, one step
    // of the division more.
    let mut effect = POLYNOMIAL;
    for bit in (0..len_bytes * 8).rev() {
        if effect == syndrome {
            return Some(bit);
        }
        effect = (effect >> 1) ^ if effect & 1 != 0 { POLYNOMIAL } else { 0 };
    }
    None
}

/// A second sum, of 16 bits, that CRC32C tells nothing of: the upper bits of the sum,
/// modulo 2^64, of all words, each times an odd number of its own. Bytes behind the last
/// word do not count.
#[must_use]
pub fn word_sum(bytes: &[u8]) -> u16 {
    /// 2^64 divided by the golden ratio.
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut factor = STEP;
    let mut sum = 0u64;
    for word in bytes.as_chunks::<8>().0 {
        sum = sum.wrapping_add(u64::from_le_bytes(*word).wrapping_mul(factor));
        factor = factor.wrapping_add(STEP << 1);
    }
    (sum >> 48) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_named_and_no_two_are_one() {
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

    /// Bytes that differ by a flipped bit and a multiple of the polynomial have the CRC32C
    /// of those with the flipped bit alone.
    #[test]
    fn what_looks_like_a_flipped_bit_has_another_word_sum() {
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
        for bit in 0..LEN * 8 {
            let mut bytes = sound.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(word_sum(&bytes), words, "bit {bit}");
        }
    }

    /// Pools have these sums: they are part of a format.
    #[test]
    fn word_sums_stay_what_they_are() {
        let ascending: Vec<u8> = (0..=255).cycle().take(4096).collect();
        assert_eq!(word_sum(&ascending), 0x3cea);
        assert_eq!(word_sum(&[0xff; 4096]), 0x191a);
        assert_eq!(word_sum(&1u64.to_le_bytes()), 0x9e37);
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
