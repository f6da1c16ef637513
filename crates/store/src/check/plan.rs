//! The repairs that a pool can make by itself.
//!
//! A plan is a list of words to be stored after a recovery of the pool itself. They may be stored
//! again, and in any order: after an interrupted repair another check makes a new plan.

use super::{FindingKind, FindingLocation, PoolReport, Remedy};
use crate::format::bitmap::{Bitmap, LINE_FRAMES};
use crate::format::frame_set::FrameSet;
use crate::format::superblock::BitmapEnds;
use crate::recovery::{PoolError, RecoveryResult, recover, write_superblocks};
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

/// The words that repair a pool.
#[derive(Debug, PartialEq, Eq)]
pub struct RepairPlan {
    is_ordered: bool,
    is_impossible: bool,
    words: Vec<(usize, u64)>,
    used_frames: Option<(u64, BitmapEnds)>,
}

impl RepairPlan {
    pub(super) fn new(is_ordered: bool) -> RepairPlan {
        RepairPlan {
            is_ordered,
            is_impossible: false,
            words: Vec::new(),
            used_frames: None,
        }
    }

    /// Marks the pool as unrecoverable: nothing may be written to it.
    pub(super) fn mark_impossible(&mut self) {
        self.is_impossible = true;
    }

    /// Whether the pool can be recovered, and so be written to.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        !self.is_impossible
    }

    pub(super) fn set_word(&mut self, at: usize, word: u64) {
        self.words.push((at, word));
    }

    /// Compares the bitmap and the count with the frames that the walk found.
    pub(super) fn compare_bitmap(
        &mut self,
        bitmap: &mut Bitmap,
        frame_set: &FrameSet,
        report: &mut PoolReport,
    ) {
        let (mut not_used, mut leaked) = (FrameCount::default(), FrameCount::default());
        let mut lines = Vec::new();
        for (i, (&seen, &found)) in frame_set.words().iter().zip(bitmap.words()).enumerate() {
            if bitmap.is_failed_word(i) {
                continue;
            }
            not_used.add(i, seen & !found);
            // Frames below a table that could not be read may be in use.
            if report.is_complete {
                leaked.add(i, found & !seen);
            }
            let differs = seen & !found != 0 || report.is_complete && seen != found;
            let line = (i as u64 * 64 / LINE_FRAMES) as u32;
            if differs && lines.last() != Some(&line) {
                lines.push(line);
            }
        }
        for (run, what) in [
            (&not_used, FindingKind::UsedButFree(not_used.count)),
            (&leaked, FindingKind::Leaked(leaked.count)),
        ] {
            if let Some(frame) = run.first {
                let line = (frame / LINE_FRAMES) as usize;
                let within = frame % LINE_FRAMES / 8;
                let byte = bitmap.line_at(line).map(|at| at as u64 + within);
                let place = FindingLocation {
                    frame: Some(frame),
                    byte,
                    ..FindingLocation::default()
                };
                report.add(what, place, Remedy::Pool);
            }
        }
        let is_whole = report.is_complete;
        bitmap.rebuild_lines(lines.iter().copied(), |word, found| match is_whole {
            true => frame_set.words()[word],
            false => frame_set.words()[word] | found,
        });
        // With lines before them that were never used.
        for &line in bitmap.changed_lines() {
            let Some(at) = bitmap.line_at(line as usize) else {
                continue;
            };
            let words = bitmap.line(line as usize);
            for (at, word) in (at..at + LINE_BYTES).step_by(8).zip(words) {
                self.set_word(at, word);
            }
        }
        self.used_frames = Some((bitmap.used(), *bitmap.ends()));
    }

    /// Recovers the pool and writes the repairs durably. Check the pool again afterwards.
    ///
    /// # Errors
    /// When the pool cannot be recovered, or the medium fails.
    pub fn apply<M: Media>(&self, media: &M) -> Result<(), PoolError> {
        if self.is_impossible {
            return Err(PoolError::Failed);
        }
        let RecoveryResult { mut block, .. } = recover(media, self.is_ordered, None, &[])?;
        let mut stores: Option<UnfencedStores> = None;
        for &(at, word) in &self.words {
            media.store(at, word);
            let flushed = media.flush(at, 8);
            stores = Some(flushed.after(stores.take()));
        }
        if let Some(stores) = stores {
            let _fenced = media.fence(stores);
        }
        media.sync()?;
        if let Some((used, ends)) = self.used_frames {
            (block.used_frames, block.bitmap_ends) = (used, ends);
        }
        write_superblocks(media, &mut block)?;
        Ok(())
    }
}

/// The number of frames, and the first.
#[derive(Default)]
struct FrameCount {
    first: Option<u64>,
    count: u64,
}

impl FrameCount {
    fn add(&mut self, word: usize, bits: u64) {
        if bits != 0 {
            let frame = word as u64 * 64 + u64::from(bits.trailing_zeros());
            self.first.get_or_insert(frame);
            self.count += u64::from(bits.count_ones());
        }
    }
}
