//! Walks every page table of a pool once and records each frame.

use super::{CheckOptions, FindingKind, FindingLocation, PoolReport, Remedy, RepairPlan};
use crate::format::devices::DeviceState;
use crate::format::frame_set::FrameSet;
use crate::format::frame_word::FrameWord;
use crate::format::geometry::{Geometry, frame_at};
use crate::format::object::{HEIGHT, Object};
use crate::format::slot::Slot;
use crate::format::superblock::Superblock;
use crate::format::table::{NodeSlots, reach};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Visited frames between two progress reports.
const PROGRESS_FRAMES: u64 = 1024;

pub(super) struct TableWalk<'c, 'p, M> {
    pub(super) media: &'c M,
    pub(super) report: &'c mut PoolReport,
    pub(super) plan: &'c mut RepairPlan,
    options: &'c mut CheckOptions<'p>,
    geometry: Geometry,
    used: u64,
    frames_found: FrameSet,
    /// Frames that clones share with their origins.
    shared_frames: FrameSet,
    visited: u64,
    object: ObjectId,
    entry: Object,
}

/// A slot and its position in its object's table.
#[derive(Clone, Copy)]
struct SlotPosition {
    at: usize,
    bits: u64,
    level: u8,
    /// The first page below it.
    page: u64,
}

impl<'c, 'p, M: Media> TableWalk<'c, 'p, M> {
    pub(super) fn new(
        media: &'c M,
        block: &Superblock,
        options: &'c mut CheckOptions<'p>,
        report: &'c mut PoolReport,
        plan: &'c mut RepairPlan,
    ) -> TableWalk<'c, 'p, M> {
        TableWalk {
            media,
            report,
            plan,
            options,
            geometry: block.geometry,
            used: block.used_frames,
            frames_found: FrameSet::empty(&block.geometry),
            shared_frames: FrameSet::empty(&block.geometry),
            visited: 0,
            object: ObjectId(0),
            entry: Object::FREE,
        }
    }

    pub(super) fn finish(mut self) -> FrameSet {
        (self.options.progress)(self.visited, self.visited);
        self.frames_found.add_all(&self.shared_frames);
        self.frames_found
    }

    /// Walks the table of an object from its root slot.
    pub(super) fn visit_object(&mut self, object: ObjectId, entry: &Object, root_at: usize) {
        self.object = object;
        self.entry = *entry;
        let root = SlotPosition {
            at: root_at,
            bits: self.media.load(root_at),
            level: HEIGHT,
            page: 0,
        };
        self.visit_slot(root);
    }

    /// Walks the subtree of a slot. The recursion is as deep as a table is high.
    fn visit_slot(&mut self, spot: SlotPosition) {
        let Some(slot) = self.decode_or_correct(spot) else {
            return;
        };
        let Some(frame) = slot.frame() else {
            return;
        };
        let level = spot.level;
        if !self.geometry.frame_numbers().contains(frame) {
            self.report_lost(FindingKind::NoSuchFrame { level }, spot, Some(frame));
            return;
        }
        if level == 0 && self.is_of_origin(frame) {
            self.shared_frames.add(frame);
            self.visit_page(spot, frame);
            return;
        }
        // Each page below a lost node names the frame of that node.
        if self.frames_found.has(frame) && !self.is_failed(frame) {
            self.report_lost(FindingKind::Shared { level }, spot, Some(frame));
            return;
        }
        self.frames_found.add(frame);
        self.visited += 1;
        if self.visited.is_multiple_of(PROGRESS_FRAMES) {
            (self.options.progress)(self.visited, self.used.max(self.visited));
        }
        match level {
            0 => self.visit_page(spot, frame),
            _ => self.visit_node(spot, frame),
        }
    }

    /// Whether a frame of a clone belongs to its origin.
    fn is_of_origin(&self, frame: FrameNo) -> bool {
        let word = self.media.load(self.geometry.frame_entry_at(frame));
        let birth = FrameWord::from_bits(word).birth().unwrap_or(Epoch(0));
        birth < self.entry.base
    }

    fn visit_node(&mut self, spot: SlotPosition, frame: FrameNo) {
        self.report.nodes += 1;
        let mut bytes = [0; PAGE_BYTES];
        self.media.read(frame_at(frame), &mut bytes);
        let level = spot.level - 1;
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let bits = u64::from_le_bytes(*word);
            if bits != 0 {
                self.visit_slot(SlotPosition {
                    at: frame_at(frame) + i * 8,
                    bits,
                    level,
                    page: spot.page + i as u64 * reach(level),
                });
            }
        }
    }

    fn visit_page(&mut self, spot: SlotPosition, frame: FrameNo) {
        self.report.pages += 1;
        if spot.page * PAGE_BYTES as u64 >= self.entry.size_bytes {
            let place = self.location_of(spot, Some(frame));
            self.report
                .add(FindingKind::BeyondEnd, place, Remedy::Replace);
        }
        let at = self.geometry.frame_entry_at(frame);
        let word = FrameWord::from_bits(self.media.load(at));
        if word.is_sound() && !self.options.reads_data {
            return;
        }
        self.report.pages_summed += 1;
        let (found, expected) = self.sums(frame);
        let corrected = match found == expected {
            true if word.is_sound() => return,
            // The birth is unknown from here on.
            true => Some(FrameWord::new(found, Epoch(0))),
            false => word.with_corrected_crc(found).filter(|_| !word.is_sound()),
        };
        if let Some(corrected) = corrected {
            let place = FindingLocation {
                byte: Some(at as u64),
                ..self.location_of(spot, Some(frame))
            };
            let bits = word.bits();
            let what = FindingKind::FrameWord { bits };
            self.report.add(what, place, Remedy::Pool);
            self.plan.set_word(at, corrected.bits());
        } else {
            let place = FindingLocation {
                byte: Some(frame_at(frame) as u64),
                ..self.location_of(spot, Some(frame))
            };
            let what = FindingKind::Data { found, expected };
            self.report.add(what, place, Remedy::Leg);
        }
    }

    /// The checksum of a frame's bytes, and the checksum in the frame table.
    fn sums(&self, frame: FrameNo) -> (u32, u32) {
        let mut bytes = [0; PAGE_BYTES];
        self.media.read(frame_at(frame), &mut bytes);
        let entry = self.geometry.frame_entry_at(frame);
        (crc32c(&bytes), self.media.load(entry) as u32)
    }

    /// The slot, after the correction of a flipped bit if necessary.
    fn decode_or_correct(&mut self, spot: SlotPosition) -> Option<Slot> {
        if let Ok(slot) = Slot::decode(spot.bits) {
            return Some(slot);
        }
        let (level, bits) = (spot.level, spot.bits);
        let corrected = Slot::correct(bits).filter(|&slot| self.is_confirmed(slot, level));
        let what = FindingKind::Slot { level, bits };
        match corrected {
            Some(slot) => {
                let place = self.location_of(spot, slot.frame());
                self.report.add(what, place, Remedy::Pool);
                self.plan.set_word(spot.at, slot.encode());
            }
            None => self.report_lost(what, spot, None),
        }
        corrected
    }

    /// Whether the target of a corrected slot confirms it.
    fn is_confirmed(&self, slot: Slot, level: u8) -> bool {
        let Some(frame) = slot.frame() else {
            return true;
        };
        if !self.geometry.frame_numbers().contains(frame) || self.frames_found.has(frame) {
            return false;
        }
        if level == 0 {
            let (found, expected) = self.sums(frame);
            return found == expected;
        }
        NodeSlots::of(self.media, frame, self.geometry.frame_numbers()).is_some()
    }

    fn is_failed(&self, frame: FrameNo) -> bool {
        let device = self.geometry.devices.device_of(frame.0);
        device.is_some_and(|device| device.state == DeviceState::Failed)
    }

    /// Reports that the subtree of this slot is lost.
    fn report_lost(&mut self, what: FindingKind, spot: SlotPosition, frame: Option<FrameNo>) {
        self.report.is_complete = false;
        // A page below a damaged slot is an error to read, so its volume finds it. A write to the
        // page needs the slot.
        let place = self.location_of(spot, frame);
        self.report.add(what, place, Remedy::Replace);
    }

    fn location_of(&self, spot: SlotPosition, frame: Option<FrameNo>) -> FindingLocation {
        let end = self.entry.size_bytes / PAGE_BYTES as u64;
        let below = spot.page..spot.page.saturating_add(reach(spot.level));
        FindingLocation {
            object: Some(self.object),
            slice: Some(self.entry.slice),
            pages: Some(below.start..below.end.min(end).max(below.start + 1)),
            frame: frame.map(|frame| frame.0),
            byte: Some(spot.at as u64),
        }
    }
}
