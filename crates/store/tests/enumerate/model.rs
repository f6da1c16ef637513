//! The oracle: the contents that a pool must hold after a crash.
//!
//! Page contents are unique by checksum and birth, so the recovered contents show for each record whether it
//! must be present and whether it must be absent. Contents are legal if they contradict neither,
//! nor the order within a group.

use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::InFlightOp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_store::frame_word::FrameWord;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) type PageBytes = [u8; PAGE_BYTES];

/// The identity of a page: the word of its frame, with checksum and birth. 0 for a hole.
pub(super) type PageWord = u64;
/// A page: its word and bytes.
pub(super) type Content = (PageWord, Arc<PageBytes>);
/// The word of a hole.
pub(super) const HOLE: PageWord = 0;

pub(super) fn content(bytes: PageBytes, birth: u32) -> Content {
    let word = FrameWord::new(crc32c(&bytes), Epoch(birth));
    (word.bits(), Arc::new(bytes))
}

/// The first line of an object's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ObjectEntry {
    pub(super) pages: u64,
    pub(super) epoch: u32,
}

/// An object; absent pages are holes.
#[derive(Clone, Debug)]
pub(super) struct ObjectContents<P> {
    pub(super) entry: ObjectEntry,
    pub(super) pages: BTreeMap<u64, P>,
}

/// The contents of a pool.
pub(super) type PoolContents = BTreeMap<SliceId, ObjectContents<Content>>;

/// The effect of one record.
#[derive(Clone, Debug)]
pub(super) enum Effect {
    /// All of these pages change; none is a hole.
    Pages(SliceId, Vec<(u64, Option<Content>)>),
    /// A clone with these contents appears.
    Clone(SliceId, ObjectContents<Content>),
    /// An object's entry changes; none deletes the object.
    Put(SliceId, Option<ObjectEntry>),
}

pub(super) fn apply(held: &mut PoolContents, effect: &Effect) {
    match effect {
        Effect::Pages(slice, pages) => {
            let Some(thing) = held.get_mut(slice) else {
                return;
            };
            for (page, content) in pages {
                match content {
                    Some(content) => thing.pages.insert(*page, content.clone()),
                    None => thing.pages.remove(page),
                };
            }
        }
        Effect::Clone(slice, contents) => drop(held.insert(*slice, contents.clone())),
        Effect::Put(slice, None) => drop(held.remove(slice)),
        Effect::Put(slice, Some(entry)) => {
            let fresh = || ObjectContents {
                entry: *entry,
                pages: BTreeMap::new(),
            };
            held.entry(*slice).or_insert_with(fresh).entry = *entry;
        }
    }
}

/// A record that may be present or not.
#[derive(Clone, Debug)]
pub(super) struct PossibleRecord {
    pub(super) effect: Effect,
    /// The operation number as other legs know it; 0 for the owner's records.
    pub(super) op: u64,
    /// Epoch of the object when the record was admitted.
    pub(super) epoch: u32,
    /// Whether another leg may lack the record.
    pub(super) is_open: bool,
    /// Records of one group persist in order: a prefix of the group is present.
    pub(super) group: usize,
}

/// Records of this group persist in any selection (`file-sync`).
pub(super) const UNORDERED: usize = 0;

/// The contents that must be present, and the records that may be.
#[derive(Clone, Debug, Default)]
pub(super) struct Oracle {
    pub(super) certain: PoolContents,
    pub(super) possible: Vec<PossibleRecord>,
    /// Operations that must be listed as in flight.
    pub(super) open: BTreeMap<u64, ExpectedInFlight>,
    /// The checksums of the pages that each snapshot sees.
    pub(super) snapshots: BTreeMap<SnapshotKey, BTreeMap<u64, u32>>,
    /// The pages that snapshots see, as far as they were created before the last crash.
    pub(super) snapshot_contents: BTreeMap<SnapshotKey, Arc<BTreeMap<u64, Content>>>,
    /// A snapshot that is being created or dropped: it may be there or not.
    pub(super) uncertain_snapshot: Option<SnapshotKey>,
}

/// A slice, and the epoch of one of its snapshots.
pub(super) type SnapshotKey = (SliceId, u32);

/// The expected entry of an operation in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpectedInFlight {
    pub(super) slice: SliceId,
    pub(super) epoch: u32,
    pub(super) pages: BTreeSet<u64>,
}

/// The contents of a recovered pool.
#[derive(Clone, Debug, Default)]
pub(super) struct RecoveredContents {
    pub(super) objects: BTreeMap<SliceId, ObjectContents<PageWord>>,
    /// Operations in flight; none: too many to list.
    pub(super) in_flight: BTreeMap<SliceId, Option<Vec<InFlightOp>>>,
    /// The checksums of the pages that each snapshot sees.
    pub(super) snapshots: BTreeMap<SnapshotKey, BTreeMap<u64, u32>>,
}

/// The check that failed, and its detail.
#[derive(Clone, Debug)]
pub(super) struct CheckFailure {
    pub(super) check: &'static str,
    pub(super) detail: String,
}

pub(super) fn fail<T>(check: &'static str, detail: impl Into<String>) -> Result<T, CheckFailure> {
    let detail = detail.into();
    Err(CheckFailure { check, detail })
}

impl Oracle {
    /// Makes every possible record certain.
    pub(super) fn make_certain(&mut self) {
        for step in std::mem::take(&mut self.possible) {
            apply(&mut self.certain, &step.effect);
        }
    }

    /// The contents that the running pool shows.
    pub(super) fn current(&self) -> PoolContents {
        let mut held = self.certain.clone();
        for step in &self.possible {
            apply(&mut held, &step.effect);
        }
        held
    }

    /// Compares with the recovered contents; returns the steps that must be present.
    pub(super) fn check(&self, found: &RecoveredContents) -> Result<BTreeSet<usize>, CheckFailure> {
        let puts: Vec<usize> = (0..self.possible.len())
            .filter(|&i| matches!(self.possible[i].effect, Effect::Put(..) | Effect::Clone(..)))
            .collect();
        let mut first = None;
        for count in 0..=puts.len() {
            match self.check_with_entries(found, &puts[..count], &puts[count..]) {
                Ok(present) => {
                    self.check_snapshots(found)?;
                    self.check_in_flight(found, &present)?;
                    return Ok(present);
                }
                Err(wrong) => first = first.or(Some(wrong)),
            }
        }
        Err(first.expect("at least one try"))
    }

    fn check_with_entries(
        &self,
        found: &RecoveredContents,
        with: &[usize],
        without: &[usize],
    ) -> Result<BTreeSet<usize>, CheckFailure> {
        let mut held = self.certain.clone();
        for &index in with {
            apply(&mut held, &self.possible[index].effect);
        }
        let objects = |found: Vec<(SliceId, ObjectEntry)>| found;
        let wanted = objects(held.iter().map(|(&s, t)| (s, t.entry)).collect());
        let present = objects(found.objects.iter().map(|(&s, t)| (s, t.entry)).collect());
        if wanted != present {
            return fail("objects", format!("{present:?} instead of {wanted:?}"));
        }
        let mut is_in: BTreeSet<usize> = with.iter().copied().collect();
        let mut is_out: BTreeSet<usize> = without.iter().copied().collect();
        for (slice, thing) in &held {
            self.check_pages(
                *slice,
                thing,
                &found.objects[slice],
                &mut is_in,
                &mut is_out,
            )?;
        }
        if let Some(&both) = is_in.intersection(&is_out).next() {
            let step = &self.possible[both];
            return fail("atomic records", format!("a part of {}", describe(step)));
        }
        for &index in &is_in {
            let group = self.possible[index].group;
            let later = |&&out: &&usize| out < index && self.possible[out].group == group;
            if group != UNORDERED
                && let Some(&out) = is_out.iter().find(later)
            {
                let (step, missing) = (&self.possible[index], &self.possible[out]);
                let detail = format!("{} without {}", describe(step), describe(missing));
                return fail("order", detail);
            }
        }
        Ok(is_in)
    }

    fn check_pages(
        &self,
        slice: SliceId,
        thing: &ObjectContents<Content>,
        found: &ObjectContents<PageWord>,
        is_in: &mut BTreeSet<usize>,
        is_out: &mut BTreeSet<usize>,
    ) -> Result<(), CheckFailure> {
        let mut writers: BTreeMap<u64, Vec<(usize, PageWord)>> = BTreeMap::new();
        for (index, step) in self.possible.iter().enumerate() {
            if let Effect::Pages(of, pages) = &step.effect
                && *of == slice
            {
                for (page, content) in pages {
                    let sum = content.as_ref().map_or(HOLE, |content| content.0);
                    writers.entry(*page).or_default().push((index, sum));
                }
            }
        }
        let mut pages: BTreeSet<u64> = thing.pages.keys().copied().collect();
        pages.extend(found.pages.keys());
        pages.extend(writers.keys());
        for page in pages {
            let base = thing.pages.get(&page).map_or(HOLE, |content| content.0);
            let sum = found.pages.get(&page).copied().unwrap_or(HOLE);
            let of_page = writers.get(&page).map_or(&[][..], Vec::as_slice);
            let sources = of_page.iter().filter(|(_, written)| *written == sum);
            match (sources.clone().count(), base == sum) {
                (0, false) if of_page.iter().any(|_| true) => {
                    return fail("contents", format!("page {page} of {slice} is of no write"));
                }
                (0, false) => {
                    let detail =
                        format!("page {page} of {slice} was acknowledged and is not there");
                    return fail("acknowledged writes", detail);
                }
                (0, true) => is_out.extend(of_page.iter().map(|(index, _)| *index)),
                (1, false) => {
                    let source = sources.clone().next().expect("one").0;
                    is_in.insert(source);
                    let later = of_page.iter().map(|(index, _)| *index);
                    is_out.extend(later.filter(|&index| index > source));
                }
                // Several records have the same bytes: no conclusion.
                _ => {}
            }
        }
        Ok(())
    }

    fn check_snapshots(&self, found: &RecoveredContents) -> Result<(), CheckFailure> {
        let is_there = |key: &SnapshotKey| found.objects.contains_key(&key.0);
        for (key, expected) in self.snapshots.iter().filter(|(key, _)| is_there(key)) {
            match found.snapshots.get(key) {
                Some(pages) if pages == expected => {}
                None if self.uncertain_snapshot == Some(*key) => {}
                Some(pages) => {
                    let pages_of = |page: &u64| (pages.get(page), expected.get(page));
                    let differs = |page: &&u64| pages.get(page) != expected.get(page);
                    let of_both = pages.keys().chain(expected.keys());
                    let pages: BTreeSet<&u64> = of_both.filter(differs).collect();
                    let sums = pages.iter().map(|page| (page, pages_of(page)));
                    let sums: Vec<_> = sums.collect();
                    return fail(
                        "snapshots",
                        format!("{key:?}: page, found, expected {sums:x?}"),
                    );
                }
                None => return fail("snapshots", format!("{key:?} is lost")),
            }
        }
        let is_known = |key: &&SnapshotKey| {
            self.snapshots.contains_key(key) || self.uncertain_snapshot == Some(**key)
        };
        match found.snapshots.keys().find(|key| !is_known(key)) {
            Some(key) => fail("snapshots", format!("{key:?} was dropped, and is there")),
            None => Ok(()),
        }
    }

    fn check_in_flight(
        &self,
        found: &RecoveredContents,
        present: &BTreeSet<usize>,
    ) -> Result<(), CheckFailure> {
        let mut open = self.open.clone();
        let steps = present.iter().map(|&index| &self.possible[index]);
        steps.for_each(|step| record_open(&mut open, step));
        for (op, open) in open {
            let Some(Some(listed)) = found.in_flight.get(&open.slice) else {
                continue;
            };
            let own = listed.iter().filter(|entry| entry.op == op);
            let is_right = |entry: &&InFlightOp| entry.epoch.0 == open.epoch;
            let listed: BTreeSet<u64> = own
                .filter(is_right)
                .flat_map(|entry| entry.page.0..entry.page.0 + u64::from(entry.count))
                .collect();
            if !open.pages.is_subset(&listed) {
                let detail = format!("operation {op}, {open:?}, is listed with pages {listed:?}");
                return fail("operations in flight", detail);
            }
        }
        Ok(())
    }
}

/// Adds the pages of an executed step to the operations that must be listed.
pub(super) fn record_open(open: &mut BTreeMap<u64, ExpectedInFlight>, step: &PossibleRecord) {
    if let (Effect::Pages(slice, pages), true) = (&step.effect, step.is_open) {
        let fresh = || ExpectedInFlight {
            slice: *slice,
            epoch: step.epoch,
            pages: BTreeSet::new(),
        };
        let open = open.entry(step.op).or_insert_with(fresh);
        open.pages.extend(pages.iter().map(|(page, _)| *page));
    }
}

fn describe(step: &PossibleRecord) -> String {
    match &step.effect {
        Effect::Pages(slice, pages) => {
            let pages: Vec<u64> = pages.iter().map(|(page, _)| *page).collect();
            format!("operation {} on pages {pages:?} of {slice}", step.op)
        }
        Effect::Clone(slice, contents) => format!("clone {slice} {:?}", contents.entry),
        Effect::Put(slice, entry) => format!("entry {entry:?} of {slice}"),
    }
}
