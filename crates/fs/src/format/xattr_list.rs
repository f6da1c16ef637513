//! The bytes of a list of extended attributes: records without order.
//!
//! A record: length of the name 1, length of the value 4, name, value.

use crate::error::{Corruption, FsError, Result};
use crate::format::Page;
use crate::format::inode::{Ino, Xattrs};
use pagemesh_base::bytes::get_u32;
use pagemesh_base::units::PAGE_BYTES;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a record before its name.
const HEADER_BYTES: usize = 5;
/// The location of a record in its list.
#[derive(Clone, Copy)]
pub(crate) struct Record {
    pub(crate) at: usize,
    name_len: usize,
    pub(crate) value_len: usize,
}

impl Record {
    pub(crate) fn name(&self) -> Range<usize> {
        let at = self.at + HEADER_BYTES;
        at..at + self.name_len
    }

    pub(crate) fn value(&self) -> Range<usize> {
        self.name().end..self.end()
    }

    pub(crate) fn end(&self) -> usize {
        self.at + self.len()
    }

    pub(crate) fn len(&self) -> usize {
        HEADER_BYTES + self.name_len + self.value_len
    }
}

pub(crate) fn encode_record(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![name.len() as u8];
    bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
    bytes.extend_from_slice(name);
    bytes.extend_from_slice(value);
    bytes
}

/// The list of an inode.
pub(crate) struct XattrList {
    pub(crate) ino: Ino,
    /// The first page.
    at: u64,
    pub(crate) len: usize,
    pub(crate) pages: Vec<Arc<Page>>,
}

impl XattrList {
    pub(crate) fn new(ino: Ino, xattrs: Xattrs, pages: Vec<Arc<Page>>) -> XattrList {
        XattrList {
            ino,
            at: xattrs.at,
            len: xattrs.len as usize,
            pages,
        }
    }

    /// The parts of a range of the list, page by page.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        let first = range.start / PAGE_BYTES;
        let pages = self.pages.iter().skip(first);
        pages.zip(first..).map_while(move |(page, index)| {
            let from = range.start.max(index * PAGE_BYTES);
            let end = range.end.min((index + 1) * PAGE_BYTES);
            (from < end).then(|| &page[from - index * PAGE_BYTES..end - index * PAGE_BYTES])
        })
    }

    pub(crate) fn copy(&self, range: Range<usize>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(range.len());
        self.parts(range)
            .for_each(|part| bytes.extend_from_slice(part));
        bytes
    }

    pub(crate) fn has_at(&self, range: Range<usize>, bytes: &[u8]) -> bool {
        if range.len() != bytes.len() {
            return false;
        }
        let within = range.start % PAGE_BYTES;
        let page = self.pages.get(range.start / PAGE_BYTES);
        match page.and_then(|page| page.get(within..within + bytes.len())) {
            Some(found) => found == bytes,
            // It goes on in the next page.
            None => self.copy(range) == bytes,
        }
    }

    /// The record at an offset before the end.
    pub(crate) fn record(&self, at: usize) -> Result<Record> {
        let cut = || FsError::Damaged {
            what: format!(
                "page {} of the volume, attributes of inode {},",
                self.at, self.ino.0
            ),
            cause: Corruption("an attribute goes beyond the end".into()),
        };
        let header = at..at + HEADER_BYTES;
        if header.end > self.len {
            return Err(cut());
        }
        let within = at % PAGE_BYTES;
        let copied;
        let header = match self.pages[at / PAGE_BYTES].get(within..within + HEADER_BYTES) {
            Some(header) => header,
            None => {
                copied = self.copy(header);
                &copied
            }
        };
        let record = Record {
            at,
            name_len: usize::from(header[0]),
            value_len: get_u32(header, 1) as usize,
        };
        match record.end() <= self.len {
            true => Ok(record),
            false => Err(cut()),
        }
    }

    /// The records from an offset on.
    pub(crate) fn records(&self, at: usize) -> impl Iterator<Item = Result<Record>> {
        let mut next = at;
        std::iter::from_fn(move || {
            (next < self.len).then(|| {
                let record = self.record(next);
                next = record.as_ref().map_or(self.len, Record::end);
                record
            })
        })
    }

    pub(crate) fn find(&self, name: &[u8]) -> Result<Option<Record>> {
        for record in self.records(0) {
            let record = record?;
            if self.has_at(record.name(), name) {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// The names of all attributes.
    pub(crate) fn names(&self) -> Result<Vec<Vec<u8>>> {
        let records = self.records(0);
        records
            .map(|record| Ok(self.copy(record?.name())))
            .collect()
    }
}
