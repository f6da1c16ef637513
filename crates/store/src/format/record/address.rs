//! The address of a record, which seeds its checksum, and the entries that are only an address:
//! pads.

use super::Line;
use super::layout::{KIND_PAD, NEW_AT, first_word, is_patch_head, with_patch_sum};
use pagemesh_base::bytes::{get_u32, get_u64, put};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::Incarnation;
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::copy::{crc32c_lines, crc32c_words};
use uuid::Uuid;

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
pub fn add_checksum(record: &mut [Line], place: &RecordAddress) {
    if let [head, body @ ..] = record
        && is_patch_head(head)
        && !body.is_empty()
    {
        let new = with_patch_sum(get_u64(head, NEW_AT), crc32c_lines(0, body));
        put(head, NEW_AT, new.to_le_bytes());
    }
    let crc = place.checksum(record);
    let first = get_u64(&record[0], 0) & !u64::from(u32::MAX);
    put(&mut record[0], 0, (first | u64::from(crc)).to_le_bytes());
}

/// The line after which the journal continues at the start of its ring.
#[must_use]
pub fn encode_pad(place: &RecordAddress) -> Line {
    let mut line = [0; LINE_BYTES];
    put(&mut line, 0, first_word(KIND_PAD, 0, 0).to_le_bytes());
    add_checksum(std::slice::from_mut(&mut line), place);
    line
}

/// Whether `line` is the pad of `place`.
#[must_use]
pub fn is_pad(line: &Line, place: &RecordAddress) -> bool {
    line[4] == KIND_PAD && place.checksum(std::slice::from_ref(line)) == get_u32(line, 0)
}

/// Whether `line` is the pad of `place` with one flipped bit.
#[must_use]
pub fn is_damaged_pad(line: &Line, place: &RecordAddress) -> bool {
    (0..LINE_BYTES * 8).any(|bit| {
        let mut line = *line;
        line[bit / 8] ^= 1 << (bit % 8);
        is_pad(&line, place)
    })
}
