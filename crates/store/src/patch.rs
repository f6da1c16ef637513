//! Parts of a page that are changed where the page lies.
//!
//! A page that is written in part is not copied into a fresh frame: its bytes go into the
//! record itself, a *patch*, and behind the fence that commits it they are put into the
//! page's frame. The slot changes all the same, to the next one that names this frame.
//!
//! Invariants:
//! - no byte is put there before the record is fenced in every pool of the write; so
//!   whatever of it a crash leaves, recovery has the record and puts the bytes there anew;
//! - while bytes are put there the slot says so ([`TrackedFile::has_changes`]), from before the
//!   first until after the last: whoever reads without a lock looks at the slot before
//!   its copy and behind it, and so never takes a torn page for one that was;
//! - the sum of the page is computed from what it was and from what changes. So a page
//!   that does not match its sum does not match it afterwards either;
//! - the page's lock word is held, by the session or, once that is dead, in its name.

use crate::defect::{self, Defect};
use crate::pool_mapping::{Handle, PoolMapping, frame_at};
use crate::record::{PATCH_LINE_BYTES, Patch, Record, patch_lines};
use crate::session::{LegSession, Session};
use crate::slot::Slot;
use pagemesh_base::ids::PageNo;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
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

/// What a patch puts into the records of all members: kept for its memory.
#[derive(Default)]
pub(crate) struct PatchBuffer {
    patch: Patch,
    /// The lines behind the heads, and their sum.
    lines: Vec<[u8; LINE_BYTES]>,
    checksum: u32,
}

/// A write of this part of a page comes. Has everything fetched that a patch will load and
/// store to, and takes its bytes in meanwhile: a core waits for more lines of memory than it
/// can have under way at once.
pub(crate) fn stage<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    (within, part): (usize, &[u8]),
) {
    if part.len() > PATCH_MAX {
        return;
    }
    for member in members.iter() {
        let bytes = (within, part.len());
        member.session.prefetch_patch(&member.handle, page, bytes);
    }
    let [first, ..] = members else { return };
    let PatchBuffer {
        patch,
        lines,
        checksum: sum,
    } = &mut first.session.patch_buffer;
    // From where they are once: whoever they belong to may change them meanwhile.
    patch.set(within, part);
    lines.clear();
    *sum = patch.encode(lines);
}

impl<M: Media> PoolMapping<M> {
    /// Whether the page behind a slot may be changed in its frame: the one place that
    /// decides it. On `file-sync` pools a page may get to the disk before its record.
    fn may_change_in_place(&self, slot: Slot) -> bool {
        slot.frame().is_some() && !slot.is_changing() && !self.has_overlay()
    }

    /// Puts the bytes of a committed patch, whose slot lies at `location_at`, into the page, and
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

/// Makes the record of each member, which knows the slot that the page has, a patch of the
/// bytes that [`stage`] took in, `len` of them. False if some page cannot be changed in
/// place, or if all should be `alike` and their sums say that they are not: a copy makes
/// them so. Nothing has happened then. Under locks.
pub(crate) fn build_records<M: Media>(
    members: &mut [LegSession<'_, M>],
    len: usize,
    alike: bool,
) -> bool {
    let is_possible = |member: &LegSession<'_, M>| {
        let LegSession { session, .. } = member;
        let old = session.record.changes[0].old;
        len <= session.patch_max() && session.mapping.may_change_in_place(old)
    };
    if !members.iter().all(is_possible) {
        return false;
    }
    let mut sums = members
        .iter()
        .map(|member| member.session.checksum_before(0));
    let first = sums.next();
    if alike && sums.any(|sum| Some(sum) != first) {
        return false;
    }
    let [first, others @ ..] = members else {
        return false;
    };
    let session = &mut *first.session;
    std::mem::swap(&mut session.record.patch, &mut session.patch_buffer.patch);
    for other in others {
        let Patch { within, bytes, .. } = &first.session.record.patch;
        other.session.record.patch.set(*within, bytes);
    }
    let is_filled = members.iter_mut().all(|it| it.session.build_patch());
    if !is_filled {
        for member in members {
            member.session.record.patch.clear();
        }
    }
    is_filled
}

/// Begins and encodes the record of each member, which [`fill`] made.
pub(crate) fn begin<M: Media>(members: &mut [LegSession<'_, M>], page: PageNo, stamp: Stamp) {
    let Some((first, others)) = members.split_first_mut() else {
        return;
    };
    let lines = std::mem::take(&mut first.session.patch_buffer.lines);
    let sum = first.session.patch_buffer.checksum;
    for member in std::iter::once(&mut *first).chain(others) {
        let session = &mut *member.session;
        session.begin_record(&member.handle, 0, page, stamp, false);
        session.encoded.push(session.record.encode_patch(sum));
        session.encoded.extend_from_slice(&lines);
    }
    first.session.patch_buffer.lines = lines;
}

impl<M: Media> Session<M> {
    /// Bytes of the longest patch: its record takes a quarter of the lane, as others do.
    fn patch_max(&self) -> usize {
        let by_journal =
            (self.mapping.geometry.journal_lines() as usize / 4 - 1) * PATCH_LINE_BYTES;
        by_journal.min(PATCH_MAX)
    }

    /// Fetches what a patch of this part of a page will load and store to.
    fn prefetch_patch(&self, handle: &Handle, page: PageNo, (within, len): (usize, usize)) {
        let Some(frame) = self.cached_frame(handle, page) else {
            return;
        };
        self.mapping
            .data
            .prefetch_all(frame_at(frame) + within, len);
        let entry_at = self.mapping.geometry.frame_entry_at(frame);
        self.mapping.meta.prefetch(entry_at);
    }

    /// The sum of the page that is the number `index` of the record at hand, before that.
    pub(crate) fn checksum_before(&self, index: usize) -> u32 {
        let frame = self.record.changes[index].old.frame();
        let entry_at = frame.map(|frame| self.mapping.geometry.frame_entry_at(frame));
        entry_at.map_or(0, |at| self.mapping.meta.load(at) as u32)
    }

    /// Finds what becomes of the page's slot and sum. False if the page cannot be read.
    fn build_patch(&mut self) -> bool {
        let crc = self.checksum_before(0);
        let Record { patch, changes, .. } = &mut self.record;
        let change = &mut changes[0];
        let Some(frame) = change.old.frame() else {
            return false;
        };
        let delta = &mut self.delta[..patch.len];
        // This pool's own: what is wrong in one must not become so in another.
        self.mapping
            .data
            .read(frame_at(frame) + patch.within, delta);
        if self.mapping.data.is_unreadable(frame_at(frame)) {
            self.mapping.report_unreadable(frame);
            return false;
        }
        for (old, new) in delta.iter_mut().zip(&patch.bytes) {
            *old ^= new;
        }
        let behind = PAGE_BYTES - patch.within - patch.len;
        change.new = change.old.map(frame, self.round);
        change.sums.crc = crc32c_patched(crc, delta, behind);
        true
    }

    /// [`Defect::PatchedBeforeFence`].
    pub(crate) fn write_before_fence(&self) {
        let Record { patch, changes, .. } = &self.record;
        if let (Some(frame), true) = (changes[0].old.frame(), self.record.is_patch()) {
            let at = frame_at(frame) + patch.within;
            self.mapping.data.write(at, &patch.bytes);
        }
    }

    /// Shows the committed patch, whose slot lies at `location_at`. False if that is not the one
    /// that it replaces: it was damaged.
    pub(crate) fn publish_patch(&mut self, at: usize) -> bool {
        let found = Slot::decode(self.mapping.meta.load(at));
        let Record { patch, changes, .. } = &self.record;
        let is_sound = found.is_err() || found == Ok(changes[0].old);
        if let (true, Some(frame)) = (is_sound, changes[0].new.frame()) {
            let (first, len) = (frame_at(frame) + patch.within, patch.len);
            let crc = self.checksum_before(0);
            self.partial_pages.patch(&self.record, crc);
            self.mapping.apply_patch(at, &self.record);
            self.record_unflushed_patch(first, len);
        }
        self.record.patch.clear();
        is_sound
    }
}
