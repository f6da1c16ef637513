//! The word of a frame in its frame table: the checksum of the page in the frame, and the birth of
//! the page.
//!
//! ```text
//! bits  0..32  CRC32C of the page
//! bits 32..60  the epoch of the page's birth; 0 if it is unknown
//! bits 60..64  check bits of the others
//! ```
//!
//! The birth is the epoch of the record that wrote the page, so a write stores both as one word. A
//! leg that was lost at an epoch misses the pages that were born since.
//!
//! Invariant: every writer stores a whole word with right check bits. Where they are wrong, the
//! medium changed the word: the birth is unknown, and a change of a part of the page copies it into
//! another frame. The word of a node's frame belongs to the page that the frame held before.

use pagemesh_base::ids::{EPOCH_MAX, Epoch};

const BIRTH_SHIFT: u32 = 32;
const CHECK_SHIFT: u32 = 60;

/// A word of a frame table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameWord(u64);

impl FrameWord {
    /// The word of a page with this checksum and birth. A birth beyond the highest epoch becomes
    /// the highest.
    #[inline]
    #[must_use]
    pub fn new(crc: u32, birth: Epoch) -> FrameWord {
        let bits = u64::from(crc) | u64::from(birth.0.min(EPOCH_MAX)) << BIRTH_SHIFT;
        FrameWord(bits | u64::from(check(bits)) << CHECK_SHIFT)
    }

    /// A word as it lies on a medium.
    #[inline]
    #[must_use]
    pub fn from_bits(bits: u64) -> FrameWord {
        FrameWord(bits)
    }

    /// The bits as they lie on a medium.
    #[inline]
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The checksum of the page. The check bits need not be right: a wrong checksum shows by the
    /// page.
    #[inline]
    #[must_use]
    pub fn crc(self) -> u32 {
        self.0 as u32
    }

    /// Whether the check bits are right.
    #[inline]
    #[must_use]
    pub fn is_sound(self) -> bool {
        u64::from(check(self.0)) == self.0 >> CHECK_SHIFT
    }

    /// The word before the damage, if one bit of its checksum was flipped: `crc` is of the page, and
    /// with it the check bits are right.
    pub(crate) fn with_corrected_crc(self, crc: u32) -> Option<FrameWord> {
        let corrected = FrameWord(self.0 ^ u64::from(self.crc() ^ crc));
        let is_one_bit = (self.crc() ^ crc).is_power_of_two();
        (is_one_bit && corrected.is_sound()).then_some(corrected)
    }

    /// The epoch of the page's birth. None if it is unknown: if the check bits are wrong, or if the
    /// writer did not know it.
    #[must_use]
    pub fn birth(self) -> Option<Epoch> {
        let birth = Epoch((self.0 >> BIRTH_SHIFT) as u32 & EPOCH_MAX);
        (self.is_sound() && birth.0 > 0).then_some(birth)
    }
}

/// The birth of a page, or of a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageBirth {
    /// The page was never written.
    NeverWritten,
    /// The epoch of the record that wrote it.
    At(Epoch),
    /// The medium damaged it, or the page changes at this time.
    Unknown,
}

/// CRC-4 with the polynomial x^4 + x + 1 over the low 60 bits. It detects every flipped bit. Its
/// period is 15, so the four parts of 15 bits are added up first.
#[inline]
fn check(bits: u64) -> u8 {
    static TABLES: [[u8; 256]; 2] = tables();
    let folded = (bits ^ bits >> 15 ^ bits >> 30 ^ bits >> 45) & 0x7fff;
    TABLES[0][folded as usize & 0xff] ^ TABLES[1][folded as usize >> 8]
}

/// The check bits of the lower and of the upper byte of 15 bits.
const fn tables() -> [[u8; 256]; 2] {
    let mut tables = [[0; 256]; 2];
    let mut byte = 0;
    while byte < 256 {
        // Bit 0 counts x^0, and bit 8 of the folded bits x^8.
        let (mut power, mut bit) = (1u8, 0);
        while bit < 16 {
            if byte >> (bit % 8) & 1 != 0 {
                tables[bit / 8][byte] ^= power;
            }
            power = power << 1;
            if power & 0x10 != 0 {
                power ^= 0x13;
            }
            bit += 1;
        }
        byte += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frame_word_has_documented_bits() {
        let word = FrameWord::new(0xdead_beef, Epoch(5));
        assert_eq!(word.bits() & ((1 << CHECK_SHIFT) - 1), 0x5_dead_beef);
        assert_eq!(FrameWord::new(0, Epoch(0)).bits(), 0);
        // x^4 is x + 1.
        assert_eq!(FrameWord::new(1 << 4, Epoch(0)).bits() >> CHECK_SHIFT, 0b11);
    }

    #[test]
    fn word_of_older_build_has_no_birth() {
        for crc in [0, 1, 0x1234_5678, u32::MAX] {
            assert_eq!(FrameWord::from_bits(u64::from(crc)).birth(), None);
        }
    }

    #[test]
    fn word_that_cannot_be_read_is_not_sound() {
        let pattern = pagemesh_pmem::unreadable::PATTERN;
        let word = FrameWord::from_bits(pattern);
        assert!(!word.is_sound() && word.birth().is_none());
        let page: Vec<u8> = (0..512).flat_map(|_| pattern.to_le_bytes()).collect();
        assert_ne!(pagemesh_base::checksum::crc32c(&page), word.crc());
        assert!(
            word.with_corrected_crc(pagemesh_base::checksum::crc32c(&page))
                .is_none()
        );
    }

    #[test]
    fn birth_beyond_highest_epoch_is_highest() {
        let word = FrameWord::new(7, Epoch(u32::MAX));
        assert_eq!(word.birth(), Some(Epoch(EPOCH_MAX)));
    }

    proptest! {
        #[test]
        fn flipped_bit_of_frame_word_is_found(crc in any::<u32>(), birth in 1..=EPOCH_MAX) {
            let word = FrameWord::new(crc, Epoch(birth));
            prop_assert_eq!((word.crc(), word.birth()), (crc, Some(Epoch(birth))));
            for bit in 0..64 {
                let flipped = FrameWord::from_bits(word.bits() ^ 1 << bit);
                prop_assert!(!flipped.is_sound() && flipped.birth().is_none(), "{}", bit);
            }
        }
    }
}
