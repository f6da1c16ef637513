//! A page-table entry, which maps one page of an object, or one node below another. It has eight
//! bytes and is swapped as one word.

use pagemesh_base::ids::{EPOCH_MAX, Epoch, FrameNo};
use std::fmt;

const FRAME_BITS: u32 = 36;
const HOLE_BIT: u32 = 36;
const GENERATION_SHIFT: u32 = 44;
const CHECK_SHIFT: u32 = 56;
const GENERATION_MASK: u64 = 0xfff;
const CHANGING_BIT: u32 = 37;
/// Bits 38 to 43 are zero until something uses them.
const RESERVED: u64 = 0b11_1111 << 38;

/// Frames a slot can name: 256 TiB of them.
pub const FRAMES_MAX: u64 = 1 << FRAME_BITS;

/// A slot that had right check bits when it was decoded or made.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Slot(u64);

/// A slot with wrong check bits, or with bits that no version uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {0:#018x} is damaged: its check bits do not match")]
pub struct DamagedSlot(pub u64);

impl Slot {
    /// Never written: reads as zeroes. The only slot without a generation.
    pub const EMPTY: Slot = Slot(0);

    /// The slot that replaces this one and maps to `frame`.
    ///
    /// # Panics
    /// When the frame is beyond its maximum.
    #[must_use]
    pub fn map(self, frame: FrameNo) -> Slot {
        assert!(frame.0 < FRAMES_MAX, "frame {frame} cannot be named");
        self.next(frame.0)
    }

    /// The slot that replaces this one and reads as zeroes. Unlike [`Slot::EMPTY`] it has a
    /// generation, and the birth of the hole: 0 if it is unknown, and at most the highest epoch.
    #[must_use]
    pub fn unmap(self, birth: Epoch) -> Slot {
        self.next(1 << HOLE_BIT | u64::from(birth.0.min(EPOCH_MAX)))
    }

    /// The same slot, marked while bytes of its frame are changed in place. A reader that finds it,
    /// or that finds another slot after its copy of the page, has read a page that may be torn.
    ///
    /// # Panics
    /// When it maps no frame.
    #[must_use]
    pub fn changing(self) -> Slot {
        assert!(self.frame().is_some(), "a hole is not changed in place");
        Slot::with_check(self.0 | 1 << CHANGING_BIT)
    }

    /// Whether the page is being changed in place.
    #[must_use]
    pub fn is_changing(self) -> bool {
        self.0 >> CHANGING_BIT & 1 != 0
    }

    /// The slot with these low bits and matching check bits.
    fn with_check(bits: u64) -> Slot {
        let bits = bits & ((1 << CHECK_SHIFT) - 1);
        Slot(bits | u64::from(check(bits)) << CHECK_SHIFT)
    }

    fn next(self, target: u64) -> Slot {
        // Zero is skipped, so that no slot but EMPTY has all bits zero.
        let generation = match (self.generation() + 1) & GENERATION_MASK {
            0 => 1,
            generation => generation,
        };
        Slot::with_check(target | generation << GENERATION_SHIFT)
    }

    /// Reads a slot that came from media.
    ///
    /// # Errors
    /// When its check bits do not match the other bits. They detect every flipped bit and every
    /// two.
    pub fn decode(bits: u64) -> Result<Slot, DamagedSlot> {
        match u64::from(check(bits)) == bits >> CHECK_SHIFT {
            true => Slot::of_checked(bits),
            false => Err(DamagedSlot(bits)),
        }
    }

    /// The slot with these bits; the check bits are right.
    fn of_checked(bits: u64) -> Result<Slot, DamagedSlot> {
        let slot = Slot(bits);
        let framed_hole = slot.is_hole() && bits & (FRAMES_MAX - 1) > u64::from(EPOCH_MAX);
        let changing_hole = slot.is_hole() && slot.is_changing();
        let ungenerated = bits != 0 && slot.generation() == 0;
        match bits & RESERVED == 0 && !framed_hole && !changing_hole && !ungenerated {
            true => Ok(slot),
            false => Err(DamagedSlot(bits)),
        }
    }

    /// Decodes a slot stored where other data takes the place of its check bits.
    ///
    /// # Errors
    /// When it sets bits that no version uses.
    pub(crate) fn decode_unchecked(bits: u64) -> Result<Slot, DamagedSlot> {
        Slot::of_checked(Slot::with_check(bits).0)
    }

    /// The slot before the damage, if one bit was flipped: check bits of this kind tell one flipped
    /// bit from two (ITU-T I.432.1).
    #[must_use]
    pub fn correct(bits: u64) -> Option<Slot> {
        (0..64).find_map(|bit| Slot::decode(bits ^ 1 << bit).ok())
    }

    /// The bits as they lie on media.
    #[must_use]
    pub fn encode(self) -> u64 {
        self.0
    }

    /// The frame that this slot maps to; none reads as zeroes.
    #[must_use]
    pub fn frame(self) -> Option<FrameNo> {
        let mapped = self != Slot::EMPTY && !self.is_hole();
        mapped.then_some(FrameNo(self.0 & (FRAMES_MAX - 1)))
    }

    /// The birth of a hole. None if it is unknown, or if the slot is no hole: the frame table has
    /// the birth of a page.
    #[must_use]
    pub fn hole_birth(self) -> Option<Epoch> {
        let birth = Epoch(self.0 as u32 & EPOCH_MAX);
        (self.is_hole() && birth.0 > 0).then_some(birth)
    }

    fn is_hole(self) -> bool {
        self.0 >> HOLE_BIT & 1 != 0
    }

    fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT & GENERATION_MASK
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("frame", &self.frame())
            .field("hole_birth", &self.hole_birth())
            .field("generation", &self.generation())
            .field("is_changing", &self.is_changing())
            .finish()
    }
}

/// CRC-8 with the polynomial x^8 + x^2 + x + 1 (ITU-T I.432.1, header error control) over the low
/// seven bytes. The check of a zero word is zero. There is one table per byte, so that the lookups
/// do not wait for each other.
fn check(bits: u64) -> u8 {
    static TABLES: [[u8; 256]; 7] = tables();
    let bytes = bits.to_le_bytes();
    let mut crc = 0;
    let mut i = 0;
    while i < 7 {
        crc ^= TABLES[i][bytes[i] as usize];
        i += 1;
    }
    crc
}

/// The last table is for the last byte. Each table before it shifts its result through one byte
/// more.
const fn tables() -> [[u8; 256]; 7] {
    let mut tables = [[0; 256]; 7];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u8;
        let mut i = 7;
        while i > 0 {
            i -= 1;
            crc = shift_byte(crc);
            tables[i][byte] = crc;
        }
        byte += 1;
    }
    tables
}

const fn shift_byte(mut crc: u8) -> u8 {
    let mut bit = 0;
    while bit < 8 {
        crc = if crc & 0x80 != 0 {
            crc << 1 ^ 0x07
        } else {
            crc << 1
        };
        bit += 1;
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn swapped_slot_differs_with_same_frame() {
        let mut slot = Slot::EMPTY;
        for _ in 0..5000 {
            let next = slot.map(FrameNo(7));
            assert_ne!(next, slot);
            slot = next.unmap(Epoch(0));
            assert_ne!(slot, Slot::EMPTY);
            assert_eq!(slot.frame(), None);
        }
    }

    #[test]
    fn frame_zero_is_not_a_hole() {
        assert_eq!(Slot::EMPTY.frame(), None);
        assert_eq!(Slot::EMPTY.map(FrameNo(0)).frame(), Some(FrameNo(0)));
    }

    #[test]
    fn slot_check_is_bytewise_crc() {
        for seed in 0..1000u64 {
            let bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8;
            let serial = bits.to_le_bytes()[..7]
                .iter()
                .fold(0, |crc, byte| shift_byte(crc ^ byte));
            assert_eq!(check(bits), serial);
        }
    }

    proptest! {
        #[test]
        fn slot_round_trips(frame in 0..FRAMES_MAX, birth in 1..=EPOCH_MAX, times in 1u32..5000) {
            let old = (0..times).fold(Slot::EMPTY, |slot, _| slot.unmap(Epoch(0)));
            let slot = old.map(FrameNo(frame));
            prop_assert_eq!(Slot::decode(slot.encode()), Ok(slot));
            prop_assert_eq!((slot.frame(), slot.hole_birth()), (Some(FrameNo(frame)), None));
            let changing = slot.changing();
            prop_assert!(changing.is_changing() && !slot.is_changing());
            prop_assert_eq!(Slot::decode(changing.encode()), Ok(changing));
            prop_assert_eq!(changing.frame(), Some(FrameNo(frame)));
            prop_assert_eq!(changing.map(FrameNo(frame)), slot.map(FrameNo(frame)));
            let hole = slot.unmap(Epoch(birth));
            prop_assert_eq!(Slot::decode(hole.encode()), Ok(hole));
            prop_assert_eq!((hole.frame(), hole.hole_birth()), (None, Some(Epoch(birth))));
            prop_assert_eq!(hole.unmap(Epoch(u32::MAX)).hole_birth(), Some(Epoch(EPOCH_MAX)));
        }

        #[test]
        fn one_and_two_flipped_bits_are_found(frame in 0..FRAMES_MAX) {
            let slot = Slot::EMPTY.map(FrameNo(frame));
            let bits = slot.encode();
            for one in 0..64 {
                for two in 0..64 {
                    let damage = 1u64 << one | 1 << two;
                    prop_assert!(Slot::decode(bits ^ damage).is_err(), "{one} {two}");
                    let corrected = Slot::correct(bits ^ damage);
                    prop_assert_eq!(corrected, (one == two).then_some(slot));
                }
            }
        }
    }
}
