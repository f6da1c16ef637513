//! Writes a stream.

use crate::error::StreamError;
use crate::fields::put;
use crate::header::Header;
use crate::record::{
    CHECKPOINT_BYTES, DATA_BYTES_MAX, END_BYTES, RecordHeader, RecordKind, Totals,
};
use crate::{ContentSummary, PAGE_BYTES};
use std::io::Write;

/// A stream that is written. Without an end record it is a cut stream.
pub struct StreamWriter<W: Write> {
    out: W,
    compressor: Option<zstd::bulk::Compressor<'static>>,
    /// The checksum of the last record.
    crc: u32,
    totals: Totals,
    /// The end of the last record.
    position: u64,
    size_bytes: u64,
    stored_bytes: u64,
}

impl<W: Write> StreamWriter<W> {
    /// Writes the header. With a level of zstd, records are compressed if that makes them shorter.
    ///
    /// # Errors
    /// When the output fails, or the header is beyond limits.
    pub fn new(
        mut out: W,
        header: &Header,
        level: Option<i32>,
    ) -> Result<StreamWriter<W>, StreamError> {
        let bytes = header.encode()?;
        out.write_all(&bytes)?;
        Ok(StreamWriter {
            out,
            compressor: level.map(zstd::bulk::Compressor::new).transpose()?,
            crc: crc32c::crc32c(&bytes),
            totals: Totals::default(),
            position: header.start.position,
            size_bytes: header.size_bytes,
            stored_bytes: bytes.len() as u64,
        })
    }

    /// Bytes of the stream so far.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Writes whole pages, in records of [`DATA_BYTES_MAX`].
    ///
    /// # Errors
    /// When the output fails, or the range is not behind that of the last record.
    pub fn data(&mut self, offset: u64, data: &[u8]) -> Result<(), StreamError> {
        let mut offset = offset;
        for part in data.chunks(DATA_BYTES_MAX) {
            self.advance(offset, part.len() as u64)?;
            self.totals.data_bytes += part.len() as u64;
            let packed = match &mut self.compressor {
                Some(compressor) => Some(compressor.compress(part)?),
                None => None,
            };
            let packed = packed.filter(|it| it.len() < part.len());
            let place = (offset, part.len() as u64);
            self.record(
                RecordKind::Data,
                place,
                packed.as_deref().unwrap_or(part),
                packed.is_some(),
            )?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Writes a range of zeroes, of whole pages.
    ///
    /// # Errors
    /// When the output fails, or the range is not behind that of the last record.
    pub fn zeroes(&mut self, offset: u64, len: u64) -> Result<(), StreamError> {
        self.advance(offset, len)?;
        self.totals.zero_bytes += len;
        self.record(RecordKind::Zeroes, (offset, len), &[], false)
    }

    /// Writes a checkpoint: all changes below the position are written.
    ///
    /// # Errors
    /// When the output fails, or the position is before the end of the last record.
    pub fn checkpoint(
        &mut self,
        position: u64,
        summary: ContentSummary,
    ) -> Result<(), StreamError> {
        self.advance(position, 0)?;
        let stored: [u8; CHECKPOINT_BYTES] = summary.to_bytes();
        self.record(RecordKind::Checkpoint, (position, 0), &stored, false)
    }

    /// Writes the end, and flushes the output.
    ///
    /// # Errors
    /// When the output fails.
    pub fn end(mut self, summary: ContentSummary) -> Result<(W, Totals), StreamError> {
        let totals = self.totals;
        let mut stored = [0; END_BYTES];
        put(&mut stored, 0, &summary.to_bytes());
        put(&mut stored, 16, &totals.records.to_le_bytes());
        put(&mut stored, 24, &totals.data_bytes.to_le_bytes());
        put(&mut stored, 32, &totals.zero_bytes.to_le_bytes());
        self.record(RecordKind::End, (self.size_bytes, 0), &stored, false)?;
        self.out.flush()?;
        Ok((self.out, totals))
    }

    fn advance(&mut self, offset: u64, len: u64) -> Result<(), StreamError> {
        let page = PAGE_BYTES as u64;
        if !offset.is_multiple_of(page) || !len.is_multiple_of(page) {
            return Err(StreamError::Unwritable(
                "a range that is not of whole pages",
            ));
        }
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= self.size_bytes);
        match end.filter(|_| offset >= self.position) {
            Some(end) => self.position = end,
            None => {
                return Err(StreamError::Unwritable(
                    "a range out of order or behind the end",
                ));
            }
        }
        Ok(())
    }

    fn record(
        &mut self,
        kind: RecordKind,
        (offset, len): (u64, u64),
        stored: &[u8],
        compressed: bool,
    ) -> Result<(), StreamError> {
        let header = RecordHeader {
            kind,
            compressed,
            stored: stored.len() as u32,
            number: self.totals.records + 1,
            offset,
            len,
        };
        let (bytes, crc) = header.encode(self.crc, stored);
        self.out.write_all(&bytes)?;
        self.out.write_all(stored)?;
        self.crc = crc;
        self.totals.records += 1;
        self.stored_bytes += (bytes.len() + stored.len()) as u64;
        Ok(())
    }
}
