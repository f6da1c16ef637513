//! A lane: one session's ring of records.
//!
//! Invariants:
//! - Positions count lines since the pool was made and never wrap; a lap is
//!   the position divided by the lane's length.
//! - A record never straddles the end of the ring: a pad goes before it, and
//!   is fenced by itself, so that a lane has at most one unfenced record.
//! - Therefore a bad record is a torn tail only when nothing valid follows it
//!   in the ring; otherwise it was fenced once and the medium lost it.
//!
//! A lane never overwrites a line at or above its head, and never fences a
//! record: that fence is the commit, and belongs to the caller.

use crate::record::{NoRecord, Place, Record, encode_pad, is_pad, lines};
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::{Media, Unfenced};

type Line = [u8; LINE_BYTES];

/// A lane on a medium.
pub struct Lane<'m, M> {
    media: &'m M,
    /// The byte where the ring starts.
    start: usize,
    /// Lines of the ring.
    length: u64,
    /// The lane's place; the position is the next line to be written.
    next: Place,
    /// The first line that must be kept.
    head: u64,
}

/// No room: everything up to the lane's length is still needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lane is full up to line {head}; a checkpoint must advance its head")]
pub struct LaneFull {
    /// The first line that is still needed.
    pub head: u64,
}

/// A record that was fenced once and is not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "lane {lane} is damaged at line {position}: {cause}, but line {later} was written after it"
)]
pub struct Damage {
    /// The lane's number.
    pub lane: u32,
    /// The bad line.
    pub position: u64,
    /// A valid line that was written later.
    pub later: u64,
    /// What is wrong with the bad line.
    pub cause: NoRecord,
}

/// What a lane holds from its head on.
#[derive(Debug, PartialEq, Eq)]
pub struct Scan {
    /// Position and record, in the order they were written.
    pub records: Vec<(u64, Record)>,
    /// The first line that is free.
    pub end: u64,
}

impl<'m, M: Media> Lane<'m, M> {
    /// The lane of `length` lines at byte `start`, empty at `first.position`.
    ///
    /// # Panics
    /// When the lane does not lie within the medium in whole lines.
    pub fn new(media: &'m M, start: usize, length: u64, first: Place) -> Lane<'m, M> {
        let bytes = length as usize * LINE_BYTES;
        assert!(
            length > 0 && start.is_multiple_of(LINE_BYTES),
            "whole lines"
        );
        assert!(
            start + bytes <= media.len_bytes(),
            "a lane within its medium"
        );
        let head = first.position;
        Lane {
            media,
            start,
            length,
            next: first,
            head,
        }
    }

    /// The first line that must be kept.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The next line to be written.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.next.position
    }

    /// Frees every line below `head`.
    ///
    /// # Panics
    /// When that is below the present head or above the end.
    pub fn advance(&mut self, head: u64) {
        assert!(
            (self.head..=self.end()).contains(&head),
            "{head} is not in the lane"
        );
        self.head = head;
    }

    /// Streams a record; the fence that follows commits it. The record's
    /// position is [`Lane::end`] less its lines.
    ///
    /// # Errors
    /// When the lane has no room; nothing was written.
    ///
    /// # Panics
    /// When the record is longer than the whole lane.
    pub fn append(&mut self, record: &Record) -> Result<Unfenced, LaneFull> {
        let count = lines(record.changes.len()) as u64;
        assert!(count <= self.length, "a record longer than its lane");
        let to_wrap = self.length - self.next.position % self.length;
        let skipped = if count > to_wrap { to_wrap } else { 0 };
        if self.end() + skipped + count - self.head > self.length {
            return Err(LaneFull { head: self.head });
        }
        if skipped > 0 {
            let pad = self.stream(&[encode_pad(&self.next)]);
            let _fenced = self.media.fence(pad);
            self.next.position += skipped;
        }
        let stores = self.stream(&record.encode(&self.next));
        self.next.position += count;
        Ok(stores)
    }

    fn stream(&self, record: &[Line]) -> Unfenced {
        let first = self.start + (self.next.position % self.length) as usize * LINE_BYTES;
        let stream = |(i, line)| self.media.stream_line(first + i * LINE_BYTES, line);
        record
            .iter()
            .enumerate()
            .map(stream)
            .reduce(Unfenced::and)
            .expect("a record has a line")
    }

    /// Reads what the lane holds from its head on and moves its end behind
    /// it. To be called once, before anything is appended.
    ///
    /// # Errors
    /// When a record that was fenced is bad.
    pub fn recover(&mut self) -> Result<Scan, Damage> {
        let ring = self.read_ring();
        let mut records = Vec::new();
        while self.end() < self.head + self.length {
            match self.decode(&ring, self.end()) {
                Ok(Entry::Pad) => self.next.position = self.end().next_multiple_of(self.length),
                Ok(Entry::Record(record)) => {
                    let position = self.end();
                    self.next.position += lines(record.changes.len()) as u64;
                    records.push((position, record));
                }
                Err(cause) => {
                    self.check_torn(&ring, cause)?;
                    break;
                }
            }
        }
        Ok(Scan {
            records,
            end: self.end(),
        })
    }

    fn read_ring(&self) -> Vec<Line> {
        let mut ring = vec![[0; LINE_BYTES]; self.length as usize];
        self.media.read(self.start, ring.as_flattened_mut());
        ring
    }

    fn decode(&self, ring: &[Line], position: u64) -> Result<Entry, NoRecord> {
        let place = Place {
            position,
            ..self.next
        };
        let from = &ring[(position % self.length) as usize..];
        // A pad at the very start of the ring would skip a whole lap.
        if !position.is_multiple_of(self.length) && is_pad(&from[0], &place) {
            return Ok(Entry::Pad);
        }
        Record::decode(from, &place).map(Entry::Record)
    }

    /// A bad line is torn unless something valid was written after it.
    fn check_torn(&self, ring: &[Line], cause: NoRecord) -> Result<(), Damage> {
        let position = self.end();
        let valid = |&later: &u64| self.decode(ring, later).is_ok();
        match (position + 1..self.head + self.length).find(valid) {
            None => Ok(()),
            Some(later) => Err(Damage {
                lane: self.next.lane,
                position,
                later,
                cause,
            }),
        }
    }
}

enum Entry {
    Pad,
    Record(Record),
}
