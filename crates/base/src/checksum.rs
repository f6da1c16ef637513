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

    #[test]
    fn appending_equals_concatenating() {
        let bytes: Vec<u8> = (0..=255).collect();
        for cut in 0..bytes.len() {
            let (head, tail) = bytes.split_at(cut);
            assert_eq!(crc32c_append(crc32c(head), tail), crc32c(&bytes));
        }
    }
}
