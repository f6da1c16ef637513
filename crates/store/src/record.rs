//! A journal record: one commit of one session. A single page takes one cache
//! line, which is streamed with one non-temporal store.
//!
//! A record certifies itself: its CRC is seeded with the place it was written
//! for ([`Place`]), so a record of another pool, lane, lap or incarnation, or
//! user bytes that look like one, never parse.

use crate::bytes::{field, get_u32, get_u64, put};
use crate::geometry::OBJECT_BYTES;
use crate::slot::{DamagedSlot, Slot};
use pagemesh_base::checksum::{crc32c, crc32c_append};
use pagemesh_base::ids::{Epoch, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::units::LINE_BYTES;
use uuid::Uuid;

/// Pages in one record: the slots of one page-table node.
pub const PAGES_MAX: usize = 512;
/// Levels of a page table: four of 512 slots reach 2^36 pages.
pub const LEVELS_MAX: u8 = 4;

const KIND_MAP: u8 = 1;
const KIND_OBJECT: u8 = 2;
const KIND_PAD: u8 = 3;
/// Lines of an object record: its head, and the entry.
const OBJECT_LINES: usize = 1 + OBJECT_BYTES as usize / LINE_BYTES;
const ENTRY_BYTES: usize = 20;
const ENTRIES_PER_LINE: usize = LINE_BYTES / ENTRY_BYTES;

/// Where a record lies: the seed of its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// CRC32C of pool, incarnation and lane: the part that never changes while
    /// a lane is in use.
    seed: u32,
    /// The lane's number.
    pub lane: u32,
    /// Lines written to the lane since the pool was made; never wraps.
    pub position: u64,
}

/// One page that a record moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// What the slot was.
    pub old: Slot,
    /// What it becomes.
    pub new: Slot,
    /// CRC32C of the frame that `new` names; 0 where it names none.
    pub data_crc: u32,
}

/// Slots of consecutive pages, swapped as one: a write, a discard, or a
/// page-table node linked or unlinked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Order in the pool.
    pub seq: Seq,
    /// Whose pages.
    pub object: ObjectId,
    /// The object's fencing number when the operation was admitted.
    pub epoch: Epoch,
    /// 0 for data pages, above for nodes of that level.
    pub level: u8,
    /// The first page; for a node, the first page below it.
    pub page: PageNo,
    /// The client's operation number.
    pub op: u64,
    /// `op` less the oldest operation of the session that may be incomplete
    /// on another leg.
    pub open: u32,
    /// One to [`PAGES_MAX`] pages, in order.
    pub changes: Vec<Change>,
}

/// An entry of the object table replaced as a whole, except for its root slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRecord {
    /// Order in the pool.
    pub seq: Seq,
    /// Which entry.
    pub object: ObjectId,
    /// The entry as it is afterwards.
    pub entry: [u8; OBJECT_BYTES as usize],
}

/// What a lane holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Slots swapped.
    Map(Record),
    /// An object made, resized, fenced or deleted.
    Object(ObjectRecord),
}

/// Why bytes are not a record. After a crash this is what ends a lane, unless
/// a later record says that this place was fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRecord {
    /// Too few bytes for the count, or a count, kind or level out of range.
    #[error("no record starts here")]
    Malformed,
    /// Torn, stale, or of another place.
    #[error("the record's checksum does not match its place")]
    Checksum,
    /// The checksum is right but a slot is not: a defect of the writer.
    #[error("the record is whole but {0}")]
    Slot(#[from] DamagedSlot),
}

/// Lines that a record of `pages` pages takes.
#[must_use]
pub fn lines(pages: usize) -> usize {
    1 + pages.saturating_sub(1).div_ceil(ENTRIES_PER_LINE)
}

/// Bytes aligned for the processor's CRC instruction.
#[repr(align(64))]
struct Aligned<const N: usize>([[u8; 8]; N]);

impl Place {
    /// The place of a line of a lane, in one opening of a pool.
    #[must_use]
    pub fn new(pool: Uuid, incarnation: Incarnation, lane: u32, position: u64) -> Place {
        let mut bytes = [0; 24];
        put(&mut bytes, 0, *pool.as_bytes());
        put(&mut bytes, 16, incarnation.0.to_le_bytes());
        put(&mut bytes, 20, lane.to_le_bytes());
        Place {
            seed: crc32c(&bytes),
            lane,
            position,
        }
    }

    /// Another line of the same lane.
    #[must_use]
    pub fn at(self, position: u64) -> Place {
        Place { position, ..self }
    }

    /// The CRC32C of pool, incarnation, lane and position, then the record,
    /// its own first four bytes as zeroes. In words, so that the processor can
    /// forward each from where it was stored.
    fn checksum(&self, head: &Words, rest: &[[u8; LINE_BYTES]]) -> u32 {
        let mut words = Aligned([[0; 8]; 9]);
        words.0[0] = self.position.to_le_bytes();
        words.0[1] = (head[0] & !u64::from(u32::MAX)).to_le_bytes();
        for (word, from) in words.0[2..].iter_mut().zip(&head[1..]) {
            *word = from.to_le_bytes();
        }
        let crc = crc32c_append(self.seed, words.0.as_flattened());
        match rest {
            [] => crc,
            rest => crc32c_append(crc, rest.as_flattened()),
        }
    }
}

/// A line as words.
type Words = [u64; 8];

fn to_line(words: &Words) -> [u8; LINE_BYTES] {
    let mut line = [0; LINE_BYTES];
    for (bytes, word) in line.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    line
}

fn to_words(line: &[u8; LINE_BYTES]) -> Words {
    std::array::from_fn(|i| get_u64(line, i * 8))
}

/// Kind, level and count: the first word without its checksum.
fn first_word(kind: u8, level: u8, count: u16) -> u64 {
    u64::from(kind) << 32 | u64::from(level) << 40 | u64::from(count) << 48
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The line that says: the lane goes on at its start.
#[must_use]
pub fn encode_pad(place: &Place) -> [u8; LINE_BYTES] {
    let mut words = [0; 8];
    words[0] = first_word(KIND_PAD, 0, 0);
    words[0] |= u64::from(place.checksum(&words, &[]));
    to_line(&words)
}

/// Whether `line` is the pad of `place`.
#[must_use]
pub fn is_pad(line: &[u8; LINE_BYTES], place: &Place) -> bool {
    line[4] == KIND_PAD && place.checksum(&to_words(line), &[]) == get_u32(line, 0)
}

/// Where the change number `index` (from 1) lies: line and byte.
fn entry_at(index: usize) -> (usize, usize) {
    let entry = index - 1;
    let line = 1 + entry / ENTRIES_PER_LINE;
    (line, entry % ENTRIES_PER_LINE * ENTRY_BYTES)
}

impl Record {
    /// Appends the record as it lies at `place` to `into`.
    ///
    /// # Panics
    /// When it has no change, too many, or a level beyond the page table.
    pub fn encode(&self, place: &Place, into: &mut Vec<[u8; LINE_BYTES]>) {
        let count = self.changes.len();
        assert!(
            (1..=PAGES_MAX).contains(&count),
            "{count} pages in a record"
        );
        assert!(
            self.level <= LEVELS_MAX,
            "level {} of a page table",
            self.level
        );
        let first = &self.changes[0];
        let mut head = [
            first_word(KIND_MAP, self.level, count as u16),
            self.seq.0,
            pair(self.object.0, self.epoch.0),
            self.page.0,
            first.old.encode(),
            first.new.encode(),
            pair(first.data_crc, self.open),
            self.op,
        ];
        let start = into.len();
        into.resize(start + lines(count), [0; LINE_BYTES]);
        let record = &mut into[start..];
        for (index, change) in self.changes.iter().enumerate().skip(1) {
            let (line, at) = entry_at(index);
            put_change(&mut record[line], at, change);
        }
        head[0] |= u64::from(place.checksum(&head, &record[1..]));
        record[0] = to_line(&head);
    }

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
            changes: Vec::new(),
        }
    }

    /// Reads the record at the start of `lane`, which may hold anything after
    /// it, into this one.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another place; this
    /// one is then of no use.
    pub fn decode_from(
        &mut self,
        lane: &[[u8; LINE_BYTES]],
        place: &Place,
    ) -> Result<(), NoRecord> {
        let head = to_words(lane.first().ok_or(NoRecord::Malformed)?);
        let [.., kind, level, low, high] = head[0].to_le_bytes();
        let count = usize::from(u16::from_le_bytes([low, high]));
        if kind != KIND_MAP || level > LEVELS_MAX || !(1..=PAGES_MAX).contains(&count) {
            return Err(NoRecord::Malformed);
        }
        let record = lane.get(..lines(count)).ok_or(NoRecord::Malformed)?;
        if place.checksum(&head, &record[1..]) != head[0] as u32 {
            return Err(NoRecord::Checksum);
        }
        self.changes.clear();
        self.changes.push(Change {
            old: Slot::decode(head[4])?,
            new: Slot::decode(head[5])?,
            data_crc: head[6] as u32,
        });
        for index in 1..count {
            let (line, at) = entry_at(index);
            self.changes.push(get_change(&record[line], at)?);
        }
        self.seq = Seq(head[1]);
        self.object = ObjectId(head[2] as u32);
        self.epoch = Epoch((head[2] >> 32) as u32);
        self.level = level;
        self.page = PageNo(head[3]);
        self.op = head[7];
        self.open = (head[6] >> 32) as u32;
        Ok(())
    }
}

impl ObjectRecord {
    fn encode(&self, place: &Place, into: &mut Vec<[u8; LINE_BYTES]>) {
        let mut record = [[0; LINE_BYTES]; OBJECT_LINES];
        record.as_flattened_mut()[LINE_BYTES..].copy_from_slice(&self.entry);
        let mut head = [0; 8];
        head[0] = first_word(KIND_OBJECT, 0, 0);
        head[1] = self.seq.0;
        head[2] = pair(self.object.0, 0);
        head[0] |= u64::from(place.checksum(&head, &record[1..]));
        record[0] = to_line(&head);
        into.extend(record);
    }

    fn decode(lane: &[[u8; LINE_BYTES]], place: &Place) -> Result<ObjectRecord, NoRecord> {
        let record = lane.get(..OBJECT_LINES).ok_or(NoRecord::Malformed)?;
        if place.checksum(&to_words(&record[0]), &record[1..]) != get_u32(&record[0], 0) {
            return Err(NoRecord::Checksum);
        }
        Ok(ObjectRecord {
            seq: Seq(get_u64(&record[0], 8)),
            object: ObjectId(get_u32(&record[0], 16)),
            entry: field(record.as_flattened(), LINE_BYTES),
        })
    }
}

impl Entry {
    /// Its order in the pool.
    #[must_use]
    pub fn seq(&self) -> Seq {
        match self {
            Entry::Map(record) => record.seq,
            Entry::Object(record) => record.seq,
        }
    }

    /// Lines that it takes.
    #[must_use]
    pub fn lines(&self) -> usize {
        match self {
            Entry::Map(record) => lines(record.changes.len()),
            Entry::Object(_) => OBJECT_LINES,
        }
    }

    /// Appends the entry as it lies at `place` to `into`.
    ///
    /// # Panics
    /// As [`Record::encode`].
    pub fn encode(&self, place: &Place, into: &mut Vec<[u8; LINE_BYTES]>) {
        match self {
            Entry::Map(record) => record.encode(place, into),
            Entry::Object(record) => record.encode(place, into),
        }
    }

    /// The entry at the start of `lane`, which may hold anything after it.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another place.
    pub fn decode(lane: &[[u8; LINE_BYTES]], place: &Place) -> Result<Entry, NoRecord> {
        let head = lane.first().ok_or(NoRecord::Malformed)?;
        if head[4] == KIND_OBJECT {
            return ObjectRecord::decode(lane, place).map(Entry::Object);
        }
        let mut record = Record::empty();
        record.decode_from(lane, place)?;
        Ok(Entry::Map(record))
    }
}

fn put_change(line: &mut [u8; LINE_BYTES], at: usize, change: &Change) {
    put(line, at, change.old.encode().to_le_bytes());
    put(line, at + 8, change.new.encode().to_le_bytes());
    put(line, at + 16, change.data_crc.to_le_bytes());
}

fn get_change(line: &[u8; LINE_BYTES], at: usize) -> Result<Change, DamagedSlot> {
    Ok(Change {
        old: Slot::decode(get_u64(line, at))?,
        new: Slot::decode(get_u64(line, at + 8))?,
        data_crc: get_u32(line, at + 16),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::ids::FrameNo;
    use proptest::prelude::*;

    fn place() -> Place {
        Place::new(Uuid::from_u128(7), Incarnation(3), 2, 1 << 40)
    }

    fn record(pages: usize) -> Record {
        let change = |i: u64| {
            let old = Slot::EMPTY.map(FrameNo(i), 0);
            Change {
                old,
                new: old.map(FrameNo(i + 1000), 5),
                data_crc: i as u32,
            }
        };
        Record {
            seq: Seq(11),
            object: ObjectId(4),
            epoch: Epoch(9),
            level: 0,
            page: PageNo(1 << 33),
            op: u64::MAX,
            open: 16,
            changes: (0..pages as u64).map(change).collect(),
        }
    }

    fn encode(record: &Record) -> Vec<[u8; LINE_BYTES]> {
        let mut lines = Vec::new();
        record.encode(&place(), &mut lines);
        lines
    }

    #[test]
    fn an_object_record_decodes_and_every_flipped_bit_is_found() {
        let entry = Entry::Object(ObjectRecord {
            seq: Seq(5),
            object: ObjectId(3),
            entry: std::array::from_fn(|i| i as u8),
        });
        let mut lines = Vec::new();
        entry.encode(&place(), &mut lines);
        assert_eq!(lines.len(), entry.lines());
        assert_eq!(Entry::decode(&lines, &place()), Ok(entry));
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::decode(&damaged, &place()).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn one_page_is_one_line() {
        assert_eq!([lines(1), lines(2), lines(4), lines(5)], [1, 2, 2, 3]);
        assert_eq!(encode(&record(1)).len(), 1);
    }

    #[test]
    fn a_record_is_valid_only_at_its_place() {
        let lines = encode(&record(3));
        let others = [
            Place::new(Uuid::from_u128(8), Incarnation(3), 2, 1 << 40),
            Place::new(Uuid::from_u128(7), Incarnation(4), 2, 1 << 40),
            Place::new(Uuid::from_u128(7), Incarnation(3), 3, 1 << 40),
            Place::new(Uuid::from_u128(7), Incarnation(3), 2, (1 << 40) + 1),
        ];
        for place in others {
            assert_eq!(Entry::decode(&lines, &place), Err(NoRecord::Checksum));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_missing_line_is_found() {
        let lines = encode(&record(7));
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::decode(&damaged, &place()).is_err(), "bit {bit}");
        }
        for kept in 0..lines.len() {
            assert!(Entry::decode(&lines[..kept], &place()).is_err());
            let mut torn = lines.clone();
            torn[kept] = [0; LINE_BYTES];
            assert!(Entry::decode(&torn, &place()).is_err(), "line {kept}");
        }
    }

    proptest! {
        #[test]
        fn decodes_what_it_encodes(pages in 1..=PAGES_MAX, level in 0..=LEVELS_MAX, rest in 0usize..4) {
            let record = Record { level, ..record(pages) };
            let mut lane = encode(&record);
            lane.extend(vec![[0xaa; LINE_BYTES]; rest]);
            prop_assert_eq!(Entry::decode(&lane, &place()), Ok(Entry::Map(record)));
        }

        #[test]
        fn any_bytes_are_no_record(lane in prop::collection::vec(any::<[[u8; 32]; 2]>(), 0..8)) {
            let lane: Vec<[u8; LINE_BYTES]> = lane.iter().map(|l| field(l.as_flattened(), 0)).collect();
            prop_assert!(Entry::decode(&lane, &place()).is_err());
        }
    }
}
