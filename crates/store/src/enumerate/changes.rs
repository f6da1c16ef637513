//! Changes through a session: the records they should leave, and what is known
//! of them when they end.

use super::medium::{Death, Medium};
use super::model::{
    Bytes, Content, Effect, Found, Open, Step, Thing, UNORDERED, Wrong, apply, content, note_open,
    wrong,
};
use super::owner;
use super::recover::{self, Kind};
use super::world::{End, World};
use crate::control;
use crate::session::{Failure, Member, clear, write};
use crate::transaction::transact;
use crate::view::StoreError;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Part, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const NODE_PAGES: u64 = 512;

impl World<'_> {
    /// Whether a dead session keeps these pages locked.
    fn is_locked(&self, slice: SliceId, pages: Range<u64>) -> bool {
        let handle = self.handle(slice);
        let pool = self.pool.borrow();
        let control = pool.view().control();
        let of_pages = (pages.start..pages.end)
            .step_by(16)
            .chain([pages.end - 1])
            .any(|page| !control.is_free(&control::Range::of(handle.object, PageNo(page), 1)));
        let of_nodes = |page: u64| {
            (1..=4u8).any(|level| {
                let range = control::Range::of_node(handle.object, level, PageNo(page));
                !control.is_free(&range)
            })
        };
        of_pages || of_nodes(pages.start) || of_nodes(pages.end - 1)
    }

    fn byte_pages(offset: u64, len: u64) -> Range<u64> {
        let page = PAGE_BYTES as u64;
        offset / page..(offset + len).div_ceil(page)
    }

    /// Writes through a session. `open` operations before it may be missing
    /// elsewhere; the session may die after `death` accesses.
    pub(super) fn write(
        &mut self,
        client: usize,
        slice: SliceId,
        offset: u64,
        data: &[u8],
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<End>, Wrong> {
        let pages = Self::byte_pages(offset, data.len() as u64);
        if !self.may_change(client, slice, [pages]) {
            return Ok(None);
        }
        let effects = self.write_effects(slice, offset, data);
        self.change(client, slice, effects, open, death, |members, stamp| {
            write(members, offset, data, stamp)
        })
    }

    /// Frees a range through a session.
    pub(super) fn clear(
        &mut self,
        client: usize,
        slice: SliceId,
        offset: u64,
        len: u64,
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<End>, Wrong> {
        if !self.may_change(client, slice, [Self::byte_pages(offset, len)]) {
            return Ok(None);
        }
        let effects = self.clear_effects(slice, offset, len);
        self.change(client, slice, effects, open, death, |members, stamp| {
            clear(members, offset, len, stamp)
        })
    }

    /// Changes parts through a session, as a whole.
    pub(super) fn transact(
        &mut self,
        client: usize,
        slice: SliceId,
        parts: &[Part],
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<End>, Wrong> {
        let pages = |part: &Part| Self::byte_pages(part.offset(), part.len());
        if !self.may_change(client, slice, parts.iter().map(pages)) {
            return Ok(None);
        }
        let effects = self.transaction_effects(slice, parts);
        self.change(client, slice, effects, open, death, |members, stamp| {
            transact(members, parts, stamp)
        })
    }

    /// Whether the client lives, and no dead one keeps these pages locked.
    fn may_change(
        &self,
        client: usize,
        slice: SliceId,
        pages: impl IntoIterator<Item = Range<u64>>,
    ) -> bool {
        let mut pages = pages.into_iter();
        self.clients[client].died_in.is_none() && !pages.any(|it| self.is_locked(slice, it))
    }

    fn shown(&self, slice: SliceId) -> Thing<Content> {
        let mut held = self.oracle.now();
        held.remove(&slice).expect("the model has it")
    }

    /// The records of a write: parts of pages by themselves, whole pages of a
    /// leaf together.
    fn write_effects(&self, slice: SliceId, offset: u64, data: &[u8]) -> Vec<Effect> {
        let shown = self.shown(slice);
        let (mut at, mut rest, mut effects) = (offset, data, Vec::new());
        while !rest.is_empty() {
            let (page, within) = (at / PAGE_BYTES as u64, at as usize % PAGE_BYTES);
            let taken = if within != 0 || rest.len() < PAGE_BYTES {
                let taken = rest.len().min(PAGE_BYTES - within);
                let merged = merge(shown.pages.get(&page), within, &rest[..taken]);
                effects.push(Effect::Pages(slice, vec![(page, Some(merged))]));
                taken
            } else {
                let in_leaf = NODE_PAGES - page % NODE_PAGES;
                let count = (rest.len() / PAGE_BYTES).min(in_leaf as usize);
                let chunks = rest.as_chunks::<PAGE_BYTES>().0[..count].iter();
                let pages = (page..).zip(chunks.map(|bytes| Some(content(*bytes))));
                effects.push(Effect::Pages(slice, pages.collect()));
                count * PAGE_BYTES
            };
            at += taken as u64;
            rest = &rest[taken..];
        }
        effects
    }

    /// All records of a transaction are there or none: to the model they are
    /// one.
    fn transaction_effects(&self, slice: SliceId, parts: &[Part]) -> Vec<Effect> {
        let shown = self.shown(slice);
        let mut pages = Vec::new();
        for part in parts {
            let (offset, len) = (part.offset(), part.len());
            match part {
                Part::Write { data, .. } => {
                    let chunks = data.as_chunks::<PAGE_BYTES>().0.iter();
                    let first = offset / PAGE_BYTES as u64;
                    pages.extend((first..).zip(chunks.map(|bytes| Some(content(*bytes)))));
                }
                Part::Clear { .. } => {
                    let mapped = |page: &u64| shown.pages.contains_key(page);
                    let cleared = Self::byte_pages(offset, len).filter(mapped);
                    pages.extend(cleared.map(|page| (page, None)));
                }
            }
        }
        match pages.is_empty() {
            true => Vec::new(),
            false => vec![Effect::Pages(slice, pages)],
        }
    }

    fn clear_effects(&self, slice: SliceId, offset: u64, len: u64) -> Vec<Effect> {
        let page_bytes = PAGE_BYTES as u64;
        let shown = self.shown(slice);
        let mut effects = Vec::new();
        let mut part = |offset: u64, len: u64| {
            let page = offset / page_bytes;
            if let (Some(old), true) = (shown.pages.get(&page), len > 0) {
                let within = (offset % page_bytes) as usize;
                let merged = merge(Some(old), within, &vec![0; len as usize]);
                effects.push(Effect::Pages(slice, vec![(page, Some(merged))]));
            }
        };
        let end = offset + len;
        let (first, last) = (
            offset.next_multiple_of(page_bytes),
            end / page_bytes * page_bytes,
        );
        if first > last {
            part(offset, len);
            return effects;
        }
        part(offset, first - offset);
        part(last, end - last);
        let mut run: Vec<(u64, Option<Content>)> = Vec::new();
        for page in first / page_bytes..last / page_bytes {
            let mapped = shown.pages.contains_key(&page);
            if (!mapped || page % NODE_PAGES == 0) && !run.is_empty() {
                effects.push(Effect::Pages(slice, std::mem::take(&mut run)));
            }
            if mapped {
                run.push((page, None));
            }
        }
        if !run.is_empty() {
            effects.push(Effect::Pages(slice, run));
        }
        effects
    }

    fn change(
        &mut self,
        client: usize,
        slice: SliceId,
        effects: Vec<Effect>,
        open: u32,
        death: Option<i64>,
        run: impl FnOnce(&mut [Member<'_, Medium>; 1], Stamp) -> Result<(), Failure>,
    ) -> Result<Option<End>, Wrong> {
        self.op += 1;
        let (op, before) = (self.op, self.oracle.clone());
        let epoch = Epoch(before.certain[&slice].entry.epoch);
        let stamp = Stamp { epoch, op, open };
        let handle = self.handle(slice);
        let group = match self.kind {
            Kind::Memory => op as usize,
            Kind::File => UNORDERED,
        };
        let oldest = op - u64::from(open);
        let told = |(old, _): &mut (u64, Open)| *old < oldest;
        for (old, _) in self.clients[client].ops.extract_if(.., told) {
            self.oracle.open.remove(&old);
            for step in self.oracle.maybe.iter_mut().filter(|step| step.op == old) {
                step.is_open = false;
            }
        }
        let first = self.oracle.maybe.len();
        let steps = effects.into_iter().map(|effect| Step {
            effect,
            op,
            epoch: epoch.0,
            is_open: true,
            group,
        });
        self.oracle.maybe.extend(steps);
        if let Some(accesses) = death {
            self.medium.die_after(accesses);
        }
        let session = &mut self.clients[client].session;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            owner::with(&self.pool, || run(&mut [Member { session, handle }], stamp))
        }));
        let _left = self.medium.live();
        let during = self.oracle.clone();
        let outcome = outcome.map(|done| done.map_err(|failure| failure.cause));
        let end = match outcome {
            Ok(Ok(())) => End::Done,
            Ok(Err(StoreError::NoSpace)) => End::Full,
            Ok(Err(cause)) => return wrong("operations", format!("{slice}: {cause}")),
            Err(cause) if cause.is::<Death>() => End::Died,
            Err(cause) => resume_unwind(cause),
        };
        if end != End::Died {
            if end == End::Full {
                self.keep_shown(slice, first)?;
            }
            if self.oracle.maybe.len() > first {
                let mut open = BTreeMap::new();
                let steps = self.oracle.maybe[first..].iter();
                steps.for_each(|step| note_open(&mut open, step));
                self.clients[client].ops.extend(open.clone());
                self.acknowledge(first, open);
            }
        } else {
            self.clients[client].died_in = Some(group);
            self.tally.deaths += 1;
        }
        self.check_crashes(&during, &self.oracle.clone())?;
        Ok(Some(end))
    }

    /// Some of the last operation's steps happened: those that can be seen.
    fn keep_shown(&mut self, slice: SliceId, first: usize) -> Result<(), Wrong> {
        self.tally.full += 1;
        let alive = self
            .clients
            .iter_mut()
            .find(|client| client.died_in.is_none());
        let session = &mut alive.expect("the one that was refused").session;
        let found = recover::look(&self.pool, session, &self.unread)?;
        while !self.shows(&found, slice) {
            if self.oracle.maybe.len() == first {
                return wrong("refused writes", "something else changed");
            }
            self.oracle.maybe.pop();
        }
        Ok(())
    }

    pub(super) fn shows(&self, found: &Found, slice: SliceId) -> bool {
        let sums = |thing: Thing<Content>| -> BTreeMap<u64, u32> {
            thing
                .pages
                .into_iter()
                .map(|(page, content)| (page, content.0))
                .collect()
        };
        sums(self.shown(slice)) == found.things[&slice].pages
    }

    /// The steps from `first` on are acknowledged.
    fn acknowledge(&mut self, first: usize, open: BTreeMap<u64, Open>) {
        if self.kind == Kind::File {
            return;
        }
        self.oracle.open.extend(open);
        for step in self.oracle.maybe.split_off(first) {
            apply(&mut self.oracle.certain, &step.effect);
            // What a dead session may still have done to these came before.
            if let Effect::Pages(slice, pages) = step.effect {
                for other in &mut self.oracle.maybe {
                    if let Effect::Pages(of, theirs) = &mut other.effect
                        && *of == slice
                    {
                        theirs.retain(|(page, _)| pages.iter().all(|(new, _)| new != page));
                    }
                }
            }
        }
    }
}

fn merge(old: Option<&Content>, within: usize, part: &[u8]) -> Content {
    let mut bytes: Bytes = old.map_or([0; PAGE_BYTES], |old| *old.1);
    bytes[within..][..part.len()].copy_from_slice(part);
    content(bytes)
}
