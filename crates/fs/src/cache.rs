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
    young: NumberMap<u64, Arc<Page>>,
    old: NumberMap<u64, Arc<Page>>,
}

impl Cache {
    pub(crate) fn get(&mut self, page: u64) -> Option<Arc<Page>> {
        if let Some(found) = self.young.get(&page) {
            return Some(found.clone());
        }
        let found = self.old.remove(&page)?;
        self.put(page, found.clone());
        Some(found)
    }

    pub(crate) fn put(&mut self, page: u64, bytes: Arc<Page>) {
        if self.young.len() == GENERATION_PAGES_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&page);
        self.young.insert(page, bytes);
    }

    pub(crate) fn forget(&mut self, page: u64) {
        self.young.remove(&page);
        self.old.remove(&page);
    }
}
