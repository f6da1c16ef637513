//! Changes of parts of a page in place.
//!
//! A partial write does not copy its page into a new frame. The bytes go into the record itself, a
//! *patch*. After the fence that commits the record they are copied into the page's frame. The slot
//! changes all the same, to its successor that names the same frame.
//!
//! Invariants:
//! - no byte is copied before the record is fenced in every pool of the write. If a crash tears the
//!   copy, recovery finds the record and copies the bytes again;
//! - the slot says so while bytes are copied ([`Slot::is_changing`]), from before the first until
//!   after the last. A reader without a lock loads the slot before and after its copy of the page,
//!   so it never takes a torn page for a whole one;
//! - the checksum of the page is computed from the old checksum and from the changed bytes. So a
//!   page that does not match its checksum does not match it afterwards either;
//! - the session holds the page's lock word. After its death the owner holds it in its name.
//!
//! # One partial write
//!
//! The write follows [`crate::session`] up to the lock words. It has at most [`PATCH_MAX`] bytes,
//! within one page that has a frame. Then:
//!
//! 1. [`build_records`] checks in each pool that the page may change in place, copies the bytes,
//!    and computes the page's new checksum. A page that does not qualify is read, merged and
//!    streamed to new frames.
//! 2. The record, with the bytes, is streamed in each pool, and **one fence commits it**.
//! 3. [`PoolMapping::apply_patch`] stores the slot with the bit for a change in progress, then the
//!    bytes, the checksum and the final slot. The session's next record flushes them.
//!
//! The other appliers of a patch are the checkpoint (`Pool::apply_patch_record`), the retirement of
//! a dead session (`Pool::publish_patch`) and recovery (`Replay::apply_patch`).

use crate::defect::{self, Defect};
use crate::format::frame_word::FrameWord;
use crate::format::geometry::frame_at;
use crate::format::record::{PATCH_LINE_BYTES, Patch, Record, patch_lines};
use crate::format::slot::Slot;
use crate::session::{LegSession, Session};
use crate::shared::pool_mapping::{Handle, PoolMapping};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;
use pagemesh_pmem::copy::crc32c_patched;
use std::sync::atomic::{Ordering, fence};

/// Bytes of the longest patch, measured. With two legs, a patch of 512 bytes takes the writer four
/// fifths of the time of a page copy. A patch of 1024 bytes takes as long as the copy, and more of
/// the bricks' time. The lines of a patch are prefetched, and a core waits for a dozen of them at
/// once; the lines of a copy are loaded one after the other.
pub const PATCH_MAX: usize = 512;

/// Lines of the longest record that a write of `bytes` bytes of a page may need.
pub(crate) fn entry_lines(bytes: usize) -> usize {
    match bytes <= PATCH_MAX {
        true => patch_lines(bytes),
        false => 1,
    }
}

/// The patch for the records of all legs. A session keeps the buffer to reuse its memory.
#[derive(Default)]
pub(crate) struct PatchBuffer {
    patch: Patch,
    /// The lines behind the record heads, and the checksum of the patch.
    lines: Vec<[u8; LINE_BYTES]>,
    checksum: u32,
}

/// Prepares a write of this part of a page. Prefetches everything that a patch will load and store
/// to, and copies the new bytes meanwhile. A core waits for more lines of memory than it can have
/// in progress at once.
pub(crate) fn stage<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    (within, part): (usize, &[u8]),
) {
    if part.len() > PATCH_MAX {
        return;
    }
    for leg in legs.iter() {
        let bytes = (within, part.len());
        leg.session.prefetch_patch(&leg.handle, page, bytes);
    }
    let [first, ..] = legs else { return };
    let PatchBuffer {
        patch,
        lines,
        checksum: sum,
    } = &mut first.session.patch_buffer;
    // Copy the caller's bytes once: their owner may change them meanwhile.
    patch.set(within, part);
    lines.clear();
    *sum = patch.encode(lines);
}

impl<M: Media> PoolMapping<M> {
    /// Whether the page of a slot may be changed in its frame. No other code decides that. On
    /// `file-sync` pools a page may reach the disk before its record. A page with wrong check bits in
    /// the word of its frame has an unknown birth, so it is copied. A page on flash moves to memory when it changes.
    fn may_change_in_place(&self, handle: &Handle, slot: Slot) -> bool {
        let may = |frame| {
            let in_memory = self.reaches(frame) && !self.geometry().is_on_flash(frame);
            let word = self.frame_word(frame);
            in_memory && word.is_sound() && !self.is_seen_by_snapshot(handle, word)
        };
        !slot.is_changing() && !self.has_overlay() && slot.frame().is_some_and(may)
    }

    /// Whether a snapshot may see the page with this word. The change that asks has its epoch already: a snapshot that it
    /// belongs behind is prepared.
    fn is_seen_by_snapshot(&self, handle: &Handle, word: FrameWord) -> bool {
        let shared_below = self.shared_below(handle);
        let is_older = word.birth().unwrap_or(Epoch(0)) < shared_below;
        is_older && !defect::is(Defect::SeenPagePatched)
    }

    /// Copies the bytes of a committed patch into the page and publishes it; its slot lies at byte
    /// `at`. Flushes nothing. The caller holds the page's lock word.
    pub(crate) fn apply_patch(&self, at: usize, record: &Record, hint: TierHint) {
        let change = &record.changes[0];
        if !defect::is(Defect::PatchNotMarked) {
            self.meta.store(at, change.new.changing().encode());
        }
        // A reader that has loaded one of the following bytes, and then fences and loads the slot,
        // finds this slot or a later one.
        fence(Ordering::Release);
        let frame = change.new.frame().expect("a patch names a frame");
        let bytes_at = frame_at(frame) + record.patch.within;
        self.data.write(bytes_at, &record.patch.bytes);
        let entry_at = self.geometry().frame_entry_at(frame);
        self.meta.store(entry_at, record.frame_word(change));
        self.meta.store(at, change.new.encode());
        self.control.warm_changed(frame, hint);
    }
}

/// Makes the record of each leg a patch of the `len` bytes that [`stage`] copied. The record
/// already holds the page's present slot. False if some page cannot be changed in place. Also false
/// if the pages should be `alike` and their checksums differ: a page copy makes them alike. Nothing
/// has happened then. The caller holds the locks.
pub(crate) fn build_records<M: Media>(
    legs: &mut [LegSession<'_, M>],
    len: usize,
    alike: bool,
) -> bool {
    let is_possible = |leg: &LegSession<'_, M>| {
        let session = &leg.session;
        let old = session.record.changes[0].old;
        len <= session.patch_max() && session.mapping.may_change_in_place(&leg.handle, old)
    };
    if !legs.iter().all(is_possible) {
        return false;
    }
    let mut sums = legs.iter().map(|leg| leg.session.checksum_before(0));
    let first = sums.next();
    if alike && sums.any(|sum| Some(sum) != first) {
        return false;
    }
    let [first, others @ ..] = legs else {
        return false;
    };
    let session = &mut *first.session;
    std::mem::swap(&mut session.record.patch, &mut session.patch_buffer.patch);
    for other in others {
        let Patch { within, bytes, .. } = &first.session.record.patch;
        other.session.record.patch.set(*within, bytes);
    }
    let is_filled = legs.iter_mut().all(|it| it.session.build_patch());
    if !is_filled {
        for leg in legs {
            leg.session.record.patch.clear();
        }
    }
    is_filled
}

/// Begins and encodes the record of each leg that [`build_records`] made.
pub(crate) fn begin<M: Media>(legs: &mut [LegSession<'_, M>], page: PageNo, stamp: Stamp) {
    let Some((first, others)) = legs.split_first_mut() else {
        return;
    };
    let lines = std::mem::take(&mut first.session.patch_buffer.lines);
    let sum = first.session.patch_buffer.checksum;
    for leg in std::iter::once(&mut *first).chain(others) {
        let session = &mut *leg.session;
        session.begin_record(&leg.handle, 0, page, stamp, false);
        session.encoded.push(session.record.encode_patch(sum));
        session.encoded.extend_from_slice(&lines);
    }
    first.session.patch_buffer.lines = lines;
}

impl<M: Media> Session<M> {
    /// Bytes of the longest patch. Its record takes at most a quarter of the journal, as other
    /// records do.
    fn patch_max(&self) -> usize {
        let by_journal =
            (self.mapping.geometry().journal_lines() as usize / 4 - 1) * PATCH_LINE_BYTES;
        by_journal.min(PATCH_MAX)
    }

    /// The checksum of page number `index` of the present record, before the record.
    pub(crate) fn checksum_before(&self, index: usize) -> u32 {
        let frame = self.record.changes[index].old.frame();
        frame.map_or(0, |frame| self.mapping.frame_word(frame).crc())
    }

    /// Computes the page's new slot and checksum. False if the page cannot be read.
    fn build_patch(&mut self) -> bool {
        let crc = self.checksum_before(0);
        let Record { patch, changes, .. } = &mut self.record;
        let change = &mut changes[0];
        let Some(frame) = change.old.frame() else {
            return false;
        };
        let delta = &mut self.delta[..patch.len];
        // Read this pool's own bytes: damage in one pool must not spread to another.
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
        change.new = change.old.map(frame);
        change.sums.crc = crc32c_patched(crc, delta, behind);
        true
    }

    /// [`Defect::PatchedBeforeFence`]: copies the bytes before the fence.
    pub(crate) fn write_before_fence(&self) {
        let Record { patch, changes, .. } = &self.record;
        if let (Some(frame), true) = (changes[0].old.frame(), self.record.is_patch()) {
            let at = frame_at(frame) + patch.within;
            self.mapping.data.write(at, &patch.bytes);
        }
    }

    /// Publishes the committed patch; its slot lies at byte `at`. A slot that does not check counts
    /// as the one that the patch replaces. False if the slot checks but is another one: the medium
    /// damaged it, and nothing is published.
    pub(crate) fn publish_patch(&mut self, at: usize) -> bool {
        let found = Slot::decode(self.mapping.meta.load(at));
        let Record { patch, changes, .. } = &self.record;
        let is_sound = found.is_err() || found == Ok(changes[0].old);
        if let (true, Some(frame)) = (is_sound, changes[0].new.frame()) {
            let (first, len) = (frame_at(frame) + patch.within, patch.len);
            let crc = self.checksum_before(0);
            self.partial_pages.patch(&self.record, crc);
            self.mapping.apply_patch(at, &self.record, self.hint);
            self.record_unflushed_patch(first, len);
        }
        self.record.patch.clear();
        is_sound
    }
}
