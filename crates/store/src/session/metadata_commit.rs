//! Commits that move no page data: object entries, and slots that the owner or the link of a node
//! swaps.
//!
//! Invariant: such a record is committed by a fence of its own, in one pool.

use super::Session;
use crate::defect::{self, Defect};
use crate::format::geometry::{OBJECT_BYTES, frame_at};
use crate::format::record::{Change, JournalEntry, OBJECT_LINES, ObjectRecord, lines};
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::checksum::{crc32c, word_sum};
use pagemesh_base::ids::{Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

impl<M: Media> Session<M> {
    /// Commits an object record. For the owner.
    pub(crate) fn commit_object(
        &mut self,
        object: ObjectId,
        entry: [u8; OBJECT_BYTES as usize],
    ) -> Result<Seq, StoreError> {
        self.ensure_resources(0, OBJECT_LINES)?;
        self.reserve_journal(OBJECT_LINES);
        self.take_seq();
        let seq = self.record.seq;
        let entry = Box::new(entry);
        let record = ObjectRecord { seq, object, entry };
        self.encoded.clear();
        JournalEntry::Object(record).encode(self.journal.next_address(), &mut self.encoded);
        let stores = self.append();
        if !defect::is(Defect::ObjectNotFenced) {
            let _committed = self.mapping.data.fence(stores);
        }
        self.publish_record(None);
        Ok(seq)
    }

    /// Swaps slots without moving data: unmaps pages, unlinks nodes. `changes` are
    /// consecutive from `page`; its slot lies at byte `at`. For the owner, which takes the locks.
    pub(crate) fn commit_changes(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
        changes: &[Change],
    ) -> Result<(), StoreError> {
        self.ensure_resources(0, lines(changes.len()))?;
        self.record.changes.clear();
        self.record.changes.extend_from_slice(changes);
        self.commit_record(handle, level, page, at, Epoch(0))
    }

    /// Commits the prepared record. Publishes it even if a slot is damaged, because it is on media.
    pub(super) fn commit_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        let stamp = Stamp {
            epoch,
            op: 0,
            open_ops: 0,
        };
        let is_summed = self.add_second_sums(level);
        self.encode_record(handle, level, page, stamp, is_summed);
        self.flush_pending_slots(at);
        let stores = self.stream_record();
        let _committed = self.mapping.data.fence(stores);
        let swapped = self.swap_slots(at, page);
        self.publish_record(None);
        swapped
    }

    /// Adds the second sums of pages that the prepared record names and that are already in their
    /// frames. So recovery can judge it like the record that wrote the pages. Returns false if a
    /// page is damaged, because its second sum is then unknown.
    fn add_second_sums(&mut self, level: u8) -> bool {
        if level > 0 {
            return true;
        }
        let mut page = [0; PAGE_BYTES];
        for change in &mut self.record.changes {
            if let Some(frame) = change.new.frame() {
                self.mapping.data.read(frame_at(frame), &mut page);
                if crc32c(&page) != change.sums.crc {
                    self.mapping.report_unreadable(frame);
                    return false;
                }
                change.sums.words = word_sum(&page);
            }
        }
        true
    }
}
