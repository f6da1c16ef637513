//! Recovery of in-flight writes: makes the legs of a column equal after a client, or all of its
//! legs, went away. No other client writes to the column meanwhile.
//!
//! For each page in flight the in-sync leg with the highest epoch and operation wins, so that
//! data that a read may have returned stays. If legs list the same newest operation, the
//! earlier ones decide: a direct client may have died with one leg changed, and another client
//! have overwritten a part of the page on all legs.
//!
//! The pages of one operation are copied as one. Otherwise a loss of the source midway could
//! leave every leg with half of a transaction.

use super::copy::{self, CopyError, HolePolicy, LegConnection, chunks, leg_connections};
use super::reconfigure::handle_leg_error;
use super::replication_sender;
use super::state::ControllerState;
use crate::limits::RESYNC_CHUNK_BYTES;
use crate::snapshot::{Gate, LegSet};
use crate::status::Count;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{InFlightOp, SliceError, SliceReply, SliceRequest};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;

/// Recovery ended early, because a leg was lost or the client was fenced.
pub(super) struct RecoveryInterrupted;

/// Pages that differ, the leg that has them right, and the legs that get them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DivergentPages {
    pub page: u64,
    pub count: u64,
    /// The newest operation that any leg lists.
    pub newest: Option<(Epoch, u64)>,
    pub winner: usize,
    pub outdated: LegSet,
}

pub(super) async fn recover_in_flight(
    state: &ControllerState,
    column: usize,
) -> Result<(), RecoveryInterrupted> {
    // Torn operations of dead direct clients are reconciled once the column serves reads.
    let _guests = state.block_live_direct_clients(|_| true).await;
    // The replica was not sent the outcome of unacknowledged changes.
    replication_sender::end_replication(state, column, "the in-sync copies are being made equal");
    let (settling, stale) = {
        let model = state.model();
        let keep = &model.columns[column];
        let legs = |wanted| {
            LegSet::from_fn(|leg| {
                keep.legs
                    .get(leg)
                    .is_some_and(|keep| keep.leg.state == wanted)
            })
        };
        let (in_sync, syncing) = (legs(LegState::InSync), legs(LegState::Syncing));
        let settling = ColumnRecovery {
            state,
            column,
            connections: leg_connections(state, column, in_sync.union(syncing))
                .ok_or(RecoveryInterrupted)?,
            in_sync,
            syncing,
        };
        (settling, keep.has_stale())
    };
    let mut tables: Vec<Option<Vec<InFlightOp>>> = vec![Some(vec![]); 3];
    for party in &settling.connections {
        let answer = party.control.call(state, SliceRequest::InFlight).await;
        match answer {
            Ok(SliceReply::InFlight(table)) => tables[party.leg] = table,
            other => return Err(settling.interrupted(party.leg, other.err())),
        }
    }
    if settling.connections.len() > 1 && !defect::is(Defect::NotRecovered) {
        settling.equalize_all(tables).await?;
    }
    // A stale leg may lack the operations in flight here. The tables stay for its return, in
    // addition to the stamps of the pages.
    settling.finish(!stale).await?;
    let mut model = state.model_mut();
    let keep = &mut model.columns[column];
    if !keep.has_source() {
        return Err(RecoveryInterrupted);
    }
    keep.needs_recovery = false;
    keep.gate = Gate::Open;
    keep.down_since = None;
    Ok(())
}

/// One recovery of a column.
struct ColumnRecovery<'a> {
    state: &'a ControllerState,
    column: usize,
    /// All written legs, as they were connected when the recovery began. A loss of one of them
    /// must fail the recovery: otherwise the others would forget the operations that it lacks.
    connections: Vec<LegConnection>,
    in_sync: LegSet,
    syncing: LegSet,
}

impl ColumnRecovery<'_> {
    fn connections_of(&self, legs: LegSet) -> Vec<LegConnection> {
        let wanted = self
            .connections
            .iter()
            .filter(|party| legs.contains(party.leg));
        wanted.cloned().collect()
    }

    async fn equalize_all(
        &self,
        tables: Vec<Option<Vec<InFlightOp>>>,
    ) -> Result<(), RecoveryInterrupted> {
        if tables.iter().any(Option::is_none) {
            let is_unlisted = |leg| self.in_sync.contains(leg) && tables[leg].is_none();
            return self.compare_all(LegSet::from_fn(is_unlisted)).await;
        }
        let tables: Vec<Vec<InFlightOp>> =
            tables.into_iter().map(Option::unwrap_or_default).collect();
        let skipped = usize::from(defect::is(Defect::RecoveredPageSkipped));
        let all = divergent_pages(&tables, self.in_sync, self.syncing);
        for operation in group_by_operation(all.into_iter().skip(skipped)) {
            self.equalize_operation(&operation).await?;
        }
        Ok(())
    }

    async fn finish(&self, forget: bool) -> Result<(), RecoveryInterrupted> {
        let told_complete = copy::send_complete(self.state, &self.connections).await;
        told_complete.map_err(|failure| self.copy_failed(failure))?;
        let requests = [SliceRequest::Flush, SliceRequest::ForgetInFlight];
        for request in requests.iter().take(1 + usize::from(forget)) {
            for party in &self.connections {
                if let Err(error) = party.control.call(self.state, request.clone()).await {
                    return Err(self.interrupted(party.leg, Some(error)));
                }
            }
        }
        Ok(())
    }

    fn interrupted(&self, leg: usize, error: Option<SliceError>) -> RecoveryInterrupted {
        let strange = SliceError::Refused("a strange answer".into());
        handle_leg_error(self.state, self.column, leg, &error.unwrap_or(strange));
        RecoveryInterrupted
    }

    fn copy_failed(&self, CopyError { leg, error }: CopyError) -> RecoveryInterrupted {
        self.interrupted(leg, Some(error))
    }

    /// Copies an operation as one transaction if it is small enough. Every operation that was a
    /// transaction is.
    async fn equalize_operation(
        &self,
        operation: &[DivergentPages],
    ) -> Result<(), RecoveryInterrupted> {
        let pages: u64 = operation.iter().map(|unequal| unequal.count).sum();
        let end = self.bytes() / PAGE_BYTES as u64;
        let is_within = operation.iter().all(|it| it.page + it.count <= end);
        let is_one = (2..=TRANSACTION_PAGES_MAX).contains(&pages) && is_within;
        if is_one && !defect::is(Defect::RecoveredByPage) {
            let (winner, behind) = (operation[0].winner, operation[0].outdated);
            let equal = self
                .in_sync
                .difference(behind)
                .difference(LegSet::of(winner));
            let mut sources = vec![
                std::iter::once(winner)
                    .chain(equal.legs())
                    .collect::<Vec<_>>(),
            ];
            // If no leg that has the operation can read every page of it, it is rolled back.
            sources.extend(
                self.in_sync
                    .intersection(behind)
                    .legs()
                    .map(|leg| vec![leg]),
            );
            for sources in sources {
                let all = self.in_sync.union(behind);
                if self.copy_operation(&sources, all, operation).await? {
                    self.count_recovered(pages * PAGE_BYTES as u64);
                    return Ok(());
                }
            }
        }
        for unequal in operation {
            self.equalize_run(*unequal).await?;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.state.model().columns[self.column].bytes
    }

    fn count_recovered(&self, bytes: u64) {
        self.state.shared.counters.add(Count::BytesSettled, bytes);
    }

    /// Copies an operation from the first of these legs to all legs that are not among them. A
    /// page that is damaged there comes from the next source, and then also goes to the damaged
    /// one. False if no source can read some page.
    async fn copy_operation(
        &self,
        sources: &[usize],
        all: LegSet,
        operation: &[DivergentPages],
    ) -> Result<bool, RecoveryInterrupted> {
        let mut targets = all;
        sources.iter().for_each(|leg| targets.remove(*leg));
        let mut parts = Vec::new();
        for page in operation.iter().flat_map(|it| it.page..it.page + it.count) {
            let offset = page * PAGE_BYTES as u64;
            let mut part = None;
            for &source in sources {
                let Some(party) = self.connections_of(LegSet::of(source)).pop() else {
                    return Err(RecoveryInterrupted);
                };
                match copy::read_page(self.state, &party, offset).await {
                    Ok(found) => {
                        part = Some(found);
                        break;
                    }
                    Err(failure) if failure.is_damage() => targets.add(source),
                    Err(failure) => return Err(self.copy_failed(failure)),
                }
            }
            let Some(part) = part else {
                return Ok(false);
            };
            parts.push(part);
        }
        let copied = copy::transact(self.state, &self.connections_of(targets), &parts).await;
        copied.map_err(|failure| self.copy_failed(failure))?;
        Ok(true)
    }

    async fn equalize_run(&self, unequal: DivergentPages) -> Result<(), RecoveryInterrupted> {
        let page = PAGE_BYTES as u64;
        let (start, stop) = (unequal.page * page, (unequal.page + unequal.count) * page);
        let winner = self.connections_of(LegSet::of(unequal.winner));
        let targets = self.connections_of(unequal.outdated);
        for range in chunks(start, stop.min(self.bytes())) {
            let copied =
                copy::copy_chunk(self.state, &winner, &targets, range, HolePolicy::Clear).await;
            match copied {
                Err(failure) if failure.is_damage_of(unequal.winner) => {
                    self.equalize_pages(unequal, range).await?;
                }
                other => other.map_err(|failure| self.copy_failed(failure))?,
            }
            self.count_recovered(range.1);
        }
        Ok(())
    }

    /// Copies page by page, because the winner cannot read every page. It is the source of each
    /// page that it can read. Any other page comes from the first leg that can read it, and
    /// goes to all legs: no leg may stay ahead because it was the source.
    async fn equalize_pages(
        &self,
        unequal: DivergentPages,
        (offset, len): (u64, u64),
    ) -> Result<(), RecoveryInterrupted> {
        let all = self.in_sync.union(unequal.outdated);
        let sources = self.in_sync.difference(unequal.outdated).legs();
        let sources = sources.chain(self.in_sync.intersection(unequal.outdated).legs());
        let sources = sources.filter(|leg| *leg != unequal.winner);
        let sources: Vec<usize> = std::iter::once(unequal.winner).chain(sources).collect();
        for at in (offset..offset + len).step_by(PAGE_BYTES) {
            let one = (at, (PAGE_BYTES as u64).min(offset + len - at));
            let mut copied = Ok(());
            for &source in &sources {
                let from = self.connections_of(LegSet::of(source));
                let to = self.connections_of(all.difference(LegSet::of(source)));
                copied = copy::copy_chunk(self.state, &from, &to, one, HolePolicy::Clear).await;
                let damaged = |failure: &CopyError| failure.is_damage_of(source);
                if !copied.as_ref().is_err_and(damaged) {
                    break;
                }
            }
            copied.map_err(|failure| self.copy_failed(failure))?;
        }
        Ok(())
    }

    /// Compares all pages, because some leg's table is incomplete. Where legs differ, a leg
    /// with an incomplete table is ahead of a leg that lists nothing there.
    async fn compare_all(&self, unlisted: LegSet) -> Result<(), RecoveryInterrupted> {
        let mut sources = self.connections_of(unlisted);
        sources.extend(self.connections_of(self.in_sync.difference(unlisted)));
        let Some(first) = sources.first() else {
            return Err(RecoveryInterrupted);
        };
        let all = self.in_sync.union(self.syncing);
        let targets = self.connections_of(all.difference(LegSet::of(first.leg)));
        for (offset, len) in chunks(0, self.bytes()) {
            for range in differing_ranges(self.state, first, &targets, offset, len).await {
                let copied =
                    copy::copy_chunk(self.state, &sources, &targets, range, HolePolicy::Clear)
                        .await;
                self.count_recovered(range.1);
                copied.map_err(|failure| self.copy_failed(failure))?;
            }
        }
        Ok(())
    }
}

/// Groups pages by operation, in the order of each operation's first page.
fn group_by_operation(all: impl Iterator<Item = DivergentPages>) -> Vec<Vec<DivergentPages>> {
    let mut operations: Vec<Vec<DivergentPages>> = Vec::new();
    let mut places = BTreeMap::new();
    for unequal in all {
        let place = match unequal.newest {
            Some(newest) => *places
                .entry((newest, unequal.winner, unequal.outdated))
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

/// Whether a chunk differs between legs. An unreadable chunk counts as different; the copy then
/// finds the cause.
pub(super) async fn differs(
    state: &ControllerState,
    first: &LegConnection,
    others: &[LegConnection],
    offset: u64,
    len: u64,
) -> bool {
    !differing_ranges(state, first, others, offset, len)
        .await
        .is_empty()
}

/// The parts of a chunk that differ, in whole pages except at the end; see [`differs`].
pub(super) async fn differing_ranges(
    state: &ControllerState,
    first: &LegConnection,
    others: &[LegConnection],
    offset: u64,
    len: u64,
) -> Vec<(u64, u64)> {
    debug_assert!(len <= RESYNC_CHUNK_BYTES);
    let whole = vec![(offset, len)];
    let request = SliceRequest::Checksums {
        page: PageNo(offset / PAGE_BYTES as u64),
        count: len.div_ceil(PAGE_BYTES as u64) as u32,
    };
    let wanted = first.control.call(state, request.clone()).await;
    let Ok(SliceReply::Checksums(wanted)) = wanted else {
        return whole;
    };
    let mut unequal = vec![false; wanted.len()];
    for other in others {
        match other.control.call(state, request.clone()).await {
            Ok(SliceReply::Checksums(found)) if found.len() == wanted.len() => {
                let pairs = wanted.iter().zip(found).zip(&mut unequal);
                pairs.for_each(|((wanted, found), unequal)| *unequal |= *wanted != found);
            }
            _ => return whole,
        }
    }
    marked_runs(&unequal, offset, len)
}

/// Runs of marked pages within a chunk, as offset and length.
fn marked_runs(marked: &[bool], offset: u64, len: u64) -> Vec<(u64, u64)> {
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

/// The pages that must be copied according to the tables of the legs.
pub(super) fn divergent_pages(
    tables: &[Vec<InFlightOp>],
    in_sync: LegSet,
    syncing: LegSet,
) -> Vec<DivergentPages> {
    let mut edges: Vec<u64> = Vec::new();
    for entry in tables.iter().flatten() {
        edges.push(entry.page.0);
        edges.push(entry.page.0 + u64::from(entry.count));
    }
    edges.sort_unstable();
    edges.dedup();
    let mut sweeps: Vec<TableSweep> = tables.iter().map(|table| TableSweep::new(table)).collect();
    let mut all = Vec::new();
    for pair in edges.windows(2) {
        let (page, end) = (pair[0], pair[1]);
        let listed: Vec<Vec<(Epoch, u64)>> =
            sweeps.iter_mut().map(|s| s.operations_at(page)).collect();
        if listed.iter().all(Vec::is_empty) {
            continue;
        }
        // Among equal legs any wins. If no in-sync leg lists the page, any in-sync leg wins.
        let sources = match defect::is(Defect::RecoveredFromSyncing) && !syncing.is_empty() {
            true => syncing,
            false => in_sync,
        };
        let Some(winner) = sources.legs().max_by_key(|&leg| &listed[leg]) else {
            continue;
        };
        let behind = LegSet::from_fn(|leg| {
            leg != winner
                && (syncing.contains(leg) || in_sync.contains(leg) && listed[leg] != listed[winner])
        });
        if !behind.is_empty() {
            all.push(DivergentPages {
                page,
                count: end - page,
                newest: listed[winner].first().copied(),
                winner,
                outdated: behind,
            });
        }
    }
    all
}

/// Walks the pages of one table, and returns the operations on each.
struct TableSweep {
    /// By first page, the last one first.
    upcoming: Vec<InFlightOp>,
    current: Vec<InFlightOp>,
}

impl TableSweep {
    fn new(table: &[InFlightOp]) -> TableSweep {
        let mut later = table.to_vec();
        later.sort_by_key(|entry| std::cmp::Reverse(entry.page));
        TableSweep {
            upcoming: later,
            current: Vec::new(),
        }
    }

    /// The operations on this page, newest first.
    fn operations_at(&mut self, page: u64) -> Vec<(Epoch, u64)> {
        while let Some(entry) = self.upcoming.pop_if(|entry| entry.page.0 <= page) {
            self.current.push(entry);
        }
        self.current
            .retain(|entry| entry.page.0 + u64::from(entry.count) > page);
        let mut listed: Vec<_> = self.current.iter().map(|it| (it.epoch, it.op)).collect();
        listed.sort_unstable_by(|a, b| b.cmp(a));
        listed.dedup();
        listed.truncate(match defect::is(Defect::RecoveredByNewest) {
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
    fn differing_ranges_are_whole_pages_except_at_end() {
        let runs = |marked: &[bool], len| marked_runs(marked, 8192, len);
        assert_eq!(runs(&[false, false], 8192), []);
        assert_eq!(
            runs(&[true, true, false, true], 13_000),
            [(8192, 8192), (20_480, 712)]
        );
        assert_eq!(runs(&[true], 100), [(8192, 100)]);
    }

    proptest! {
        /// The sweep finds for each page the same as a look at every entry.
        #[test]
        fn newest_operation_wins(
            tables in prop::collection::vec(
                prop::collection::vec((0u64..20, 1u32..6, 1u32..3, 1u64..9), 0..6), 3),
            syncing in any::<bool>(),
        ) {
            let tables: Vec<Vec<InFlightOp>> = tables.iter().map(|table| {
                let entry = |&(page, count, epoch, op): &_| InFlightOp {
                    page: PageNo(page), count, epoch: Epoch(epoch), op,
                };
                table.iter().map(entry).collect()
            }).collect();
            let in_sync = LegSet::from_fn(|leg| leg < 2 || !syncing);
            let behind = LegSet::from_fn(|leg| leg == 2 && syncing);
            let found = divergent_pages(&tables, in_sync, behind);
            for page in 0..30u64 {
                let listed = |leg: usize| {
                    let on_page = tables[leg].iter()
                        .filter(|e| (e.page.0..e.page.0 + u64::from(e.count)).contains(&page));
                    let listed: BTreeSet<_> = on_page.map(|e| (e.epoch, e.op)).collect();
                    listed.into_iter().rev().collect::<Vec<_>>()
                };
                let best = in_sync.legs().map(listed).max().unwrap_or_default();
                let is_listed = (0..3).any(|leg| !listed(leg).is_empty());
                let expected = LegSet::from_fn(|leg| {
                    is_listed && (in_sync.contains(leg) && listed(leg) != best || behind.contains(leg))
                });
                let here: Vec<_> = found.iter()
                    .filter(|u| (u.page..u.page + u.count).contains(&page)).collect();
                prop_assert!(here.len() <= 1);
                // Without any entry in-sync all in-sync legs are equal.
                let got = here.first().map_or(LegSet::NONE, |u| u.outdated);
                prop_assert_eq!(got, expected, "page {}", page);
                if let Some(one) = here.first() {
                    prop_assert_eq!(listed(one.winner), best);
                }
            }
        }
    }
}
