//! Which frames are free.
//!
//! On media there is a bit per frame: in use at the checkpoint. It is written
//! by the checkpoint only, in whole lines that are not read again. In memory,
//! groups of 32 768 frames are read from it when first touched; they also hold
//! what is granted but not yet named by an applied record. So memory and time
//! follow what is used, not the size of the pool.

use crate::control::Run;
use crate::geometry::Geometry;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, Unfenced};

const GROUP: u64 = (PAGE_BYTES * 8) as u64;
const WORDS: usize = PAGE_BYTES / 8;
/// Lines of a group, and frames of a line.
const LINES: usize = PAGE_BYTES / LINE_BYTES;
const LINE_FRAMES: u64 = (LINE_BYTES * 8) as u64;

struct Group {
    /// In use or granted.
    busy: Box<[u64; WORDS]>,
    /// As on media, or as the next flush will make it.
    used: Box<[u64; WORDS]>,
    free: u64,
}

/// The frames of a pool.
pub(crate) struct Frames {
    bitmap_at: usize,
    first: u64,
    end: u64,
    /// By number, as far as read.
    groups: Vec<Option<Group>>,
    /// Where to look next.
    cursor: u64,
    /// Frames neither in use nor granted.
    free: u64,
    /// Bits set on media.
    used: u64,
    /// Lines of the bitmap that were changed and not flushed, and a bit for
    /// each that is in the list.
    dirty: Vec<u32>,
    is_dirty: Vec<u64>,
}

impl Frames {
    pub(crate) fn new(geometry: &Geometry, used: u64) -> Frames {
        let numbers = geometry.frame_numbers();
        Frames {
            bitmap_at: geometry.bitmap.start as usize,
            first: numbers.start,
            end: numbers.end,
            groups: (0..numbers.end.div_ceil(GROUP)).map(|_| None).collect(),
            cursor: numbers.start,
            free: (numbers.end - numbers.start).saturating_sub(used),
            used,
            dirty: Vec::new(),
            is_dirty: vec![0; (geometry.bitmap.len as usize / LINE_BYTES).div_ceil(64)],
        }
    }

    /// Frames neither in use nor granted.
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Frames in use at the last checkpoint.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Takes a run of at most `want` frames; none when the pool is full.
    pub(crate) fn take<M: Media>(&mut self, media: &M, want: u64) -> Option<Run> {
        if self.free == 0 || want == 0 {
            return None;
        }
        let groups = self.end.div_ceil(GROUP) - self.first / GROUP;
        for _ in 0..=groups {
            let number = self.cursor / GROUP;
            let bounds = (number * GROUP).max(self.first)..((number + 1) * GROUP).min(self.end);
            let from = self.cursor;
            let taken = self
                .group(media, number)
                .take(number, from, bounds.end, want);
            if let Some(run) = taken {
                self.cursor = self.wrap(run.start + run.len);
                self.free -= run.len;
                return Some(run);
            }
            self.cursor = self.wrap(bounds.end);
        }
        None
    }

    fn wrap(&self, frame: u64) -> u64 {
        if frame >= self.end { self.first } else { frame }
    }

    fn group<M: Media>(&mut self, media: &M, number: u64) -> &mut Group {
        let (first, end, at) = (self.first, self.end, self.bitmap_at);
        self.groups[number as usize].get_or_insert_with(|| {
            let mut used = Box::new([0; WORDS]);
            for (i, word) in used.iter_mut().enumerate() {
                *word = media.load(at + number as usize * PAGE_BYTES + i * 8);
            }
            let mut busy = used.clone();
            let bounds = number * GROUP..(number + 1) * GROUP;
            let outside = bounds.filter(|frame| !(first..end).contains(frame));
            for frame in outside {
                busy[(frame % GROUP / 64) as usize] |= 1 << (frame % 64);
            }
            let free = busy.iter().map(|word| u64::from(word.count_zeros())).sum();
            Group { busy, used, free }
        })
    }

    /// Returns frames that were granted and never named by a record.
    pub(crate) fn give_back(&mut self, run: Run) {
        (run.start..run.start + run.len).for_each(|frame| self.release(frame));
    }

    /// Frees a frame whose record is checkpointed.
    pub(crate) fn release(&mut self, frame: u64) {
        self.free += 1;
        if let Some(group) = &mut self.groups[(frame / GROUP) as usize] {
            let (word, bit) = ((frame % GROUP / 64) as usize, 1 << (frame % 64));
            assert!(group.busy[word] & bit != 0, "frame {frame} is freed twice");
            group.busy[word] &= !bit;
            group.free += 1;
        }
    }

    /// A record put the frame to use: sets its bit on media. What is in use is
    /// counted by records, each applied once, and not by bits: after a crash
    /// some of these are ahead of the superblock.
    pub(crate) fn set<M: Media>(&mut self, media: &M, frame: u64) {
        self.used += 1;
        self.write(media, frame, true);
    }

    /// A record freed the frame: clears its bit on media.
    pub(crate) fn clear<M: Media>(&mut self, media: &M, frame: u64) {
        // On a file a lost record can make the count wrong by one.
        self.used = self.used.saturating_sub(1);
        self.write(media, frame, false);
    }

    /// Writes the frame's bit on media. Idempotent.
    pub(crate) fn write<M: Media>(&mut self, media: &M, frame: u64, set: bool) {
        assert!(
            (self.first..self.end).contains(&frame),
            "frame {frame} is in the pool"
        );
        let used = &mut self.group(media, frame / GROUP).used;
        let (word, bit) = ((frame % GROUP / 64) as usize, 1 << (frame % 64));
        if (used[word] & bit != 0) == set {
            return;
        }
        used[word] ^= bit;
        let line = (frame / LINE_FRAMES) as usize;
        let (word, bit) = (line / 64, 1 << (line % 64));
        if self.is_dirty[word] & bit == 0 {
            self.is_dirty[word] |= bit;
            self.dirty.push(line as u32);
        }
    }

    /// Writes every changed line.
    pub(crate) fn flush<M: Media>(&mut self, media: &M, stores: Unfenced) -> Unfenced {
        let mut stores = stores;
        for line in self.dirty.drain(..) {
            let line = line as usize;
            self.is_dirty[line / 64] = 0;
            let Some(group) = &self.groups[line / LINES] else {
                unreachable!("a line is changed in a group that was read");
            };
            let mut bytes = [0; LINE_BYTES];
            let words = group.used[line % LINES * 8..].iter();
            for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            let at = self.bitmap_at + line * LINE_BYTES;
            stores = stores.and(media.stream_line(at, &bytes));
        }
        stores
    }
}

impl Group {
    fn take(&mut self, number: u64, from: u64, end: u64, want: u64) -> Option<Run> {
        if self.free == 0 {
            return None;
        }
        let is_busy = |busy: &[u64; WORDS], frame: u64| {
            busy[(frame % GROUP / 64) as usize] >> (frame % 64) & 1 != 0
        };
        let mut frame = from.max(number * GROUP);
        while frame < end && is_busy(&self.busy, frame) {
            // Skip what is left of a full word at once.
            let word = self.busy[(frame % GROUP / 64) as usize] >> (frame % 64);
            frame += u64::from((!word).trailing_zeros()).clamp(1, 64 - frame % 64);
        }
        let start = frame;
        while frame < end && frame - start < want && !is_busy(&self.busy, frame) {
            self.busy[(frame % GROUP / 64) as usize] |= 1 << (frame % 64);
            frame += 1;
        }
        let len = frame - start;
        self.free -= len;
        (len > 0).then_some(Run { start, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_pmem::Recorder;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn every_frame_is_taken_once_until_it_is_released(
            steps in prop::collection::vec((1u64..40, any::<bool>()), 1..120),
        ) {
            let geometry = Geometry::plan(2 << 20).expect("a plan");
            let media = Recorder::new(2 << 20);
            let mut frames = Frames::new(&geometry, 0);
            let total = frames.free();
            let mut taken = BTreeSet::new();
            for (want, release) in steps {
                if release {
                    for frame in taken.iter().copied().take(want as usize).collect::<Vec<_>>() {
                        taken.remove(&frame);
                        frames.release(frame);
                    }
                } else if let Some(run) = frames.take(&media, want) {
                    prop_assert!((1..=want).contains(&run.len));
                    for frame in run.start..run.start + run.len {
                        prop_assert!(geometry.frame_numbers().contains(&frame));
                        prop_assert!(taken.insert(frame), "{} twice", frame);
                    }
                } else {
                    prop_assert_eq!(taken.len() as u64, total);
                }
                prop_assert_eq!(frames.free(), total - taken.len() as u64);
            }
        }
    }
}
