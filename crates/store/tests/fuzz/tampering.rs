//! Changes of a pool's image, encoded in 12 bytes each.
//!
//! ```text
//! 0  kind   1   see `TamperedImage::apply`
//! 1  unit   1   number of the entry
//! 2  at     2   position in the entry
//! 4  value  8
//! ```
//!
//! Most changes also correct the checksum of the changed structure. They simulate the writes of a
//! defect or an attacker, not only losses of the medium.

use super::entries::reseal_superblock;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, FrameNo};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_store::geometry::{Geometry, IN_FLIGHT_BYTES, OBJECT_BYTES, Region};
use pagemesh_store::record::{JournalEntry, RecordAddress, add_checksum, claimed_lines};
use pagemesh_store::slot::Slot;
use pagemesh_store::superblock::Superblock;
use pagemesh_store::test_api::update_line_checksum;

pub(super) const CHANGE_BYTES: usize = 12;
/// Changes of one case.
const CHANGES_MAX: usize = 16;

/// The bytes of a pool.
pub(super) struct TamperedImage {
    bytes: Vec<u8>,
    block: Superblock,
    /// Whether all changed bytes have a checksum, and no checksum was corrected.
    pub(super) is_detectable: bool,
    /// Whether no superblock was changed together with its checksum.
    pub(super) has_true_counters: bool,
}

impl TamperedImage {
    pub(super) fn new(image: &pagemesh_pmem::Image) -> TamperedImage {
        let bytes = image.to_bytes();
        let page = |number: usize| bytes[number * PAGE_BYTES..].first_chunk().expect("a page");
        let block = Superblock::choose([page(0), page(1)]).expect("a sound pool");
        TamperedImage {
            bytes,
            block,
            is_detectable: true,
            has_true_counters: true,
        }
    }

    pub(super) fn to_image(&self) -> pagemesh_pmem::Image {
        pagemesh_pmem::Image::from_bytes(&self.bytes)
    }

    fn geometry(&self) -> Geometry {
        self.block.geometry
    }

    pub(super) fn tamper(&mut self, script: &[u8]) {
        for change in script
            .as_chunks::<CHANGE_BYTES>()
            .0
            .iter()
            .take(CHANGES_MAX)
        {
            let [what, unit, low, high, value @ ..] = *change;
            let at = usize::from(u16::from_le_bytes([low, high]));
            self.apply(what, usize::from(unit), at, u64::from_le_bytes(value));
        }
    }

    fn apply(&mut self, what: u8, unit: usize, at: usize, value: u64) {
        let geometry = self.geometry();
        let is_bitmap = what % 16 == 7 && unit.is_multiple_of(2);
        self.is_detectable &= is_bitmap || [3, 6, 8].contains(&(what % 16));
        self.has_true_counters &= !what.is_multiple_of(16);
        match what % 16 {
            0 => self.change_superblock(unit, at, value, true),
            1 => self.change_superblock(unit, at, value, false),
            2 => self.change_entry(geometry.objects, OBJECT_BYTES, unit, at % 128, value, true),
            3 => self.change_entry(geometry.objects, OBJECT_BYTES, unit, at, value, false),
            4 => self.change_entry(geometry.in_flight, IN_FLIGHT_BYTES, unit, at, value, true),
            5 => self.change_record(unit, at, value, true),
            6 => self.change_record(unit, at, value, false),
            7 => self.change_bitmap(at / 8 * 8 % 128, value, !unit.is_multiple_of(2)),
            8 => self.put(self.frame_word(unit), value),
            9 => self.change_slot(self.root(unit), value),
            10 => self.change_slot(self.frame(unit) + at / 8 * 8 % PAGE_BYTES, value),
            11 => self.put(self.frame(unit) + at / 8 * 8 % PAGE_BYTES, value),
            12 => self.move_record(unit, at),
            13 => self.copy_page(unit, at),
            14 => self.set_record_slot(unit, at, value),
            _ => {
                let place = at * 32 % self.bytes.len();
                self.bytes[place] ^= 1 << (value % 8);
            }
        }
    }

    fn put(&mut self, at: usize, value: u64) {
        if let Some(word) = self.bytes.get_mut(at..at + 8) {
            word.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Changes both copies, or one: the change must be effective.
    fn change_superblock(&mut self, unit: usize, at: usize, value: u64, reseal: bool) {
        for copy in 0..2 {
            if unit % 3 == copy {
                continue;
            }
            let start = copy * PAGE_BYTES;
            self.put(start + at % (PAGE_BYTES - 7), value);
            if let (true, Some(page)) = (reseal, self.bytes[start..].first_chunk_mut()) {
                reseal_superblock(page);
            }
        }
    }

    fn change_entry(
        &mut self,
        region: Region,
        size: u64,
        unit: usize,
        at: usize,
        value: u64,
        reseal: bool,
    ) {
        let size = size as usize;
        let start = region.start as usize + unit % 8 * size;
        self.put(start + at % (size - 7), value);
        if reseal {
            let covered = size.min(2 * LINE_BYTES);
            let entry = &mut self.bytes[start..start + covered];
            let crc = crc32c(&entry[4..]).to_le_bytes();
            entry[..4].copy_from_slice(&crc);
        }
    }

    /// The bitmap of a pool of this size has two lines.
    fn change_bitmap(&mut self, at: usize, value: u64, reseal: bool) {
        let start = self.geometry().bitmap.start as usize;
        self.put(start + at, value);
        let line = at / LINE_BYTES;
        let bytes = self.bytes[start + line * LINE_BYTES..].first_chunk_mut();
        if let (true, Some(bytes)) = (reseal, bytes) {
            update_line_checksum(self.block.pool, line, bytes);
        }
    }

    fn root(&self, unit: usize) -> usize {
        self.geometry().objects.start as usize + unit % 8 * OBJECT_BYTES as usize + 128
    }

    /// Chooses among the first frames, because allocation starts there.
    fn frame(&self, unit: usize) -> usize {
        self.geometry().frames.start as usize + unit % 64 * PAGE_BYTES
    }

    fn frame_word(&self, unit: usize) -> usize {
        let frame = self.frame(unit) / PAGE_BYTES;
        self.geometry().frame_table.start as usize + frame * 8
    }

    fn change_slot(&mut self, at: usize, value: u64) {
        let frames = self.geometry().first_frames();
        // Mostly existing frames, sometimes one just past the end, sometimes any number.
        let frame = match value >> 56 {
            0..200 => frames.start + value % (frames.end - frames.start),
            200..220 => frames.end + value % 3,
            _ => value % (1 << 36),
        };
        let slot = match value >> 48 & 7 {
            0 => Slot::EMPTY,
            1 => Slot::EMPTY.map(FrameNo(frame)).unmap(Epoch(3)),
            _ => Slot::EMPTY.map(FrameNo(frame)),
        };
        self.put(at, slot.encode());
    }

    /// Offset, line count and address of the `nth` record that recovery will read.
    fn record(&self, nth: usize) -> Option<(usize, usize, RecordAddress)> {
        let mut found = Vec::new();
        for journal in 0..self.block.journals_end {
            let start = self.geometry().journal_at(journal);
            let (pool, incarnation) = (self.block.pool, self.block.incarnation);
            let head = self.block.journal_heads[journal as usize];
            let mut place = RecordAddress::new(pool, incarnation, journal, head);
            loop {
                let line = place.position % self.geometry().journal_lines();
                let at = start + line as usize * LINE_BYTES;
                let lines = self.bytes[at..].as_chunks::<LINE_BYTES>().0;
                let Ok(entry) = JournalEntry::decode(lines, &place) else {
                    found.push((at, 1, place));
                    break;
                };
                found.push((at, entry.lines(), place));
                place = place.at(place.position + entry.lines() as u64);
            }
        }
        found.get(nth % found.len().max(1)).copied()
    }

    fn seal_record(&mut self, at: usize, place: &RecordAddress) {
        let (lines, _) = self.bytes[at..].as_chunks_mut::<LINE_BYTES>();
        let count = claimed_lines(&lines[0]);
        if let Some(record) = lines.get_mut(..count) {
            add_checksum(record, place);
        }
    }

    fn change_record(&mut self, unit: usize, at: usize, value: u64, reseal: bool) {
        let Some((start, lines, place)) = self.record(unit) else {
            return;
        };
        let field = at % (lines * LINE_BYTES);
        // Fields have 1, 2, 4 or 8 bytes; a short one leaves its neighbours unchanged.
        let width = 1 << (at >> 14);
        let field = field / width * width;
        self.bytes[start + field..start + field + width]
            .copy_from_slice(&value.to_le_bytes()[..width]);
        if reseal {
            self.seal_record(start, &place);
        }
    }

    fn set_record_slot(&mut self, unit: usize, at: usize, value: u64) {
        if let Some((start, _, place)) = self.record(unit) {
            self.change_slot(start + 32 + at % 2 * 8, value);
            self.seal_record(start, &place);
        }
    }

    /// Copies a whole record to the place of another one or behind the last, with a valid checksum
    /// there.
    fn move_record(&mut self, unit: usize, to: usize) {
        let (Some((from, lines, _)), Some((at, _, place))) = (self.record(unit), self.record(to))
        else {
            return;
        };
        let bytes = self.bytes[from..from + lines * LINE_BYTES].to_vec();
        if let Some(into) = self.bytes.get_mut(at..at + bytes.len()) {
            into.copy_from_slice(&bytes);
            self.seal_record(at, &place);
        }
    }

    fn copy_page(&mut self, from: usize, to: usize) {
        let (from, to) = (self.frame(from), self.frame(to));
        self.bytes.copy_within(from..from + PAGE_BYTES, to);
    }
}
