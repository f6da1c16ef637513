//! The scan of the journals: the records that count.
//!
//! Invariant: a group counts if its data is there, or if something proves that it was committed: its
//! slot, or a record that replaced the slot.

use super::ahead::{self, EntriesAhead, PAGES_AHEAD};
use super::error::PoolError;
use super::replay::Replay;
use super::{Recovery, repair};
use crate::defect::{self, Defect};
use crate::format::geometry::{Geometry, frame_at};
use crate::format::in_flight::{InFlightTableFull, in_flight_of};
use crate::format::journal::{JournalScan, journal_of};
use crate::format::record::{Change, JournalEntry, Record};
use crate::format::table::SlotLocation;
use pagemesh_base::checksum::{crc32c, flipped_bit, word_sum};
use pagemesh_base::ids::{ObjectId, Seq};
use pagemesh_base::slice::InFlightOp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::BTreeSet;

/// The records of the journals.
pub(super) struct JournalScans {
    /// Per journal the entries, without an incomplete last group, and the line after them.
    pub(super) whole: Vec<(Vec<JournalEntry>, u64)>,
    /// Per journal the remains of an incomplete last group.
    torn: Vec<Vec<JournalEntry>>,
}

impl<M: Media> Recovery<'_, M> {
    /// Reads the journals that may hold records: all of them if a superblock is damaged.
    pub(super) fn scan_journals(&mut self) -> Result<JournalScans, PoolError> {
        let journals_read = if self.is_alone {
            self.block.geometry.journals
        } else {
            self.block.journals_end
        };
        let (mut whole, mut torn) = (Vec::new(), Vec::new());
        for number in 0..journals_read {
            let scan = self.scan_journal(number)?;
            self.summary.corrected += scan.corrected.len() as u64;
            self.summary.dropped += scan.torn_group.len() as u64;
            let entries = scan.entries.into_iter().map(|(_, entry)| entry).collect();
            whole.push((entries, scan.end));
            torn.push(scan.torn_group);
        }
        let entries = whole.iter().flat_map(|(entries, _): &(Vec<_>, _)| entries);
        let needed = entries.filter(|entry| entry.seq() >= self.block.checkpoint);
        self.replay.record_patched_frames(needed);
        Ok(JournalScans { whole, torn })
    }

    fn scan_journal(&self, number: u32) -> Result<JournalScan, PoolError> {
        let mut journal = journal_of(&self.block, number);
        if self.is_alone && journal.has_next_lap(self.media) {
            return Err(PoolError::Superseded(number));
        }
        let scan = if self.ordered {
            journal.recover(self.media)?
        } else {
            journal.recover_unordered(self.media)
        };
        if scan.has_older_format {
            return Err(PoolError::OlderFormat(number));
        }
        Ok(scan)
    }

    /// Corrects the slots above those that the records change.
    pub(super) fn correct_slots(&mut self, journals: &JournalScans) {
        let read = journals.whole.iter().map(|(entries, _)| entries);
        let read = read.chain(&journals.torn);
        let (geometry, bitmap) = (&self.block.geometry, &self.bitmap);
        for entries in read.flat_map(|entries| entries.chunks(PAGES_AHEAD)) {
            let needed = entries
                .iter()
                .filter(|entry| entry.seq() >= self.block.checkpoint);
            ahead::load_nodes(self.media, geometry, entries);
            let corrected =
                repair::correct_slots(self.media, geometry, bitmap, needed, &mut self.stores);
            self.corrected_slots.extend(corrected);
        }
        self.summary.corrected += self.corrected_slots.len() as u64;
    }

    /// Refuses a pool that lost a part of a committed transaction.
    pub(super) fn check_torn_groups(&self, journals: &JournalScans) -> Result<(), PoolError> {
        let JournalScans { whole, torn } = journals;
        for (number, torn) in (0..).zip(torn) {
            let replay = &self.replay;
            if replay.is_partial_group_committed(torn, whole, self.ordered) {
                return Err(PoolError::Transaction(number));
            }
        }
        Ok(())
    }

    /// The records to be applied, in seq order: groups with their data, above the checkpoint. Lists
    /// the operations of each journal that may be incomplete on other legs.
    pub(super) fn select_records(
        &mut self,
        scans: Vec<(Vec<JournalEntry>, u64)>,
    ) -> Vec<JournalEntry> {
        let superseded = if self.ordered {
            self.replay.superseded_groups(&scans)
        } else {
            BTreeSet::new()
        };
        let mut found = Vec::new();
        for (number, (entries, end)) in (0..).zip(scans) {
            let last = entries.last().map(JournalEntry::seq);
            let entries = self.keep_whole_groups(&entries, &superseded);
            if let (true, Some(last)) = (self.ordered, last) {
                let group = entries.iter().filter(|entry| entry.seq() == last);
                let flushed = flush_records(self.media, &self.block.geometry, number, group);
                self.stores.extend(flushed);
            }
            self.list_in_flight(&entries);
            if end != self.block.journal_heads[number as usize] {
                self.block.journals_end = self.block.journals_end.max(number + 1);
            }
            self.block.journal_heads[number as usize] = end;
            let entries = entries.into_iter();
            found.extend(entries.filter(|entry| entry.seq() >= self.block.checkpoint));
        }
        found.sort_unstable_by_key(JournalEntry::seq);
        self.summary.records = found.len() as u64;
        found
    }

    /// The groups of a journal whose data is there. A group with missing data was never fenced, so
    /// it can only be the last. On a file any data since the checkpoint may be missing.
    fn keep_whole_groups(
        &mut self,
        entries: &[JournalEntry],
        superseded: &BTreeSet<Seq>,
    ) -> Vec<JournalEntry> {
        let ordered = self.ordered;
        let last = entries.last().map(JournalEntry::seq);
        let mut kept = Vec::with_capacity(entries.len());
        let mut ahead = EntriesAhead::new(entries);
        for group in entries.chunk_by(|one, next| one.seq() == next.seq()) {
            if let (false, Some(next)) = (ordered, ahead.before(group)) {
                ahead::load_data(
                    self.media,
                    &self.block.geometry,
                    next,
                    self.block.checkpoint,
                );
            }
            let seq = group[0].seq();
            let suspect = seq >= self.block.checkpoint && (!ordered || Some(seq) == last);
            let replay = &self.replay;
            let data: Vec<DataState> = if suspect {
                group.iter().map(|entry| replay.data_state(entry)).collect()
            } else {
                Vec::new()
            };
            let whole = !data.iter().any(|&data| data.is_torn(ordered))
                || group.iter().any(|entry| replay.is_swapped(entry))
                || superseded.contains(&seq);
            if !whole {
                self.summary.dropped += group.len() as u64;
                continue;
            }
            let states = group.iter().zip(&data);
            for (entry, _) in states.filter(|(_, it)| **it != DataState::Intact) {
                match replay.correctable_pages(entry) {
                    Some(pages) => self.flipped.extend(pages),
                    None => self.summary.damaged += 1,
                }
            }
            kept.extend_from_slice(group);
        }
        kept
    }

    /// Lists the operations at the end of a journal that may be incomplete on other legs.
    fn list_in_flight(&mut self, entries: &[JournalEntry]) {
        let open = in_flight_at_end(entries).filter(|_| !defect::is(Defect::InFlightLost));
        for mut entry in open {
            entry.1.page.0 += u64::from(defect::is(Defect::InFlightMisplaced));
            match self.table.add(self.media, entry.0, entry.1, None) {
                Ok((is_new, stored)) => {
                    self.summary.in_flight += u64::from(is_new);
                    self.stores.push(stored);
                }
                Err(InFlightTableFull) => self.overflowed.push(entry.0),
            }
        }
    }
}

/// Flushes the last records of a journal, and their data. Their writer may have died before the
/// fence; earlier records were fenced.
fn flush_records<'e, M: Media>(
    media: &M,
    geometry: &Geometry,
    number: u32,
    records: impl Iterator<Item = &'e JournalEntry>,
) -> Vec<UnfencedStores> {
    let journal = geometry.journal_at(number);
    let mut stores = vec![media.flush(journal, geometry.journal_bytes as usize)];
    for entry in records {
        let JournalEntry::Map(record) = entry else {
            continue;
        };
        let frames = record
            .changes
            .iter()
            .filter_map(|change| change.new.frame());
        // Applying a record with a frame outside the pool returns an error later.
        let frames = frames.filter(|&frame| geometry.frame_numbers().contains(frame));
        stores.extend(frames.map(|frame| media.flush(frame_at(frame), PAGE_BYTES)));
    }
    stores
}

/// Operations that may be incomplete on other legs, as far back as the last operation's `open`
/// count reaches.
fn in_flight_at_end(entries: &[JournalEntry]) -> impl Iterator<Item = (ObjectId, InFlightOp)> {
    let mut oldest = None;
    let mut open = Vec::new();
    for entry in entries.iter().rev() {
        let JournalEntry::Map(record) = entry else {
            continue;
        };
        let Some(found) = in_flight_of(record) else {
            continue;
        };
        let oldest = *oldest.get_or_insert(record.op - u64::from(record.open).min(record.op));
        if record.op < oldest {
            break;
        }
        open.push((record.object, found));
    }
    open.into_iter()
}

/// The state of the data that a record names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DataState {
    Intact,
    /// One bit of a page differs. The medium damaged it since, or a crash lost a part of the page
    /// and its frame held an older version. A torn page may look like that, too.
    Flipped,
    /// As `Flipped`, of one page. The second sum proves the right content in both cases: this bit
    /// must be flipped back.
    Correctable(usize),
    /// A page cannot be read, so it is unknown whether it was written.
    Unreadable,
    /// The data was not written, or not as a whole.
    Torn,
}

impl DataState {
    /// Whether the record was never committed, unless its slot shows that it was. Without a second
    /// sum a wrong bit has two explanations. If only the last record of a journal is in doubt, the
    /// likelier one counts: that it was not committed. On a file that would hide a flip in data
    /// that was synced since the checkpoint. So there the record counts, with a damaged page.
    pub(super) fn is_torn(self, ordered: bool) -> bool {
        match self {
            // An unreadable page that was acknowledged must not be replaced by an older one.
            DataState::Intact | DataState::Correctable(_) | DataState::Unreadable => false,
            DataState::Flipped => ordered && !defect::is(Defect::NearlyWholeKept),
            DataState::Torn => true,
        }
    }
}

impl<'m, M: Media> Replay<'m, M> {
    /// Records the frames that these records change in place.
    fn record_patched_frames<'e>(&mut self, entries: impl Iterator<Item = &'e JournalEntry>) {
        for entry in entries {
            if let JournalEntry::Map(record) = entry
                && let (true, Some(frame)) = (record.is_patch(), record.changes[0].new.frame())
            {
                let last = self.patched_frames.entry(frame.0).or_insert(record.seq);
                *last = record.seq.max(*last);
            }
        }
    }

    /// Whether patches changed the frame's bytes, so that they no longer match this record. For a
    /// newly allocated frame only later patches count. The session that made such a patch had found
    /// this record's slot, so this record was committed. If the record keeps its frame, it wrote no
    /// bytes, and bytes of earlier patches may still be missing.
    fn is_patched(&self, record: &Record, change: &Change) -> bool {
        if defect::is(Defect::PatchedPageTorn) {
            return false;
        }
        let frame = change.new.frame();
        let last = frame.and_then(|frame| self.patched_frames.get(&frame.0));
        last.is_some_and(|&last| change.old.frame() == frame || last > record.seq)
    }

    fn data_state(&self, entry: &JournalEntry) -> DataState {
        let JournalEntry::Map(record) = entry else {
            return DataState::Intact;
        };
        if defect::is(Defect::SkippedCrc) {
            return DataState::Intact;
        }
        let changes = record.changes.iter();
        changes.fold(DataState::Intact, |so_far, change| {
            so_far.max(self.change_data_state(record, change))
        })
    }

    pub(super) fn change_data_state(&self, record: &Record, change: &Change) -> DataState {
        let Some(frame) = change.new.frame() else {
            return DataState::Intact;
        };
        if !self.geometry.frame_numbers().contains(frame) {
            return DataState::Torn;
        }
        // Pages that a record adopts were durable before.
        let has_no_data = record.level > 0 || record.is_patch() || record.is_adoption;
        if has_no_data || self.is_patched(record, change) {
            return DataState::Intact;
        }
        let mut page = [0; PAGE_BYTES];
        self.media.read(frame_at(frame), &mut page);
        let sum = crc32c(&page);
        let is_right = |page: &[u8]| word_sum(page) == change.sums.words;
        if sum == change.sums.crc {
            return match !record.has_second_sum || is_right(&page) {
                true => DataState::Intact,
                false => DataState::Torn,
            };
        }
        let is_unreadable = self.media.is_unreadable(frame_at(frame));
        if is_unreadable && !defect::is(Defect::UnreadableDropped) {
            return DataState::Unreadable;
        }
        let Some(bit) = flipped_bit(PAGE_BYTES, sum, change.sums.crc) else {
            return DataState::Torn;
        };
        if !record.has_second_sum || defect::is(Defect::NearlyWholeKept) {
            return DataState::Flipped;
        }
        page[bit / 8] ^= 1 << (bit % 8);
        match is_right(&page) {
            true => DataState::Correctable(bit),
            false => DataState::Torn,
        }
    }

    /// Last groups of journals with missing data, if other records found their slots swapped. Locks
    /// are released only after the fence, so such a group was committed and its page was damaged
    /// since. If the group were dropped, its frame would be freed without ever having been in use.
    fn superseded_groups(&self, scans: &[(Vec<JournalEntry>, u64)]) -> BTreeSet<Seq> {
        let last = scans.iter().filter_map(|(entries, _)| {
            let seq = entries.last()?.seq();
            let group: Vec<&JournalEntry> = entries.iter().filter(|it| it.seq() == seq).collect();
            Some((seq, group))
        });
        let torn = last.filter(|(_, group)| {
            group
                .iter()
                .any(|it| self.data_state(it) != DataState::Intact)
        });
        let superseded = torn.filter(|(_, group)| group.iter().any(|it| is_superseded(it, scans)));
        superseded.map(|(seq, _)| seq).collect()
    }

    /// Whether an incomplete group was committed, so that the medium has lost some of its records.
    fn is_partial_group_committed(
        &self,
        rest: &[JournalEntry],
        scans: &[(Vec<JournalEntry>, u64)],
        ordered: bool,
    ) -> bool {
        let is_its = |entry| self.is_swapped(entry) || ordered && is_superseded(entry, scans);
        rest.iter().any(is_its) && !defect::is(Defect::GroupHalfRecovered)
    }

    /// Whether a slot is the one that the record publishes. Slots are swapped only after the fence,
    /// so the record was committed, and a page that does not match its checksum was damaged since.
    /// If the record were dropped, its frame would be free and in use at once.
    fn is_swapped(&self, entry: &JournalEntry) -> bool {
        let JournalEntry::Map(record) = entry else {
            return true;
        };
        match self.locate(record) {
            Ok(SlotLocation::At(at)) => record.is_published_at(self.media, at),
            _ => false,
        }
    }
}

/// Whether some record replaced a slot that this one had published.
fn is_superseded(entry: &JournalEntry, scans: &[(Vec<JournalEntry>, u64)]) -> bool {
    let mut all = scans.iter().flat_map(|(entries, _)| entries);
    all.any(|other| supersedes(other, entry))
}

/// Whether a record replaced a slot that another had published.
fn supersedes(later: &JournalEntry, earlier: &JournalEntry) -> bool {
    let (JournalEntry::Map(later), JournalEntry::Map(earlier)) = (later, earlier) else {
        return false;
    };
    let slots = |record: &Record| {
        let page = record.page.0;
        page..page.saturating_add(record.changes.len() as u64)
    };
    let (new, old) = (slots(earlier), slots(later));
    let is_data = later.level == 0 && earlier.level == 0;
    if !is_data || later.object != earlier.object || later.seq <= earlier.seq {
        return false;
    }
    let mut shared = new.start.max(old.start)..new.end.min(old.end);
    shared.any(|slot| {
        let before = &earlier.changes[(slot - new.start) as usize];
        let after = &later.changes[(slot - old.start) as usize];
        before.new == after.old
    })
}
