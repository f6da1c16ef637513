//! Reads a stream.

use crate::ContentSummary;
use crate::error::StreamError;
use crate::fields::{take, u64_at};
use crate::header::{HEADER_BYTES, Header};
use crate::record::{RECORD_HEADER_BYTES, Record, RecordHeader, RecordKind, Totals, checksum};
use std::io::{ErrorKind, Read};

/// A stream that is read. It returns a record only if the stream is intact up to the end of it.
pub struct StreamReader<R: Read> {
    input: R,
    header: Header,
    /// The checksum of the last record.
    crc: u32,
    totals: Totals,
    /// The end of the last record.
    position: u64,
    is_over: bool,
}

impl<R: Read> StreamReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// When the input fails, or does not begin with an intact header of a known version.
    pub fn new(mut input: R) -> Result<StreamReader<R>, StreamError> {
        let mut bytes = [0; HEADER_BYTES];
        let found = read_up_to(&mut input, &mut bytes)?;
        if found < HEADER_BYTES {
            // A file of another kind may be short, too.
            return Err(match found < 8 || &bytes[..8] != b"pmstream" {
                true => StreamError::NotAStream,
                false => StreamError::Cut { position: 0 },
            });
        }
        let header = Header::decode(&bytes)?;
        Ok(StreamReader {
            input,
            crc: crc32c::crc32c(&bytes),
            totals: Totals::default(),
            position: header.start.position,
            is_over: false,
            header,
        })
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The next record; none after the end.
    ///
    /// # Errors
    /// When the input fails, or the stream is cut, damaged, or goes on behind its end. No later call returns a record
    /// then.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Record>, StreamError> {
        if self.is_over {
            return Ok(None);
        }
        self.is_over = true;
        let record = self.read_record()?;
        self.is_over = false;
        if let Record::End { .. } = record {
            let mut more = [0];
            if read_up_to(&mut self.input, &mut more)? > 0 {
                self.is_over = true;
                return Err(StreamError::Trailing);
            }
            self.is_over = true;
        }
        Ok(Some(record))
    }

    fn read_record(&mut self) -> Result<Record, StreamError> {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        self.read_exact(&mut bytes)?;
        let header = RecordHeader::decode(&bytes).map_err(|what| self.damaged(what))?;
        // At most a record: `decode` has checked the length.
        let mut stored = vec![0; header.stored as usize];
        self.read_exact(&mut stored)?;
        let crc = checksum(self.crc, &bytes, &stored);
        if header.number != self.totals.records + 1 {
            return Err(self.damaged("a record is missing, repeated or out of order"));
        }
        if crc != RecordHeader::crc(&bytes) {
            return Err(self.damaged("the checksum of the record is wrong"));
        }
        let record = self.decode(&header, stored)?;
        self.crc = crc;
        self.totals.records += 1;
        Ok(record)
    }

    fn decode(&mut self, header: &RecordHeader, stored: Vec<u8>) -> Result<Record, StreamError> {
        let end = header.offset.checked_add(header.len);
        let end =
            end.filter(|end| *end <= self.header.size_bytes && header.offset >= self.position);
        let end =
            end.ok_or_else(|| self.damaged("a record overlaps another, or the end of the volume"))?;
        let (offset, len) = (header.offset, header.len);
        let record = match header.kind {
            RecordKind::Data => {
                self.totals.data_bytes += len;
                let data = match header.compressed {
                    true => self.decompress(&stored, len as usize)?,
                    false => stored,
                };
                Record::Data { offset, data }
            }
            RecordKind::Zeroes => {
                self.totals.zero_bytes += len;
                Record::Zeroes { offset, len }
            }
            RecordKind::Checkpoint => Record::Checkpoint {
                position: offset,
                summary: ContentSummary::from_bytes(take(&stored, 0)),
            },
            RecordKind::End => {
                let totals = Totals {
                    records: u64_at(&stored, 16),
                    data_bytes: u64_at(&stored, 24),
                    zero_bytes: u64_at(&stored, 32),
                };
                if totals != self.totals {
                    return Err(self.damaged("the sums of the stream do not fit"));
                }
                let summary = ContentSummary::from_bytes(take(&stored, 0));
                Record::End { totals, summary }
            }
        };
        self.position = end;
        Ok(record)
    }

    fn decompress(&self, stored: &[u8], len: usize) -> Result<Vec<u8>, StreamError> {
        let data = zstd::bulk::decompress(stored, len).ok();
        let data = data.filter(|data| data.len() == len);
        data.ok_or_else(|| self.damaged("the compressed bytes of the record do not fit"))
    }

    fn damaged(&self, what: &'static str) -> StreamError {
        let number = self.totals.records + 1;
        StreamError::Damaged { number, what }
    }

    fn read_exact(&mut self, into: &mut [u8]) -> Result<(), StreamError> {
        let found = read_up_to(&mut self.input, into)?;
        match found == into.len() {
            true => Ok(()),
            false => Err(StreamError::Cut {
                position: self.position,
            }),
        }
    }
}

/// Fills the buffer, or reads to the end of the input.
fn read_up_to(input: &mut impl Read, into: &mut [u8]) -> Result<usize, StreamError> {
    let mut at = 0;
    while at < into.len() {
        match input.read(&mut into[at..]) {
            Ok(0) => break,
            Ok(count) => at += count,
            Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause.into()),
        }
    }
    Ok(at)
}
