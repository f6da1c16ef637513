//! The last pages of files that grew: the next append to a page changes these bytes, and need not read them.
//!
//! Invariants: a kept page keeps no file open. The bytes are those in the space. Only the append that stored them, and the next one, hold the file
//! without dropping them ([`FileLock::try_write`]); every other lock of the file drops them.

use crate::format::Page;
use crate::live::file_lock::FileLock;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// Files whose last pages are kept, 4 KiB each: as many logs as programs append to at a time.
const TAIL_PAGES_MAX: usize = 64;

/// A page of a file, by its number in the space.
pub(crate) type TailPage = (u64, Arc<Page>);

/// See the module. A weak reference keeps the address of its lock from reuse.
#[derive(Default)]
pub(crate) struct TailPages(VecDeque<(Weak<FileLock>, TailPage)>);

impl TailPages {
    /// Takes the last page of a file, if no thread has locked the file since. The caller holds it exclusively.
    pub(crate) fn take(&mut self, lock: &Arc<FileLock>) -> Option<TailPage> {
        let is_of_file = |(of, _): &(Weak<FileLock>, _)| of.as_ptr() == Arc::as_ptr(lock);
        let at = self.0.iter().position(is_of_file)?;
        let (_, tail) = self.0.remove(at)?;
        lock.keeps_tail_page().then_some(tail)
    }

    /// Keeps the last page of a file. The caller still holds the file as at the append.
    pub(crate) fn put(&mut self, lock: &Arc<FileLock>, tail: TailPage) {
        if self.0.len() == TAIL_PAGES_MAX {
            self.0.pop_front();
        }
        lock.keep_tail_page();
        self.0.push_back((Arc::downgrade(lock), tail));
    }
}
