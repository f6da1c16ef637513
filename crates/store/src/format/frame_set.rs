//! The set of frames that the page tables of a pool name.

use crate::format::bitmap::Bitmap;
use crate::format::geometry::{Geometry, frame_at};
use crate::format::object::{HEIGHT, ROOT_AT};
use crate::format::slot::Slot;
use crate::format::version_log::{VersionLogPlace, load_versions};
use pagemesh_base::ids::{FrameNo, ObjectId};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use uuid::Uuid;

/// A bit for each frame of a pool, as in its bitmap.
pub(crate) struct FrameSet(Vec<u64>);

impl FrameSet {
    /// A set without frames.
    pub(crate) fn empty(geometry: &Geometry) -> FrameSet {
        FrameSet(vec![0; Bitmap::words_of(geometry)])
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.0
    }

    pub(crate) fn has(&self, frame: FrameNo) -> bool {
        self.0[(frame.0 / 64) as usize] >> (frame.0 % 64) & 1 != 0
    }

    pub(crate) fn add(&mut self, frame: FrameNo) {
        self.0[(frame.0 / 64) as usize] |= 1 << (frame.0 % 64);
    }

    /// Adds the frames of another set of the same pool.
    pub(crate) fn add_all(&mut self, other: &FrameSet) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }

    /// Collects the frames of the page tables of the first `objects_end` objects, and those of the version log. The flag is false
    /// if some table could not be read to its end. A root has check bits of its own, so damage in
    /// the rest of an object's entry does not matter. The time grows with the stored data: one page
    /// is read for each 2 MiB.
    pub(crate) fn from_tables<M: Media>(
        media: &M,
        geometry: &Geometry,
        objects_end: u32,
        (log, pool): (&VersionLogPlace, Uuid),
    ) -> (FrameSet, bool) {
        let mut frame_set = FrameSet::empty(geometry);
        let mut is_whole = true;
        for object in (0..objects_end).map(ObjectId) {
            let root_at = geometry.object_at(object) + ROOT_AT;
            is_whole &= frame_set.add_table(media, geometry, media.load(root_at), HEIGHT);
        }
        is_whole &= frame_set.add_version_log(media, geometry, (log, pool));
        (frame_set, is_whole)
    }

    /// Adds the frames of the version log, and those of the versions in it. False if a line is damaged.
    pub(crate) fn add_version_log<M: Media>(
        &mut self,
        media: &M,
        geometry: &Geometry,
        (log, pool): (&VersionLogPlace, Uuid),
    ) -> bool {
        log.frames().for_each(|frame| self.add(frame));
        let numbers = geometry.frame_numbers();
        let versions = load_versions(media, log, pool);
        let mut is_whole = true;
        for version in versions {
            match version.filter(|version| numbers.contains(version.frame)) {
                Some(version) => self.add(version.frame),
                None => is_whole = false,
            }
        }
        is_whole
    }

    /// Adds the frames below a slot. The recursion is as deep as a table is high.
    fn add_table<M: Media>(
        &mut self,
        media: &M,
        geometry: &Geometry,
        bits: u64,
        level: u8,
    ) -> bool {
        let Ok(slot) = Slot::decode(bits) else {
            return false;
        };
        let Some(frame) = slot.frame() else {
            return true;
        };
        if !geometry.frame_numbers().contains(frame) {
            return false;
        }
        if level == 0 || self.has(frame) {
            self.add(frame);
            return true;
        }
        self.add(frame);
        let mut node = [0; PAGE_BYTES];
        media.read(frame_at(frame), &mut node);
        let slots = node.as_chunks::<8>().0.iter();
        let slots = slots.map(|word| u64::from_le_bytes(*word));
        let mut is_whole = true;
        for bits in slots.filter(|&bits| bits != 0) {
            is_whole &= self.add_table(media, geometry, bits, level - 1);
        }
        is_whole
    }
}
