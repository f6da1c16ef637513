//! The changes of a record, loaded from the slots that it replaces. The caller holds the locks.

use super::Session;
use crate::defect::{self, Defect};
use crate::format::record::{Change, NO_SUMS};
use crate::format::slot::Slot;
use crate::shared::error::{StoreError, damaged_page_error};
use pagemesh_base::ids::PageNo;
use pagemesh_pmem::Media;

impl<M: Media> Session<M> {
    /// Loads the slots that a write of whole pages replaces. The caller holds the locks.
    pub(crate) fn load_changes(
        &mut self,
        page: PageNo,
        count: usize,
        (at, round): (usize, u8),
    ) -> Result<(), StoreError> {
        self.round = round;
        self.record.changes.clear();
        for i in 0..count {
            let at = at + i * 8;
            // The frame of a damaged slot is unknown. The page is written as a whole, so the frame
            // is not needed. It stays in use, and a check of the pool finds it. No frame is freed
            // by a damaged slot.
            let old = match Slot::decode(self.mapping.meta.load(at)) {
                Err(_) if self.mapping.is_unreadable(at) => {
                    return Err(damaged_page_error(PageNo(page.0 + i as u64)));
                }
                Err(_) => Slot::EMPTY,
                Ok(slot) => self.mapping.check_frame(slot, PageNo(page.0 + i as u64))?,
            };
            self.record.changes.push(Change {
                old,
                new: old,
                sums: NO_SUMS,
            });
        }
        Ok(())
    }

    /// Loads the slot of a page that is written in part. The caller holds the locks.
    pub(super) fn load_slot(
        &mut self,
        page: PageNo,
        (at, round): (usize, u8),
    ) -> Result<(), StoreError> {
        self.load_changes(page, 1, (at, round))?;
        // A resyncing leg merges these bytes into stale ones. The page must still be copied, so its
        // stamp stays.
        if round == 0 {
            self.round = self.record.changes[0].old.round();
        }
        Ok(())
    }

    /// Loads changes that unmap the first run of mapped or damaged pages of a range. Returns the
    /// number of pages before the run, and its length.
    pub(crate) fn load_unmap_changes(
        &mut self,
        at: usize,
        page: PageNo,
        count: u64,
        round: u8,
    ) -> Result<(u64, u64), StoreError> {
        self.record.changes.clear();
        let mut skipped = 0;
        for i in 0..count {
            let page = PageNo(page.0 + i);
            // As for a write, the frame of a damaged slot is not needed.
            let at = at + i as usize * 8;
            let (old, is_damaged) = match Slot::decode(self.mapping.meta.load(at)) {
                Err(_) if defect::is(Defect::DamageNotCleared) => {
                    return Err(damaged_page_error(page));
                }
                Err(_) if self.mapping.is_unreadable(at) => return Err(damaged_page_error(page)),
                Err(_) => (Slot::EMPTY, true),
                Ok(slot) => (self.mapping.check_frame(slot, page)?, false),
            };
            if old.frame().is_some() || is_damaged {
                let change = Change {
                    old,
                    new: old.unmap(round),
                    sums: NO_SUMS,
                };
                self.record.changes.push(change);
            } else if self.record.changes.is_empty() {
                skipped += 1;
            } else {
                break;
            }
        }
        Ok((skipped, self.record.changes.len() as u64))
    }
}
