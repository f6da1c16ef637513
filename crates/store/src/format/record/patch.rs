//! Patches: the bytes of a part of a page in the lines after the head of their record.

use super::encode::RecordAddress;
use super::layout::{
    BYTES_BEFORE_KIND, DATA_CRC_AT, FIRST_AT, FRAME_MASK, KIND_BYTES, KIND_SHIFT, NEW_AT, to_line,
    with_patch_sum, with_sum,
};
use super::{Change, GroupPosition, InvalidRecord, Line, Record};
use crate::format::slot::Slot;
use pagemesh_base::bytes::{get_u32, get_u64};
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::copy::crc32c_lines;

/// Bytes of a page in such a line.
pub(crate) const PATCH_LINE_BYTES: usize = LINE_BYTES - 1;

/// Bytes of a part of a page, to be written in address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patch {
    /// The offset of the first byte in the page.
    pub within: usize,
    /// The number of bytes, less than a page. 0 if the record is no patch.
    pub len: usize,
    /// The bytes; empty if only the head was read.
    pub bytes: Vec<u8>,
}

impl Patch {
    /// Copies the bytes.
    pub(crate) fn set(&mut self, within: usize, bytes: &[u8]) {
        self.within = within;
        self.len = bytes.len();
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        // The bytes' owner may change them meanwhile, so they are copied once and not read again.
        std::hint::black_box(&mut self.bytes);
    }

    /// Makes the record no patch.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.bytes.clear();
    }

    /// Whether the patch is within one page.
    fn is_within_page(&self) -> bool {
        self.len < PAGE_BYTES && self.within + self.len <= PAGE_BYTES
    }

    /// Appends the lines after the head to `into`, and returns their sum.
    pub(crate) fn encode(&self, into: &mut Vec<Line>) -> u32 {
        let start = into.len();
        let (chunks, rest) = self.bytes.as_chunks();
        into.extend(chunks.iter().map(bytes_line));
        if !rest.is_empty() {
            let mut chunk = [0; PATCH_LINE_BYTES];
            chunk[..rest.len()].copy_from_slice(rest);
            into.push(bytes_line(&chunk));
        }
        crc32c_lines(0, &into[start..])
    }
}

/// Lines that a patch of `bytes` bytes takes.
#[must_use]
pub fn patch_lines(bytes: usize) -> usize {
    1 + bytes.div_ceil(PATCH_LINE_BYTES)
}

/// A line of the bytes of a patch.
fn bytes_line(bytes: &[u8; PATCH_LINE_BYTES]) -> Line {
    // By words, as the line is streamed: see `Session::encode_record`.
    let first = get_u64(bytes, 0);
    let low = first & u64::from(u32::MAX);
    let high = (first << 8) & !(u64::MAX >> 24);
    to_line(&std::array::from_fn(|i| match i {
        0 => low | u64::from(KIND_BYTES) << KIND_SHIFT | high,
        _ => get_u64(bytes, i * 8 - 1),
    }))
}

impl Record {
    /// The head of a patch with this sum of its bytes; [`add_checksum`](super::add_checksum) completes it.
    ///
    /// # Panics
    /// When it is not a part of one page.
    pub(crate) fn encode_patch(&self, sum: u32) -> Line {
        let Record { patch, changes, .. } = self;
        assert!(
            changes.len() == 1 && self.level == 0 && patch.is_within_page(),
            "a part of one page"
        );
        let slots = [changes[0].old.encode(), changes[0].new.encode()];
        let [old, new] = with_sum(slots, patch.within as u16);
        self.head([old, with_patch_sum(new, sum)])
    }

    /// Decodes the head of a patch.
    pub(super) fn decode_patch(
        &mut self,
        head: &Line,
        address: &RecordAddress,
    ) -> Result<(), InvalidRecord> {
        if address.checksum(std::slice::from_ref(head)) != get_u32(head, 0) {
            return Err(InvalidRecord::Checksum);
        }
        let [.., level, low, high] = get_u64(head, 0).to_le_bytes();
        let old = Slot::decode_unchecked(get_u64(head, FIRST_AT))?;
        let frame = old.frame().ok_or(InvalidRecord::Malformed)?;
        let new = get_u64(head, NEW_AT);
        let is_sum = new & FRAME_MASK <= u64::from(u32::MAX);
        let new = Slot::decode_unchecked(new & !FRAME_MASK | frame.0)?;
        let crc = get_u32(head, DATA_CRC_AT);
        self.changes.clear();
        self.changes.push(Change {
            old,
            new,
            sums: PageChecksums { crc, words: 0 },
        });
        self.has_second_sum = false;
        self.is_adoption = false;
        self.group_position = GroupPosition::default();
        self.patch.bytes.clear();
        self.patch.within = u16::from_le_bytes([head[FIRST_AT + 7], head[NEW_AT + 7]]).into();
        self.patch.len = u16::from_le_bytes([low, high]).into();
        self.decode_head_fields(head, level)?;
        let is_changing = old.is_changing() || new.is_changing();
        let is_in_place = new.frame() == Some(frame) && !is_changing;
        match level == 0 && is_sum && is_in_place && self.is_patch() && self.patch.is_within_page()
        {
            true => Ok(()),
            false => Err(InvalidRecord::Malformed),
        }
    }

    /// Decodes the bytes of a patch from the lines after its head. `new` is the head's word for the
    /// new slot.
    pub(super) fn decode_patch_bytes(
        &mut self,
        body: &[Line],
        new: u64,
    ) -> Result<(), InvalidRecord> {
        if u64::from(crc32c_lines(0, body)) != new & FRAME_MASK {
            return Err(InvalidRecord::Checksum);
        }
        let Patch { bytes, len, .. } = &mut self.patch;
        bytes.resize(body.len() * PATCH_LINE_BYTES, 0);
        let chunks = bytes.as_chunks_mut::<PATCH_LINE_BYTES>().0;
        for (line, chunk) in body.iter().zip(chunks) {
            if line[BYTES_BEFORE_KIND] != KIND_BYTES {
                return Err(InvalidRecord::Malformed);
            }
            chunk[..BYTES_BEFORE_KIND].copy_from_slice(&line[..BYTES_BEFORE_KIND]);
            chunk[BYTES_BEFORE_KIND..].copy_from_slice(&line[BYTES_BEFORE_KIND + 1..]);
        }
        let has_rest = bytes.iter().skip(*len).any(|&byte| byte != 0);
        bytes.truncate(*len);
        match bytes.len() == *len && !has_rest {
            true => Ok(()),
            false => Err(InvalidRecord::Malformed),
        }
    }
}
