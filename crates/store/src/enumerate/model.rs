//! The oracle: what a pool must hold after a crash.
//!
//! Every page content is told from any other by its checksum, so what was
//! found says by itself which records it came from: of each record, whether it
//! must be there and whether it must not. Legal is what contradicts neither,
//! nor the order within a group.

use pagemesh_base::checksum::crc32c;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::InFlight;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) type Bytes = [u8; PAGE_BYTES];

/// A page: its checksum and bytes.
pub(super) type Content = (u32, Arc<Bytes>);

pub(super) fn content(bytes: Bytes) -> Content {
    (crc32c(&bytes), Arc::new(bytes))
}

pub(super) fn sum_of_zeroes() -> u32 {
    crc32c(&[0; PAGE_BYTES])
}

/// The first line of an object's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) pages: u64,
    pub(super) epoch: u32,
    pub(super) round: u8,
}

/// An object; pages that are not there are holes.
#[derive(Clone, Debug)]
pub(super) struct Thing<P> {
    pub(super) entry: Entry,
    pub(super) pages: BTreeMap<u64, P>,
}

/// What a pool holds.
pub(super) type Held = BTreeMap<SliceId, Thing<Content>>;

/// What one record does.
#[derive(Clone, Debug)]
pub(super) enum Effect {
    /// Pages change, all of them; none is a hole.
    Pages(SliceId, Vec<(u64, Option<Content>)>),
    /// An object's entry changes; none deletes it.
    Put(SliceId, Option<Entry>),
}

pub(super) fn apply(held: &mut Held, effect: &Effect) {
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
        Effect::Put(slice, None) => drop(held.remove(slice)),
        Effect::Put(slice, Some(entry)) => {
            let fresh = || Thing {
                entry: *entry,
                pages: BTreeMap::new(),
            };
            held.entry(*slice).or_insert_with(fresh).entry = *entry;
        }
    }
}

/// A record that may be there or not.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) effect: Effect,
    /// The operation, as other legs know it; 0 for the owner's.
    pub(super) op: u64,
    /// Of the object when it was admitted.
    pub(super) epoch: u32,
    /// Whether another leg may lack it.
    pub(super) is_open: bool,
    /// Steps of a group are there as far as some point, in order.
    pub(super) group: usize,
}

/// Records before this group persist in any selection (`file-sync`).
pub(super) const UNORDERED: usize = 0;

/// What must be there, and what may.
#[derive(Clone, Debug, Default)]
pub(super) struct Oracle {
    pub(super) certain: Held,
    pub(super) maybe: Vec<Step>,
    /// Operations that must be listed as in flight.
    pub(super) open: BTreeMap<u64, Open>,
}

/// What must be listed of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) slice: SliceId,
    pub(super) epoch: u32,
    pub(super) pages: BTreeSet<u64>,
}

/// What a recovered pool held.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) things: BTreeMap<SliceId, Thing<u32>>,
    /// Operations in flight; none: too many to list.
    pub(super) listed: BTreeMap<SliceId, Option<Vec<InFlight>>>,
}

/// Which check failed, and how.
#[derive(Clone, Debug)]
pub(super) struct Wrong {
    pub(super) check: &'static str,
    pub(super) detail: String,
}

pub(super) fn wrong<T>(check: &'static str, detail: impl Into<String>) -> Result<T, Wrong> {
    let detail = detail.into();
    Err(Wrong { check, detail })
}

impl Oracle {
    /// Takes every record for certain.
    pub(super) fn settle(&mut self) {
        for step in std::mem::take(&mut self.maybe) {
            apply(&mut self.certain, &step.effect);
        }
    }

    /// What the pool shows while nothing crashes.
    pub(super) fn now(&self) -> Held {
        let mut held = self.certain.clone();
        for step in &self.maybe {
            apply(&mut held, &step.effect);
        }
        held
    }

    /// Compares; the steps that must be there.
    pub(super) fn judge(&self, found: &Found) -> Result<BTreeSet<usize>, Wrong> {
        let puts: Vec<usize> = (0..self.maybe.len())
            .filter(|&i| matches!(self.maybe[i].effect, Effect::Put(..)))
            .collect();
        let mut first = None;
        for count in 0..=puts.len() {
            match self.judge_with(found, &puts[..count], &puts[count..]) {
                Ok(present) => {
                    self.judge_listed(found, &present)?;
                    return Ok(present);
                }
                Err(wrong) => first = first.or(Some(wrong)),
            }
        }
        Err(first.expect("at least one try"))
    }

    fn judge_with(
        &self,
        found: &Found,
        with: &[usize],
        without: &[usize],
    ) -> Result<BTreeSet<usize>, Wrong> {
        let mut held = self.certain.clone();
        for &index in with {
            apply(&mut held, &self.maybe[index].effect);
        }
        let objects = |found: Vec<(SliceId, Entry)>| found;
        let wanted = objects(held.iter().map(|(&s, t)| (s, t.entry)).collect());
        let present = objects(found.things.iter().map(|(&s, t)| (s, t.entry)).collect());
        if wanted != present {
            return wrong("objects", format!("{present:?} instead of {wanted:?}"));
        }
        let mut is_in: BTreeSet<usize> = with.iter().copied().collect();
        let mut is_out: BTreeSet<usize> = without.iter().copied().collect();
        for (slice, thing) in &held {
            self.judge_pages(*slice, thing, &found.things[slice], &mut is_in, &mut is_out)?;
        }
        if let Some(&both) = is_in.intersection(&is_out).next() {
            let step = &self.maybe[both];
            return wrong("atomic records", format!("a part of {}", describe(step)));
        }
        for &index in &is_in {
            let group = self.maybe[index].group;
            let later = |&&out: &&usize| out < index && self.maybe[out].group == group;
            if group != UNORDERED
                && let Some(&out) = is_out.iter().find(later)
            {
                let (step, missing) = (&self.maybe[index], &self.maybe[out]);
                let detail = format!("{} without {}", describe(step), describe(missing));
                return wrong("order", detail);
            }
        }
        Ok(is_in)
    }

    fn judge_pages(
        &self,
        slice: SliceId,
        thing: &Thing<Content>,
        found: &Thing<u32>,
        is_in: &mut BTreeSet<usize>,
        is_out: &mut BTreeSet<usize>,
    ) -> Result<(), Wrong> {
        let zeroes = sum_of_zeroes();
        let mut writers: BTreeMap<u64, Vec<(usize, u32)>> = BTreeMap::new();
        for (index, step) in self.maybe.iter().enumerate() {
            if let Effect::Pages(of, pages) = &step.effect
                && *of == slice
            {
                for (page, content) in pages {
                    let sum = content.as_ref().map_or(zeroes, |content| content.0);
                    writers.entry(*page).or_default().push((index, sum));
                }
            }
        }
        let mut pages: BTreeSet<u64> = thing.pages.keys().copied().collect();
        pages.extend(found.pages.keys());
        pages.extend(writers.keys());
        for page in pages {
            let base = thing.pages.get(&page).map_or(zeroes, |content| content.0);
            let sum = found.pages.get(&page).copied().unwrap_or(zeroes);
            let of_page = writers.get(&page).map_or(&[][..], Vec::as_slice);
            let sources = of_page.iter().filter(|(_, written)| *written == sum);
            match (sources.clone().count(), base == sum) {
                (0, false) if of_page.iter().any(|_| true) => {
                    return wrong("contents", format!("page {page} of {slice} is of no write"));
                }
                (0, false) => {
                    let detail =
                        format!("page {page} of {slice} was acknowledged and is not there");
                    return wrong("acknowledged writes", detail);
                }
                (0, true) => is_out.extend(of_page.iter().map(|(index, _)| *index)),
                (1, false) => {
                    let source = sources.clone().next().expect("one").0;
                    is_in.insert(source);
                    let later = of_page.iter().map(|(index, _)| *index);
                    is_out.extend(later.filter(|&index| index > source));
                }
                // The same bytes from several: nothing follows.
                _ => {}
            }
        }
        Ok(())
    }

    fn judge_listed(&self, found: &Found, present: &BTreeSet<usize>) -> Result<(), Wrong> {
        let mut open = self.open.clone();
        let steps = present.iter().map(|&index| &self.maybe[index]);
        steps.for_each(|step| note_open(&mut open, step));
        for (op, open) in open {
            let Some(Some(listed)) = found.listed.get(&open.slice) else {
                continue;
            };
            let own = listed.iter().filter(|entry| entry.op == op);
            let is_right = |entry: &&InFlight| entry.epoch.0 == open.epoch;
            let listed: BTreeSet<u64> = own
                .filter(is_right)
                .flat_map(|entry| entry.page.0..entry.page.0 + u64::from(entry.count))
                .collect();
            if !open.pages.is_subset(&listed) {
                let detail = format!("operation {op}, {open:?}, is listed with pages {listed:?}");
                return wrong("operations in flight", detail);
            }
        }
        Ok(())
    }
}

/// Takes in what must be listed of a step that happened.
pub(super) fn note_open(open: &mut BTreeMap<u64, Open>, step: &Step) {
    if let (Effect::Pages(slice, pages), true) = (&step.effect, step.is_open) {
        let fresh = || Open {
            slice: *slice,
            epoch: step.epoch,
            pages: BTreeSet::new(),
        };
        let open = open.entry(step.op).or_insert_with(fresh);
        open.pages.extend(pages.iter().map(|(page, _)| *page));
    }
}

fn describe(step: &Step) -> String {
    match &step.effect {
        Effect::Pages(slice, pages) => {
            let pages: Vec<u64> = pages.iter().map(|(page, _)| *page).collect();
            format!("operation {} on pages {pages:?} of {slice}", step.op)
        }
        Effect::Put(slice, entry) => format!("entry {entry:?} of {slice}"),
    }
}
