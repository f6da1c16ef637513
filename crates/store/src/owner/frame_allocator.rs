//! The free frames of a pool: those that are neither in use by the bitmap nor granted.
//!
//! Memory holds two bits per frame. One is the bit on media. The other says that the frame is
//! unavailable: in use, granted, or freed by a record that is not checkpointed yet. Frames that were never used are *fresh*:
//! they are opened in large runs when few others are free, so that the used part of the bitmap, which the next opening
//! reads, stays small on a large pool with little data. Fresh frames take no memory.

mod fresh;

use crate::format::bitmap::{Bitmap, clear_bits};
use crate::format::devices::{DEVICES_MAX, Device, DeviceState};
use crate::format::geometry::Geometry;
use crate::shared::control::FrameRun;
use fresh::FreshFrames;
use pagemesh_base::ids::FrameNo;
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::BTreeSet;
use std::ops::Range;

/// Frames of a group. The free frames of each group are counted, so that a search skips full
/// groups.
const GROUP_FRAMES: u64 = 1 << 15;
/// Frames that are withheld from use because they cannot be read, at most. A medium with more
/// unreadable frames has ended its brick long before, unless clients report frames that are sound.
const WITHHELD_MAX: usize = 1024;

/// The class of a frame, which decides its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameClass {
    /// Granted to sessions, and used for nodes. Without flash all frames are of this class.
    Memory,
    /// Reserved for pages that the tier demotes.
    Flash,
}

/// The frames of a pool.
pub(crate) struct FrameAllocator {
    bitmap: Bitmap,
    /// A bit per frame: in use, granted, or not a frame of the pool.
    unavailable: Vec<u64>,
    fresh: FreshFrames,
    /// Free frames of each group.
    free_per_group: Vec<u32>,
    /// The next frame to examine, of each class.
    cursors: [u64; 2],
    /// Free frames of each class.
    free: [u64; 2],
    /// Frames from here on are on flash.
    flash_start: u64,
    /// Flash frames that the tier holds, and that no record is known to name.
    reserved: BTreeSet<u64>,
    /// Unreadable frames, which are not used again.
    withheld: Vec<u64>,
    /// Frames of draining and failed devices: none is granted.
    closed: Vec<Range<u64>>,
}

impl FrameAllocator {
    pub(crate) fn new(bitmap: Bitmap) -> FrameAllocator {
        let geometry = bitmap.geometry();
        let is_closed = |device: &&Device| device.state != DeviceState::Active;
        let closed: Vec<_> = geometry.devices.iter().filter(is_closed).collect();
        let mut allocator = FrameAllocator {
            closed: closed.into_iter().map(Device::frames).collect(),
            unavailable: vec![0; bitmap.words().len()],
            fresh: FreshFrames::default(),
            cursors: [geometry.first_frames().start, 0],
            free: [0; 2],
            flash_start: flash_start(geometry),
            reserved: BTreeSet::new(),
            free_per_group: Vec::new(),
            withheld: Vec::new(),
            bitmap,
        };
        allocator.mark_numbers_of_no_frame();
        for used in allocator.bitmap.used_ranges() {
            open_bits(&mut allocator.unavailable, allocator.bitmap.words(), used);
        }
        for closed in allocator.closed.clone() {
            set_bits(&mut allocator.unavailable, closed);
        }
        allocator.find_fresh();
        allocator.count_free();
        allocator
    }

    /// Marks numbers before, between and behind the frames of devices as unavailable.
    fn mark_numbers_of_no_frame(&mut self) {
        let mut ranges: Vec<_> = self.bitmap.geometry().frame_numbers().ranges().collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut next = 0;
        for range in ranges {
            set_bits(&mut self.unavailable, next..range.start);
            next = range.end;
        }
        let end = self.unavailable.len() as u64 * 64;
        set_bits(&mut self.unavailable, next..end);
    }

    /// Finds the fresh frames of devices that are not draining.
    fn find_fresh(&mut self) {
        let frames = self.bitmap.geometry().frame_numbers().ranges();
        let devices = frames.zip(self.bitmap.used_ranges());
        let open = devices.filter(|(frames, _)| !self.closed.contains(frames));
        let fresh = open.map(|(frames, used)| used.end..frames.end);
        self.fresh = FreshFrames::new(fresh.collect());
    }

    /// Adds the frames of a device that joined the pool.
    pub(crate) fn add_device(&mut self, geometry: &Geometry, device: &Device) {
        self.bitmap.set_geometry(geometry);
        self.flash_start = flash_start(geometry);
        let old = std::mem::take(&mut self.unavailable);
        self.unavailable = vec![0; self.bitmap.words().len().max(old.len())];
        for words in self.fresh.other_words(old.len()) {
            self.unavailable[words.clone()].copy_from_slice(&old[words]);
        }
        // Numbers of a device that has left. Those behind are new zeroes.
        let Range { start, end } = device.frames();
        clear_bits(&mut self.unavailable, start..end.min(old.len() as u64 * 64));
        self.mark_numbers_of_no_frame();
        self.fresh.add(device.frames());
        self.hold_withheld_and_reserved();
        self.count_free();
    }

    /// Keeps the frames of a device from being granted.
    pub(crate) fn close_frames(&mut self, frames: Range<u64>) {
        set_bits(&mut self.unavailable, frames.clone());
        self.fresh.remove(&frames);
        if !self.closed.contains(&frames) {
            self.closed.push(frames);
        }
        self.count_free();
    }

    /// Lets the frames of a device be granted again.
    pub(crate) fn open_frames(&mut self, frames: Range<u64>) {
        self.closed.retain(|closed| *closed != frames);
        self.fresh.remove(&frames);
        let is_its = |used: &Range<u64>| used.start == frames.start;
        let used_end = self.bitmap.used_ranges().find(is_its).map(|used| used.end);
        let fresh = used_end.unwrap_or(frames.end)..frames.end;
        open_bits(&mut self.unavailable, self.bitmap.words(), frames);
        self.fresh.add(fresh);
        self.hold_withheld_and_reserved();
        self.count_free();
    }

    fn hold_withheld_and_reserved(&mut self) {
        for &frame in self.withheld.iter().chain(&self.reserved) {
            self.unavailable[(frame / 64) as usize] |= 1 << (frame % 64);
        }
    }

    /// Takes over the frames of a pool that a device has left.
    pub(crate) fn remove_frames(&mut self, geometry: &Geometry) {
        self.bitmap.set_geometry(geometry);
        self.flash_start = flash_start(geometry);
        self.count_free();
        let numbers = geometry.frame_numbers();
        self.withheld
            .retain(|&frame| numbers.contains(FrameNo(frame)));
        self.closed
            .retain(|closed| numbers.contains(FrameNo(closed.start)));
    }

    /// Frames of a range that can be granted.
    pub(crate) fn free_in(&self, frames: Range<u64>) -> u64 {
        let words = words_of(frames);
        let free = words.map(|(word, mask)| (!self.unavailable[word] & mask).count_ones());
        free.map(u64::from).sum()
    }

    /// Frames of a range that were in use at the last checkpoint, without unreadable ones.
    pub(crate) fn used_in(&self, frames: Range<u64>) -> u64 {
        let bitmap = self.bitmap.words();
        let parts = self.bitmap.used_ranges();
        let parts = parts.map(|it| it.start.max(frames.start)..it.end.min(frames.end));
        let used: u64 = parts
            .filter(|part| !part.is_empty())
            .flat_map(words_of)
            .map(|(word, mask)| u64::from((bitmap[word] & mask).count_ones()))
            .sum();
        let is_unreadable =
            |frame: &&u64| frames.contains(frame) && self.bitmap.has(FrameNo(**frame));
        used - self.withheld.iter().filter(is_unreadable).count() as u64
    }

    /// Whether a frame of a range cannot be read.
    pub(crate) fn has_withheld_in(&self, frames: Range<u64>) -> bool {
        self.withheld.iter().any(|frame| frames.contains(frame))
    }

    /// Whether the tier holds a frame of a range, to which a page may be on its way.
    pub(crate) fn has_reserved_in(&self, frames: Range<u64>) -> bool {
        self.reserved.range(frames).next().is_some()
    }

    fn is_closed(&self, frame: u64) -> bool {
        self.closed.iter().any(|closed| closed.contains(&frame))
    }

    fn count_free(&mut self) {
        let words = self.unavailable.len() as u64;
        let groups = (words * 64).div_ceil(GROUP_FRAMES);
        let frames =
            |group: u64| group * GROUP_FRAMES..((group + 1) * GROUP_FRAMES).min(words * 64);
        let free = |group| match self.fresh.contains(&frames(group)) {
            // Their words are not read, which would take memory.
            true => GROUP_FRAMES,
            false => self.free_in(frames(group)),
        };
        let mut free: Vec<u32> = (0..groups).map(|group| free(group) as u32).collect();
        for &frame in &self.withheld {
            let group = frame / GROUP_FRAMES;
            free[group as usize] -= u32::from(self.fresh.contains(&frames(group)));
        }
        self.free_per_group = free;
        let all = self.free_per_group.iter().map(|&free| u64::from(free));
        let all: u64 = all.sum();
        let first_group = self.flash_start.div_ceil(GROUP_FRAMES).min(groups);
        let flash = &self.free_per_group[first_group as usize..];
        let in_part = self.flash_start..(first_group * GROUP_FRAMES).min(words * 64);
        let flash = flash.iter().map(|&free| u64::from(free)).sum::<u64>() + self.free_in(in_part);
        self.free = [all - flash, flash];
        self.fresh.count(self.flash_start, self.granted_frames());
    }

    /// Frames of devices that are not draining, of each class.
    fn granted_frames(&self) -> [u64; 2] {
        let mut counts = [0; 2];
        let frames = self.bitmap.geometry().frame_numbers().ranges();
        for frames in frames.filter(|frames| !self.closed.contains(frames)) {
            counts[self.class_of(frames.start) as usize] += frames.end - frames.start;
        }
        counts
    }

    fn class_of(&self, frame: u64) -> FrameClass {
        match frame < self.flash_start {
            true => FrameClass::Memory,
            false => FrameClass::Flash,
        }
    }

    /// Withholds a frame: it is never granted or freed again.
    pub(crate) fn withhold(&mut self, frame: u64) {
        let numbers = self.bitmap.geometry().frame_numbers();
        let is_ours = numbers.contains(FrameNo(frame));
        if !is_ours
            || self.bitmap.is_failed(frame)
            || self.is_withheld(frame)
            || self.withheld.len() == WITHHELD_MAX
        {
            return;
        }
        let (word, bit) = ((frame / 64) as usize, 1 << (frame % 64));
        if self.unavailable[word] & bit == 0 {
            self.unavailable[word] |= bit;
            self.free_per_group[(frame / GROUP_FRAMES) as usize] -= 1;
            self.free[self.class_of(frame) as usize] -= 1;
        }
        self.withheld.push(frame);
    }

    pub(crate) fn is_withheld(&self, frame: u64) -> bool {
        self.withheld.contains(&frame)
    }

    pub(crate) fn bitmap(&self) -> &Bitmap {
        &self.bitmap
    }

    /// Frames neither in use nor granted.
    pub(crate) fn free(&self) -> u64 {
        self.free.iter().sum()
    }

    /// The same of one class.
    #[inline]
    pub(crate) fn free_of(&self, class: FrameClass) -> u64 {
        self.free[class as usize]
    }

    /// Frames in use at the last checkpoint.
    pub(crate) fn used(&self) -> u64 {
        self.bitmap.used()
    }

    /// Takes a run of at most `want` frames for sessions or nodes; none when there are none.
    pub(crate) fn allocate(&mut self, want: u64) -> Option<FrameRun> {
        self.allocate_of(FrameClass::Memory, want)
    }

    /// Takes flash frames for the tier, at most `want`.
    pub(crate) fn reserve_flash(&mut self, want: u64) -> Vec<FrameNo> {
        let mut taken = Vec::new();
        while (taken.len() as u64) < want {
            let run = self.allocate_of(FrameClass::Flash, want - taken.len() as u64);
            let Some(run) = run else { break };
            taken.extend((run.start..run.start + run.len).map(FrameNo));
        }
        self.reserved.extend(taken.iter().map(|frame| frame.0));
        taken
    }

    /// Ends the reservation of frames. A record names them, or they are unused and free again.
    pub(crate) fn end_reservation(&mut self, frames: &[FrameNo], are_used: bool) {
        for &FrameNo(frame) in frames {
            let was_reserved = self.reserved.remove(&frame);
            debug_assert!(was_reserved, "frame {frame} was reserved");
            // The device may have left meanwhile.
            let numbers = self.bitmap.geometry().frame_numbers();
            if !are_used && numbers.contains(FrameNo(frame)) {
                self.return_unused(FrameRun {
                    start: frame,
                    len: 1,
                });
            }
        }
    }

    fn allocate_of(&mut self, class: FrameClass, want: u64) -> Option<FrameRun> {
        if self.free_of(class) == 0 || want == 0 {
            return None;
        }
        self.fresh.open_if_short(class, self.free_of(class));
        let all = self.unavailable.len() as u64 * 64;
        let (first, behind) = match class {
            FrameClass::Memory => (0, self.flash_start.min(all)),
            FrameClass::Flash => (self.flash_start, all),
        };
        let mut cursor = self.cursors[class as usize].max(first);
        // Fresh frames are passed over, and split up to two groups for each device.
        for _ in 0..=self.free_per_group.len() + 3 * DEVICES_MAX {
            if cursor >= behind {
                cursor = first;
            }
            let (fresh_end, opened_end) = self.fresh.around(cursor);
            if let Some(end) = fresh_end {
                cursor = end;
                continue;
            }
            let group = cursor / GROUP_FRAMES;
            let end = ((group + 1) * GROUP_FRAMES).min(behind).min(opened_end);
            if let Some(run) = self.allocate_in_group(group, cursor..end, want) {
                self.cursors[class as usize] = run.start + run.len;
                return Some(run);
            }
            cursor = end;
        }
        None
    }

    /// Takes the first run of free frames of a part of a group, at most `want`.
    fn allocate_in_group(&mut self, group: u64, part: Range<u64>, want: u64) -> Option<FrameRun> {
        if self.free_per_group[group as usize] == 0 {
            return None;
        }
        let Range { mut start, end } = part;
        while start < end {
            let (word, bit) = ((start / 64) as usize, start % 64);
            let busy = u64::from((self.unavailable[word] >> bit).trailing_ones());
            start += busy;
            // The shift brought zeroes in above the word's bits.
            if busy < 64 - bit {
                break;
            }
        }
        let mut frame = start;
        while frame < end.min(start + want) {
            let (word, bit) = ((frame / 64) as usize, frame % 64);
            let free = u64::from((self.unavailable[word] >> bit).trailing_zeros());
            let most = (start + want).min(end) - frame;
            let len = free.min(64 - bit).min(most);
            if len == 0 {
                break;
            }
            self.unavailable[word] |= (u64::MAX >> (64 - len)) << bit;
            frame += len;
            if bit + len < 64 {
                break;
            }
        }
        let len = frame.saturating_sub(start);
        self.free_per_group[group as usize] -= len as u32;
        self.free[self.class_of(start) as usize] -= len;
        (len > 0).then_some(FrameRun { start, len })
    }

    /// Returns frames that were granted and never named by a record.
    pub(crate) fn return_unused(&mut self, run: FrameRun) {
        for frame in run.start..run.start + run.len {
            // A frame that is free already was freed because a table names it too. The checkpoint
            // that freed it has reported that.
            let _ = self.release(frame);
        }
    }

    /// Frees a frame after its record is checkpointed. False if it was free already: two slots name
    /// it.
    #[must_use]
    pub(crate) fn release(&mut self, frame: u64) -> bool {
        let (word, bit) = ((frame / 64) as usize, 1 << (frame % 64));
        let was_busy = self.unavailable[word] & bit != 0;
        if was_busy && !self.is_withheld(frame) && !self.is_closed(frame) {
            self.unavailable[word] &= !bit;
            self.free_per_group[(frame / GROUP_FRAMES) as usize] += 1;
            self.free[self.class_of(frame) as usize] += 1;
        }
        was_busy
    }

    /// A record took the frame into use, or freed it: writes its bit in the bitmap.
    #[inline(always)]
    pub(crate) fn write(&mut self, frame: u64, set: bool) {
        self.bitmap.write(frame, set);
    }

    /// Lines of the bitmap that the next flush writes.
    pub(crate) fn changed_lines(&self) -> u64 {
        self.bitmap.changed_lines().len() as u64
    }

    /// Writes every changed line of the bitmap, if there is one.
    pub(crate) fn flush<M: Media>(&mut self, media: &M) -> Option<UnfencedStores> {
        self.bitmap.flush(media)
    }
}

/// The number from which on frames are on flash.
fn flash_start(geometry: &Geometry) -> u64 {
    geometry.flash_start().unwrap_or(u64::MAX)
}

/// The words that hold the bits of a range, each with a mask of those bits.
fn words_of(bits: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let Range { start, end } = bits;
    (start / 64..end.div_ceil(64).max(start / 64)).map(move |word| {
        let first = word * 64;
        let from = u64::MAX << start.saturating_sub(first);
        let past_end = (first + 64).saturating_sub(end);
        (word as usize, from & u64::MAX >> past_end)
    })
}

fn set_bits(words: &mut [u64], bits: Range<u64>) {
    for (word, mask) in words_of(bits) {
        words[word] |= mask;
    }
}

/// Makes the frames of a device available that are not in use.
fn open_bits(busy: &mut [u64], used: &[u64], frames: Range<u64>) {
    for (word, mask) in words_of(frames) {
        busy[word] = busy[word] & !mask | used[word] & mask;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::bitmap_ends::BitmapEnds;
    use pagemesh_pmem::Recorder;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use uuid::Uuid;

    fn frames() -> FrameAllocator {
        let geometry = Geometry::plan(2 << 20).expect("a plan");
        let media = Recorder::new(2 << 20);
        for tables in geometry.device_frames() {
            Bitmap::format(&media, &tables, Uuid::nil());
        }
        let ends = BitmapEnds::of_new(&geometry);
        let (bitmap, bad) = Bitmap::load(&media, &geometry, Uuid::nil(), ends);
        assert_eq!(bad, []);
        FrameAllocator::new(bitmap)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn ranges_of_bits_are_as_bit_by_bit(
            used in prop::collection::vec(any::<u64>(), 4),
            busy in prop::collection::vec(any::<u64>(), 4),
            (start, len) in (0u64..256, 0u64..256),
        ) {
            let end = (start + len).min(256);
            let has = |words: &[u64], bit: u64| words[(bit / 64) as usize] >> (bit % 64) & 1 == 1;
            let (mut set, mut opened) = (busy.clone(), busy.clone());
            set_bits(&mut set, start..end);
            open_bits(&mut opened, &used, start..end);
            let counted: u32 = words_of(start..end)
                .map(|(word, mask)| (busy[word] & mask).count_ones())
                .sum();
            prop_assert_eq!(u64::from(counted), (start..end).filter(|&bit| has(&busy, bit)).count() as u64);
            for bit in 0..256 {
                let is_inside = (start..end).contains(&bit);
                prop_assert_eq!(has(&set, bit), is_inside || has(&busy, bit));
                prop_assert_eq!(has(&opened, bit), has(if is_inside { &used } else { &busy }, bit));
            }
        }

        #[test]
        fn counts_of_a_range_are_as_frame_by_frame(
            taken in prop::collection::vec(0u64..512, 0..200),
            unreadable in prop::collection::vec(0u64..512, 0..8),
            (start, len) in (0u64..512, 0u64..512),
        ) {
            let mut frames = frames();
            let numbers = frames.bitmap.geometry().first_frames();
            for &frame in taken.iter().filter(|frame| numbers.contains(frame)) {
                frames.write(frame, true);
            }
            for &frame in &unreadable {
                frames.withhold(frame);
            }
            let range = start..(start + len).min(512);
            let is_used = |&frame: &u64| frames.bitmap.has(FrameNo(frame)) && !frames.is_withheld(frame);
            prop_assert_eq!(frames.used_in(range.clone()), range.clone().filter(is_used).count() as u64);
            let is_free = |&frame: &u64| frames.unavailable[(frame / 64) as usize] >> (frame % 64) & 1 == 0;
            prop_assert_eq!(frames.free_in(range.clone()), range.filter(is_free).count() as u64);
        }

        #[test]
        fn frame_is_allocated_once_until_released(
            steps in prop::collection::vec((1u64..40, any::<bool>()), 1..120),
        ) {
            let mut frames = frames();
            let total = frames.free();
            let numbers = Geometry::plan(2 << 20).expect("a plan").first_frames();
            prop_assert_eq!(total, numbers.end - numbers.start);
            let mut taken = BTreeSet::new();
            for (want, release) in steps {
                if release {
                    for frame in taken.iter().copied().take(want as usize).collect::<Vec<_>>() {
                        taken.remove(&frame);
                        prop_assert!(frames.release(frame));
                        prop_assert!(!frames.release(frame), "{} twice", frame);
                    }
                } else if let Some(run) = frames.allocate(want) {
                    prop_assert!((1..=want).contains(&run.len));
                    for frame in run.start..run.start + run.len {
                        prop_assert!(numbers.contains(&frame));
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
