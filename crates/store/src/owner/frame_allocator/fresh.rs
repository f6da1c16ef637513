//! Frames that were never used, and are not granted before they are opened.

use super::FrameClass;
use std::ops::Range;

/// Frames that are opened at a time: 64 GiB, with 2.3 MiB of the bitmap.
pub(super) const OPENED_FRAMES: u64 = 1 << 24;

/// The fresh frames of each device. Each range ends with the device's frames.
#[derive(Default)]
pub(super) struct FreshFrames {
    ranges: Vec<Range<u64>>,
    /// Fresh frames of each class, and the frames of each class that are open.
    fresh: [u64; 2],
    open: [u64; 2],
    flash_start: u64,
}

impl FreshFrames {
    pub(super) fn new(ranges: Vec<Range<u64>>) -> FreshFrames {
        let mut fresh = FreshFrames::default();
        ranges.into_iter().for_each(|range| fresh.add(range));
        fresh
    }

    /// Adds the frames of a device that were never used, and opens the first of them, so that each device takes
    /// its part of the data. The caller counts afterwards.
    pub(super) fn add(&mut self, unused: Range<u64>) {
        let range = unused.start.saturating_add(OPENED_FRAMES)..unused.end;
        if !range.is_empty() {
            self.ranges.push(range);
        }
    }

    /// Removes those of a device with these frames. The caller counts afterwards.
    pub(super) fn remove(&mut self, frames: &Range<u64>) {
        self.ranges.retain(|range| !frames.contains(&range.start));
    }

    /// Counts the frames, of which devices have `granted` of each class.
    pub(super) fn count(&mut self, flash_start: u64, granted: [u64; 2]) {
        self.flash_start = flash_start;
        self.fresh = [0; 2];
        for range in &self.ranges {
            self.fresh[self.class_of(range) as usize] += range.end - range.start;
        }
        let of = |class: usize| granted[class] - self.fresh[class];
        self.open = [of(0), of(1)];
    }

    fn class_of(&self, range: &Range<u64>) -> FrameClass {
        match range.start < self.flash_start {
            true => FrameClass::Memory,
            false => FrameClass::Flash,
        }
    }

    /// Whether all these frames are fresh.
    pub(super) fn contains(&self, frames: &Range<u64>) -> bool {
        let is_around = |range: &Range<u64>| range.start <= frames.start && frames.end <= range.end;
        self.ranges.iter().any(is_around)
    }

    /// Opens fresh frames of a class until a third of the open frames are free. `free` frames of it are free, with fresh ones.
    #[inline]
    pub(super) fn open_if_short(&mut self, class: FrameClass, free: u64) {
        while self.fresh[class as usize] > 0 && self.is_short(class, free) {
            self.open(class);
        }
    }

    fn is_short(&self, class: FrameClass, free: u64) -> bool {
        let free = free.saturating_sub(self.fresh[class as usize]);
        // A search passes over two frames for each free one, and long runs are left.
        free < self.open[class as usize] / 3 || free == 0
    }

    /// Opens frames of the device with the most fresh ones, so that the data of several devices grows alike.
    #[cold]
    fn open(&mut self, class: FrameClass) {
        let of_class = |number: &usize| self.class_of(&self.ranges[*number]) == class;
        let numbers = (0..self.ranges.len()).filter(of_class);
        let Some(most) = numbers.max_by_key(|&it| self.ranges[it].end - self.ranges[it].start)
        else {
            return;
        };
        let range = &mut self.ranges[most];
        let opened = OPENED_FRAMES.min(range.end - range.start);
        range.start += opened;
        if range.is_empty() {
            self.ranges.swap_remove(most);
        }
        self.fresh[class as usize] -= opened;
        self.open[class as usize] += opened;
    }

    /// The end of the fresh frames around one, if it is fresh. And the next fresh frame behind it.
    #[inline]
    pub(super) fn around(&self, frame: u64) -> (Option<u64>, u64) {
        let mut found = None;
        let mut next = u64::MAX;
        for range in &self.ranges {
            if range.contains(&frame) {
                found = Some(range.end);
            } else if range.start > frame {
                next = next.min(range.start);
            }
        }
        (found, next)
    }

    /// The words below `len` with a bit of another frame.
    pub(super) fn other_words(&self, len: usize) -> Vec<Range<usize>> {
        let mut ranges = self.ranges.clone();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut words = Vec::new();
        let mut next = 0;
        for range in ranges {
            let (start, end) = (range.start.div_ceil(64) as usize, (range.end / 64) as usize);
            if start < end {
                words.push(next..start);
                next = end;
            }
        }
        words.push(next..len);
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::bitmap::Bitmap;
    use crate::format::bitmap_ends::BitmapEnds;
    use crate::format::devices::DeviceKind;
    use crate::format::geometry::Geometry;
    use crate::owner::frame_allocator::FrameAllocator;
    use pagemesh_pmem::Recorder;
    use std::collections::VecDeque;
    use uuid::Uuid;

    /// The frames of a pool without data, with two devices. Its medium is never read.
    fn frames() -> (FrameAllocator, Geometry) {
        let mut geometry = Geometry::plan(1 << 38).expect("a plan");
        let added = geometry.add_device(Uuid::from_u128(1), 1 << 37, DeviceKind::LikeFirst);
        added.expect("a device");
        let ends = BitmapEnds::of_new(&geometry);
        let tables: Vec<_> = geometry.device_frames().collect();
        // Only lines before the frames of the first device are used.
        let bytes = tables[0].line_at(ends.used_lines(&tables[0]).end) + 4096;
        let media = Recorder::new(bytes.next_multiple_of(4096));
        Bitmap::format(&media, &tables[0], Uuid::nil());
        let mut first_only = geometry;
        first_only.devices = Default::default();
        let ends = BitmapEnds::of_new(&first_only);
        let (mut bitmap, bad) = Bitmap::load(&media, &first_only, Uuid::nil(), ends);
        assert_eq!(bad, []);
        bitmap.set_geometry(&geometry);
        (FrameAllocator::new(bitmap), geometry)
    }

    #[test]
    fn overwrites_use_no_more_of_the_bitmap() {
        let (mut frames, geometry) = frames();
        let start = geometry.first_frames().start;
        let starts: Vec<_> = geometry
            .frame_numbers()
            .ranges()
            .map(|it| it.start)
            .collect();
        let mut used = VecDeque::new();
        let mut granted = 0;
        while granted < 4 * OPENED_FRAMES {
            let run = frames.allocate(4096).expect("a free frame");
            granted += run.len;
            let first = starts.iter().copied().filter(|&it| it <= run.start).max();
            let opened_end = first.expect("a device") + OPENED_FRAMES;
            assert!(run.start + run.len <= opened_end, "{run:?}");
            frames.write(run.start + run.len - 1, true);
            used.push_back(run);
            if used.len() > 8 {
                let old = used.pop_front().expect("a run");
                frames.return_unused(old);
            }
        }
        let end = frames.bitmap().ends().lines_of_first();
        assert!(u64::from(end) <= (start + OPENED_FRAMES) / 448 + 1, "{end}");
    }

    #[test]
    fn each_fresh_frame_is_granted_once() {
        let (mut frames, geometry) = frames();
        let total = frames.free();
        assert_eq!(total, geometry.frame_bytes() / 4096);
        let mut runs = Vec::new();
        while let Some(run) = frames.allocate(1 << 20) {
            runs.push(run.start..run.start + run.len);
        }
        assert_eq!(frames.free(), 0);
        let numbers: Vec<_> = geometry.frame_numbers().ranges().collect();
        let is_ours = |run: &Range<u64>| {
            numbers
                .iter()
                .any(|it| it.start <= run.start && run.end <= it.end)
        };
        assert!(runs.iter().all(is_ours));
        // Both devices were used from the beginning of the second half on.
        let second = numbers[1].start;
        let first_of_second = runs.iter().position(|run| run.start >= second);
        assert!(first_of_second.expect("used") < runs.len() * 3 / 4);
        runs.sort_unstable_by_key(|run| run.start);
        assert!(runs.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert_eq!(
            runs.iter().map(|run| run.end - run.start).sum::<u64>(),
            total
        );
    }

    #[test]
    fn device_that_joins_and_drains_is_fresh_again() {
        let (mut frames, geometry) = frames();
        let device = *geometry.devices.iter().next().expect("a device");
        let all = frames.free();
        let taken = frames.allocate(100).expect("a free frame");
        frames.withhold(device.frames().start + 7);
        let before = frames.free();
        frames.close_frames(device.frames());
        let first = geometry.first_frames();
        assert_eq!(frames.free(), first.end - first.start - 100);
        frames.open_frames(device.frames());
        assert_eq!((frames.free(), before), (all - 101, all - 101));
        let mut without = geometry;
        without.devices.put(device.id, None);
        frames.close_frames(device.frames());
        frames.remove_frames(&without);
        assert_eq!(frames.free(), first.end - first.start - 100);
        frames.add_device(&geometry, &device);
        assert_eq!(frames.free(), all - 100);
        frames.return_unused(taken);
        assert_eq!(frames.free(), all);
    }
}
