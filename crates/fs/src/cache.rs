//! Pages of the name space in memory: those used lately, in two generations. When
//! the young one is full it becomes the old one, and what nobody asked for since
//! is forgotten.

use crate::format::Page;
use crate::hash::NumberMap;
use std::sync::Arc;

/// Pages kept: 64 MiB of them, with one more generation of half as many in the
/// making. Inodes of a million files are four times as much.
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
