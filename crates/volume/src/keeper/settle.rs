//! Settling: makes the legs of a column equal after a client, or all of its
//! legs, went away. Nobody else writes to the column meanwhile.
//!
//! For each page in flight the in-sync leg with the highest epoch and
//! operation wins: what a read may have shown stays. Where legs list the same newest
//! one, those before it decide: a guest may have died with one leg changed, and another
//! have overwritten a part of the page on all of them. What one operation changed
//! is copied as one: were the source lost half-way, no leg would be left with
//! half of a transaction.

use super::copy::{self, CopyError, Holes, Party, chunks, parties};
use super::follow;
use super::reform::failed;
use super::state::State;
use crate::limits::RESYNC_CHUNK_BYTES;
use crate::status::Count;
use crate::view::{Gate, Mask};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{InFlight, SliceError, SliceReply, SliceRequest};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;

/// A leg was lost on the way, or everything was.
pub(super) struct Interrupted;

/// Pages that differ, who has them right, and who gets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unequal {
    pub page: u64,
    pub count: u64,
    /// The newest operation that any leg lists.
    pub newest: Option<(Epoch, u64)>,
    pub winner: usize,
    pub behind: Mask,
}

pub(super) async fn settle(state: &State, column: usize) -> Result<(), Interrupted> {
    // What is left behind the dead is made alike once there is something to read.
    let _guests = state.keep_living_guests_out(|_| true).await;
    // What becomes of changes that nobody acknowledged was not sent to it.
    follow::end(state, column, "the other copies are made equal");
    let (settling, stale) = {
        let model = state.model();
        let keep = &model.columns[column];
        let legs = |wanted| {
            Mask::where_leg(|leg| {
                keep.legs
                    .get(leg)
                    .is_some_and(|keep| keep.leg.state == wanted)
            })
        };
        let (in_sync, syncing) = (legs(LegState::InSync), legs(LegState::Syncing));
        let settling = Settling {
            state,
            column,
            parties: parties(state, column, in_sync.or(syncing)).ok_or(Interrupted)?,
            in_sync,
            syncing,
        };
        (settling, keep.has_stale())
    };
    let mut tables: Vec<Option<Vec<InFlight>>> = vec![Some(vec![]); 3];
    for party in &settling.parties {
        let answer = party.control.ask(state, SliceRequest::InFlight).await;
        match answer {
            Ok(SliceReply::InFlight(table)) => tables[party.leg] = table,
            other => return Err(settling.interrupted(party.leg, other.err())),
        }
    }
    if settling.parties.len() > 1 && !defect::is(Defect::NotSettled) {
        settling.make_all_equal(tables).await?;
    }
    // A stale leg may lack what is in flight here: the table is kept for its
    // return, beside the pages' stamps.
    settling.finish(!stale).await?;
    let mut model = state.edit();
    let keep = &mut model.columns[column];
    if !keep.has_source() {
        return Err(Interrupted);
    }
    keep.settle = false;
    keep.gate = Gate::Open;
    keep.down_since = None;
    Ok(())
}

/// One settling of a column.
struct Settling<'a> {
    state: &'a State,
    column: usize,
    /// All legs that are written, as they were connected when it began: one that
    /// is lost meanwhile must fail it. Nothing else would tell that it lacks what
    /// the others then forget.
    parties: Vec<Party>,
    in_sync: Mask,
    syncing: Mask,
}

impl Settling<'_> {
    fn parties(&self, legs: Mask) -> Vec<Party> {
        let wanted = self.parties.iter().filter(|party| legs.has(party.leg));
        wanted.cloned().collect()
    }

    async fn make_all_equal(&self, tables: Vec<Option<Vec<InFlight>>>) -> Result<(), Interrupted> {
        if tables.iter().any(Option::is_none) {
            let is_unlisted = |leg| self.in_sync.has(leg) && tables[leg].is_none();
            return self.compare_all(Mask::where_leg(is_unlisted)).await;
        }
        let tables: Vec<Vec<InFlight>> =
            tables.into_iter().map(Option::unwrap_or_default).collect();
        let skipped = usize::from(defect::is(Defect::SettledPageSkipped));
        let all = unequal(&tables, self.in_sync, self.syncing);
        for operation in by_operation(all.into_iter().skip(skipped)) {
            self.make_operation_equal(&operation).await?;
        }
        Ok(())
    }

    async fn finish(&self, forget: bool) -> Result<(), Interrupted> {
        let told_complete = copy::tell_complete(self.state, &self.parties).await;
        told_complete.map_err(|failure| self.told(failure))?;
        let requests = [SliceRequest::Flush, SliceRequest::Settled];
        for request in requests.iter().take(1 + usize::from(forget)) {
            for party in &self.parties {
                if let Err(error) = party.control.ask(self.state, request.clone()).await {
                    return Err(self.interrupted(party.leg, Some(error)));
                }
            }
        }
        Ok(())
    }

    fn interrupted(&self, leg: usize, error: Option<SliceError>) -> Interrupted {
        let strange = SliceError::Refused("a strange answer".into());
        failed(self.state, self.column, leg, &error.unwrap_or(strange));
        Interrupted
    }

    fn told(&self, CopyError { leg, error }: CopyError) -> Interrupted {
        self.interrupted(leg, Some(error))
    }

    /// As one where it can be a transaction; what was one always can.
    async fn make_operation_equal(&self, operation: &[Unequal]) -> Result<(), Interrupted> {
        let pages: u64 = operation.iter().map(|unequal| unequal.count).sum();
        let end = self.bytes() / PAGE_BYTES as u64;
        let is_within = operation.iter().all(|it| it.page + it.count <= end);
        let is_one = (2..=TRANSACTION_PAGES_MAX).contains(&pages) && is_within;
        if is_one && !defect::is(Defect::SettledByPage) {
            let (winner, behind) = (operation[0].winner, operation[0].behind);
            let equal = self.in_sync.without(behind).without(Mask::of(winner));
            let mut sources = vec![
                std::iter::once(winner)
                    .chain(equal.legs())
                    .collect::<Vec<_>>(),
            ];
            // If nobody who has it can give every page, it is taken back.
            sources.extend(self.in_sync.and(behind).legs().map(|leg| vec![leg]));
            for sources in sources {
                let all = self.in_sync.or(behind);
                if self.copy_operation(&sources, all, operation).await? {
                    self.settled(pages * PAGE_BYTES as u64);
                    return Ok(());
                }
            }
        }
        for unequal in operation {
            self.make_equal(*unequal).await?;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.state.model().columns[self.column].bytes
    }

    fn settled(&self, bytes: u64) {
        self.state.hub.tally.add(Count::BytesSettled, bytes);
    }

    /// Copies an operation from the first of these legs to all that are not among
    /// them; a page that is damaged there comes from the next, and all get it.
    /// False if no source has some page.
    async fn copy_operation(
        &self,
        sources: &[usize],
        all: Mask,
        operation: &[Unequal],
    ) -> Result<bool, Interrupted> {
        let mut targets = all;
        sources.iter().for_each(|leg| targets.remove(*leg));
        let mut parts = Vec::new();
        for page in operation.iter().flat_map(|it| it.page..it.page + it.count) {
            let offset = page * PAGE_BYTES as u64;
            let mut part = None;
            for &source in sources {
                let Some(party) = self.parties(Mask::of(source)).pop() else {
                    return Err(Interrupted);
                };
                match copy::read_page(self.state, &party, offset).await {
                    Ok(found) => {
                        part = Some(found);
                        break;
                    }
                    Err(failure) if failure.is_damage() => targets.add(source),
                    Err(failure) => return Err(self.told(failure)),
                }
            }
            let Some(part) = part else {
                return Ok(false);
            };
            parts.push(part);
        }
        let copied = copy::transact(self.state, &self.parties(targets), &parts).await;
        copied.map_err(|failure| self.told(failure))?;
        Ok(true)
    }

    async fn make_equal(&self, unequal: Unequal) -> Result<(), Interrupted> {
        let page = PAGE_BYTES as u64;
        let (start, stop) = (unequal.page * page, (unequal.page + unequal.count) * page);
        let winner = self.parties(Mask::of(unequal.winner));
        let targets = self.parties(unequal.behind);
        for range in chunks(start, stop.min(self.bytes())) {
            let copied =
                copy::copy_chunk(self.state, &winner, &targets, range, Holes::Cleared).await;
            match copied {
                Err(failure) if failure.is_damage_of(unequal.winner) => {
                    self.make_pages_equal(unequal, range).await?;
                }
                other => other.map_err(|failure| self.told(failure))?,
            }
            self.settled(range.1);
        }
        Ok(())
    }

    /// The winner cannot give every page. Those that it can it gives; each of the
    /// others comes from the first leg that has it, and goes to all: a leg must
    /// not stay ahead because it was the one to be copied from.
    async fn make_pages_equal(
        &self,
        unequal: Unequal,
        (offset, len): (u64, u64),
    ) -> Result<(), Interrupted> {
        let all = self.in_sync.or(unequal.behind);
        let sources = self.in_sync.without(unequal.behind).legs();
        let sources = sources.chain(self.in_sync.and(unequal.behind).legs());
        let sources = sources.filter(|leg| *leg != unequal.winner);
        let sources: Vec<usize> = std::iter::once(unequal.winner).chain(sources).collect();
        for at in (offset..offset + len).step_by(PAGE_BYTES) {
            let one = (at, (PAGE_BYTES as u64).min(offset + len - at));
            let mut copied = Ok(());
            for &source in &sources {
                let from = self.parties(Mask::of(source));
                let to = self.parties(all.without(Mask::of(source)));
                copied = copy::copy_chunk(self.state, &from, &to, one, Holes::Cleared).await;
                let damaged = |failure: &CopyError| failure.is_damage_of(source);
                if !copied.as_ref().is_err_and(damaged) {
                    break;
                }
            }
            copied.map_err(|failure| self.told(failure))?;
        }
        Ok(())
    }

    /// No leg knows what was in flight, so each page is compared. Where legs differ,
    /// one that has more in flight than it can list is ahead of one that lists
    /// nothing there.
    async fn compare_all(&self, unlisted: Mask) -> Result<(), Interrupted> {
        let mut sources = self.parties(unlisted);
        sources.extend(self.parties(self.in_sync.without(unlisted)));
        let Some(first) = sources.first() else {
            return Err(Interrupted);
        };
        let all = self.in_sync.or(self.syncing);
        let targets = self.parties(all.without(Mask::of(first.leg)));
        for (offset, len) in chunks(0, self.bytes()) {
            for range in differing(self.state, first, &targets, offset, len).await {
                let copied =
                    copy::copy_chunk(self.state, &sources, &targets, range, Holes::Cleared).await;
                self.settled(range.1);
                copied.map_err(|failure| self.told(failure))?;
            }
        }
        Ok(())
    }
}

/// Puts what one operation changed together, in the order of its first pages.
fn by_operation(all: impl Iterator<Item = Unequal>) -> Vec<Vec<Unequal>> {
    let mut operations: Vec<Vec<Unequal>> = Vec::new();
    let mut places = BTreeMap::new();
    for unequal in all {
        let place = match unequal.newest {
            Some(newest) => *places
                .entry((newest, unequal.winner, unequal.behind))
                .or_insert(operations.len()),
            None => operations.len(),
        };
        match operations.get_mut(place) {
            Some(operation) => operation.push(unequal),
            None => operations.push(vec![unequal]),
        }
    }
    operations
}

/// Whether a chunk differs between legs, as far as can be told; what cannot be
/// read counts as different, and copying finds out why.
pub(super) async fn differs(
    state: &State,
    first: &Party,
    others: &[Party],
    offset: u64,
    len: u64,
) -> bool {
    !differing(state, first, others, offset, len)
        .await
        .is_empty()
}

/// The parts of a chunk that differ, in whole pages but for the end; see
/// [`differs`].
pub(super) async fn differing(
    state: &State,
    first: &Party,
    others: &[Party],
    offset: u64,
    len: u64,
) -> Vec<(u64, u64)> {
    debug_assert!(len <= RESYNC_CHUNK_BYTES);
    let whole = vec![(offset, len)];
    let request = SliceRequest::Checksums {
        page: PageNo(offset / PAGE_BYTES as u64),
        count: len.div_ceil(PAGE_BYTES as u64) as u32,
    };
    let wanted = first.control.ask(state, request.clone()).await;
    let Ok(SliceReply::Checksums(wanted)) = wanted else {
        return whole;
    };
    let mut unequal = vec![false; wanted.len()];
    for other in others {
        match other.control.ask(state, request.clone()).await {
            Ok(SliceReply::Checksums(found)) if found.len() == wanted.len() => {
                let pairs = wanted.iter().zip(found).zip(&mut unequal);
                pairs.for_each(|((wanted, found), unequal)| *unequal |= *wanted != found);
            }
            _ => return whole,
        }
    }
    runs_of(&unequal, offset, len)
}

/// Runs of marked pages within a chunk, as offset and length.
fn runs_of(marked: &[bool], offset: u64, len: u64) -> Vec<(u64, u64)> {
    let page = PAGE_BYTES as u64;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (at, _) in (offset..)
        .step_by(PAGE_BYTES)
        .zip(marked)
        .filter(|(_, marked)| **marked)
    {
        let part = page.min(offset + len - at);
        match runs.last_mut() {
            Some((start, len)) if *start + *len == at => *len += part,
            _ => runs.push((at, part)),
        }
    }
    runs
}

/// What the tables of the legs say must be copied.
pub(super) fn unequal(tables: &[Vec<InFlight>], in_sync: Mask, syncing: Mask) -> Vec<Unequal> {
    let mut edges: Vec<u64> = Vec::new();
    for entry in tables.iter().flatten() {
        edges.push(entry.page.0);
        edges.push(entry.page.0 + u64::from(entry.count));
    }
    edges.sort_unstable();
    edges.dedup();
    let mut sweeps: Vec<Sweep> = tables.iter().map(|table| Sweep::new(table)).collect();
    let mut all = Vec::new();
    for pair in edges.windows(2) {
        let (page, end) = (pair[0], pair[1]);
        let listed: Vec<Vec<(Epoch, u64)>> = sweeps.iter_mut().map(|s| s.at(page)).collect();
        if listed.iter().all(Vec::is_empty) {
            continue;
        }
        // Among equals any; with nothing listed in-sync, any in-sync leg.
        let sources = match defect::is(Defect::SettledFromSyncing) && !syncing.is_empty() {
            true => syncing,
            false => in_sync,
        };
        let Some(winner) = sources.legs().max_by_key(|&leg| &listed[leg]) else {
            continue;
        };
        let behind = Mask::where_leg(|leg| {
            leg != winner && (syncing.has(leg) || in_sync.has(leg) && listed[leg] != listed[winner])
        });
        if !behind.is_empty() {
            all.push(Unequal {
                page,
                count: end - page,
                newest: listed[winner].first().copied(),
                winner,
                behind,
            });
        }
    }
    all
}

/// Goes over the pages of one table, and tells the operations on each.
struct Sweep {
    /// By first page, the last one first.
    later: Vec<InFlight>,
    open: Vec<InFlight>,
}

impl Sweep {
    fn new(table: &[InFlight]) -> Sweep {
        let mut later = table.to_vec();
        later.sort_by_key(|entry| std::cmp::Reverse(entry.page));
        Sweep {
            later,
            open: Vec::new(),
        }
    }

    /// The newest first.
    fn at(&mut self, page: u64) -> Vec<(Epoch, u64)> {
        while let Some(entry) = self.later.pop_if(|entry| entry.page.0 <= page) {
            self.open.push(entry);
        }
        self.open
            .retain(|entry| entry.page.0 + u64::from(entry.count) > page);
        let mut listed: Vec<_> = self.open.iter().map(|it| (it.epoch, it.op)).collect();
        listed.sort_unstable_by(|a, b| b.cmp(a));
        listed.dedup();
        listed.truncate(match defect::is(Defect::SettledByNewest) {
            true => 1,
            false => usize::MAX,
        });
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn parts_that_differ_are_whole_pages_but_for_the_end() {
        let runs = |marked: &[bool], len| runs_of(marked, 8192, len);
        assert_eq!(runs(&[false, false], 8192), []);
        assert_eq!(
            runs(&[true, true, false, true], 13_000),
            [(8192, 8192), (20_480, 712)]
        );
        assert_eq!(runs(&[true], 100), [(8192, 100)]);
    }

    proptest! {
        /// The sweep says for each page what looking at every entry says.
        #[test]
        fn the_newest_wins(
            tables in prop::collection::vec(
                prop::collection::vec((0u64..20, 1u32..6, 1u32..3, 1u64..9), 0..6), 3),
            syncing in any::<bool>(),
        ) {
            let tables: Vec<Vec<InFlight>> = tables.iter().map(|table| {
                let entry = |&(page, count, epoch, op): &_| InFlight {
                    page: PageNo(page), count, epoch: Epoch(epoch), op,
                };
                table.iter().map(entry).collect()
            }).collect();
            let in_sync = Mask::where_leg(|leg| leg < 2 || !syncing);
            let behind = Mask::where_leg(|leg| leg == 2 && syncing);
            let found = unequal(&tables, in_sync, behind);
            for page in 0..30u64 {
                let listed = |leg: usize| {
                    let on_page = tables[leg].iter()
                        .filter(|e| (e.page.0..e.page.0 + u64::from(e.count)).contains(&page));
                    let listed: BTreeSet<_> = on_page.map(|e| (e.epoch, e.op)).collect();
                    listed.into_iter().rev().collect::<Vec<_>>()
                };
                let best = in_sync.legs().map(listed).max().unwrap_or_default();
                let is_listed = (0..3).any(|leg| !listed(leg).is_empty());
                let expected = Mask::where_leg(|leg| {
                    is_listed && (in_sync.has(leg) && listed(leg) != best || behind.has(leg))
                });
                let here: Vec<_> = found.iter()
                    .filter(|u| (u.page..u.page + u.count).contains(&page)).collect();
                prop_assert!(here.len() <= 1);
                // Without any entry in-sync all in-sync legs are the same.
                let got = here.first().map_or(Mask::NONE, |u| u.behind);
                prop_assert_eq!(got, expected, "page {}", page);
                if let Some(one) = here.first() {
                    prop_assert_eq!(listed(one.winner), best);
                }
            }
        }
    }
}
