//! A journal record: one commit of one session. A single page takes one cache line. The writer
//! encodes the record first and streams the data. Then it adds the checksums of the data and the
//! record's own ([`add_checksum`]).
//!
//! A record certifies itself: its CRC is seeded with its address ([`RecordAddress`]). So a record
//! of another pool, journal, lap or incarnation never decodes, and user bytes that look like a
//! record do not either.
//!
//! Records that count only together are a group. They follow each other in one journal, under one
//! seq. Each has its [`GroupPosition`]; the reader of the journal checks that the others are there.

mod decode;
mod encode;
mod layout;
mod patch;
#[cfg(test)]
mod tests;

use crate::format::frame_word::FrameWord;
use crate::format::geometry::OBJECT_BYTES;
use crate::format::slot::{DamagedSlot, Slot};
pub use decode::{claimed_lines, is_damaged_pad, is_older_patch, is_pad};
pub use encode::{RecordAddress, add_checksum, encode_pad, set_sums};
pub(crate) use layout::OBJECT_LINES;
use layout::{COUNT_BITS, ENTRIES_PER_LINE};
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::ids::{Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::Media;
pub(crate) use patch::PATCH_LINE_BYTES;
pub use patch::{Patch, patch_lines};

/// Pages in one record: the slots of one page-table node.
pub const PAGES_MAX: usize = 512;
/// Levels of a page table: four of 512 slots reach 2^36 pages.
pub const LEVELS_MAX: u8 = 4;
/// Lines of the longest group: as many as the head's bits for them can count.
pub const GROUP_LINES_MAX: usize = 64;
const _: () = assert!(GROUP_LINES_MAX == 1 << (16 - COUNT_BITS));
// A page takes one line at most.
const _: () = assert!(TRANSACTION_PAGES_MAX <= GROUP_LINES_MAX as u64);

type Line = [u8; LINE_BYTES];

/// A change of one page's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The slot before.
    pub old: Slot,
    /// The slot after.
    pub new: Slot,
    /// The sums of the frame that `new` names; zeroes where it names none. The second sum is set
    /// only if the record has second sums.
    pub sums: PageChecksums,
}

/// The sums of no page.
pub const NO_SUMS: PageChecksums = PageChecksums { crc: 0, words: 0 };

/// The position of a record in its group. The default is a single record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupPosition {
    /// Lines of the group before the record; below [`GROUP_LINES_MAX`].
    pub lines_before: u8,
    /// Whether another record of the group follows.
    pub is_continued: bool,
}

/// Slots of consecutive pages, swapped as one: a write, a discard, or a
/// page-table node linked or unlinked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Order in the pool.
    pub seq: Seq,
    /// The object of the pages.
    pub object: ObjectId,
    /// The object's epoch when the operation was admitted.
    pub epoch: Epoch,
    /// 0 for data pages, above for nodes of that level.
    pub level: u8,
    /// The first page; for a node, the first page below it.
    pub page: PageNo,
    /// The client's operation number.
    pub op: u64,
    /// `op` minus the session's oldest operation that may be incomplete on another leg.
    pub open: u32,
    /// Its position in a group of records.
    pub group_position: GroupPosition,
    /// The birth of the pages, if they were born before: on another leg, or in another frame of this
    /// pool. Such a record has second sums, and no operation before its own is incomplete.
    pub kept_birth: Option<Epoch>,
    /// Whether the frames hold pages that were written and stored before: kept versions of pages. The record has no
    /// sums then, and the words of the frames stay.
    pub is_adoption: bool,
    /// Whether changes have a second sum. One sum cannot tell a flipped bit from data that was
    /// never written.
    pub has_second_sum: bool,
    /// One to [`PAGES_MAX`] pages, in order.
    pub changes: Vec<Change>,
    /// The new bytes of a record that changes one page in place. Both slots name the same frame,
    /// and the CRC32C covers the whole page afterwards. Such a record is alone and has no
    /// second sum, because it carries all data that it needs.
    pub patch: Patch,
}

/// An entry of the object table replaced as a whole, except for its root slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRecord {
    /// Order in the pool.
    pub seq: Seq,
    /// The number of the entry.
    pub object: ObjectId,
    /// The entry as it is afterwards.
    pub entry: Box<[u8; OBJECT_BYTES as usize]>,
}

/// An entry of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalEntry {
    /// Slots swapped.
    Map(Record),
    /// An object created, resized, fenced or deleted.
    Object(ObjectRecord),
}

/// Why bytes are not a record. After a crash such bytes end a journal, unless a later record proves
/// that they were fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRecord {
    /// Too few bytes for the count, or a count, kind or level out of range.
    #[error("no record starts here")]
    Malformed,
    /// Torn, stale, or of another address.
    #[error("the record's checksum does not match its address")]
    Checksum,
    /// The record is valid, but does not belong to the group at its address.
    #[error("the record there belongs to another group")]
    Misplaced,
    /// The checksum is right but a slot is not: a defect of the writer.
    #[error("the record's checksum is right, but {0}")]
    Slot(#[from] DamagedSlot),
}

/// Lines that a record of `pages` pages takes.
#[must_use]
pub fn lines(pages: usize) -> usize {
    1 + pages.saturating_sub(1).div_ceil(ENTRIES_PER_LINE)
}

impl Record {
    /// A record without changes, to be decoded into.
    #[must_use]
    pub fn empty() -> Record {
        Record {
            seq: Seq(0),
            object: ObjectId(0),
            epoch: Epoch(0),
            level: 0,
            page: PageNo(0),
            op: 0,
            open: 0,
            group_position: GroupPosition::default(),
            kept_birth: None,
            is_adoption: false,
            has_second_sum: false,
            changes: Vec::new(),
            patch: Patch::default(),
        }
    }

    /// The word of the frame table for the page of a change.
    #[inline]
    #[must_use]
    pub fn frame_word(&self, change: &Change) -> u64 {
        FrameWord::new(change.sums.crc, self.birth()).bits()
    }

    /// The birth of the pages that the record writes. A patch is a birth as well: a leg that was lost
    /// before must get the page.
    #[inline]
    #[must_use]
    pub fn birth(&self) -> Epoch {
        self.kept_birth.unwrap_or(self.epoch)
    }

    /// The changes with their pages. Of a node: with the first page of the record and those behind it.
    pub fn changes_by_page(&self) -> impl Iterator<Item = (&Change, PageNo)> {
        self.changes.iter().zip((self.page.0..).map(PageNo))
    }

    /// Whether the record changes a page in place.
    #[must_use]
    pub fn is_patch(&self) -> bool {
        self.patch.len > 0
    }

    /// Lines of the record.
    #[must_use]
    pub fn lines(&self) -> usize {
        match self.is_patch() {
            true => patch_lines(self.patch.len),
            false => lines(self.changes.len()),
        }
    }

    /// Whether some slot is the one that the record publishes. The first slot lies at byte `at`.
    pub(crate) fn is_published_at<M: Media>(&self, media: &M, at: usize) -> bool {
        let mut changes = (at..).step_by(8).zip(&self.changes);
        changes.any(|(at, change)| media.load(at) == change.new.encode())
    }
}

impl JournalEntry {
    /// The entry's order in the pool.
    #[must_use]
    pub fn seq(&self) -> Seq {
        match self {
            JournalEntry::Map(record) => record.seq,
            JournalEntry::Object(record) => record.seq,
        }
    }

    /// Lines of the entry.
    #[must_use]
    pub fn lines(&self) -> usize {
        match self {
            JournalEntry::Map(record) => record.lines(),
            JournalEntry::Object(_) => OBJECT_LINES,
        }
    }
}
