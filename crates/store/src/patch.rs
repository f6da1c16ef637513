//! Parts of a page that are changed where the page lies.
//!
//! A page that is written in part is not copied into a fresh frame: its bytes go into the
//! record itself, a *patch*, and behind the fence that commits it they are put into the
//! page's frame. The slot changes all the same, to the next one that names this frame.
//!
//! Invariants:
//! - no byte is put there before the record is fenced in every pool of the write; so
//!   whatever of it a crash leaves, recovery has the record and puts the bytes there anew;
//! - while bytes are put there the slot says so ([`Slot::is_changing`]), from before the
//!   first until after the last: whoever reads without a lock looks at the slot before
//!   its copy and behind it, and so never takes a torn page for one that was;
//! - the sum of the page is computed from what it was and from what changes. So a page
//!   that does not match its sum does not match it afterwards either;
//! - the page's lock word is held, by the session or, once that is dead, in its name.

use crate::defect::{self, Defect};
use crate::record::{PATCH_LINE_BYTES, Record, patch_lines};
use crate::session::{Member, Session};
use crate::slot::Slot;
use crate::view::{Handle, View, frame_at};
use pagemesh_base::ids::PageNo;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_pmem::copy::crc32c_patched;
use std::sync::atomic::{Ordering, fence};

/// Bytes of the longest patch, measured: with two copies, one of 512 takes the writer four
/// fifths of the time of a copy of its page, and one of 1024 as much, and more of the bricks'.
/// Its lines are fetched, of which a core waits for a dozen at once; those of a copy follow
/// each other.
pub const PATCH_MAX: usize = 512;

/// Lines of the longest record that a write of so many bytes of a page may need.
pub(crate) fn entry_lines(bytes: usize) -> usize {
    match bytes <= PATCH_MAX {
        true => patch_lines(bytes),
        false => 1,
    }
}

impl<M: Media> View<M> {
    /// Whether the page behind a slot may be changed in its frame: the one place that
    /// decides it. On `file-sync` pools a page may get to the disk before its record.
    fn may_change_in_place(&self, slot: Slot) -> bool {
        slot.frame().is_some() && !slot.is_changing() && !self.has_overlay()
    }

    /// Puts the bytes of a committed patch, whose slot lies at `at`, into the page, and
    /// shows it. Nothing is flushed. Under the page's lock word.
    pub(crate) fn apply_patch(&self, at: usize, record: &Record) {
        let change = &record.changes[0];
        if !defect::is(Defect::PatchNotMarked) {
            self.meta.store(at, change.new.changing().encode());
        }
        // Whoever has loaded one of the bytes that follow, and then fences and loads the
        // slot, finds this one or a later one.
        fence(Ordering::Release);
        let frame = change.new.frame().expect("a patch names a frame");
        let bytes_at = frame_at(frame) + record.patch.within;
        self.data.write(bytes_at, &record.patch.bytes);
        let entry_at = self.geometry.frame_entry_at(frame);
        self.meta.store(entry_at, u64::from(change.sums.crc));
        self.meta.store(at, change.new.encode());
    }
}

/// Makes the record of each member, which knows the slot that the page has, a patch. False
/// if some page cannot be changed in place, or if all should be `alike` and their sums say
/// that they are not: a copy makes them so. Nothing has happened then. Under locks.
pub(crate) fn fill<M: Media>(
    members: &mut [Member<'_, M>],
    (within, part): (usize, &[u8]),
    alike: bool,
) -> bool {
    let is_possible = |member: &Member<'_, M>| {
        let Member { session, .. } = member;
        let old = session.record.changes[0].old;
        part.len() <= session.patch_max() && session.view.may_change_in_place(old)
    };
    if !members.iter().all(is_possible) {
        return false;
    }
    let mut sums = members.iter().map(|member| member.session.sum_before());
    let first = sums.next();
    if alike && sums.any(|sum| Some(sum) != first) {
        return false;
    }
    let [first, others @ ..] = members else {
        return false;
    };
    // From where they are once: whoever they belong to may change them meanwhile.
    first.session.take_bytes(within, part);
    for other in others {
        let bytes = &first.session.record.patch.bytes;
        other.session.take_bytes(within, bytes);
    }
    let is_filled = members.iter_mut().all(|it| it.session.fill_patch());
    if !is_filled {
        for member in members {
            member.session.record.patch.bytes.clear();
        }
    }
    is_filled
}

impl<M: Media> Session<M> {
    /// Bytes of the longest patch: its record takes a quarter of the lane, as others do.
    fn patch_max(&self) -> usize {
        let by_lane = (self.view.geometry.lane_lines() as usize / 4 - 1) * PATCH_LINE_BYTES;
        by_lane.min(PATCH_MAX)
    }

    /// A write of this part of a page will come: fetches what it will load and store to,
    /// while the locked instructions before it are under way.
    pub(crate) fn expect_patch(
        &self,
        handle: &Handle,
        page: PageNo,
        (within, len): (usize, usize),
    ) {
        if len > PATCH_MAX {
            return;
        }
        let Some(frame) = self.guess_frame(handle, page) else {
            return;
        };
        self.view.data.prefetch_all(frame_at(frame) + within, len);
        let entry_at = self.view.geometry.frame_entry_at(frame);
        self.view.meta.prefetch(entry_at);
    }

    /// The sum of the page that the record at hand changes.
    fn sum_before(&self) -> u32 {
        let frame = self.record.changes[0].old.frame();
        let entry_at = frame.map(|frame| self.view.geometry.frame_entry_at(frame));
        entry_at.map_or(0, |at| self.view.meta.load(at) as u32)
    }

    fn take_bytes(&mut self, within: usize, bytes: &[u8]) {
        let patch = &mut self.record.patch;
        patch.within = within;
        patch.bytes.clear();
        patch.bytes.extend_from_slice(bytes);
    }

    /// Finds what becomes of the page's slot and sum. False if the page cannot be read.
    fn fill_patch(&mut self) -> bool {
        let crc = self.sum_before();
        let Record { patch, changes, .. } = &mut self.record;
        let change = &mut changes[0];
        let Some(frame) = change.old.frame() else {
            return false;
        };
        let delta = &mut self.delta[..patch.bytes.len()];
        // This pool's own: what is wrong in one must not become so in another.
        self.view.data.read(frame_at(frame) + patch.within, delta);
        if self.view.data.is_unreadable(frame_at(frame)) {
            return false;
        }
        for (old, new) in delta.iter_mut().zip(&patch.bytes) {
            *old ^= new;
        }
        let behind = PAGE_BYTES - patch.within - patch.bytes.len();
        change.new = change.old.map(frame, self.round);
        change.sums.crc = crc32c_patched(crc, delta, behind);
        true
    }

    /// [`Defect::PatchedBeforeFence`].
    pub(crate) fn put_early(&self) {
        let Record { patch, changes, .. } = &self.record;
        if let (Some(frame), true) = (changes[0].old.frame(), self.record.is_patch()) {
            let at = frame_at(frame) + patch.within;
            self.view.data.write(at, &patch.bytes);
        }
    }

    /// Shows the committed patch, whose slot lies at `at`. False if that is not the one
    /// that it replaces: it was damaged.
    pub(crate) fn show_patch(&mut self, at: usize) -> bool {
        let found = Slot::decode(self.view.meta.load(at));
        let Record { patch, changes, .. } = &self.record;
        let is_sound = found.is_err() || found == Ok(changes[0].old);
        if let (true, Some(frame)) = (is_sound, changes[0].new.frame()) {
            let (first, len) = (frame_at(frame) + patch.within, patch.bytes.len());
            self.view.apply_patch(at, &self.record);
            self.note_patched(first, len);
        }
        self.record.patch.bytes.clear();
        is_sound
    }
}
