//! A journal record: one commit of one session. A single page takes one cache
//! line, which is streamed with one non-temporal store.
//!
//! A record certifies itself: its CRC is seeded with the place it was written
//! for ([`Place`]), so a record of another pool, lane, lap or incarnation, or
//! user bytes that look like one, never parse.

use crate::bytes::{field, get_u16, get_u32, get_u64, put};
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
const KIND_PAD: u8 = 3;
const ENTRY_BYTES: usize = 20;
const ENTRIES_PER_LINE: usize = LINE_BYTES / ENTRY_BYTES;

/// Where a record lies: the seed of its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The pool's identity.
    pub pool: Uuid,
    /// The opening of the pool that wrote the record.
    pub incarnation: Incarnation,
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

impl Place {
    fn seed(&self) -> u32 {
        let mut bytes = [0; 32];
        put(&mut bytes, 0, *self.pool.as_bytes());
        put(&mut bytes, 16, self.incarnation.0.to_le_bytes());
        put(&mut bytes, 20, self.lane.to_le_bytes());
        put(&mut bytes, 24, self.position.to_le_bytes());
        crc32c(&bytes)
    }

    fn checksum(&self, record: &[[u8; LINE_BYTES]]) -> u32 {
        let bytes = record.as_flattened();
        crc32c_append(self.seed(), &bytes[4..])
    }
}

/// The line that says: the lane goes on at its start.
#[must_use]
pub fn encode_pad(place: &Place) -> [u8; LINE_BYTES] {
    let mut line = [0; LINE_BYTES];
    line[4] = KIND_PAD;
    let crc = place.checksum(&[line]);
    put(&mut line, 0, crc.to_le_bytes());
    line
}

/// Whether `line` is the pad of `place`.
#[must_use]
pub fn is_pad(line: &[u8; LINE_BYTES], place: &Place) -> bool {
    line[4] == KIND_PAD && place.checksum(&[*line]) == get_u32(line, 0)
}

/// Where the change number `index` (from 1) lies: line and byte.
fn entry_at(index: usize) -> (usize, usize) {
    let entry = index - 1;
    let line = 1 + entry / ENTRIES_PER_LINE;
    (line, entry % ENTRIES_PER_LINE * ENTRY_BYTES)
}

impl Record {
    /// The record as it lies at `place`.
    ///
    /// # Panics
    /// When it has no change, too many, or a level beyond the page table.
    #[must_use]
    pub fn encode(&self, place: &Place) -> Vec<[u8; LINE_BYTES]> {
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
        let mut record = vec![[0; LINE_BYTES]; lines(count)];
        let head = &mut record[0];
        put(head, 4, [KIND_MAP, self.level]);
        put(head, 6, (count as u16).to_le_bytes());
        put(head, 8, self.seq.0.to_le_bytes());
        put(head, 16, self.object.0.to_le_bytes());
        put(head, 20, self.epoch.0.to_le_bytes());
        put(head, 24, self.page.0.to_le_bytes());
        put_change(head, 32, &self.changes[0]);
        put(head, 52, self.open.to_le_bytes());
        put(head, 56, self.op.to_le_bytes());
        for (index, change) in self.changes.iter().enumerate().skip(1) {
            let (line, at) = entry_at(index);
            put_change(&mut record[line], at, change);
        }
        let crc = place.checksum(&record);
        put(&mut record[0], 0, crc.to_le_bytes());
        record
    }

    /// The record at the start of `lane`, which may hold anything after it.
    ///
    /// # Errors
    /// When there is none, it is torn, or it belongs to another place.
    pub fn decode(lane: &[[u8; LINE_BYTES]], place: &Place) -> Result<Record, NoRecord> {
        let head = lane.first().ok_or(NoRecord::Malformed)?;
        let count = usize::from(get_u16(head, 6));
        let [kind, level] = field(head, 4);
        if kind != KIND_MAP || level > LEVELS_MAX || !(1..=PAGES_MAX).contains(&count) {
            return Err(NoRecord::Malformed);
        }
        let record = lane.get(..lines(count)).ok_or(NoRecord::Malformed)?;
        if place.checksum(record) != get_u32(head, 0) {
            return Err(NoRecord::Checksum);
        }
        let mut changes = vec![get_change(head, 32)?];
        for index in 1..count {
            let (line, at) = entry_at(index);
            changes.push(get_change(&record[line], at)?);
        }
        Ok(Record {
            seq: Seq(get_u64(head, 8)),
            object: ObjectId(get_u32(head, 16)),
            epoch: Epoch(get_u32(head, 20)),
            level,
            page: PageNo(get_u64(head, 24)),
            op: get_u64(head, 56),
            open: get_u32(head, 52),
            changes,
        })
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

    const PLACE: Place = Place {
        pool: Uuid::from_u128(7),
        incarnation: Incarnation(3),
        lane: 2,
        position: 1 << 40,
    };

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

    #[test]
    fn one_page_is_one_line() {
        assert_eq!([lines(1), lines(2), lines(4), lines(5)], [1, 2, 2, 3]);
        assert_eq!(record(1).encode(&PLACE).len(), 1);
    }

    #[test]
    fn a_record_is_valid_only_at_its_place() {
        let lines = record(3).encode(&PLACE);
        let others = [
            Place {
                pool: Uuid::from_u128(8),
                ..PLACE
            },
            Place {
                incarnation: Incarnation(4),
                ..PLACE
            },
            Place { lane: 3, ..PLACE },
            Place {
                position: PLACE.position + 1,
                ..PLACE
            },
        ];
        for place in others {
            assert_eq!(Record::decode(&lines, &place), Err(NoRecord::Checksum));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_missing_line_is_found() {
        let lines = record(7).encode(&PLACE);
        for bit in 0..lines.len() * LINE_BYTES * 8 {
            let mut damaged = lines.clone();
            damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::decode(&damaged, &PLACE).is_err(), "bit {bit}");
        }
        for kept in 0..lines.len() {
            assert!(Record::decode(&lines[..kept], &PLACE).is_err());
            let mut torn = lines.clone();
            torn[kept] = [0; LINE_BYTES];
            assert!(Record::decode(&torn, &PLACE).is_err(), "line {kept}");
        }
    }

    proptest! {
        #[test]
        fn decodes_what_it_encodes(pages in 1..=PAGES_MAX, level in 0..=LEVELS_MAX, rest in 0usize..4) {
            let record = Record { level, ..record(pages) };
            let mut lane = record.encode(&PLACE);
            lane.extend(vec![[0xaa; LINE_BYTES]; rest]);
            prop_assert_eq!(Record::decode(&lane, &PLACE), Ok(record));
        }

        #[test]
        fn any_bytes_are_no_record(lane in prop::collection::vec(any::<[[u8; 32]; 2]>(), 0..8)) {
            let lane: Vec<[u8; LINE_BYTES]> = lane.iter().map(|l| field(l.as_flattened(), 0)).collect();
            prop_assert!(Record::decode(&lane, &PLACE).is_err());
        }
    }
}
