//! The version log: versions of pages that a checkpoint has passed, that a snapshot sees, and that no slot names yet.
//!
//! The log is a ring of lines in frames of the pool. The superblock names the frames, and the positions of the first
//! and of the last line. A checkpoint appends lines before it writes the superblock; later the owner links the frames of
//! the versions to the object of the slice's versions, and the head passes the lines.
//!
//! ```text
//!  0  crc    4   CRC32C of the pool's id, the position (8 bytes) and bytes 4..32
//!  4  object 4
//!  8  page   8
//! 16  frame  8
//! 24  birth  4
//! 28  death  4
//! ```
//!
//! A line with one wrong bit is corrected when it is read.
//!
//! Invariants: a line decodes at its own position only. A place in the ring is used again only after a superblock with
//! a head beyond its line is durable. One exception: a recovery that finds the log full replaces its last line by one that does not
//! decode.

use crate::format::devices::FrameNumbers;
use crate::format::geometry::frame_at;
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::checksum::{crc32c, crc32c_append};
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use uuid::Uuid;

/// Bytes of a line.
pub(crate) const VERSION_LINE_BYTES: usize = 32;
/// Lines of one frame.
pub(crate) const FRAME_LINES: u64 = (PAGE_BYTES / VERSION_LINE_BYTES) as u64;
/// Runs of frames that the log may have.
pub(crate) const LOG_RUNS_MAX: usize = 5;
/// Bytes of the log's place in the superblock.
pub(crate) const LOG_PLACE_BYTES: usize = RUNS_AT + LOG_RUNS_MAX * 8;
const RUNS_AT: usize = 20;

/// A version of a page that was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The object of the slice.
    pub object: ObjectId,
    /// The page.
    pub page: PageNo,
    /// The frame with the bytes of the version.
    pub frame: FrameNo,
    /// The epoch of the record that wrote it; 0 if it is unknown.
    pub birth: Epoch,
    /// The epoch of the record that replaced it.
    pub death: Epoch,
}

impl Version {
    /// Whether the snapshot at this epoch sees it.
    #[must_use]
    pub fn is_seen_by(&self, snapshot: Epoch) -> bool {
        self.birth < snapshot && snapshot <= self.death
    }

    /// Whether it is kept while this is the newest snapshot of an object, which was cloned at `base`. A move within the pool keeps the birth
    /// of the page, so the replaced version has not lived. No snapshot of a clone is as old as its base.
    pub(crate) fn is_kept_for(&self, newest: Epoch, base: Epoch) -> bool {
        self.birth < newest && self.birth < self.death && self.death > base
    }

    fn encode(&self, pool: Uuid, position: u64) -> [u8; VERSION_LINE_BYTES] {
        let mut line = [0; VERSION_LINE_BYTES];
        put(&mut line, 4, self.object.0.to_le_bytes());
        put(&mut line, 8, self.page.0.to_le_bytes());
        put(&mut line, 16, self.frame.0.to_le_bytes());
        put(&mut line, 24, self.birth.0.to_le_bytes());
        put(&mut line, 28, self.death.0.to_le_bytes());
        let crc = line_checksum(&line, pool, position);
        put(&mut line, 0, crc.to_le_bytes());
        line
    }

    /// None if it is not the line of this position.
    fn decode(line: &[u8; VERSION_LINE_BYTES], pool: Uuid, position: u64) -> Option<Version> {
        let is_whole = line_checksum(line, pool, position) == get_u32(line, 0);
        is_whole.then(|| Version {
            object: ObjectId(get_u32(line, 4)),
            page: PageNo(get_u64(line, 8)),
            frame: FrameNo(get_u64(line, 16)),
            birth: Epoch(get_u32(line, 24)),
            death: Epoch(get_u32(line, 28)),
        })
    }

    /// The same, with one wrong bit at most, which is corrected.
    fn decode_redundant(
        line: &[u8; VERSION_LINE_BYTES],
        pool: Uuid,
        position: u64,
    ) -> Option<Version> {
        let flipped = |bit: usize| {
            let mut line = *line;
            line[bit / 8] ^= 1 << (bit % 8);
            Version::decode(&line, pool, position)
        };
        let whole = Version::decode(line, pool, position);
        whole.or_else(|| (0..VERSION_LINE_BYTES * 8).find_map(flipped))
    }
}

fn line_checksum(line: &[u8; VERSION_LINE_BYTES], pool: Uuid, position: u64) -> u32 {
    let crc = crc32c_append(crc32c(pool.as_bytes()), &position.to_le_bytes());
    crc32c_append(crc, &line[4..])
}

/// Frames of the log with consecutive numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogRun {
    /// The number of the first.
    pub start: u64,
    /// How many.
    pub len: u64,
}

impl LogRun {
    const START_BITS: u32 = 40;

    fn encode(self) -> u64 {
        self.start | self.len << LogRun::START_BITS
    }

    fn decode(word: u64) -> LogRun {
        LogRun {
            start: word & ((1 << LogRun::START_BITS) - 1),
            len: word >> LogRun::START_BITS,
        }
    }

    /// The numbers of its frames.
    pub fn frames(self) -> std::ops::Range<u64> {
        self.start..self.start + self.len
    }
}

/// The place of the log, as the superblock has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VersionLogPlace {
    runs: [LogRun; LOG_RUNS_MAX],
    /// The position of the first line that counts.
    pub head: u64,
    /// The position behind the last line.
    pub tail: u64,
    /// Whether its frames are in the bitmap, and in the count of used frames.
    pub is_counted: bool,
}

impl VersionLogPlace {
    /// An empty log in these frames.
    ///
    /// # Panics
    /// When there are too many runs.
    pub(crate) fn new(frames: &[LogRun]) -> VersionLogPlace {
        let mut place = VersionLogPlace::default();
        place.runs[..frames.len()].copy_from_slice(frames);
        place
    }

    /// Whether the pool has a log.
    #[must_use]
    pub fn is_present(&self) -> bool {
        self.capacity() > 0
    }

    /// The runs of its frames.
    pub fn runs(&self) -> impl Iterator<Item = LogRun> + '_ {
        self.runs.iter().copied().filter(|run| run.len > 0)
    }

    /// The lines that it can hold.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.runs().map(|run| run.len).sum::<u64>() * FRAME_LINES
    }

    /// The lines that can still be appended.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.capacity() - (self.tail - self.head)
    }

    /// The frame with the line of a position, and the line's byte in the frame.
    pub(crate) fn line_at(&self, position: u64) -> (FrameNo, usize) {
        let line = position % self.capacity();
        let mut index = line / FRAME_LINES;
        for run in self.runs() {
            if index < run.len {
                let byte = (line % FRAME_LINES) as usize * VERSION_LINE_BYTES;
                return (FrameNo(run.start + index), byte);
            }
            index -= run.len;
        }
        unreachable!("a line is within the capacity")
    }

    /// The numbers of its frames.
    pub(crate) fn frames(&self) -> impl Iterator<Item = FrameNo> + '_ {
        self.runs().flat_map(LogRun::frames).map(FrameNo)
    }

    pub(crate) fn encode(&self, into: &mut [u8]) {
        put(into, 0, u32::from(self.is_counted).to_le_bytes());
        put(into, 4, self.head.to_le_bytes());
        put(into, 12, self.tail.to_le_bytes());
        for (run, at) in self.runs.iter().zip((RUNS_AT..).step_by(8)) {
            put(into, at, run.encode().to_le_bytes());
        }
    }

    /// The place that a superblock names, if it is possible in a pool with these frames.
    pub(crate) fn decode(bytes: &[u8], frames: &FrameNumbers<'_>) -> Result<Self, &'static str> {
        let runs = std::array::from_fn(|number| {
            LogRun::decode(u64::from_le_bytes(field(bytes, RUNS_AT + number * 8)))
        });
        let (head, tail) = (get_u64(bytes, 4), get_u64(bytes, 12));
        let place = VersionLogPlace {
            runs,
            head,
            tail,
            is_counted: get_u32(bytes, 0) != 0,
        };
        let is_within = |run: LogRun| {
            let mut ranges = frames.ranges();
            ranges.any(|range| range.start <= run.start && run.frames().end <= range.end)
        };
        let fits = tail
            .checked_sub(head)
            .is_some_and(|lines| lines <= place.capacity());
        match fits && place.runs().all(is_within) {
            true => Ok(place),
            false => Err("its version log lies outside of the pool"),
        }
    }
}

/// The bytes of a frame of the log, which the owner appends to.
pub(crate) struct LogFrame {
    pub(crate) frame: FrameNo,
    pub(crate) bytes: Box<[u8; PAGE_BYTES]>,
}

/// The lines of these versions. If the log has no room for all of them, the last line is one that does not decode, so each snapshot
/// counts as one that may lack versions. In a full log it replaces a line.
pub(crate) fn lines_within_room(
    place: &mut VersionLogPlace,
    versions: &[Version],
) -> Vec<Option<Version>> {
    let mut lines: Vec<_> = versions.iter().copied().map(Some).collect();
    if lines.len() as u64 > place.room() {
        if place.room() == 0 {
            place.tail -= 1;
        }
        lines.truncate(place.room() as usize);
        lines.pop();
        lines.push(None);
    }
    lines
}

/// The frames that change when lines are appended, with their new bytes. A line without a version does not decode. `read` fills the
/// bytes of the first frame, which may have lines already.
pub(crate) fn append_lines(
    place: &mut VersionLogPlace,
    pool: Uuid,
    lines: impl ExactSizeIterator<Item = Option<Version>>,
    mut read: impl FnMut(FrameNo, &mut [u8; PAGE_BYTES]),
) -> Vec<LogFrame> {
    assert!(
        lines.len() as u64 <= place.room(),
        "as many lines are appended as the log has room for"
    );
    let mut frames: Vec<LogFrame> = Vec::new();
    for version in lines {
        let (frame, at) = place.line_at(place.tail);
        if frames.last().is_none_or(|last| last.frame != frame) {
            let mut bytes = Box::new([0; PAGE_BYTES]);
            // The other lines of the frame may count.
            read(frame, &mut bytes);
            frames.push(LogFrame { frame, bytes });
        }
        if let Some(last) = frames.last_mut() {
            let line = version.map(|version| version.encode(pool, place.tail));
            put(
                &mut last.bytes[..],
                at,
                line.unwrap_or([0; VERSION_LINE_BYTES]),
            );
        }
        place.tail += 1;
    }
    frames
}

/// The versions of the log on a medium, from the head on. A damaged line is None.
pub(crate) fn load_versions<M: Media>(
    media: &M,
    place: &VersionLogPlace,
    pool: Uuid,
) -> Vec<Option<Version>> {
    read_lines(place, pool, |frame, into| media.read(frame_at(frame), into))
}

fn read_lines(
    place: &VersionLogPlace,
    pool: Uuid,
    mut read: impl FnMut(FrameNo, &mut [u8; PAGE_BYTES]),
) -> Vec<Option<Version>> {
    let mut bytes = [0; PAGE_BYTES];
    let mut loaded = None;
    let mut versions = Vec::with_capacity((place.tail - place.head) as usize);
    for position in place.head..place.tail {
        let (frame, at) = place.line_at(position);
        if loaded != Some(frame) {
            read(frame, &mut bytes);
            loaded = Some(frame);
        }
        let line = field(&bytes, at);
        versions.push(Version::decode_redundant(&line, pool, position));
    }
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(page: u64) -> Version {
        Version {
            object: ObjectId(3),
            page: PageNo(page),
            frame: FrameNo(page + 100),
            birth: Epoch(2),
            death: Epoch(5),
        }
    }

    #[test]
    fn version_is_seen_by_snapshots_of_its_life() {
        let seen: Vec<u32> = (0..8)
            .filter(|&snapshot| version(1).is_seen_by(Epoch(snapshot)))
            .collect();
        assert_eq!(seen, [3, 4, 5]);
    }

    #[test]
    fn line_decodes_at_its_position_only() {
        let pool = Uuid::from_u128(7);
        let line = version(9).encode(pool, 12);
        assert_eq!(Version::decode(&line, pool, 12), Some(version(9)));
        assert_eq!(Version::decode(&line, pool, 13), None);
        assert_eq!(Version::decode(&line, Uuid::from_u128(8), 12), None);
        for bit in 0..VERSION_LINE_BYTES * 8 {
            let mut damaged = line;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Version::decode(&damaged, pool, 12), None, "bit {bit}");
            let corrected = Version::decode_redundant(&damaged, pool, 12);
            assert_eq!(corrected, Some(version(9)), "bit {bit}");
            for second in 0..bit {
                let mut damaged = damaged;
                damaged[second / 8] ^= 1 << (second % 8);
                let found = Version::decode_redundant(&damaged, pool, 12);
                assert_eq!(found, None, "bits {bit} and {second}");
            }
        }
        assert_eq!(Version::decode_redundant(&line, pool, 13), None);
    }

    #[test]
    fn versions_beyond_room_leave_a_line_that_does_not_decode() {
        let mut place = VersionLogPlace::new(&[LogRun { start: 10, len: 1 }]);
        let pool = Uuid::from_u128(7);
        let versions: Vec<Version> = (0..FRAME_LINES + 1).map(version).collect();
        let mut bytes = [0; PAGE_BYTES];
        let mut append = |place: &mut VersionLogPlace, versions: &[Version]| {
            let lines = lines_within_room(place, versions).into_iter();
            for written in append_lines(place, pool, lines, |_, into| *into = bytes) {
                bytes = *written.bytes;
            }
            read_lines(place, pool, |_, into| *into = bytes)
        };
        let all = FRAME_LINES as usize;
        let mut expected: Vec<_> = versions.iter().copied().map(Some).take(all).collect();
        expected[all - 1] = None;
        assert_eq!(append(&mut place.clone(), &versions), expected);
        let whole = append(&mut place, &versions[..all]);
        assert!(whole.iter().all(Option::is_some) && place.room() == 0);
        assert_eq!(append(&mut place, &versions[all..]), expected);
        assert_eq!(place.room(), 0);
    }

    #[test]
    fn lines_wrap_around_the_runs() {
        let runs = [LogRun { start: 10, len: 1 }, LogRun { start: 20, len: 2 }];
        let mut place = VersionLogPlace::new(&runs);
        let pool = Uuid::from_u128(7);
        let mut media = std::collections::HashMap::new();
        let mut expected = Vec::new();
        for round in 0..20u64 {
            let more: Vec<Version> = (0..100).map(|page| version(round * 100 + page)).collect();
            while place.room() < 100 {
                place.head += 50;
                expected.drain(..50);
            }
            let read = |frame, into: &mut [u8; PAGE_BYTES]| {
                if let Some(bytes) = media.get(&frame) {
                    *into = *bytes;
                }
            };
            let lines = more.iter().copied().map(Some);
            for written in append_lines(&mut place, pool, lines, read) {
                media.insert(written.frame, *written.bytes);
            }
            expected.extend(more.into_iter().map(Some));
            let read = |frame, into: &mut [u8; PAGE_BYTES]| *into = media[&frame];
            assert_eq!(read_lines(&place, pool, read), expected);
        }
        assert!(media.keys().all(|frame| [10, 20, 21].contains(&frame.0)));
    }
}
