//! The flushes of slots and patches. The flushes of a record wait for the next record's fence.
//!
//! Invariant: the session remembers one range of unflushed slots, all in one line or of one record.

use super::{Session, defects};
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::Media;

impl<M: Media> Session<M> {
    /// Flushes the slots of the previous record for the fence of the present one; `at` is the byte
    /// of the present record's first slot. The flushed slots are in this core's cache now, and will
    /// not be when a checkpoint needs them persistent. Slots in the same line wait for each other,
    /// because a flush may evict the line.
    pub(super) fn flush_pending_slots(&mut self, at: usize) {
        self.flush_patch();
        if let Some((first, end)) = self.unflushed_slots
            && !(first / LINE_BYTES == at / LINE_BYTES && (end - 1) / LINE_BYTES == at / LINE_BYTES)
        {
            self.flush_slots(first, end);
        }
    }

    /// Flushes all slots that were swapped so far, for the next fence. Slots of several places
    /// cannot wait: the session remembers one range, and the flush of a range over both places
    /// flushes all lines in between. A crash does not reveal such a range, as it holds every slot;
    /// `record_unflushed_slots` asserts against it.
    pub(crate) fn flush_all_slots(&mut self) {
        self.flush_patch();
        if let Some((first, end)) = self.unflushed_slots {
            self.flush_slots(first, end);
        }
    }

    /// Flushes the bytes that the previous record wrote in place. They are not flushed at once,
    /// because the unlock would wait for the flush.
    fn flush_patch(&mut self) {
        if let Some((first, end)) = self.unflushed_patch.take()
            && !defects::skips_patch_flush()
        {
            let flushed = self.mapping.data.flush(first, end - first);
            self.pending_patch = Some(flushed.after(self.pending_patch.take()));
        }
    }

    fn flush_slots(&mut self, first: usize, end: usize) {
        let end = defects::flushed_slots_end(first, end);
        self.pending_slots = Some(self.mapping.data.flush(first, end - first));
        self.has_lost_flush |= self.mapping.data.is_unreadable(first);
        self.unflushed_slots = None;
    }

    /// Records that bytes were written in place. They are flushed for the next record, together
    /// with the slot.
    pub(crate) fn record_unflushed_patch(&mut self, first: usize, len: usize) {
        debug_assert!(
            self.unflushed_patch.is_none(),
            "a record flushes the bytes of the one before"
        );
        self.unflushed_patch = Some((first, first + len));
    }

    /// Records that `slots` slots, the first at byte `at`, are about to be swapped.
    pub(super) fn record_unflushed_slots(&mut self, at: usize, slots: usize) {
        if self.mapping.has_overlay() {
            return;
        }
        let (first, end) = self.unflushed_slots.unwrap_or((at, at));
        // The session remembers one range. If the range grew from one place to another, no slot
        // would be lost. But its flush would cover all lines in between, possibly most of the pool.
        let line = |byte: usize| byte / LINE_BYTES;
        debug_assert!(
            line(first) == line(at) && line(end.max(at + 1) - 1) == line(at),
            "slots at {first} and {at} are unflushed at once"
        );
        self.unflushed_slots = Some((first.min(at), end.max(at + slots * 8)));
    }
}
