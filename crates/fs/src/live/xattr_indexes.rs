//! Indexes of long lists of extended attributes.
//!
//! An index holds the pages that it was made from, and a page that was replaced since is read again. So a change need not
//! update an index, and a change that fails leaves no trace in one.

use crate::error::Result;
use crate::format::Page;
use crate::format::inode::Ino;
use crate::format::xattr_list::{Record, XattrList};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::VecDeque;
use std::sync::Arc;

/// Lists with an index: those that were used last. One takes up to 250 KiB, with its pages.
const INDEXES_MAX: usize = 16;
/// Shorter lists are searched: that is as fast.
const INDEXED_PAGES_MIN: usize = 2;

/// The indexes; the last used list comes first.
#[derive(Default)]
pub(crate) struct XattrIndexes(VecDeque<(Ino, Vec<IndexedPage>)>);

/// The records that begin in a page.
struct IndexedPage {
    page: Arc<Page>,
    /// The name of the last record may lie there.
    next_page: Option<Arc<Page>>,
    /// Offset of the first record that begins in this page or behind it.
    first: usize,
    /// The list ends here, or behind this page.
    list_end: usize,
    /// End of the last record.
    end: usize,
    /// Hashes of the names, and offsets.
    records: Vec<(u32, usize)>,
}

/// FNV-1a.
fn hash(name: &[u8]) -> u32 {
    name.iter().fold(0x811c_9dc5, |hash, &byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

impl IndexedPage {
    fn new(list: &XattrList, index: usize, first: usize) -> Result<IndexedPage> {
        let list_end = list.len.min((index + 1) * PAGE_BYTES);
        let mut indexed = IndexedPage {
            page: Arc::clone(&list.pages[index]),
            next_page: list.pages.get(index + 1).cloned(),
            first,
            list_end,
            end: first,
            records: Vec::new(),
        };
        while indexed.end < list_end {
            let record = list.record(indexed.end)?;
            let hash = hash(&list.copy(record.name()));
            indexed.records.push((hash, record.at));
            indexed.end = record.end();
        }
        Ok(indexed)
    }

    /// Whether the page is still a page of the list.
    fn is_current(&self, list: &XattrList, index: usize, first: usize) -> bool {
        let next = match (&self.next_page, list.pages.get(index + 1)) {
            (Some(own), Some(found)) => Arc::ptr_eq(own, found),
            (own, found) => own.is_none() && found.is_none(),
        };
        next && Arc::ptr_eq(&self.page, &list.pages[index])
            && self.first == first
            && self.list_end == list.len.min((index + 1) * PAGE_BYTES)
    }
}

impl XattrIndexes {
    /// The record of a name.
    pub(crate) fn find(&mut self, list: &XattrList, name: &[u8]) -> Result<Option<Record>> {
        if list.pages.len() < INDEXED_PAGES_MIN {
            return list.find(name);
        }
        let hash = hash(name);
        let pages = self.current(list)?.iter();
        let records = pages.flat_map(|page| &page.records);
        for (_, at) in records.filter(|(found, _)| *found == hash) {
            let record = list.record(*at)?;
            if list.has_at(record.name(), name) {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// The last record that is as long as this one.
    pub(crate) fn last_of_len(&mut self, list: &XattrList, like: Record) -> Result<Record> {
        for page in self.current(list)?.iter().rev() {
            let mut end = page.end;
            for &(_, at) in page.records.iter().rev() {
                if end - at == like.len() {
                    return list.record(at);
                }
                end = at;
            }
        }
        Ok(like)
    }

    /// The index of a list.
    fn current(&mut self, list: &XattrList) -> Result<&[IndexedPage]> {
        let known = self.0.iter().position(|(ino, _)| *ino == list.ino);
        let (_, mut pages) = known
            .and_then(|at| self.0.remove(at))
            .unwrap_or((list.ino, Vec::new()));
        let mut first = 0;
        for index in 0..list.pages.len() {
            let is_current = |page: &IndexedPage| page.is_current(list, index, first);
            if !pages.get(index).is_some_and(is_current) {
                let page = IndexedPage::new(list, index, first)?;
                match pages.get_mut(index) {
                    Some(old) => *old = page,
                    None => pages.push(page),
                }
            }
            first = pages[index].end;
        }
        pages.truncate(list.pages.len());
        self.0.push_front((list.ino, pages));
        self.0.truncate(INDEXES_MAX);
        Ok(&self.0[0].1)
    }
}
