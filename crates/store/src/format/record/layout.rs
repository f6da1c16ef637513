//! The places of a record's fields in its lines.

use super::Line;
use crate::format::geometry::OBJECT_BYTES;
use crate::format::slot::FRAMES_MAX;
use pagemesh_base::units::LINE_BYTES;

/// Bits of the count in a head's half word; the bits above hold the lines before.
pub(super) const COUNT_BITS: u32 = 10;
/// Bit in a head's byte for the level: the group continues after the record.
pub(super) const GROUP_CONTINUES: u8 = 1 << 7;
pub(super) const KIND_MAP: u8 = 1;
pub(super) const KIND_OBJECT: u8 = 2;
pub(super) const KIND_PAD: u8 = 3;
/// A map with second sums of its data. Its slots have no check bits: their places hold the sum, the
/// lower byte in the old slot.
pub(super) const KIND_SUMMED_MAP: u8 = 4;
/// A patch by a build in which heads had no sum of their own: its sum covers all of its lines.
pub(super) const KIND_OLDER_PATCH: u8 = 5;
/// A map of one page that is changed in place: the bytes are in the lines after the head. The count
/// counts the bytes. The field of the second sum holds the offset of the first byte in the page.
/// Both slots name the same frame, so the frame's bits in the new slot hold the sum of these lines.
/// The record's own sum covers the head alone, so a reader that does not need the bytes does not
/// read them.
pub(super) const KIND_PATCH: u8 = 6;
/// A map with second sums that keeps a birth: the pages that it writes were born before, on another
/// leg or in another frame. The birth takes the place of `open`, which is 0.
pub(super) const KIND_KEPT_BIRTH: u8 = 7;
/// A map of frames with pages that were written and stored before, for the versions of a slice. It has no sums, and the words
/// of the frames stay.
pub(super) const KIND_ADOPTION: u8 = 8;
/// The byte of those lines in the place of the kind. It is no kind, and no single flipped bit makes
/// it one. So user bytes are never decoded as a record.
pub(super) const KIND_BYTES: u8 = 0xf0;
/// Bytes of the line before the kind.
pub(super) const BYTES_BEFORE_KIND: usize = 4;
/// Lines of an object record: its head, and the entry.
pub(crate) const OBJECT_LINES: usize = 1 + OBJECT_BYTES as usize / LINE_BYTES;
/// The byte of the first change in a head, and the byte of its checksum, which `open` follows.
pub(super) const FIRST_AT: usize = 32;
pub(super) const DATA_CRC_AT: usize = 48;
/// The bit of the kind in a head's first word.
pub(super) const KIND_SHIFT: u32 = 32;
/// The bit of the second sum's byte in a slot's word.
pub(super) const SUM_SHIFT: u32 = 56;
/// The frame in a slot's word.
pub(super) const FRAME_MASK: u64 = FRAMES_MAX - 1;
/// The byte of the first change's new slot in a head.
pub(super) const NEW_AT: usize = FIRST_AT + 8;
pub(super) const ENTRY_BYTES: usize = 20;
pub(super) const ENTRIES_PER_LINE: usize = LINE_BYTES / ENTRY_BYTES;

/// A head as words.
pub(super) type Words = [u64; 8];

pub(super) fn to_line(words: &Words) -> Line {
    let mut line = [0; LINE_BYTES];
    for (bytes, word) in line.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    line
}

/// Whether a line has the kind of a patch's head; the line may be damaged.
pub(super) fn is_patch_head(line: &Line) -> bool {
    line[BYTES_BEFORE_KIND] == KIND_PATCH
}

/// The slots of a change with a sum in place of their check bits.
pub(super) fn with_sum([old, new]: [u64; 2], sum: u16) -> [u64; 2] {
    let with = |slot, byte| slot & !(0xff << SUM_SHIFT) | u64::from(byte) << SUM_SHIFT;
    let [low, high] = sum.to_le_bytes();
    [with(old, low), with(new, high)]
}

/// The word of the new slot, with the sum of a patch's bytes in place of the frame.
pub(super) fn with_patch_sum(new: u64, sum: u32) -> u64 {
    new & !FRAME_MASK | u64::from(sum)
}

/// Kind, level and count: the first word without its checksum.
pub(super) fn first_word(kind: u8, level: u8, count: u16) -> u64 {
    u64::from(kind) << KIND_SHIFT | u64::from(level) << 40 | u64::from(count) << 48
}

pub(super) fn pack_u32s(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The count of pages, from the half word that also has the lines before.
pub(super) fn page_count(packed: u16) -> usize {
    usize::from(packed & ((1 << COUNT_BITS) - 1))
}

/// The location of change number `index`: line and byte.
pub(super) fn change_at(index: usize) -> (usize, usize) {
    if index == 0 {
        return (0, FIRST_AT);
    }
    let entry = index - 1;
    let line = 1 + entry / ENTRIES_PER_LINE;
    (line, entry % ENTRIES_PER_LINE * ENTRY_BYTES)
}
