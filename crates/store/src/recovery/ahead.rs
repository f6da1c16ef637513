//! Loads of the pages that recovery is about to read, many at a time. On a disk each would be waited for otherwise.
//!
//! Nothing here changes the result: a page that was not loaded is loaded by its read.

use crate::format::geometry::{Geometry, frame_at};
use crate::format::object::{HEIGHT, ROOT_AT};
use crate::format::record::{JournalEntry, Record};
use crate::format::table::{PageTable, SlotLocation};
use pagemesh_base::ids::Seq;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Pages that are loaded together, at most. The smallest cache of a pool on a disk has 409 places for pages that were not
/// read yet, and evicts them first.
pub(crate) const PAGES_AHEAD: usize = 256;

/// The next entries of a list that is read in order, group by group.
pub(super) struct EntriesAhead<'e> {
    rest: &'e [JournalEntry],
    /// The first ones of the rest that were returned.
    returned: usize,
}

impl<'e> EntriesAhead<'e> {
    pub(super) fn new(entries: &'e [JournalEntry]) -> EntriesAhead<'e> {
        EntriesAhead {
            rest: entries,
            returned: 0,
        }
    }

    /// The entries to load before the next group is read.
    pub(super) fn before(&mut self, group: &[JournalEntry]) -> Option<&'e [JournalEntry]> {
        let mut next = None;
        if self.returned < group.len() {
            let count = first_entries(self.rest).max(group.len());
            next = Some(&self.rest[..count]);
            self.returned = count;
        }
        self.rest = &self.rest[group.len()..];
        self.returned -= group.len();
        next
    }
}

/// The number of the first entries that change at most [`PAGES_AHEAD`] pages, or 1.
pub(super) fn first_entries(entries: &[JournalEntry]) -> usize {
    let mut pages = 0;
    let fitting = entries.iter().take_while(|entry| {
        pages += match entry {
            JournalEntry::Map(record) => record.changes.len(),
            JournalEntry::Object(_) => 1,
        };
        pages <= PAGES_AHEAD
    });
    fitting.count().max(1).min(entries.len())
}

fn records<'e>(
    entries: &'e [JournalEntry],
    geometry: &Geometry,
) -> impl Iterator<Item = &'e Record> {
    let objects = geometry.object_count();
    entries.iter().filter_map(move |entry| match entry {
        JournalEntry::Map(record) if record.object.0 < objects => Some(record),
        _ => None,
    })
}

/// Loads the data that records from a seq on name.
pub(super) fn load_data<M: Media>(
    media: &M,
    geometry: &Geometry,
    entries: &[JournalEntry],
    from: Seq,
) {
    if !media.is_on_disk(0) {
        return;
    }
    let numbers = geometry.frame_numbers();
    let records = records(entries, geometry);
    let data = records.filter(|record| record.level == 0 && record.seq >= from);
    let frames = data.flat_map(|record| record.changes.iter().filter_map(|it| it.new.frame()));
    let frames = frames.filter(|&frame| numbers.contains(frame));
    let mut pages: Vec<usize> = frames.map(frame_at).collect();
    pages.sort_unstable();
    pages.dedup();
    // Only a group may have more.
    pages.truncate(PAGES_AHEAD);
    media.load_ahead(&pages);
}

/// Loads the nodes of page tables with the slots that records change.
pub(super) fn load_nodes<M: Media>(media: &M, geometry: &Geometry, entries: &[JournalEntry]) {
    if !media.is_on_disk(0) {
        return;
    }
    let mut left = PAGES_AHEAD;
    for level in (0..HEIGHT).rev() {
        let records = records(entries, geometry).filter(|record| record.level <= level);
        let locations = records.filter_map(|record| {
            let root_at = geometry.object_at(record.object) + ROOT_AT;
            let table = PageTable::new(media, root_at, HEIGHT, geometry.frame_numbers());
            match table.locate(level, record.page) {
                Ok(SlotLocation::At(at)) => Some(at / PAGE_BYTES * PAGE_BYTES),
                _ => None,
            }
        });
        let mut nodes: Vec<usize> = locations.collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.truncate(left);
        left -= nodes.len();
        media.load_ahead(&nodes);
    }
}
