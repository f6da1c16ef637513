//! The bytes of an entry, and its checksum for its address in a journal. The sums of the data and
//! the checksum are set last, when the data was streamed.
//!
//! Invariant: an encoded entry is valid at one address only.

use super::layout::{
    COUNT_BITS, DATA_CRC_AT, GROUP_CONTINUES, KIND_ADOPTION, KIND_KEPT_BIRTH, KIND_MAP,
    KIND_OBJECT, KIND_PAD, KIND_PATCH, KIND_SUMMED_MAP, NEW_AT, OBJECT_LINES, change_at,
    first_word, is_patch_head, pack_u32s, to_line, with_patch_sum, with_sum,
};
use super::{
    Change, GROUP_LINES_MAX, GroupPosition, JournalEntry, LEVELS_MAX, Line, ObjectRecord,
    PAGES_MAX, Record, lines,
};
use pagemesh_base::bytes::{get_u64, put};
use pagemesh_base::checksum::{PageChecksums, crc32c};
use pagemesh_base::ids::Incarnation;
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::copy::{crc32c_lines, crc32c_words};
use uuid::Uuid;

impl Record {
    /// Appends the record to `into`; [`add_checksum`] completes it.
    ///
    /// # Panics
    /// When it has no change, too many, or a level beyond the page table.
    pub fn encode(&self, into: &mut Vec<Line>) {
        if self.is_patch() {
            let start = into.len();
            into.push([0; LINE_BYTES]);
            let sum = self.patch.encode(into);
            into[start] = self.encode_patch(sum);
            return;
        }
        let count = self.changes.len();
        assert!(
            self.kept_birth.is_none() || (self.has_second_sum && self.open == 0),
            "a record that keeps a birth has second sums and no open operations"
        );
        assert!(
            !self.is_adoption
                || (self.level <= 1 && !self.has_second_sum && self.kept_birth.is_none()),
            "a record that adopts pages or a leaf has no sums"
        );
        assert!(
            (1..=PAGES_MAX).contains(&count),
            "{count} pages in a record"
        );
        assert!(
            self.level <= LEVELS_MAX
                && usize::from(self.group_position.lines_before) < GROUP_LINES_MAX,
            "level {} of a page table, {:?}",
            self.level,
            self.group_position
        );
        into.push(self.head(self.encode_slots(&self.changes[0])));
        if count == 1 {
            return;
        }
        let start = into.len() - 1;
        into.resize(start + lines(count), [0; LINE_BYTES]);
        let record = &mut into[start..];
        for (index, change) in self.changes.iter().enumerate().skip(1) {
            let (line, at) = change_at(index);
            let [old, new] = self.encode_slots(change);
            put(&mut record[line], at, old.to_le_bytes());
            put(&mut record[line], at + 8, new.to_le_bytes());
            put(&mut record[line], at + 16, change.sums.crc.to_le_bytes());
        }
    }

    /// The head, with the encoded slots of the first change.
    pub(super) fn head(&self, [old, new]: [u64; 2]) -> Line {
        to_line(&[
            self.first_word(),
            self.seq.0,
            pack_u32s(self.object.0, self.epoch.0),
            self.page.0,
            old,
            new,
            pack_u32s(self.changes[0].sums.crc, self.open_or_birth()),
            self.op,
        ])
    }

    /// The encoded slots of a change that is no patch.
    fn encode_slots(&self, change: &Change) -> [u64; 2] {
        let slots = [change.old.encode(), change.new.encode()];
        match self.has_second_sum {
            true => with_sum(slots, change.sums.words),
            false => slots,
        }
    }

    pub(super) fn first_word(&self) -> u64 {
        if self.is_patch() {
            return first_word(KIND_PATCH, self.level, self.patch.len as u16);
        }
        let GroupPosition {
            lines_before,
            is_continued,
        } = self.group_position;
        let level = self.level | if is_continued { GROUP_CONTINUES } else { 0 };
        let count = self.changes.len() as u16 | u16::from(lines_before) << COUNT_BITS;
        let kind = match (self.kept_birth, self.has_second_sum) {
            _ if self.is_adoption => KIND_ADOPTION,
            (Some(_), _) => KIND_KEPT_BIRTH,
            (None, true) => KIND_SUMMED_MAP,
            (None, false) => KIND_MAP,
        };
        first_word(kind, level, count)
    }

    fn open_or_birth(&self) -> u32 {
        self.kept_birth.map_or(self.open, |birth| birth.0)
    }
}

impl ObjectRecord {
    pub(super) fn encode(&self, into: &mut Vec<Line>) {
        let mut record = [[0; LINE_BYTES]; OBJECT_LINES];
        put(
            &mut record[0],
            0,
            first_word(KIND_OBJECT, 0, 0).to_le_bytes(),
        );
        put(&mut record[0], 8, self.seq.0.to_le_bytes());
        put(&mut record[0], 16, self.object.0.to_le_bytes());
        record.as_flattened_mut()[LINE_BYTES..].copy_from_slice(&self.entry[..]);
        into.extend(record);
    }
}

impl JournalEntry {
    /// Appends the entry, encoded for `address`, to `into`.
    ///
    /// # Panics
    /// As [`Record::encode`].
    pub fn encode(&self, address: &RecordAddress, into: &mut Vec<Line>) {
        let start = into.len();
        match self {
            JournalEntry::Map(record) => record.encode(into),
            JournalEntry::Object(record) => record.encode(into),
        }
        add_checksum(&mut into[start..], address);
    }
}

/// Sets the sums of the data of change number `index` in an encoded record with second sums.
pub fn set_sums(record: &mut [Line], index: usize, sums: PageChecksums) {
    let (line, at) = change_at(index);
    // Whole words in their places, as the line is streamed: see `Session::encode_record`.
    if index == 0 {
        let open = get_u64(&record[0], DATA_CRC_AT) & !u64::from(u32::MAX);
        let word = open | u64::from(sums.crc);
        put(&mut record[0], DATA_CRC_AT, word.to_le_bytes());
    } else {
        put(&mut record[line], at + 16, sums.crc.to_le_bytes());
    }
    let slots = [at, at + 8].map(|at| get_u64(&record[line], at));
    let [old, new] = with_sum(slots, sums.words);
    put(&mut record[line], at, old.to_le_bytes());
    put(&mut record[line], at + 8, new.to_le_bytes());
}

/// The address of a record: the seed of its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordAddress {
    /// CRC32C of pool, incarnation and journal: the part that is constant while a journal is in
    /// use.
    seed: u32,
    /// The journal's number.
    pub journal: u32,
    /// Lines written to the journal since the pool was made; never wraps.
    pub position: u64,
}

impl RecordAddress {
    /// The address of a line of a journal, in one opening of a pool.
    #[must_use]
    pub fn new(pool: Uuid, incarnation: Incarnation, journal: u32, position: u64) -> RecordAddress {
        let mut bytes = [0; 24];
        put(&mut bytes, 0, *pool.as_bytes());
        put(&mut bytes, 16, incarnation.0.to_le_bytes());
        put(&mut bytes, 20, journal.to_le_bytes());
        RecordAddress {
            seed: crc32c(&bytes),
            journal,
            position,
        }
    }

    /// Another line of the same journal.
    #[must_use]
    pub fn at(self, position: u64) -> RecordAddress {
        RecordAddress { position, ..self }
    }

    /// The CRC32C of pool, incarnation, journal and position, then of the record with its own first
    /// four bytes as zeroes. Of a patch it covers only the head.
    pub(super) fn checksum(&self, record: &[Line]) -> u32 {
        let Some((head, rest)) = record.split_first() else {
            return self.seed;
        };
        let rest = if is_patch_head(head) { &[] } else { rest };
        let first = get_u64(head, 0) & !u64::from(u32::MAX);
        let mut crc = crc32c_words(
            self.seed,
            &[self.position.to_le_bytes(), first.to_le_bytes()],
        );
        if let Some(others) = head.as_chunks().0.last_chunk::<7>() {
            crc = crc32c_words(crc, others);
        }
        match rest {
            [] => crc,
            rest => crc32c_lines(crc, rest),
        }
    }
}

/// Adds the checksum of an encoded record for this address. If the lines of a patch follow its
/// head, adds their sum as well.
pub fn add_checksum(record: &mut [Line], address: &RecordAddress) {
    if let [head, body @ ..] = record
        && is_patch_head(head)
        && !body.is_empty()
    {
        let new = with_patch_sum(get_u64(head, NEW_AT), crc32c_lines(0, body));
        put(head, NEW_AT, new.to_le_bytes());
    }
    let crc = address.checksum(record);
    let first = get_u64(&record[0], 0) & !u64::from(u32::MAX);
    put(&mut record[0], 0, (first | u64::from(crc)).to_le_bytes());
}

/// The line after which the journal continues at the start of its ring.
#[must_use]
pub fn encode_pad(address: &RecordAddress) -> Line {
    let mut line = [0; LINE_BYTES];
    put(&mut line, 0, first_word(KIND_PAD, 0, 0).to_le_bytes());
    add_checksum(std::slice::from_mut(&mut line), address);
    line
}
