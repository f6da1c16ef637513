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

    #[inline(always)]
    fn group<M: Media>(&mut self, media: &M, number: u64) -> &mut Group {
        let (frames, at) = (self.first..self.end, self.bitmap_at);
        self.groups[number as usize].get_or_insert_with(|| Group::read(media, frames, at, number))
    }

    /// Returns frames that were granted and never named by a record.
    pub(crate) fn give_back(&mut self, run: Run) {
        for frame in run.start..run.start + run.len {
            // One that is free already was freed by a table that names it too:
            // the checkpoint that did has told.
            let _ = self.release(frame);
        }
    }

    /// Frees a frame whose record is checkpointed. False if it was free: the
    /// bitmap lost its bit, or two slots name it.
    #[must_use]
    pub(crate) fn release(&mut self, frame: u64) -> bool {
        if let Some(group) = &mut self.groups[(frame / GROUP) as usize] {
            let (word, bit) = ((frame % GROUP / 64) as usize, 1 << (frame % 64));
            if group.busy[word] & bit == 0 {
                return false;
            }
            group.busy[word] &= !bit;
            group.free += 1;
        }
        self.free += 1;
        true
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

    /// Writes the frame's bit on media. Idempotent. Inlined, so that misses of
    /// the caches overlap where many are written.
    #[inline(always)]
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

    /// Writes every changed line, if there is any.
    pub(crate) fn flush<M: Media>(&mut self, media: &M) -> Option<Unfenced> {
        let mut stores: Option<Unfenced> = None;
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
            let streamed = media.stream_line(at, &bytes);
            stores = Some(match stores {
                Some(earlier) => earlier.and(streamed),
                None => streamed,
            });
        }
        stores
    }
}

impl Group {
    #[cold]
    fn read<M: Media>(
        media: &M,
        frames: std::ops::Range<u64>,
        bitmap_at: usize,
        number: u64,
    ) -> Group {
        let mut used = Box::new([0; WORDS]);
        for (i, word) in used.iter_mut().enumerate() {
            *word = media.load(bitmap_at + number as usize * PAGE_BYTES + i * 8);
        }
        let mut busy = used.clone();
        let bounds = number * GROUP..(number + 1) * GROUP;
        for frame in bounds.filter(|frame| !frames.contains(frame)) {
            busy[(frame % GROUP / 64) as usize] |= 1 << (frame % 64);
        }
        let free = busy.iter().map(|word| u64::from(word.count_zeros())).sum();
        Group { busy, used, free }
    }

    /// The first run of free frames from `from` on, at most `want` of them.
    fn take(&mut self, number: u64, from: u64, end: u64, want: u64) -> Option<Run> {
        if self.free == 0 {
            return None;
        }
        let mut start = from.max(number * GROUP);
        while start < end {
            let (word, bit) = ((start % GROUP / 64) as usize, start % 64);
            let busy = u64::from((self.busy[word] >> bit).trailing_ones());
            start += busy;
            // Zeroes were shifted in behind the word.
            if busy < 64 - bit {
                break;
            }
        }
        let mut frame = start;
        while frame < end.min(start + want) {
            let (word, bit) = ((frame % GROUP / 64) as usize, frame % 64);
            let free = u64::from((self.busy[word] >> bit).trailing_zeros());
            let most = (start + want).min(end) - frame;
            let len = free.min(64 - bit).min(most);
            if len == 0 {
                break;
            }
            self.busy[word] |= (u64::MAX >> (64 - len)) << bit;
            frame += len;
            if bit + len < 64 {
                break;
            }
        }
        let len = frame.saturating_sub(start);
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

    #[test]
    fn freeing_a_frame_whose_bit_the_medium_lost_is_told() {
        let geometry = Geometry::plan(2 << 20).expect("a plan");
        let media = Recorder::new(2 << 20);
        // One frame is in use by the count, and none by the bits.
        let mut frames = Frames::new(&geometry, 1);
        let run = frames.take(&media, 1).expect("free frames");
        let lost = run.start + 100;
        frames.clear(&media, lost);
        assert!(!frames.release(lost));
        assert_eq!(frames.used(), 0);
    }

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
                        prop_assert!(frames.release(frame));
                        prop_assert!(!frames.release(frame), "{} twice", frame);
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
