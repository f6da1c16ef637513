//! The partial-page cache of a session: the pages of its last partial writes, with their present
//! bytes. A log writer fills page after page part by part. Without the cache it loads each page
//! from memory again, because streaming stores leave the page there.

use crate::format::record::Record;
use crate::format::slot::Slot;
use pagemesh_base::ids::{ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;

/// A write that crosses a page edge leaves parts of two pages.
const CACHED_PAGES_MAX: usize = 2;

pub(crate) type PageBytes = Box<[u8; PAGE_BYTES]>;

/// Identifies the content of a page. A slot repeats after 4095 changes, or when its node was freed
/// and linked anew; the checksum then tells whether the bytes are the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageKey {
    pub(crate) object: ObjectId,
    pub(crate) page: PageNo,
    pub(crate) slot: Slot,
    pub(crate) crc: u32,
}

impl PageKey {
    /// The key of page number `index` of a record, after the record.
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

/// The cached pages, the last one at the end. The caller of [`PartialPageCache::take`] names the
/// page's present slot and checksum, so a stale page is never found.
#[derive(Default)]
pub(crate) struct PartialPageCache(Vec<(PageKey, PageBytes)>);

impl PartialPageCache {
    /// Removes the page from the cache and returns its bytes with true. If the cache does not have
    /// it, returns a buffer for a page with false.
    pub(crate) fn take(&mut self, of: PageKey) -> (PageBytes, bool) {
        let found = self.0.iter().position(|(kept, _)| *kept == of);
        match found {
            Some(at) => (self.0.remove(at).1, true),
            None if self.0.len() == CACHED_PAGES_MAX => (self.0.remove(0).1, false),
            None => (Box::new([0; PAGE_BYTES]), false),
        }
    }

    /// Caches page number `index` of a record.
    pub(crate) fn put(&mut self, record: &Record, index: usize, bytes: PageBytes) {
        if self.0.len() == CACHED_PAGES_MAX {
            self.0.remove(0);
        }
        self.0.push((PageKey::from_record(record, index), bytes));
    }

    /// A patch is about to change the page with this checksum in place: changes the cached page
    /// alike.
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
