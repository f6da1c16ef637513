//! The in-flight table: operations of dead or fenced sessions that may be missing on another leg,
//! until the legs were made equal.
//!
//! ```text
//!  0  crc     4   CRC32C of bytes 4..32
//!  4  object  4
//!  8  page    8
//! 16  op      8
//! 24  epoch   4
//! 28  count   4   pages; 0 in a free entry
//! ```
//! Only the owner of the pool writes the table, word by word. If the pool dies during a write or a
//! removal, the entry lacks its last or its first word and counts as free. Then the session's
//! journal still has the operation, or nothing needs it any more. Any other entry with a wrong
//! checksum was damaged by the medium.

use crate::format::geometry::{IN_FLIGHT_BYTES, Region};
use crate::format::object::HEIGHT;
use crate::format::record::{PAGES_MAX, Record};
use crate::format::table::reach;
use pagemesh_base::bytes::{get_u32, get_u64, put};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, ObjectId, PageNo};
use pagemesh_base::slice::InFlightOp;
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::HashMap;
use std::ops::Range;

const BYTES: usize = IN_FLIGHT_BYTES as usize;

/// The table, with a copy in memory.
pub(crate) struct InFlightTable {
    region: Region,
    entries: HashMap<ObjectId, Vec<TableEntry>>,
    /// Objects with a leg that is behind, and the epoch of its loss. Their operations of earlier
    /// epochs stay in the table, even once they are complete.
    retained_below: HashMap<ObjectId, Epoch>,
    free: Vec<u32>,
    damaged: Vec<DamagedEntry>,
    /// Entries stored since the table was loaded.
    stored: u64,
}

/// An entry of the table.
struct TableEntry {
    /// Its number in the table.
    index: u32,
    operation: InFlightOp,
    /// The journal position of the operation, while the journal of a living session holds it as
    /// well.
    journaled: Option<JournaledOp>,
}

impl TableEntry {
    /// Whether no leg can lack the operation any more. A leg that is behind since `lost_since` may
    /// lack an earlier one that is complete by now: it lost its unflushed operations with its power.
    fn is_over(&self, lost_since: Epoch, is_complete: &impl Fn(JournaledOp) -> bool) -> bool {
        self.operation.epoch >= lost_since && self.journaled.is_some_and(is_complete)
    }
}

/// An operation of a living session that a barrier listed. It is complete once the session reports
/// so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournaledOp {
    pub session: u32,
    /// The journal line where its record begins.
    pub position: u64,
}

/// An entry that the medium damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DamagedEntry {
    index: u32,
    /// The byte where it lies.
    pub(crate) at: usize,
    /// The entry before the damage, if one flipped bit explains it.
    corrected: Option<(ObjectId, InFlightOp)>,
}

/// No entry is free.
pub(crate) struct InFlightTableFull;

impl InFlightTable {
    /// Reads the table. The time is proportional to its fixed size.
    pub(crate) fn load<M: Media>(media: &M, region: Region) -> InFlightTable {
        let mut bytes = vec![0; region.len as usize];
        media.read(region.start as usize, &mut bytes);
        let mut table = InFlightTable {
            region,
            entries: HashMap::new(),
            retained_below: HashMap::new(),
            free: Vec::new(),
            damaged: Vec::new(),
            stored: 0,
        };
        for (index, entry) in (0u32..).zip(bytes.as_chunks::<BYTES>().0) {
            match decode(entry) {
                DecodedEntry::Entry(object, found) => table.insert(object, index, found, None),
                DecodedEntry::Free => table.free.push(index),
                DecodedEntry::Damaged => table.damaged.push(DamagedEntry {
                    index,
                    at: region.start as usize + index as usize * BYTES,
                    corrected: correct(entry),
                }),
            }
        }
        table.free.reverse();
        table
    }

    /// Entries that the medium damaged.
    pub(crate) fn damaged(&self) -> &[DamagedEntry] {
        &self.damaged
    }

    /// Rewrites damaged entries. False if one of them is lost: its object is then unknown.
    pub(crate) fn repair<M: Media>(&mut self, media: &M, stores: &mut Vec<UnfencedStores>) -> bool {
        let mut is_whole = true;
        for damaged in std::mem::take(&mut self.damaged) {
            let index = damaged.index;
            if let Some((object, entry)) = damaged.corrected {
                self.insert(object, index, entry, None);
                stores.push(self.store(media, index, &encode(object, &entry)));
            } else {
                is_whole = false;
                stores.push(self.store(media, index, &[0; BYTES]));
                self.free.push(index);
            }
        }
        is_whole
    }

    fn insert(
        &mut self,
        object: ObjectId,
        index: u32,
        what: InFlightOp,
        noted: Option<JournaledOp>,
    ) {
        let entry = TableEntry {
            index,
            operation: what,
            journaled: noted,
        };
        self.entries.entry(object).or_default().push(entry);
    }

    /// Retains operations of an object of epochs below this one, even if they are complete; 0: none.
    pub(crate) fn retain_below(&mut self, object: ObjectId, lost_since: Epoch) {
        match lost_since {
            Epoch(0) => self.retained_below.remove(&object),
            _ => self.retained_below.insert(object, lost_since),
        };
    }

    fn lost_since(&self, object: ObjectId) -> Epoch {
        let lost_since = self.retained_below.get(&object).copied();
        lost_since.unwrap_or(Epoch(0))
    }

    /// The entries of an object, without those that are over by now.
    pub(crate) fn of(
        &self,
        object: ObjectId,
        is_complete: impl Fn(JournaledOp) -> bool,
    ) -> impl Iterator<Item = InFlightOp> {
        let entries = self.entries.get(&object).into_iter().flatten();
        let lost_since = self.lost_since(object);
        let open = entries.filter(move |entry| !entry.is_over(lost_since, &is_complete));
        open.map(|entry| entry.operation)
    }

    /// Removes the operations that living sessions have completed since the barrier listed them,
    /// unless they are retained for a leg that is behind.
    pub(crate) fn remove_complete<M: Media>(
        &mut self,
        media: &M,
        is_complete: impl Fn(JournaledOp) -> bool,
    ) -> Option<UnfencedStores> {
        let mut gone = Vec::new();
        for (object, list) in &mut self.entries {
            let lost_since = self.retained_below.get(object).copied();
            let lost_since = lost_since.unwrap_or(Epoch(0));
            gone.extend(list.extract_if(.., |entry| entry.is_over(lost_since, &is_complete)));
        }
        self.erase(media, gone)
    }

    /// Detaches the entries of a session: from now on they stay, even if the session completes
    /// them.
    pub(crate) fn detach_session(&mut self, session: u32) {
        for entry in self.entries.values_mut().flatten() {
            entry.journaled = entry.journaled.filter(|noted| noted.session != session);
        }
    }

    fn erase<M: Media>(&mut self, media: &M, gone: Vec<TableEntry>) -> Option<UnfencedStores> {
        let mut stores = None;
        for TableEntry { index, .. } in gone {
            stores = Some(self.store(media, index, &[0; BYTES]).after(stores));
            self.free.push(index);
        }
        stores
    }

    /// Adds an entry unless the table has it. Returns whether it was added, and the stores to be
    /// fenced. An entry without a session stays until all entries of its object are removed.
    pub(crate) fn add<M: Media>(
        &mut self,
        media: &M,
        object: ObjectId,
        entry: InFlightOp,
        noted: Option<JournaledOp>,
    ) -> Result<(bool, UnfencedStores), InFlightTableFull> {
        let mut present = self.entries.get_mut(&object).into_iter().flatten();
        if let Some(present) = present.find(|present| present.operation == entry) {
            present.journaled = present.journaled.and(noted);
            // The writer of the present entry may have died before its fence.
            let at = self.region.start as usize + present.index as usize * BYTES;
            return Ok((false, media.flush(at, BYTES)));
        }
        let index = self.free.pop().ok_or(InFlightTableFull)?;
        self.insert(object, index, entry, noted);
        let stored = self.store(media, index, &encode(object, &entry));
        Ok((true, stored))
    }

    /// Removes the entries of an object.
    pub(crate) fn remove_object<M: Media>(
        &mut self,
        media: &M,
        object: ObjectId,
    ) -> Option<UnfencedStores> {
        let gone = self.entries.remove(&object)?;
        self.erase(media, gone)
    }

    /// The number of free entries.
    pub(crate) fn free(&self) -> u64 {
        self.free.len() as u64
    }

    /// Entries stored since the table was loaded. Each takes the write of a line.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }

    /// The number of all entries.
    pub(crate) fn count(&self) -> u32 {
        (self.region.len / IN_FLIGHT_BYTES) as u32
    }

    /// Rewrites entries that differ from memory. Returns their number, and the stores to be fenced.
    pub(crate) fn rewrite_damaged<M: Media>(
        &mut self,
        media: &M,
        part: Range<u32>,
    ) -> (u64, Option<UnfencedStores>) {
        let all = self.entries.iter();
        let all = all.flat_map(|(object, list)| list.iter().map(move |entry| (*object, entry)));
        let known: HashMap<u32, [u8; BYTES]> = all
            .filter(|(_, entry)| part.contains(&entry.index))
            .map(|(object, entry)| (entry.index, encode(object, &entry.operation)))
            .collect();
        let mut bytes = vec![0; part.len() * BYTES];
        let at = self.region.start as usize + part.start as usize * BYTES;
        media.read(at, &mut bytes);
        let (mut corrected, mut stores) = (0, None);
        for (index, found) in part.zip(bytes.as_chunks::<BYTES>().0) {
            let wanted = match known.get(&index) {
                Some(entry) if entry == found => continue,
                Some(entry) => entry,
                // The remains of an entry that a crash may have left.
                None if matches!(decode(found), DecodedEntry::Free) => continue,
                None => &[0; BYTES],
            };
            let stored = self.store(media, index, wanted);
            stores = Some(stored.after(stores));
            corrected += 1;
        }
        (corrected, stores)
    }

    fn store<M: Media>(&mut self, media: &M, index: u32, entry: &[u8; BYTES]) -> UnfencedStores {
        self.stored += 1;
        let at = self.region.start as usize + index as usize * BYTES;
        for (i, word) in entry.as_chunks::<8>().0.iter().enumerate() {
            media.store(at + i * 8, u64::from_le_bytes(*word));
        }
        media.flush(at, BYTES)
    }
}

/// The in-flight entry of a client's record. Records of the owner and records that link nodes have
/// none.
pub(crate) fn in_flight_of(record: &Record) -> Option<InFlightOp> {
    (record.level == 0 && record.op != 0).then_some(InFlightOp {
        page: record.page,
        count: record.changes.len() as u32,
        epoch: record.epoch,
        op: record.op,
    })
}

fn encode(object: ObjectId, entry: &InFlightOp) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    put(&mut bytes, 4, object.0.to_le_bytes());
    put(&mut bytes, 8, entry.page.0.to_le_bytes());
    put(&mut bytes, 16, entry.op.to_le_bytes());
    put(&mut bytes, 24, entry.epoch.0.to_le_bytes());
    put(&mut bytes, 28, entry.count.to_le_bytes());
    let crc = crc32c(&bytes[4..]);
    put(&mut bytes, 0, crc.to_le_bytes());
    bytes
}

enum DecodedEntry {
    Entry(ObjectId, InFlightOp),
    Free,
    Damaged,
}

fn decode(bytes: &[u8; BYTES]) -> DecodedEntry {
    let (first, last, count) = (get_u64(bytes, 0), get_u64(bytes, 24), get_u32(bytes, 28));
    if first == 0 || last == 0 {
        return DecodedEntry::Free;
    }
    let page = get_u64(bytes, 8);
    // No record has another count or position.
    let possible = (1..=PAGES_MAX as u32).contains(&count)
        && page.saturating_add(u64::from(count)) <= reach(HEIGHT);
    if !possible || crc32c(&bytes[4..]) != get_u32(bytes, 0) {
        return DecodedEntry::Damaged;
    }
    let entry = InFlightOp {
        page: PageNo(page),
        count,
        epoch: Epoch(get_u32(bytes, 24)),
        op: get_u64(bytes, 16),
    };
    DecodedEntry::Entry(ObjectId(get_u32(bytes, 4)), entry)
}

/// The entry before the damage, if one bit of it was flipped.
fn correct(bytes: &[u8; BYTES]) -> Option<(ObjectId, InFlightOp)> {
    (0..BYTES * 8).find_map(|bit| {
        let mut bytes = *bytes;
        bytes[bit / 8] ^= 1 << (bit % 8);
        match decode(&bytes) {
            DecodedEntry::Entry(object, found) => Some((object, found)),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_pmem::Recorder;

    #[test]
    fn unfenced_entry_is_durable_once_added_again() {
        let media = Recorder::new(4096);
        let region = Region {
            start: 0,
            len: IN_FLIGHT_BYTES * 4,
        };
        let (object, entry) = (
            ObjectId(3),
            InFlightOp {
                page: PageNo(7),
                count: 1,
                epoch: Epoch(2),
                op: 9,
            },
        );
        // The writer dies before the flush; the machine continues.
        for (at, word) in encode(object, &entry).as_chunks::<8>().0.iter().enumerate() {
            media.store(at * 8, u64::from_le_bytes(*word));
        }
        let mut table = InFlightTable::load(&media, region);
        let Ok((is_new, stored)) = table.add(&media, object, entry, None) else {
            panic!("entries are free");
        };
        assert!(!is_new);
        let _fenced = media.fence(stored);
        let left = Recorder::from_image(media.crash_point().image(0));
        let found = &InFlightTable::load(&left, region).entries[&object];
        assert_eq!(
            found.iter().map(|it| it.operation).collect::<Vec<_>>(),
            [entry]
        );
    }
}
