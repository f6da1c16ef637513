//! Cache of name-space pages, in two generations. When the young one is full it replaces the old
//! one, and pages that were not used since are dropped.

use crate::format::Page;
use crate::hash::NumberMap;
use std::sync::Arc;

/// Pages of one generation; both together take at most 64 MiB. The inodes of a million files take
/// four times as much.
const GENERATION_PAGES_MAX: usize = 8192;

#[derive(Default)]
pub(crate) struct Cache {
    young_pages: NumberMap<u64, Arc<Page>>,
    old_pages: NumberMap<u64, Arc<Page>>,
}

impl Cache {
    pub(crate) fn get(&mut self, page: u64) -> Option<Arc<Page>> {
        if let Some(found) = self.young_pages.get(&page) {
            return Some(found.clone());
        }
        let found = self.old_pages.remove(&page)?;
        self.put(page, found.clone());
        Some(found)
    }

    pub(crate) fn put(&mut self, page: u64, bytes: Arc<Page>) {
        if self.young_pages.len() == GENERATION_PAGES_MAX {
            self.old_pages = std::mem::take(&mut self.young_pages);
        }
        self.old_pages.remove(&page);
        self.young_pages.insert(page, bytes);
    }

    pub(crate) fn forget(&mut self, page: u64) {
        self.young_pages.remove(&page);
        self.old_pages.remove(&page);
    }
}
