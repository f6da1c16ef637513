//! A lane: one session's ring of records.
//!
//! Invariants:
//! - Positions count lines since the pool was made and never wrap; a lap is
//!   the position divided by the lane's length.
//! - A group of records never straddles the end of the ring: a pad goes before
//!   it, and is fenced by itself, so that a lane has at most one unfenced group.
//!   A record that is alone is a group of one.
//! - Therefore a bad record is a torn tail only when nothing valid follows its
//!   group in the ring; otherwise it was fenced once and the medium lost it.
//! - A group counts when all of it is there.
//! - A record with one flipped bit is mended: a torn one is never so close to
//!   whole, unless it is the very record that was being written.
//!
//! A lane never overwrites a line at or above its head, and never fences a
//! record: that fence is the commit, and belongs to the caller.

use crate::defect::{self, Defect};
use crate::record::{
    Entry, NoRecord, ObjectRecord, Place, Record, Standing, encode_pad, is_older_patch, is_pad,
    lines_claimed, was_pad,
};
use pagemesh_base::ids::Seq;
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::{Media, Unfenced};

/// How many heads ahead one is fetched.
const HEADS_AHEAD: u64 = 4;

type Line = [u8; LINE_BYTES];

/// A lane. Which medium it lies on is the caller's to say each time.
#[derive(Clone, Debug)]
pub struct Lane {
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
    pub entries: Vec<(u64, Entry)>,
    /// The first line that is free.
    pub end: u64,
    /// Positions of entries that had a flipped bit.
    pub mended: Vec<u64>,
    /// What is there of a last group that is not whole.
    pub torn: Vec<Entry>,
    /// Whether it ends at a record of an older build, which this one cannot read.
    pub is_older: bool,
}

impl Scan {
    /// Whether nothing was written behind the head.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.torn.is_empty()
    }
}

/// A group that goes on behind the records read so far.
#[derive(Clone, Copy)]
struct Begun {
    start: u64,
    seq: Seq,
    /// Entries before it.
    entries: usize,
}

/// Where and why a lane ends.
struct Bad {
    position: u64,
    cause: NoRecord,
}

impl Lane {
    /// The lane of `length` lines at byte `start`, empty at `first.position`.
    ///
    /// # Panics
    /// When the lane does not consist of whole lines.
    #[must_use]
    pub fn new(start: usize, length: u64, first: Place) -> Lane {
        assert!(
            length > 0 && start.is_multiple_of(LINE_BYTES),
            "whole lines"
        );
        let head = first.position;
        Lane {
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

    /// Goes on at `end`, up to which another user of the lane wrote.
    ///
    /// # Panics
    /// When that is not within a lap of the head.
    pub fn resume(&mut self, end: u64) {
        assert!(
            (self.head..=self.head + self.length).contains(&end),
            "{end} is not in the lane"
        );
        self.next.position = end;
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

    /// The byte where a line lies.
    fn byte_of(&self, position: u64) -> usize {
        self.start + (position % self.length) as usize * LINE_BYTES
    }

    /// The place of the next line.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.next
    }

    /// Whether an entry of `count` lines can be appended, and how many lines
    /// are skipped at the end of the ring to do so.
    ///
    /// # Errors
    /// When the lane has no room.
    ///
    /// # Panics
    /// When the entry might not even fit into an empty lane.
    pub fn has_room(&self, count: usize) -> Result<u64, LaneFull> {
        let count = count as u64;
        assert!(2 * count - 1 <= self.length, "an entry of half its lane");
        let to_wrap = self.length - self.next.position % self.length;
        let skipped = if count > to_wrap { to_wrap } else { 0 };
        match self.end() + skipped + count - self.head > self.length {
            true => Err(LaneFull { head: self.head }),
            false => Ok(skipped),
        }
    }

    /// Makes sure that an entry of `count` lines can be appended: wraps the
    /// lane by a fenced pad where it does not fit before the end.
    ///
    /// # Errors
    /// When the lane has no room; nothing was written.
    ///
    /// # Panics
    /// As [`Lane::has_room`].
    pub fn reserve<M: Media>(&mut self, media: &M, count: usize) -> Result<(), LaneFull> {
        let skipped = self.has_room(count)?;
        if skipped > 0 {
            let pad = self.stream(media, &[encode_pad(&self.next)]);
            if !defect::is(Defect::PadNotFenced) {
                let _fenced = media.fence(pad);
            }
            self.next.position += skipped;
        }
        Ok(())
    }

    /// Streams an entry, encoded for [`Lane::place`], for which room was
    /// reserved. The fence that follows commits it.
    ///
    /// # Panics
    /// When no room was reserved.
    pub fn append<M: Media>(&mut self, media: &M, entry: &[Line]) -> Unfenced {
        let count = entry.len() as u64;
        let end = self.end() + count;
        assert!(end - self.head <= self.length, "room was reserved");
        assert!(self.end() % self.length + count <= self.length, "no wrap");
        let stores = self.stream(media, entry);
        self.next.position = end;
        stores
    }

    fn stream<M: Media>(&self, media: &M, entry: &[Line]) -> Unfenced {
        let first = self.byte_of(self.end());
        let stream = |(i, line)| media.stream_line(first + i * LINE_BYTES, line);
        entry
            .iter()
            .enumerate()
            .map(stream)
            .reduce(Unfenced::and)
            .expect("an entry has a line")
    }

    /// Reads what the lane holds from its head on and moves its end behind
    /// it. To be called once, before anything is appended.
    ///
    /// # Errors
    /// When a record that was fenced is bad.
    pub fn recover<M: Media>(&mut self, media: &M) -> Result<Scan, Damage> {
        let ring = self.read_ring(media);
        let (mut scan, bad) = self.scan(&ring);
        if let Some(bad) = bad.filter(|_| !scan.is_older) {
            self.check_torn(&ring, &bad, &mut scan.torn)?;
        }
        Ok(scan)
    }

    /// As [`Lane::recover`], on a medium that loses unsynced lines in any
    /// order: whatever follows the first bad line was never promised.
    pub fn recover_unordered<M: Media>(&mut self, media: &M) -> Scan {
        let ring = self.read_ring(media);
        self.scan(&ring).0
    }

    /// Reads on from the end as far as groups are whole, and what ended it.
    fn scan(&mut self, ring: &[Line]) -> (Scan, Option<Bad>) {
        let (mut entries, mut mended) = (Vec::new(), Vec::new());
        let (mut begun, mut bad, mut is_older) = (None, None, false);
        while self.end() < self.head + self.length {
            let position = self.end();
            let found = self.decode(ring, position).or_else(|cause| {
                let found = self.mend(&ring[(position % self.length) as usize..]);
                let found = found.filter(|found| self.is_next(begun, found));
                mended.extend(found.is_some().then_some(position));
                found.ok_or(cause)
            });
            let found = found.and_then(|found| match self.is_next(begun, &found) {
                true => Ok(found),
                false => Err(NoRecord::Misplaced),
            });
            match found {
                Ok(Found::Pad) => self.next.position = position.next_multiple_of(self.length),
                Ok(Found::Entry(entry)) => {
                    begun = match standing(&entry).goes_on {
                        true => begun.or(Some(Begun {
                            start: position,
                            seq: entry.seq(),
                            entries: entries.len(),
                        })),
                        false => None,
                    };
                    self.next.position += entry.lines() as u64;
                    entries.push((position, entry));
                }
                Err(cause) => {
                    let from = &ring[(position % self.length) as usize..];
                    is_older = is_older_patch(from, &self.next);
                    bad = Some(Bad { position, cause });
                    break;
                }
            }
        }
        let mut torn = Vec::new();
        if let Some(begun) = begun.filter(|_| !defect::is(Defect::GroupHalfRecovered)) {
            let of_it = entries.drain(begun.entries..);
            torn.extend(of_it.map(|(_, entry)| entry));
            mended.retain(|&position| position < begun.start);
            self.next.position = begun.start;
        }
        let end = self.end();
        let scan = Scan {
            entries,
            end,
            mended,
            torn,
            is_older,
        };
        (scan, bad)
    }

    /// Whether what lies at the end may: a group goes on where it says, under
    /// the same seq, and never over the end of the ring.
    fn is_next(&self, begun: Option<Begun>, found: &Found) -> bool {
        let Found::Entry(entry) = found else {
            return begun.is_none();
        };
        let lines_before = u64::from(standing(entry).lines_before);
        let straddles = lines_before > self.end() % self.length;
        match begun {
            None => lines_before == 0,
            Some(begun) => {
                let is_its = begun.start + lines_before == self.end() && begun.seq == entry.seq();
                is_its && !straddles
            }
        }
    }

    /// What the lines at the end were, if one bit of them was flipped.
    fn mend(&self, from: &[Line]) -> Option<Found> {
        if !self.end().is_multiple_of(self.length) && was_pad(&from[0], &self.next) {
            return Some(Found::Pad);
        }
        Entry::mend(from, &self.next).map(Found::Entry)
    }

    /// Whether the lane holds entries of the lap after the one that starts at
    /// its head: then the head is not the one that it had last.
    pub fn is_lapped<M: Media>(&self, media: &M) -> bool {
        let ring = self.read_ring(media);
        let next_lap = self.head + self.length..self.head + 2 * self.length;
        next_lap
            .into_iter()
            .any(|later| self.decode(&ring, later).is_ok())
    }

    /// Decodes the entry at the end into `record`, if it is a map record, and
    /// moves the end behind it. For readers that follow a lane's writer, who
    /// published that everything below some position is there.
    ///
    /// # Errors
    /// When there is no valid entry; the end stays.
    pub fn follow(&mut self, chunk: &Chunk, record: &mut Record) -> Result<Followed, NoRecord> {
        let from = chunk.from(self.end());
        let place = self.next;
        if is_pad(&from[0], &place) && !place.position.is_multiple_of(self.length) {
            self.next.position = self.end().next_multiple_of(self.length);
            return Ok(Followed::Pad);
        }
        if record.decode_from(from, &place).is_ok() {
            self.next.position += record.lines() as u64;
            return Ok(Followed::Map);
        }
        let entry = Entry::decode(from, &place)?;
        self.next.position += entry.lines() as u64;
        match entry {
            Entry::Object(object) => Ok(Followed::Object(object)),
            Entry::Map(_) => Err(NoRecord::Malformed),
        }
    }

    /// As [`Lane::follow`], straight from the medium, where the head tells all that is
    /// wanted: of a map of one page, and of a patch whose bytes are where they belong. False
    /// for all else, and for what is damaged; nothing has moved then.
    pub fn follow_head<M: Media>(&mut self, media: &M, record: &mut Record) -> bool {
        let mut head = [0; LINE_BYTES];
        media.read(self.byte_of(self.end()), &mut head);
        let place = self.next;
        if record.decode_head(&head, &place).is_err() {
            return false;
        }
        let lines = record.lines() as u64;
        // Those that follow are mostly as long.
        media.prefetch_load(self.byte_of(place.position + HEADS_AHEAD * lines));
        self.next.position += lines;
        true
    }

    /// Writes the entry at the end anew, if one flipped bit is all that is wrong
    /// with it. Its lines must be committed, so that nobody else writes them, and
    /// the chunk must hold as many as the longest entry has, if there are.
    pub fn mend_next<M: Media>(&self, media: &M, chunk: &Chunk) -> Option<Unfenced> {
        let from = chunk.from(self.end());
        let mut whole = Vec::new();
        match self.mend(from)? {
            Found::Pad => whole.push(encode_pad(&self.next)),
            Found::Entry(entry) => entry.encode(&self.next, &mut whole),
        }
        let first = self.byte_of(self.end());
        let wanted = whole.as_flattened().as_chunks::<8>().0;
        let found = from.as_flattened().as_chunks::<8>().0;
        let differ = (first..).step_by(8).zip(wanted.iter().zip(found));
        let stores = differ.filter(|(_, (wanted, found))| wanted != found);
        stores
            .map(|(at, (wanted, _))| {
                media.store(at, u64::from_le_bytes(*wanted));
                media.flush(at, 8)
            })
            .reduce(Unfenced::and)
    }

    /// Reads lines from the end on, at most up to `until` and the ring's own
    /// end.
    pub fn read_on<M: Media>(&self, media: &M, until: u64, into: &mut Chunk) {
        let offset = self.end() % self.length;
        let count = (until - self.end()).min(self.length - offset);
        into.start = self.end();
        into.lines.resize(count as usize, [0; LINE_BYTES]);
        media.read(self.byte_of(self.end()), into.lines.as_flattened_mut());
    }

    fn read_ring<M: Media>(&self, media: &M) -> Vec<Line> {
        let mut ring = vec![[0; LINE_BYTES]; self.length as usize];
        media.read(self.start, ring.as_flattened_mut());
        ring
    }

    fn decode(&self, ring: &[Line], position: u64) -> Result<Found, NoRecord> {
        let place = self.next.at(position);
        let from = &ring[(position % self.length) as usize..];
        // A pad at the very start of the ring would skip a whole lap.
        if !position.is_multiple_of(self.length) && is_pad(&from[0], &place) {
            return Ok(Found::Pad);
        }
        Entry::decode(from, &place).map(Found::Entry)
    }

    /// A bad line is torn unless something valid was written after it. Records
    /// of its own group were written with it; they go to `torn`.
    fn check_torn(&self, ring: &[Line], bad: &Bad, torn: &mut Vec<Entry>) -> Result<(), Damage> {
        for later in bad.position + 1..self.head + self.length {
            let Ok(found) = self.decode(ring, later) else {
                continue;
            };
            match found {
                Found::Entry(entry)
                    if later.saturating_sub(u64::from(standing(&entry).lines_before))
                        <= bad.position =>
                {
                    torn.push(entry);
                }
                _ => {
                    return Err(Damage {
                        lane: self.next.lane,
                        position: bad.position,
                        later,
                        cause: bad.cause,
                    });
                }
            }
        }
        Ok(())
    }

    /// Takes entries from the ring that are valid from the head on: their writer
    /// is dead, and nobody shall find parts of a group behind what is written
    /// next. A pad before them stays: without it, one that a crash leaves would
    /// look like something written after a line that was lost.
    pub fn void<M: Media>(&self, media: &M) -> Option<Unfenced> {
        let ring = self.read_ring(media);
        let all = self.head..self.head + self.length;
        let is_entry = |&position: &u64| {
            let found = self.decode(&ring, position);
            found.is_ok_and(|found| matches!(found, Found::Entry(_)))
        };
        let valid = all.filter(is_entry);
        valid
            .map(|position| {
                let at = self.byte_of(position);
                media.store(at, 0);
                media.flush(at, 8)
            })
            .reduce(Unfenced::and)
    }
}

fn standing(entry: &Entry) -> Standing {
    match entry {
        Entry::Map(record) => record.standing,
        Entry::Object(_) => Standing::default(),
    }
}

/// Lines of a lane that lie behind each other in its ring.
#[derive(Debug, Default)]
pub struct Chunk {
    /// The position of the first.
    start: u64,
    lines: Vec<Line>,
}

impl Chunk {
    /// The position behind the last line.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.lines.len() as u64
    }

    /// Has nothing any more.
    pub fn clear(&mut self) {
        self.lines.clear();
    }

    /// Whether the entry at this position is there, as long as it says that it is.
    #[must_use]
    pub fn has(&self, position: u64) -> bool {
        let is_in = (self.start..self.end()).contains(&position);
        is_in && lines_claimed(&self.from(position)[0]) <= self.from(position).len()
    }

    fn from(&self, position: u64) -> &[Line] {
        &self.lines[(position - self.start) as usize..]
    }
}

/// What [`Lane::follow`] met.
#[derive(Debug, PartialEq, Eq)]
pub enum Followed {
    /// The lane went on at its start.
    Pad,
    /// A map record, now in the caller's.
    Map,
    /// An object record.
    Object(ObjectRecord),
}

enum Found {
    Pad,
    Entry(Entry),
}
