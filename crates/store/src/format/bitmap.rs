//! The bitmap of frames in use, as stored on media.
//!
//! A line has 448 bits and a checksum that covers the pool's identity and the line's number too.
//! Only the checkpoint and recovery write lines, and always whole ones. The used lines are read once,
//! when the pool is opened ([`BitmapEnds`]). Each device has the lines of its own frames.
//!
//! Invariants: no line counts unless its checksum matches. If the records above the checkpoint
//! explain a wrong checksum, a crash tore the line. Otherwise the medium damaged it, and recovery
//! rebuilds it from the page tables (`docs/rfd/006-bitmap.md`).

use crate::defect::{self, Defect};
use crate::format::bitmap_ends::BitmapEnds;
use crate::format::devices::Device;
use crate::format::geometry::{DeviceFrames, Geometry};
pub(crate) use crate::format::regions::LINE_FRAMES;
use crate::format::regions::LINE_WORDS;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::FrameNo;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::copy::crc32c_words;
use pagemesh_pmem::{Media, UnfencedStores};
use std::ops::Range;
use uuid::Uuid;

/// Lines of a page.
const PAGE_LINES: usize = PAGE_BYTES / LINE_BYTES;

type BitmapLine = [u64; LINE_WORDS + 1];

/// The bitmap of a pool, in memory.
pub(crate) struct Bitmap {
    geometry: Geometry,
    seed: u32,
    /// The used lines. Bits of the others are clear, and take no memory.
    ends: BitmapEnds,
    /// The line behind the used ones of the first device.
    first_end: usize,
    /// The bits as on media, or as the next flush writes them. They are whole lines without their
    /// checksums; bits of no frame are clear.
    words: Vec<u64>,
    used: u64,
    /// Lines that were changed and not flushed, and a bit for each line in that list.
    dirty: Vec<u32>,
    is_dirty: Vec<u64>,
    /// Frames of failed devices. Their bits are clear.
    failed: Vec<Range<u64>>,
}

/// A line with a wrong checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DamagedLine {
    pub(crate) number: u32,
    found: BitmapLine,
}

impl DamagedLine {
    /// The frames of the line's bits.
    pub(crate) fn frames(&self) -> Range<u64> {
        let start = u64::from(self.number) * LINE_FRAMES;
        start..start + LINE_FRAMES
    }
}

impl Bitmap {
    /// Words of bits in the bitmap of a pool.
    pub(crate) fn words_of(geometry: &Geometry) -> usize {
        geometry.bitmap_lines() as usize * LINE_WORDS
    }

    fn empty(geometry: &Geometry, pool: Uuid, ends: BitmapEnds) -> Bitmap {
        let words = Bitmap::words_of(geometry);
        let lines = words / LINE_WORDS;
        Bitmap {
            geometry: *geometry,
            seed: crc32c(pool.as_bytes()),
            ends,
            first_end: first_end(geometry, &ends),
            words: vec![0; words],
            used: 0,
            dirty: Vec::new(),
            is_dirty: vec![0; lines.div_ceil(64)],
            failed: geometry.devices.failed().map(Device::frames).collect(),
        }
    }

    /// Writes the bitmap of a device on which nothing is in use: the lines before its frames.
    pub(crate) fn format<M: Media>(media: &M, tables: &DeviceFrames, pool: Uuid) {
        let mut stores: Option<UnfencedStores> = None;
        for (at, page) in Bitmap::empty_pages(tables, pool) {
            let (_, streamed) = M::stream_page(&[(media, at)], &page);
            stores = Some(streamed.after(stores.take()));
        }
        if let Some(stores) = stores {
            let _fenced = media.fence(stores);
        }
    }

    /// The pages of such a bitmap, and their places in the pool.
    pub(crate) fn empty_pages(
        tables: &DeviceFrames,
        pool: Uuid,
    ) -> impl Iterator<Item = (usize, [u8; PAGE_BYTES])> {
        let seed = crc32c(pool.as_bytes());
        let Range { start, end } = tables.lines();
        let used = start..tables.frames.start / LINE_FRAMES;
        used.step_by(PAGE_LINES).map(move |first| {
            let mut page = [0; PAGE_BYTES];
            let bytes = page.as_chunks_mut::<LINE_BYTES>().0;
            for (number, bytes) in (first..end).zip(bytes) {
                let mut line = [0; LINE_WORDS + 1];
                line[LINE_WORDS] = line_checksum(seed, number as usize, &line);
                *bytes = bytes_of(&line);
            }
            (tables.line_at(first), page)
        })
    }

    /// Reads the bitmap, and the lines with wrong checksums. Their bits are as found. The next
    /// flush writes them with right checksums, so the caller must correct them first.
    pub(crate) fn load<M: Media>(
        media: &M,
        geometry: &Geometry,
        pool: Uuid,
        ends: BitmapEnds,
    ) -> (Bitmap, Vec<DamagedLine>) {
        let mut bitmap = Bitmap::empty(geometry, pool, ends);
        let mut bad = Vec::new();
        let mut page = [0; PAGE_BYTES];
        for tables in geometry.device_frames().filter(|it| !it.is_failed) {
            let Range { start, end } = ends.used_lines(&tables);
            for first in (start..end).step_by(PAGE_LINES) {
                media.read(tables.line_at(first), &mut page);
                for (number, bytes) in (first..end).zip(page.as_chunks::<LINE_BYTES>().0) {
                    bad.extend(bitmap.load_line(number as usize, bytes));
                }
            }
        }
        for bad in &bad {
            bitmap.mark_dirty(bad.number as usize);
        }
        bitmap.mask_and_count();
        (bitmap, bad)
    }

    fn load_line(&mut self, number: usize, bytes: &[u8; LINE_BYTES]) -> Option<DamagedLine> {
        let found = words_of(bytes);
        self.words[number * LINE_WORDS..][..LINE_WORDS].copy_from_slice(&found[..LINE_WORDS]);
        let is_sound = found[LINE_WORDS] == line_checksum(self.seed, number, &found);
        (!is_sound).then_some(DamagedLine {
            number: number as u32,
            found,
        })
    }

    /// Takes over the frames of a pool that a device has joined or left. None of the device's is in use.
    pub(crate) fn set_geometry(&mut self, geometry: &Geometry) {
        let before = std::mem::replace(&mut self.geometry, *geometry);
        self.failed = geometry.devices.failed().map(Device::frames).collect();
        self.ends = self.ends.after_change(&before, geometry);
        self.first_end = first_end(geometry, &self.ends);
        let words = Bitmap::words_of(geometry).max(self.words.len());
        // New zeroes take no memory. Zeroes that are stored or copied would.
        let old = std::mem::replace(&mut self.words, vec![0; words]);
        for tables in geometry.device_frames() {
            let used = words_of_lines(self.ends.used_lines(&tables));
            let kept = used.start..used.end.min(old.len());
            if before.device_frames().any(|it| it == tables) && !kept.is_empty() {
                self.words[kept.clone()].copy_from_slice(&old[kept]);
            }
        }
        self.is_dirty.resize((words / LINE_WORDS).div_ceil(64), 0);
        self.mask_and_count();
    }

    /// Clears the bits of no frame and of failed devices, and counts the set bits.
    fn mask_and_count(&mut self) {
        self.used = 0;
        for tables in self.geometry.device_frames() {
            let lines = self.ends.used_lines(&tables);
            let (start, end) = (lines.start * LINE_FRAMES, lines.end * LINE_FRAMES);
            if tables.is_failed {
                clear_bits(&mut self.words, start..end);
                continue;
            }
            let Range {
                start: first,
                end: behind,
            } = tables.frames;
            clear_bits(&mut self.words, start..first.min(end));
            clear_bits(&mut self.words, behind..end);
            let ones = self.words[words_of_lines(lines)].iter();
            self.used += ones.map(|word| u64::from(word.count_ones())).sum::<u64>();
        }
    }

    /// The used part of each device's bitmap.
    pub(crate) fn ends(&self) -> &BitmapEnds {
        &self.ends
    }

    /// The used frame numbers of each device: no bit behind them is set.
    pub(crate) fn used_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let tables = self.geometry.device_frames();
        tables.map(|tables| self.ends.used_frames(&tables))
    }

    /// The line behind the last used one.
    pub(crate) fn used_end(&self) -> u32 {
        let tables = self.geometry.device_frames();
        let ends = tables.map(|tables| self.ends.used_lines(&tables).end);
        ends.max().unwrap_or(0) as u32
    }

    /// The device with a line, if the line is not a used one.
    fn device_of_unused(&self, line: u64) -> Option<DeviceFrames> {
        let mut tables = self.geometry.device_frames();
        let tables = tables.find(|tables| tables.lines().contains(&line))?;
        (!self.ends.used_lines(&tables).contains(&line)).then_some(tables)
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// A bit per frame, by number.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether a frame of the pool is in use.
    pub(crate) fn has(&self, frame: FrameNo) -> bool {
        self.words[(frame.0 / 64) as usize] >> (frame.0 % 64) & 1 != 0
    }

    /// Frames in use.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Whether a crash explains a damaged line: its checksum fits a state to which records
    /// above the checkpoint led. `before` is the state of the line's frames that such records name,
    /// before those records. `changes` are the changes that the records then made, in order. No
    /// other bits of the line changed meanwhile.
    pub(crate) fn is_torn(
        &self,
        bad: &DamagedLine,
        before: impl Iterator<Item = (u64, bool)>,
        changes: &[(u64, bool)],
    ) -> bool {
        let mut line = bad.found;
        let start = bad.frames().start;
        let put = |line: &mut BitmapLine, (frame, set): (u64, bool)| {
            let (word, bit) = (((frame - start) / 64) as usize, 1 << (frame % 64));
            match set {
                true => line[word] |= bit,
                false => line[word] &= !bit,
            }
        };
        let fits = |line: &BitmapLine| {
            let seal = line_checksum(self.seed, bad.number as usize, line);
            line[LINE_WORDS] == seal
        };
        before.for_each(|frame| put(&mut line, frame));
        fits(&line)
            || changes.iter().any(|&change| {
                put(&mut line, change);
                fits(&line)
            })
    }

    /// Rebuilds lines: sets each of their words to the result of `wanted`, called with the word's
    /// number and present value.
    pub(crate) fn rebuild_lines(
        &mut self,
        lines: impl Iterator<Item = u32>,
        wanted: impl Fn(usize, u64) -> u64,
    ) {
        for line in lines {
            let words = words_of_lines(u64::from(line)..u64::from(line) + 1);
            let is_unused = self.device_of_unused(line.into()).is_some();
            if is_unused && words.clone().all(|word| wanted(word, 0) == 0) {
                continue;
            }
            for word in words {
                self.words[word] = wanted(word, self.words[word]);
            }
            self.mark_dirty(line as usize);
        }
        self.mask_and_count();
    }

    /// Lines of the bitmap.
    pub(crate) fn lines(&self) -> Range<u32> {
        0..(self.words.len() / LINE_WORDS) as u32
    }

    /// Writes the frame's bit. Idempotent. Inlined, so that the cache misses of many calls overlap.
    #[inline(always)]
    pub(crate) fn write(&mut self, frame: u64, set: bool) {
        let numbers = self.geometry.frame_numbers();
        assert!(
            numbers.contains(FrameNo(frame)),
            "frame {frame} is in the pool"
        );
        if !self.failed.is_empty() && self.is_failed(frame) {
            return;
        }
        let word = &mut self.words[(frame / 64) as usize];
        let bit = 1 << (frame % 64);
        if (*word & bit != 0) == set {
            return;
        }
        *word ^= bit;
        match set {
            true => self.used += 1,
            false => self.used -= 1,
        }
        self.mark_dirty((frame / LINE_FRAMES) as usize);
    }

    /// Whether a frame is of a failed device.
    #[cold]
    pub(crate) fn is_failed(&self, frame: u64) -> bool {
        self.failed.iter().any(|frames| frames.contains(&frame))
    }

    /// Whether a word has bits of a failed device.
    pub(crate) fn is_failed_word(&self, word: usize) -> bool {
        let (start, end) = (word as u64 * 64, (word as u64 + 1) * 64);
        let mut failed = self.failed.iter();
        failed.any(|frames| frames.start < end && start < frames.end)
    }

    #[inline(always)]
    fn mark_dirty(&mut self, line: usize) {
        let (word, bit) = (line / 64, 1 << (line % 64));
        if self.is_dirty[word] & bit == 0 {
            self.is_dirty[word] |= bit;
            self.dirty.push(line as u32);
            if line >= self.first_end {
                self.raise_end(line as u64);
            }
        }
    }

    /// Makes a line a used one. Lines before it were never written: they get a checksum, too.
    #[cold]
    fn raise_end(&mut self, line: u64) {
        let Some(tables) = self.device_of_unused(line) else {
            return;
        };
        let gap = self.ends.used_lines(&tables).end..line;
        self.ends.raise(&tables, line);
        self.first_end = first_end(&self.geometry, &self.ends);
        if !defect::is(Defect::BitmapGapNotWritten) {
            gap.for_each(|line| self.mark_dirty(line as usize));
        }
    }

    /// A line in the form that media hold.
    pub(crate) fn line(&self, number: usize) -> BitmapLine {
        let mut line = [0; LINE_WORDS + 1];
        line[..LINE_WORDS].copy_from_slice(&self.words[number * LINE_WORDS..][..LINE_WORDS]);
        line[LINE_WORDS] = line_checksum(self.seed, number, &line);
        line
    }

    /// The byte where a line lies. None for a line without frames.
    pub(crate) fn line_at(&self, number: usize) -> Option<usize> {
        self.geometry.bitmap_line_at(number as u64)
    }

    /// Rewrites the lines that differ on media, and returns their number. Changed lines
    /// are left to the next flush.
    pub(crate) fn correct<M: Media>(
        &self,
        media: &M,
        lines: Range<u32>,
    ) -> (u64, Option<UnfencedStores>) {
        let (mut corrected, mut stores): (u64, Option<UnfencedStores>) = (0, None);
        for number in lines.map(|number| number as usize) {
            let Some(at) = self.line_at(number) else {
                continue;
            };
            if self.device_of_unused(number as u64).is_some() {
                continue;
            }
            let mut found = [0; LINE_BYTES];
            media.read(at, &mut found);
            let line = bytes_of(&self.line(number));
            let is_dirty = self.is_dirty[number / 64] & 1 << (number % 64) != 0;
            if found == line || is_dirty {
                continue;
            }
            corrected += 1;
            let streamed = media.stream_line(at, &line);
            stores = Some(streamed.after(stores.take()));
        }
        (corrected, stores)
    }

    /// Lines that the next flush writes.
    pub(crate) fn changed_lines(&self) -> &[u32] {
        &self.dirty
    }

    /// Writes every changed line, if there is one.
    pub(crate) fn flush<M: Media>(&mut self, media: &M) -> Option<UnfencedStores> {
        let mut stores: Option<UnfencedStores> = None;
        for &number in &self.dirty {
            let number = number as usize;
            self.is_dirty[number / 64] = 0;
            let Some(at) = self.line_at(number) else {
                continue;
            };
            let line = self.line(number);
            let streamed = media.stream_line(at, &bytes_of(&line));
            stores = Some(streamed.after(stores.take()));
        }
        self.dirty.clear();
        stores
    }
}

/// Whether a frame of the pool was in use at the checkpoint by the bitmap on media. False if the
/// checksum of its line does not match.
pub(crate) fn is_used_on<M: Media>(
    media: &M,
    geometry: &Geometry,
    pool: Uuid,
    frame: FrameNo,
) -> bool {
    let number = (frame.0 / LINE_FRAMES) as usize;
    let Some(at) = geometry.bitmap_line_at(number as u64) else {
        return false;
    };
    let mut bytes = [0; LINE_BYTES];
    media.read(at, &mut bytes);
    let line = words_of(&bytes);
    let bit = frame.0 % LINE_FRAMES;
    line[LINE_WORDS] == line_checksum(crc32c(pool.as_bytes()), number, &line)
        && line[(bit / 64) as usize] >> (bit % 64) & 1 != 0
}

/// The line behind the used ones of the first device.
fn first_end(geometry: &Geometry, ends: &BitmapEnds) -> usize {
    let first = geometry.device_frames().next();
    first.map_or(0, |tables| ends.used_lines(&tables).end as usize)
}

fn words_of_lines(lines: Range<u64>) -> Range<usize> {
    lines.start as usize * LINE_WORDS..lines.end as usize * LINE_WORDS
}

pub(crate) fn clear_bits(words: &mut [u64], bits: Range<u64>) {
    let Range { start, end } = bits;
    if start >= end {
        return;
    }
    let (first, last) = ((start / 64) as usize, ((end - 1) / 64) as usize);
    let from = u64::MAX << (start % 64);
    let to = u64::MAX >> (63 - (end - 1) % 64);
    if first == last {
        words[first] &= !(from & to);
        return;
    }
    words[first] &= !from;
    words[first + 1..last].fill(0);
    words[last] &= !to;
}

/// The last word of a line: the CRC32C of pool, line number and bits.
#[inline]
fn line_checksum(seed: u32, number: usize, line: &BitmapLine) -> u64 {
    let mut words = [[0; 8]; LINE_WORDS + 1];
    words[0] = (number as u64).to_le_bytes();
    for (bytes, word) in words[1..].iter_mut().zip(line) {
        *bytes = word.to_le_bytes();
    }
    u64::from(crc32c_words(seed, &words))
}

/// Corrects the checksum of a line on media.
#[cfg(feature = "test-api")]
pub fn update_line_checksum(pool: Uuid, number: usize, bytes: &mut [u8; LINE_BYTES]) {
    let mut line = words_of(bytes);
    line[LINE_WORDS] = line_checksum(crc32c(pool.as_bytes()), number, &line);
    *bytes = bytes_of(&line);
}

fn words_of(bytes: &[u8; LINE_BYTES]) -> BitmapLine {
    let mut line = [0; LINE_WORDS + 1];
    for (word, bytes) in line.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    line
}

fn bytes_of(line: &BitmapLine) -> [u8; LINE_BYTES] {
    let mut bytes = [0; LINE_BYTES];
    for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(line) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_pmem::{Image, Recorder};
    use proptest::prelude::*;

    const POOL: Uuid = Uuid::from_u128(3);
    const BYTES: usize = 16 << 20;

    /// Sets and clears bits of a new pool on a medium with old bytes, and reads the bitmap again.
    fn write_and_load(changes: &[(u64, bool)]) -> (Bitmap, Bitmap, Vec<DamagedLine>) {
        let geometry = Geometry::plan(BYTES as u64).expect("a plan");
        let media = Recorder::unrecorded(Image::filled(BYTES, 0x5555_aaaa_1234_8765));
        for tables in geometry.device_frames() {
            Bitmap::format(&media, &tables, POOL);
        }
        let ends = BitmapEnds::of_new(&geometry);
        let (mut written, bad) = Bitmap::load(&media, &geometry, POOL, ends);
        assert_eq!(bad, []);
        let frames = geometry.first_frames();
        for &(frame, set) in changes {
            written.write(frames.start + frame % (frames.end - frames.start), set);
        }
        if let Some(stores) = written.flush(&media) {
            let _fenced = media.fence(stores);
        }
        let (loaded, bad) = Bitmap::load(&media, &geometry, POOL, *written.ends());
        (written, loaded, bad)
    }

    proptest! {
        #[test]
        fn used_lines_read_as_they_were_written(
            changes in prop::collection::vec((any::<u64>(), any::<bool>()), 0..20),
        ) {
            let (written, loaded, bad) = write_and_load(&changes);
            prop_assert_eq!(bad, []);
            prop_assert_eq!(written.words(), loaded.words());
            prop_assert_eq!(written.used(), loaded.used());
            let last_set = written.words().iter().rposition(|&word| word != 0);
            let needed = last_set.map_or(0, |word| (word / LINE_WORDS + 1) as u32);
            prop_assert!(needed <= written.used_end());
        }
    }

    #[test]
    fn unwritten_line_before_a_used_one_is_found() {
        let far = [(3000, true)];
        assert_eq!(write_and_load(&far).2, []);
        pagemesh_base::defect::set(Some(Defect::BitmapGapNotWritten));
        let bad = write_and_load(&far).2.len();
        pagemesh_base::defect::set(None);
        assert!(bad > 0);
    }
}
