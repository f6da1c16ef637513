//! The journal of a session: a ring of records.
//!
//! Invariants:
//! - Positions count lines since the pool was made and never wrap. A lap is the position divided by
//!   the length of the journal.
//! - A group of records never straddles the end of the ring. A pad goes before it, and is fenced by
//!   itself, so that a journal has at most one unfenced group. A single record is a group of one.
//! - Therefore a bad record is a torn tail only if no valid entry follows its group in the ring.
//!   Otherwise the record was fenced once and the medium lost it.
//! - A group counts if all of its records are there.
//! - A record with one flipped bit is corrected. A torn record is never that close to a whole one,
//!   unless it is the very record that was being written.
//!
//! A journal never overwrites a line at or above its head. It never fences a record: that fence is
//! the commit, and belongs to the caller.

use crate::defect::{self, Defect};
use crate::format::record::{
    GroupPosition, InvalidRecord, JournalEntry, ObjectRecord, Record, RecordAddress, claimed_lines,
    encode_pad, is_damaged_pad, is_older_patch, is_pad,
};
use crate::format::superblock::Superblock;
use pagemesh_base::ids::Seq;
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

/// The number of entries that the prefetch runs ahead of the reader.
const PREFETCHED_HEADS: u64 = 4;

type Line = [u8; LINE_BYTES];

/// A journal. The caller passes its medium to each call.
#[derive(Clone, Debug)]
pub struct Journal {
    /// The byte where the ring starts.
    start: usize,
    /// Lines of the ring.
    length: u64,
    /// The address of the next line to be written.
    next_address: RecordAddress,
    /// The first line that must be retained.
    head: u64,
}

/// No room: the whole ring is still needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the journal is full up to line {head}; a checkpoint must advance its head")]
pub struct JournalFull {
    /// The first line that is still needed.
    pub head: u64,
}

/// A record that was fenced once and is no longer there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "journal {journal} is damaged at line {position}: {cause}, but line {later} was written after it"
)]
pub struct JournalDamage {
    /// The journal's number.
    pub journal: u32,
    /// The bad line.
    pub position: u64,
    /// A valid line that was written later.
    pub later: u64,
    /// The defect of the bad line.
    pub cause: InvalidRecord,
}

/// The content of a journal from its head on.
#[derive(Debug, PartialEq, Eq)]
pub struct JournalScan {
    /// Position and record, in the order they were written.
    pub entries: Vec<(u64, JournalEntry)>,
    /// The first line that is free.
    pub end: u64,
    /// Positions of entries that had a flipped bit.
    pub corrected: Vec<u64>,
    /// The remains of a last group that is not complete.
    pub torn_group: Vec<JournalEntry>,
    /// Whether the journal ends at a record of an older build, which this one cannot read.
    pub has_older_format: bool,
}

impl JournalScan {
    /// Whether the journal holds no entry from its head on.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.torn_group.is_empty()
    }
}

/// A group that continues after the records read so far.
#[derive(Clone, Copy)]
struct OpenGroup {
    start: u64,
    seq: Seq,
    /// Entries before it.
    entries: usize,
}

/// The end of the readable part of a journal, and its cause.
struct ScanEnd {
    position: u64,
    cause: InvalidRecord,
}

/// The journal of a session number, from its head by the superblock.
pub(crate) fn journal_of(block: &Superblock, number: u32) -> Journal {
    let address = RecordAddress::new(
        block.pool,
        block.incarnation,
        number,
        block.journal_heads[number as usize],
    );
    Journal::new(
        block.geometry.journal_at(number),
        block.geometry.journal_lines(),
        address,
    )
}

impl Journal {
    /// The journal of `length` lines at byte `start`, empty at `first.position`.
    ///
    /// # Panics
    /// When the journal does not start at a whole line or has no lines.
    #[must_use]
    pub fn new(start: usize, length: u64, first: RecordAddress) -> Journal {
        assert!(
            length > 0 && start.is_multiple_of(LINE_BYTES),
            "whole lines"
        );
        let head = first.position;
        Journal {
            start,
            length,
            next_address: first,
            head,
        }
    }

    /// The first line that must be retained.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The next line to be written.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.next_address.position
    }

    /// Continues at `end`, up to which another user of the journal wrote.
    ///
    /// # Panics
    /// When that is not within a lap of the head.
    pub fn resume(&mut self, end: u64) {
        assert!(
            (self.head..=self.head + self.length).contains(&end),
            "{end} is not in the journal"
        );
        self.next_address.position = end;
    }

    /// Frees every line below `head`.
    ///
    /// # Panics
    /// When that is below the present head or above the end.
    pub fn advance(&mut self, head: u64) {
        assert!(
            (self.head..=self.end()).contains(&head),
            "{head} is not in the journal"
        );
        self.head = head;
    }

    /// The byte of a line.
    fn byte_of(&self, position: u64) -> usize {
        self.start + (position % self.length) as usize * LINE_BYTES
    }

    /// The address of the next line.
    #[must_use]
    pub fn next_address(&self) -> &RecordAddress {
        &self.next_address
    }

    /// Whether an entry of `count` lines can be appended, and how many lines
    /// are skipped at the end of the ring to do so.
    ///
    /// # Errors
    /// When the journal has no room.
    ///
    /// # Panics
    /// When the entry might not even fit into an empty journal.
    pub fn has_room(&self, count: usize) -> Result<u64, JournalFull> {
        let count = count as u64;
        assert!(2 * count - 1 <= self.length, "an entry of half its journal");
        let to_wrap = self.length - self.next_address.position % self.length;
        let skipped = if count > to_wrap { to_wrap } else { 0 };
        match self.end() + skipped + count - self.head > self.length {
            true => Err(JournalFull { head: self.head }),
            false => Ok(skipped),
        }
    }

    /// Makes room for an entry of `count` lines. If the entry does not fit before the end of the
    /// ring, writes a fenced pad and continues at the start.
    ///
    /// # Errors
    /// When the journal has no room; nothing was written.
    ///
    /// # Panics
    /// As [`Journal::has_room`].
    pub fn reserve<M: Media>(&mut self, media: &M, count: usize) -> Result<(), JournalFull> {
        let skipped = self.has_room(count)?;
        if skipped > 0 {
            let pad = self.stream(media, &[encode_pad(&self.next_address)]);
            if !defect::is(Defect::PadNotFenced) {
                let _fenced = media.fence(pad);
            }
            self.next_address.position += skipped;
        }
        Ok(())
    }

    /// Streams an entry that is encoded for [`Journal::next_address`]. The caller has reserved room
    /// for it. The caller's next fence commits it.
    ///
    /// # Panics
    /// When no room was reserved.
    pub fn append<M: Media>(&mut self, media: &M, entry: &[Line]) -> UnfencedStores {
        let count = entry.len() as u64;
        let end = self.end() + count;
        assert!(end - self.head <= self.length, "room was reserved");
        assert!(self.end() % self.length + count <= self.length, "no wrap");
        let stores = self.stream(media, entry);
        self.next_address.position = end;
        stores
    }

    fn stream<M: Media>(&self, media: &M, entry: &[Line]) -> UnfencedStores {
        let first = self.byte_of(self.end());
        let stream = |(i, line)| media.stream_line(first + i * LINE_BYTES, line);
        entry
            .iter()
            .enumerate()
            .map(stream)
            .reduce(UnfencedStores::and)
            .expect("an entry has a line")
    }

    /// Reads all entries from the head on and moves the end of the journal to the end of the last
    /// whole group. The caller calls it once, before it appends anything.
    ///
    /// # Errors
    /// When a record that was fenced is bad.
    pub fn recover<M: Media>(&mut self, media: &M) -> Result<JournalScan, JournalDamage> {
        let ring = self.read_ring(media);
        let (mut scan, bad) = self.read_groups(&ring);
        if let Some(bad) = bad.filter(|_| !scan.has_older_format) {
            self.check_torn(&ring, &bad, &mut scan.torn_group)?;
        }
        Ok(scan)
    }

    /// As [`Journal::recover`], on a medium that loses unsynced lines in any order: entries after
    /// the first bad line were never acknowledged as durable.
    pub fn recover_unordered<M: Media>(&mut self, media: &M) -> JournalScan {
        let ring = self.read_ring(media);
        self.read_groups(&ring).0
    }

    /// Reads whole groups from the end on. Returns them, and the reason for the end.
    fn read_groups(&mut self, ring: &[Line]) -> (JournalScan, Option<ScanEnd>) {
        let (mut entries, mut corrected) = (Vec::new(), Vec::new());
        let (mut begun, mut bad, mut is_older) = (None, None, false);
        while self.end() < self.head + self.length {
            let position = self.end();
            let found = self.decode(ring, position).or_else(|cause| {
                let found = self.correct(&ring[(position % self.length) as usize..]);
                let found = found.filter(|found| self.may_follow(begun, found));
                corrected.extend(found.is_some().then_some(position));
                found.ok_or(cause)
            });
            let found = found.and_then(|found| match self.may_follow(begun, &found) {
                true => Ok(found),
                false => Err(InvalidRecord::Misplaced),
            });
            match found {
                Ok(DecodedEntry::Pad) => {
                    self.next_address.position = position.next_multiple_of(self.length)
                }
                Ok(DecodedEntry::Entry(entry)) => {
                    begun = match group_position(&entry).is_continued {
                        true => begun.or(Some(OpenGroup {
                            start: position,
                            seq: entry.seq(),
                            entries: entries.len(),
                        })),
                        false => None,
                    };
                    self.next_address.position += entry.lines() as u64;
                    entries.push((position, entry));
                }
                Err(cause) => {
                    let from = &ring[(position % self.length) as usize..];
                    is_older = is_older_patch(from, &self.next_address);
                    bad = Some(ScanEnd { position, cause });
                    break;
                }
            }
        }
        let mut torn = Vec::new();
        if let Some(begun) = begun.filter(|_| !defect::is(Defect::GroupHalfRecovered)) {
            let of_it = entries.drain(begun.entries..);
            torn.extend(of_it.map(|(_, entry)| entry));
            corrected.retain(|&position| position < begun.start);
            self.next_address.position = begun.start;
        }
        let end = self.end();
        let scan = JournalScan {
            entries,
            end,
            corrected,
            torn_group: torn,
            has_older_format: is_older,
        };
        (scan, bad)
    }

    /// Whether the entry found may stand at the end. A group continues at the line that its record
    /// names, under the same seq, and never over the end of the ring.
    fn may_follow(&self, begun: Option<OpenGroup>, found: &DecodedEntry) -> bool {
        let DecodedEntry::Entry(entry) = found else {
            return begun.is_none();
        };
        let lines_before = u64::from(group_position(entry).lines_before);
        let straddles = lines_before > self.end() % self.length;
        match begun {
            None => lines_before == 0,
            Some(begun) => {
                let is_its = begun.start + lines_before == self.end() && begun.seq == entry.seq();
                is_its && !straddles
            }
        }
    }

    /// The entry at the end, if the flip of one bit makes its lines valid.
    fn correct(&self, from: &[Line]) -> Option<DecodedEntry> {
        if !self.end().is_multiple_of(self.length) && is_damaged_pad(&from[0], &self.next_address) {
            return Some(DecodedEntry::Pad);
        }
        JournalEntry::correct(from, &self.next_address).map(DecodedEntry::Entry)
    }

    /// Whether the journal holds entries of the lap after the one that starts at its head. If so,
    /// the head is an old one.
    pub fn has_next_lap<M: Media>(&self, media: &M) -> bool {
        let ring = self.read_ring(media);
        let next_lap = self.head + self.length..self.head + 2 * self.length;
        next_lap
            .into_iter()
            .any(|later| self.decode(&ring, later).is_ok())
    }

    /// Decodes the entry at the end into `record`, if it is a map record, and moves the end past
    /// it. For readers of a journal. The writer must have published that all entries below some
    /// position are there.
    ///
    /// # Errors
    /// When there is no valid entry; the end stays.
    pub fn read_next(
        &mut self,
        chunk: &JournalChunk,
        record: &mut Record,
    ) -> Result<NextEntry, InvalidRecord> {
        let from = chunk.lines_from(self.end());
        let address = self.next_address;
        if is_pad(&from[0], &address) && !address.position.is_multiple_of(self.length) {
            self.next_address.position = self.end().next_multiple_of(self.length);
            return Ok(NextEntry::Pad);
        }
        if record.decode_from(from, &address).is_ok() {
            self.next_address.position += record.lines() as u64;
            return Ok(NextEntry::Map);
        }
        let entry = JournalEntry::decode(from, &address)?;
        self.next_address.position += entry.lines() as u64;
        match entry {
            JournalEntry::Object(object) => Ok(NextEntry::Object(object)),
            JournalEntry::Map(_) => Err(InvalidRecord::Malformed),
        }
    }

    /// As [`Journal::read_next`], straight from the medium, for entries with all needed fields in
    /// the head: maps of one page, and patches with their bytes already in the page. False for all
    /// other entries and for damaged ones; the end has not moved then.
    pub fn read_next_head<M: Media>(&mut self, media: &M, record: &mut Record) -> bool {
        let mut head = [0; LINE_BYTES];
        media.read(self.byte_of(self.end()), &mut head);
        let address = self.next_address;
        if record.decode_head(&head, &address).is_err() {
            return false;
        }
        let lines = record.lines() as u64;
        // The next entries mostly have the same length.
        media.prefetch_load(self.byte_of(address.position + PREFETCHED_HEADS * lines));
        self.next_address.position += lines;
        true
    }

    /// Rewrites the entry at the end, if one flipped bit is its only defect. Its lines must be
    /// committed, so that its session no longer writes them. The chunk must hold as many lines as
    /// the longest entry has, if there are so many.
    pub fn correct_next<M: Media>(
        &self,
        media: &M,
        chunk: &JournalChunk,
    ) -> Option<UnfencedStores> {
        let from = chunk.lines_from(self.end());
        let mut whole = Vec::new();
        match self.correct(from)? {
            DecodedEntry::Pad => whole.push(encode_pad(&self.next_address)),
            DecodedEntry::Entry(entry) => entry.encode(&self.next_address, &mut whole),
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
            .reduce(UnfencedStores::and)
    }

    /// Reads lines from the end on, at most up to `until` and to the end of the ring.
    pub fn read_ahead<M: Media>(&self, media: &M, until: u64, into: &mut JournalChunk) {
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

    fn decode(&self, ring: &[Line], position: u64) -> Result<DecodedEntry, InvalidRecord> {
        let address = self.next_address.at(position);
        let from = &ring[(position % self.length) as usize..];
        // A pad at the very start of the ring would skip a whole lap.
        if !position.is_multiple_of(self.length) && is_pad(&from[0], &address) {
            return Ok(DecodedEntry::Pad);
        }
        JournalEntry::decode(from, &address).map(DecodedEntry::Entry)
    }

    /// A bad line is torn unless a valid entry was written after it. Records of its own group were
    /// written with it; they go to `torn`.
    fn check_torn(
        &self,
        ring: &[Line],
        bad: &ScanEnd,
        torn: &mut Vec<JournalEntry>,
    ) -> Result<(), JournalDamage> {
        for later in bad.position + 1..self.head + self.length {
            let Ok(found) = self.decode(ring, later) else {
                continue;
            };
            match found {
                DecodedEntry::Entry(entry)
                    if later.saturating_sub(u64::from(group_position(&entry).lines_before))
                        <= bad.position =>
                {
                    torn.push(entry);
                }
                _ => {
                    return Err(JournalDamage {
                        journal: self.next_address.journal,
                        position: bad.position,
                        later,
                        cause: bad.cause,
                    });
                }
            }
        }
        Ok(())
    }

    /// Invalidates all entries from the head on. Their writer is dead, and parts of its group must
    /// not be found after the next writer's entries. A pad before them stays: without it, an entry
    /// that a crash leaves would look as if it was written after a lost line.
    pub fn invalidate_entries<M: Media>(&self, media: &M) -> Option<UnfencedStores> {
        let ring = self.read_ring(media);
        let all = self.head..self.head + self.length;
        let is_entry = |&position: &u64| {
            let found = self.decode(&ring, position);
            found.is_ok_and(|found| matches!(found, DecodedEntry::Entry(_)))
        };
        let valid = all.filter(is_entry);
        valid
            .map(|position| {
                let at = self.byte_of(position);
                media.store(at, 0);
                media.flush(at, 8)
            })
            .reduce(UnfencedStores::and)
    }
}

fn group_position(entry: &JournalEntry) -> GroupPosition {
    match entry {
        JournalEntry::Map(record) => record.group_position,
        JournalEntry::Object(_) => GroupPosition::default(),
    }
}

/// Consecutive lines of a journal in its ring.
#[derive(Debug, Default)]
pub struct JournalChunk {
    /// The position of the first.
    start: u64,
    lines: Vec<Line>,
}

impl JournalChunk {
    /// The position after the last line.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.lines.len() as u64
    }

    /// Empties the chunk.
    pub fn clear(&mut self) {
        self.lines.clear();
    }

    /// Whether the chunk holds the whole entry at this position, by the length that the entry
    /// claims.
    #[must_use]
    pub fn has(&self, position: u64) -> bool {
        let is_in = (self.start..self.end()).contains(&position);
        is_in && claimed_lines(&self.lines_from(position)[0]) <= self.lines_from(position).len()
    }

    fn lines_from(&self, position: u64) -> &[Line] {
        &self.lines[(position - self.start) as usize..]
    }
}

/// The kind of entry that [`Journal::read_next`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum NextEntry {
    /// A pad: the journal continues at the start of its ring.
    Pad,
    /// A map record, now in the caller's `record`.
    Map,
    /// An object record.
    Object(ObjectRecord),
}

enum DecodedEntry {
    Pad,
    Entry(JournalEntry),
}
