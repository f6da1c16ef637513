//! Following every page table of a pool, once, and noting each frame.

use super::{Options, Place, Plan, Remedy, Report, What};
use crate::geometry::Geometry;
use crate::object::{HEIGHT, Object};
use crate::seen::Seen;
use crate::slot::Slot;
use crate::superblock::Superblock;
use crate::table::{NodeSlots, reach};
use crate::view::frame_at;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{FrameNo, ObjectId};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Visited frames between two words of progress.
const PROGRESS_FRAMES: u64 = 1024;

pub(super) struct Walk<'c, 'p, M> {
    pub(super) media: &'c M,
    pub(super) report: &'c mut Report,
    pub(super) plan: &'c mut Plan,
    options: &'c mut Options<'p>,
    geometry: Geometry,
    used: u64,
    seen: Seen,
    visited: u64,
    object: ObjectId,
    entry: Object,
}

/// A slot and where it stands in its object's table.
#[derive(Clone, Copy)]
struct Spot {
    at: usize,
    bits: u64,
    level: u8,
    /// The first page below it.
    page: u64,
}

impl<'c, 'p, M: Media> Walk<'c, 'p, M> {
    pub(super) fn new(
        media: &'c M,
        block: &Superblock,
        options: &'c mut Options<'p>,
        report: &'c mut Report,
        plan: &'c mut Plan,
    ) -> Walk<'c, 'p, M> {
        Walk {
            media,
            report,
            plan,
            options,
            geometry: block.geometry,
            used: block.used_frames,
            seen: Seen::none(&block.geometry),
            visited: 0,
            object: ObjectId(0),
            entry: Object::FREE,
        }
    }

    pub(super) fn finish(self) -> Seen {
        (self.options.progress)(self.visited, self.visited);
        self.seen
    }

    /// Follows the table of an object from its root slot.
    pub(super) fn object(&mut self, object: ObjectId, entry: &Object, root_at: usize) {
        self.object = object;
        self.entry = *entry;
        let root = Spot {
            at: root_at,
            bits: self.media.load(root_at),
            level: HEIGHT,
            page: 0,
        };
        self.spot(root);
    }

    /// Follows a slot. As deep as a table is high.
    fn spot(&mut self, spot: Spot) {
        let Some(slot) = self.decoded(spot) else {
            return;
        };
        let Some(frame) = slot.frame() else {
            return;
        };
        let level = spot.level;
        if !self.geometry.frame_numbers().contains(&frame.0) {
            self.lost(What::NoSuchFrame { level }, spot, Some(frame));
            return;
        }
        if self.seen.has(frame) {
            self.lost(What::Shared { level }, spot, Some(frame));
            return;
        }
        self.seen.add(frame);
        self.visited += 1;
        if self.visited.is_multiple_of(PROGRESS_FRAMES) {
            (self.options.progress)(self.visited, self.used.max(self.visited));
        }
        match level {
            0 => self.page(spot, frame),
            _ => self.node(spot, frame),
        }
    }

    fn node(&mut self, spot: Spot, frame: FrameNo) {
        self.report.nodes += 1;
        let mut bytes = [0; PAGE_BYTES];
        self.media.read(frame_at(frame), &mut bytes);
        let level = spot.level - 1;
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let bits = u64::from_le_bytes(*word);
            if bits != 0 {
                self.spot(Spot {
                    at: frame_at(frame) + i * 8,
                    bits,
                    level,
                    page: spot.page + i as u64 * reach(level),
                });
            }
        }
    }

    fn page(&mut self, spot: Spot, frame: FrameNo) {
        self.report.pages += 1;
        if spot.page * PAGE_BYTES as u64 >= self.entry.size_bytes {
            let place = self.place(spot, Some(frame));
            self.report.add(What::Beyond, place, Remedy::Replace);
        }
        if !self.options.reads_data {
            return;
        }
        self.report.pages_summed += 1;
        let (found, expected) = self.sums(frame);
        if found != expected {
            let place = Place {
                byte: Some(frame_at(frame) as u64),
                ..self.place(spot, Some(frame))
            };
            let what = What::Data { found, expected };
            self.report.add(what, place, Remedy::Leg);
        }
    }

    /// The sum of a frame's bytes, and what it was when they were written.
    fn sums(&self, frame: FrameNo) -> (u32, u32) {
        let mut bytes = [0; PAGE_BYTES];
        self.media.read(frame_at(frame), &mut bytes);
        let entry = self.geometry.frame_entry_at(frame);
        (crc32c(&bytes), self.media.load(entry) as u32)
    }

    /// The slot as it is, or as it was before a bit flipped.
    fn decoded(&mut self, spot: Spot) -> Option<Slot> {
        if let Ok(slot) = Slot::decode(spot.bits) {
            return Some(slot);
        }
        let (level, bits) = (spot.level, spot.bits);
        let mended = Slot::mend(bits).filter(|&slot| self.is_proven(slot, level));
        let what = What::Slot { level, bits };
        match mended {
            Some(slot) => {
                let place = self.place(spot, slot.frame());
                self.report.add(what, place, Remedy::Pool);
                self.plan.set(spot.at, slot.encode());
            }
            None => self.lost(what, spot, None),
        }
        mended
    }

    /// Whether what a mended slot names speaks for it.
    fn is_proven(&self, slot: Slot, level: u8) -> bool {
        let Some(frame) = slot.frame() else {
            return true;
        };
        if !self.geometry.frame_numbers().contains(&frame.0) || self.seen.has(frame) {
            return false;
        }
        if level == 0 {
            let (found, expected) = self.sums(frame);
            return found == expected;
        }
        NodeSlots::of(self.media, frame, &self.geometry.frame_numbers()).is_some()
    }

    /// What is below this slot is not known any more.
    fn lost(&mut self, what: What, spot: Spot, frame: Option<FrameNo>) {
        self.report.is_whole = false;
        // A page behind a slot that does not check is an error to read, and so
        // is found by its volume. Writing it needs the slot.
        let place = self.place(spot, frame);
        self.report.add(what, place, Remedy::Replace);
    }

    fn place(&self, spot: Spot, frame: Option<FrameNo>) -> Place {
        let end = self.entry.size_bytes / PAGE_BYTES as u64;
        let below = spot.page..spot.page.saturating_add(reach(spot.level));
        Place {
            object: Some(self.object),
            slice: Some(self.entry.slice),
            pages: Some(below.start..below.end.min(end).max(below.start + 1)),
            frame: frame.map(|frame| frame.0),
            byte: Some(spot.at as u64),
        }
    }
}
