//! The bytes that a pool has written to its medium since its owner opened it.
//!
//! Nothing is counted on the data path. Sessions publish the ends of their journals and the frames
//! that they took anyway, and a close resets neither. The owner counts the table lines of a record
//! when a checkpoint applies it, whichever process has flushed them.
//!
//! The counts differ from the medium's own:
//! - slots and patches count at the checkpoint that passes their record, so up to one checkpoint late;
//! - a journal's pad counts as all lines that it skips. The medium gets one;
//! - streamed bytes of an operation that its session did not commit do not count;
//! - lines of which the processor's cache made the write-backs itself count once;
//! - on `file-sync` pools the kernel writes whole pages of the file. The counts are of lines.

use super::pool::Pool;
use crate::format::geometry::OBJECT_BYTES;
use crate::format::record::{Patch, Record};
use crate::recovery::{PoolError, write_superblock};
use pagemesh_base::ids::ObjectId;
use pagemesh_base::media_bytes::MediaBytes;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;

const LINE: u64 = LINE_BYTES as u64;
const PAGE: u64 = PAGE_BYTES as u64;
/// Slots of a line.
const LINE_SLOTS: u64 = LINE / 8;

/// The bytes of the records that a checkpoint applies, apart from their frames and journal lines.
#[derive(Default)]
pub(super) struct AppliedBytes {
    bytes: MediaBytes,
    /// The line of slots that was counted last, if the session may not have flushed it before its
    /// next record: object, level, number. Records of one line follow each other, and the session
    /// flushes the line once for all of them.
    slot_line: Option<(ObjectId, u8, u64)>,
    /// The line of the frame table that was counted last.
    checksum_line: Option<usize>,
}

impl AppliedBytes {
    pub(super) fn bytes(&self) -> MediaBytes {
        self.bytes
    }

    /// Another session may have stored to the same lines.
    pub(super) fn begin_journal(&mut self) {
        (self.slot_line, self.checksum_line) = (None, None);
    }

    pub(super) fn add_table_lines(&mut self, lines: u64) {
        self.bytes.tables += lines * LINE;
    }

    pub(super) fn add_object(&mut self) {
        self.bytes.tables += OBJECT_BYTES;
    }

    /// Adds the lines of the slots that a record swaps.
    pub(super) fn add_slots(&mut self, record: &Record) {
        let first = record.page.0 >> (9 * u32::from(record.level));
        let last = first + (record.changes.len() as u64).saturating_sub(1);
        let (first, last) = (first / LINE_SLOTS, last / LINE_SLOTS);
        let line = (record.object, record.level, first);
        let is_counted = self.slot_line == Some(line);
        self.add_table_lines(last - first + 1 - u64::from(is_counted));
        self.slot_line = (first == last).then_some(line);
    }

    /// Adds the line of the checksum at byte `at` of the pool.
    pub(super) fn add_checksum_at(&mut self, at: usize) {
        let line = Some(at / LINE_BYTES);
        if self.checksum_line != line {
            self.checksum_line = line;
            self.add_table_lines(1);
        }
    }

    /// Adds the lines of a page that a patch changes in place.
    pub(super) fn add_patch(&mut self, patch: &Patch) {
        let (first, end) = (patch.within, patch.within + patch.len);
        let lines = end.div_ceil(LINE_BYTES) - first / LINE_BYTES;
        self.bytes.data += lines as u64 * LINE;
    }
}

impl<M: Media> Pool<M> {
    /// The bytes written to the medium since the pool was opened, without the recovery's.
    #[must_use]
    pub fn media_bytes(&self) -> MediaBytes {
        let (lines, frames) = self.sessions.lines_and_frames(&self.mapping);
        // Any process that maps the pool may have written any counts.
        let corrected = self
            .corrected_slots()
            .saturating_add(self.corrected_records);
        let lines_of_tables = corrected.saturating_add(self.in_flight.stored());
        let mut bytes = self.owner_bytes;
        bytes.add(MediaBytes {
            data: frames.saturating_mul(PAGE),
            journal: lines.saturating_mul(LINE),
            tables: lines_of_tables.saturating_mul(LINE),
        });
        bytes
    }

    pub(super) fn add_table_lines(&mut self, lines: u64) {
        self.owner_bytes.tables += lines * LINE;
    }

    /// Writes the superblock to its page and makes it durable.
    pub(super) fn write_superblock(&mut self) -> Result<(), PoolError> {
        write_superblock(&*self.mapping.data, &self.superblock)?;
        let more_heads = self.superblock.encode_more_heads().len() as u64;
        self.owner_bytes.tables += PAGE + more_heads.next_multiple_of(PAGE);
        Ok(())
    }
}
