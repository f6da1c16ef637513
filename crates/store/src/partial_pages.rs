//! The pages of which a session wrote parts last, as they are now: one who writes page after
//! page part by part, as logs are, need not load them from memory again, where streaming
//! leaves them.

use crate::record::Record;
use crate::slot::Slot;
use pagemesh_base::ids::{ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;

/// A write over an edge of two pages leaves parts of both.
const CACHED_PAGES_MAX: usize = 2;

pub(crate) type PageBytes = Box<[u8; PAGE_BYTES]>;

/// A page as it was written. A slot is the same again after 4095 changes, or when its node was
/// given up and made anew; the sum tells whether it has the same bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageKey {
    pub(crate) object: ObjectId,
    pub(crate) page: PageNo,
    pub(crate) slot: Slot,
    pub(crate) crc: u32,
}

impl PageKey {
    /// What a record shows of its page number `index`.
    fn from_record(record: &Record, index: usize) -> PageKey {
        let change = &record.changes[index];
        PageKey {
            object: record.object,
            page: PageNo(record.page.0 + index as u64),
            slot: change.new,
            crc: change.sums.crc,
        }
    }
}

/// Those pages, the last one behind. That they are what they were is for whoever takes one
/// to see.
#[derive(Default)]
pub(crate) struct PartialPageCache(Vec<(PageKey, PageBytes)>);

impl PartialPageCache {
    /// The bytes of this page, or else room for a page.
    pub(crate) fn take(&mut self, of: PageKey) -> (PageBytes, bool) {
        let found = self.0.iter().position(|(kept, _)| *kept == of);
        match found {
            Some(at) => (self.0.remove(at).1, true),
            None if self.0.len() == CACHED_PAGES_MAX => (self.0.remove(0).1, false),
            None => (Box::new([0; PAGE_BYTES]), false),
        }
    }

    /// Keeps what a record shows of its page number `index`.
    pub(crate) fn put(&mut self, record: &Record, index: usize, bytes: PageBytes) {
        if self.0.len() == CACHED_PAGES_MAX {
            self.0.remove(0);
        }
        self.0.push((PageKey::from_record(record, index), bytes));
    }

    /// A patch is about to change a page of this sum in place: changes it here, too.
    pub(crate) fn patch(&mut self, record: &Record, crc: u32) {
        let Record { patch, changes, .. } = record;
        let before = PageKey {
            slot: changes[0].old,
            crc,
            ..PageKey::from_record(record, 0)
        };
        let kept = self.0.iter_mut().find(|(kept, _)| *kept == before);
        if let Some((of, bytes)) = kept {
            bytes[patch.within..patch.within + patch.len].copy_from_slice(&patch.bytes);
            *of = PageKey::from_record(record, 0);
        }
    }
}
