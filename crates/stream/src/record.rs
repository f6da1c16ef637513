//! The records behind the header.

use crate::fields::{put, u32_at, u64_at};
use crate::{ContentSummary, PAGE_BYTES};

/// Bytes of pages of the longest record of data.
pub const DATA_BYTES_MAX: usize = 1 << 20;
/// Bytes of the fixed part of a record.
pub const RECORD_HEADER_BYTES: usize = 40;
/// Stored bytes of a checkpoint: its summary.
pub(crate) const CHECKPOINT_BYTES: usize = 16;
/// Stored bytes of the end: its summary, and the totals.
pub(crate) const END_BYTES: usize = 16 + 3 * 8;

const CRC_AT: usize = 36;

/// The sums of a stream, from where it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Records before the end.
    pub records: u64,
    /// Bytes of pages with data.
    pub data_bytes: u64,
    /// Bytes that became zeroes.
    pub zero_bytes: u64,
}

/// A record. Records of data and zeroes come in the order of their offsets, and do not overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The bytes of whole pages.
    Data {
        /// The first byte.
        offset: u64,
        /// 1 to 256 pages.
        data: Vec<u8>,
    },
    /// A range that reads as zeroes.
    Zeroes {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// All changes below a byte are in the stream so far. A stream may begin here.
    Checkpoint {
        /// The byte.
        position: u64,
        /// The content summary of these changes.
        summary: ContentSummary,
    },
    /// The end. Nothing follows.
    End {
        /// The sums of the stream.
        totals: Totals,
        /// The content summary of all changes, also of those before the stream's start.
        summary: ContentSummary,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    Data = 1,
    Zeroes = 2,
    Checkpoint = 3,
    End = 4,
}

/// The fixed part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub kind: RecordKind,
    /// Whether the stored bytes are a frame of zstd.
    pub compressed: bool,
    /// Bytes behind the header.
    pub stored: u32,
    /// From 1 on.
    pub number: u64,
    pub offset: u64,
    pub len: u64,
}

impl RecordHeader {
    pub fn encode(&self, previous_crc: u32, stored: &[u8]) -> ([u8; RECORD_HEADER_BYTES], u32) {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        (bytes[0], bytes[1]) = (self.kind as u8, u8::from(self.compressed));
        put(&mut bytes, 4, &self.stored.to_le_bytes());
        put(&mut bytes, 8, &self.number.to_le_bytes());
        put(&mut bytes, 16, &self.offset.to_le_bytes());
        put(&mut bytes, 24, &self.len.to_le_bytes());
        let crc = checksum(previous_crc, &bytes, stored);
        put(&mut bytes, CRC_AT, &crc.to_le_bytes());
        (bytes, crc)
    }

    /// The fixed part, before its checksum is known to be right. Its lengths are within limits.
    pub fn decode(bytes: &[u8; RECORD_HEADER_BYTES]) -> Result<RecordHeader, &'static str> {
        let kind = match bytes[0] {
            1 => RecordKind::Data,
            2 => RecordKind::Zeroes,
            3 => RecordKind::Checkpoint,
            4 => RecordKind::End,
            _ => return Err("the kind of a record is unknown"),
        };
        let header = RecordHeader {
            kind,
            compressed: bytes[1] == 1,
            stored: u32_at(bytes, 4),
            number: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            len: u64_at(bytes, 24),
        };
        let unused = [&bytes[2..4], &bytes[32..CRC_AT]].concat();
        if bytes[1] > 1 || unused.iter().any(|byte| *byte != 0) {
            return Err("unused bits of a record are set");
        }
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), &'static str> {
        let page = PAGE_BYTES as u64;
        let stored = self.stored as usize;
        let is_sound = match self.kind {
            RecordKind::Data => {
                let is_stored = match self.compressed {
                    true => (1..self.len).contains(&u64::from(self.stored)),
                    false => u64::from(self.stored) == self.len,
                };
                is_stored && self.len > 0 && self.len <= DATA_BYTES_MAX as u64
            }
            RecordKind::Zeroes => stored == 0 && self.len > 0,
            RecordKind::Checkpoint => stored == CHECKPOINT_BYTES && self.len == 0,
            RecordKind::End => stored == END_BYTES && self.len == 0,
        };
        let is_whole = self.offset.is_multiple_of(page) && self.len.is_multiple_of(page);
        let is_plain = self.kind == RecordKind::Data || !self.compressed;
        match is_sound && is_whole && is_plain {
            true => Ok(()),
            false => Err("the lengths of a record do not fit"),
        }
    }

    pub fn crc(bytes: &[u8; RECORD_HEADER_BYTES]) -> u32 {
        u32_at(bytes, CRC_AT)
    }
}

/// The checksum of a record, which continues that of the record before it.
pub(crate) fn checksum(previous: u32, header: &[u8; RECORD_HEADER_BYTES], stored: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&previous.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &header[..CRC_AT]);
    crc32c::crc32c_append(crc, stored)
}
