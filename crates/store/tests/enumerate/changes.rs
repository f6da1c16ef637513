//! Changes through a session: the records that they should leave, and how far the oracle knows them
//! after the call.

use super::harness::{CrashHarness, OpOutcome};
use super::medium::{CrashMedium, ThreadDeath};
use super::model::{
    CheckFailure, Content, Effect, ExpectedInFlight, ObjectContents, PageBytes, PageWord,
    PossibleRecord, RecoveredContents, UNORDERED, apply, content, fail, record_open,
};
use super::owner;
use super::recover::{self, MediumKind};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_store::control::LockWords;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::session::{LegFailure, LegSession, clear, write};
use pagemesh_store::test_api::ControlInternals;
use pagemesh_store::transaction::transact;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const NODE_PAGES: u64 = 512;

impl CrashHarness<'_> {
    /// Whether a dead session holds the locks of these pages.
    fn is_locked(&self, slice: SliceId, pages: Range<u64>) -> bool {
        let handle = self.handle(slice);
        let pool = self.pool.borrow();
        let control = pool.mapping().control();
        let of_pages = (pages.start..pages.end)
            .step_by(16)
            .chain([pages.end - 1])
            .any(|page| !control.is_unlocked(&LockWords::of(handle.object(), PageNo(page), 1)));
        let of_nodes = |page: u64| {
            (1..=4u8).any(|level| {
                let range = LockWords::of_node(handle.object(), level, PageNo(page));
                !control.is_unlocked(&range)
            })
        };
        of_pages || of_nodes(pages.start) || of_nodes(pages.end - 1)
    }

    fn byte_pages(offset: u64, len: u64) -> Range<u64> {
        let page = PAGE_BYTES as u64;
        offset / page..(offset + len).div_ceil(page)
    }

    /// Writes through a session. Another leg may lack the last `open_ops` operations before this
    /// one. The session dies after `death` accesses, if given.
    pub(super) fn write(
        &mut self,
        client: usize,
        slice: SliceId,
        offset: u64,
        data: &[u8],
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<OpOutcome>, CheckFailure> {
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
    ) -> Result<Option<OpOutcome>, CheckFailure> {
        if !self.may_change(client, slice, [Self::byte_pages(offset, len)]) {
            return Ok(None);
        }
        let effects = self.clear_effects(slice, offset, len);
        self.change(client, slice, effects, open, death, |members, stamp| {
            clear(members, offset, len, stamp)
        })
    }

    /// Changes several parts through a session as one transaction.
    pub(super) fn transact(
        &mut self,
        client: usize,
        slice: SliceId,
        parts: &[TransactionPart],
        open: u32,
        death: Option<i64>,
    ) -> Result<Option<OpOutcome>, CheckFailure> {
        let pages = |part: &TransactionPart| Self::byte_pages(part.offset(), part.len());
        if !self.may_change(client, slice, parts.iter().map(pages)) {
            return Ok(None);
        }
        let effects = self.transaction_effects(slice, parts);
        self.change(client, slice, effects, open, death, |members, stamp| {
            transact(members, parts, stamp)
        })
    }

    /// Whether the client is alive and no dead client holds the locks of these pages.
    fn may_change(
        &self,
        client: usize,
        slice: SliceId,
        pages: impl IntoIterator<Item = Range<u64>>,
    ) -> bool {
        let mut pages = pages.into_iter();
        self.clients[client].died_in.is_none() && !pages.any(|it| self.is_locked(slice, it))
    }

    fn epoch_of(&self, slice: SliceId) -> u32 {
        self.oracle.certain[&slice].entry.epoch
    }

    fn current_contents(&self, slice: SliceId) -> ObjectContents<Content> {
        let mut held = self.oracle.current();
        held.remove(&slice).expect("the model has it")
    }

    /// The records of a write: one for each partial page, one for the whole pages of each leaf.
    fn write_effects(&self, slice: SliceId, offset: u64, data: &[u8]) -> Vec<Effect> {
        let (shown, birth) = (self.current_contents(slice), self.epoch_of(slice));
        let (mut at, mut rest, mut effects) = (offset, data, Vec::new());
        while !rest.is_empty() {
            let (page, within) = (at / PAGE_BYTES as u64, at as usize % PAGE_BYTES);
            let taken = if within != 0 || rest.len() < PAGE_BYTES {
                let taken = rest.len().min(PAGE_BYTES - within);
                let merged = merge_part(shown.pages.get(&page), within, &rest[..taken], birth);
                effects.push(Effect::Pages(slice, vec![(page, Some(merged))]));
                taken
            } else {
                let in_leaf = NODE_PAGES - page % NODE_PAGES;
                let count = (rest.len() / PAGE_BYTES).min(in_leaf as usize);
                let chunks = rest.as_chunks::<PAGE_BYTES>().0[..count].iter();
                let pages = (page..).zip(chunks.map(|bytes| Some(content(*bytes, birth))));
                effects.push(Effect::Pages(slice, pages.collect()));
                count * PAGE_BYTES
            };
            at += taken as u64;
            rest = &rest[taken..];
        }
        effects
    }

    /// A transaction is atomic: the model treats all its records as one.
    fn transaction_effects(&self, slice: SliceId, parts: &[TransactionPart]) -> Vec<Effect> {
        let (shown, birth) = (self.current_contents(slice), self.epoch_of(slice));
        let mut pages = Vec::new();
        for part in parts {
            let (offset, len) = (part.offset(), part.len());
            match part {
                TransactionPart::Write { data, .. } => {
                    let chunks = data.as_chunks::<PAGE_BYTES>().0.iter();
                    let first = offset / PAGE_BYTES as u64;
                    pages.extend((first..).zip(chunks.map(|bytes| Some(content(*bytes, birth)))));
                }
                TransactionPart::Clear { .. } => {
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
        let (shown, birth) = (self.current_contents(slice), self.epoch_of(slice));
        let mut effects = Vec::new();
        let mut part = |offset: u64, len: u64| {
            let page = offset / page_bytes;
            if let (Some(old), true) = (shown.pages.get(&page), len > 0) {
                let within = (offset % page_bytes) as usize;
                let merged = merge_part(Some(old), within, &vec![0; len as usize], birth);
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
        run: impl FnOnce(&mut [LegSession<'_, CrashMedium>; 1], Stamp) -> Result<(), LegFailure>,
    ) -> Result<Option<OpOutcome>, CheckFailure> {
        self.op += 1;
        let op = self.op;
        let epoch = Epoch(self.epoch_of(slice));
        let stamp = Stamp {
            epoch,
            op,
            open_ops: open,
        };
        let handle = self.handle(slice);
        let group = match self.kind {
            MediumKind::Memory | MediumKind::Tier => op as usize,
            MediumKind::File => UNORDERED,
        };
        let oldest = op - u64::from(open);
        let told = |(old, _): &mut (u64, ExpectedInFlight)| *old < oldest;
        for (old, _) in self.clients[client].ops.extract_if(.., told) {
            self.oracle.open.remove(&old);
            for step in self
                .oracle
                .possible
                .iter_mut()
                .filter(|step| step.op == old)
            {
                step.is_open = false;
            }
        }
        let first = self.oracle.possible.len();
        let steps = effects.into_iter().map(|effect| PossibleRecord {
            effect,
            op,
            epoch: epoch.0,
            is_open: true,
            group,
        });
        self.oracle.possible.extend(steps);
        if let Some(accesses) = death {
            self.medium.die_after(accesses);
        }
        let session = &mut self.clients[client].session;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            owner::with_owner(&self.pool, || {
                run(&mut [LegSession { session, handle }], stamp)
            })
        }));
        let _left = self.medium.cancel_death();
        let during = self.oracle.clone();
        let outcome = outcome.map(|done| done.map_err(|failure| failure.cause));
        let end = match outcome {
            Ok(Ok(())) => OpOutcome::Completed,
            Ok(Err(StoreError::NoSpace)) => OpOutcome::PoolFull,
            Ok(Err(cause)) => return fail("operations", format!("{slice}: {cause}")),
            Err(cause) if cause.is::<ThreadDeath>() => OpOutcome::Died,
            Err(cause) => resume_unwind(cause),
        };
        if end != OpOutcome::Died {
            if end == OpOutcome::PoolFull {
                self.keep_visible_steps(slice, first)?;
            }
            if self.oracle.possible.len() > first {
                let mut open = BTreeMap::new();
                let steps = self.oracle.possible[first..].iter();
                steps.for_each(|step| record_open(&mut open, step));
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

    /// A refused operation leaves some of its steps: keeps the steps that a read can see.
    fn keep_visible_steps(&mut self, slice: SliceId, first: usize) -> Result<(), CheckFailure> {
        self.tally.pool_full += 1;
        let alive = self
            .clients
            .iter_mut()
            .find(|client| client.died_in.is_none());
        let session = &mut alive.expect("the refused client is alive").session;
        let found = recover::read_contents(&self.pool, session, &self.unread_sums)?;
        while !self.matches(&found, slice) {
            if self.oracle.possible.len() == first {
                return fail("refused writes", "something else changed");
            }
            self.oracle.possible.pop();
        }
        Ok(())
    }

    pub(super) fn matches(&self, found: &RecoveredContents, slice: SliceId) -> bool {
        let sums = |thing: ObjectContents<Content>| -> BTreeMap<u64, PageWord> {
            thing
                .pages
                .into_iter()
                .map(|(page, content)| (page, content.0))
                .collect()
        };
        sums(self.current_contents(slice)) == found.objects[&slice].pages
    }

    /// Marks the steps from `first` on as acknowledged.
    fn acknowledge(&mut self, first: usize, open: BTreeMap<u64, ExpectedInFlight>) {
        if self.kind == MediumKind::File {
            return;
        }
        self.oracle.open.extend(open);
        for step in self.oracle.possible.split_off(first) {
            apply(&mut self.oracle.certain, &step.effect);
            // Steps of a dead session on the same pages came before the acknowledged ones.
            if let Effect::Pages(slice, pages) = step.effect {
                for other in &mut self.oracle.possible {
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

fn merge_part(old: Option<&Content>, within: usize, part: &[u8], birth: u32) -> Content {
    let mut bytes: PageBytes = old.map_or([0; PAGE_BYTES], |old| *old.1);
    bytes[within..][..part.len()].copy_from_slice(part);
    content(bytes, birth)
}
