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
//!
//! The copied pages are born now on all written legs, then also on those that have them already. So births
//! are equal afterwards, and a stale leg gets the pages from each leg. A leg that is too full or damaged for this
//! keeps its births.
//!
//! Each leg lists its operations in flight. If they are too many to list, all pages are compared
//! ([`ColumnRecovery::compare_all`]). A flush of the legs follows. Then they forget their lists,
//! unless a stale leg will need them.

mod divergence;

use crate::controller::compare::differing_ranges;
use crate::controller::copy::{self, CopyError, CopyKind, LegConnection, chunks, leg_connections};
use crate::controller::leg_errors::handle_leg_error;
use crate::controller::replication_sender;
use crate::controller::state::{ControllerState, DirectAccessGuard};
use crate::snapshot::{ColumnGate, LegSet};
use crate::status::Count;
use divergence::{DivergentPages, divergent_pages, group_by_operation};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{InFlightOp, SliceError, SliceReply, SliceRequest};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use std::cell::Cell;

/// Writes in flight that a detach makes equal, over all legs of a column.
const FORGOTTEN_MAX: usize = 1024;

/// Recovery ended early, because a leg was lost or the client was fenced.
pub(super) struct RecoveryInterrupted;

pub(super) async fn recover_in_flight(
    state: &ControllerState,
    column: usize,
) -> Result<(), RecoveryInterrupted> {
    // Torn operations of dead direct clients are reconciled once the column serves reads.
    let _guests = state.block_live_direct_clients(|_| true).await;
    // The replica was not sent the outcome of unacknowledged changes.
    replication_sender::end_replication(state, column, "the in-sync copies are being made equal");
    let settling = ColumnRecovery::of_written_legs(state, column).ok_or(RecoveryInterrupted)?;
    let stale = state.model().columns[column].has_stale();
    let tables = settling.in_flight_tables().await?;
    if settling.connections.len() > 1 && !defect::is(Defect::NotRecovered) {
        settling.equalize_all(tables).await?;
    }
    // A stale leg may lack the operations in flight here. They are older than its loss, so the
    // births of their pages do not tell. The tables stay for its return.
    settling.finish(!stale).await?;
    let mut model = state.model_mut();
    let keep = &mut model.columns[column];
    if !keep.has_source() {
        return Err(RecoveryInterrupted);
    }
    keep.needs_recovery = false;
    keep.gate = ColumnGate::Open;
    keep.down_since = None;
    Ok(())
}

/// Lets the legs of a column forget writes that they list as in flight, after all channels have ended. Otherwise the manager
/// could not tell that the legs are equal, and would refuse a snapshot of the detached volume. A column with legs that are not
/// in-sync keeps its lists: the next client needs them.
pub(super) async fn forget_in_flight(
    state: &ControllerState,
    column: usize,
) -> Result<(), RecoveryInterrupted> {
    let is_whole = {
        let model = state.model();
        let column = &model.columns[column];
        let mut legs = column.legs.iter();
        column.gate == ColumnGate::Open && legs.all(|it| it.leg.state == LegState::InSync)
    };
    let direct_access = state.shared.direct_access.get();
    let _blocked = DirectAccessGuard::new(direct_access);
    if !is_whole || direct_access.is_some_and(|it| !it.segment.is_idle()) {
        return Ok(());
    }
    let settling = ColumnRecovery::of_written_legs(state, column).ok_or(RecoveryInterrupted)?;
    let tables = settling.in_flight_tables().await?;
    let listed = tables.iter().flatten().map(Vec::len).sum::<usize>();
    // A long comparison is left to the next client.
    if tables.iter().any(Option::is_none) || !(1..=FORGOTTEN_MAX).contains(&listed) {
        return Ok(());
    }
    if settling.connections.len() > 1 {
        settling.equalize_all(tables).await?;
    }
    settling.finish(true).await
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
    /// In-sync legs that could not give data a new birth.
    unable: Cell<LegSet>,
}

impl<'a> ColumnRecovery<'a> {
    /// A recovery of the written legs. None if one is not connected.
    fn of_written_legs(state: &'a ControllerState, column: usize) -> Option<ColumnRecovery<'a>> {
        let model = state.model();
        let legs = |wanted| {
            LegSet::from_fn(|leg| {
                let mut keep = model.columns[column].legs.get(leg).into_iter();
                keep.any(|keep| keep.leg.state == wanted)
            })
        };
        let (in_sync, syncing) = (legs(LegState::InSync), legs(LegState::Syncing));
        drop(model);
        Some(ColumnRecovery {
            state,
            column,
            connections: leg_connections(state, column, in_sync.union(syncing))?,
            in_sync,
            syncing,
            unable: Cell::new(LegSet::NONE),
        })
    }

    /// The writes in flight that each leg lists; none: too many to list.
    async fn in_flight_tables(&self) -> Result<Vec<Option<Vec<InFlightOp>>>, RecoveryInterrupted> {
        let mut tables: Vec<Option<Vec<InFlightOp>>> = vec![Some(vec![]); 3];
        for party in &self.connections {
            let answer = party.control.call(self.state, SliceRequest::InFlight).await;
            match answer {
                Ok(SliceReply::InFlight(table)) => tables[party.leg] = table,
                other => return Err(self.interrupted(party.leg, other.err())),
            }
        }
        Ok(tables)
    }

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
            let all = self.in_sync.union(behind);
            let offsets = operation.iter().flat_map(|it| it.page..it.page + it.count);
            let offsets: Vec<u64> = offsets.map(|page| page * PAGE_BYTES as u64).collect();
            for sources in sources {
                if self.copy_operation(&sources, all, &offsets).await? {
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
        self.state.shared.counters.add(Count::BytesRecovered, bytes);
    }

    /// Copies an operation to all legs that are not among these sources, and lets it be born anew on the
    /// sources. False if no source can read some page.
    async fn copy_operation(
        &self,
        sources: &[usize],
        all: LegSet,
        offsets: &[u64],
    ) -> Result<bool, RecoveryInterrupted> {
        let mut targets = all;
        sources.iter().for_each(|leg| targets.remove(*leg));
        let from = sources.iter().map(|&leg| LegSet::of(leg));
        let from: Vec<_> = from.flat_map(|leg| self.connections_of(leg)).collect();
        let to = self.connections_of(targets);
        let copied = copy::copy_operation(self.state, &from, to, offsets).await;
        if !copied.map_err(|failure| self.copy_failed(failure))? {
            return Ok(false);
        }
        for holder in self.holders(targets) {
            let to = vec![holder.clone()];
            let born = copy::copy_operation(self.state, &from, to, offsets).await;
            let born = self.unless_unable(&holder, born.map(drop));
            born.map_err(|failure| self.copy_failed(failure))?;
        }
        Ok(true)
    }

    /// Copies a range to legs, and lets it be born anew on the in-sync legs that hold it.
    async fn copy_chunk(
        &self,
        from: &[LegConnection],
        targets: LegSet,
        range: (u64, u64),
    ) -> Result<(), CopyError> {
        let kind = CopyKind::BornNow;
        let to = self.connections_of(targets);
        copy::copy_chunk(self.state, from, &to, range, kind).await?;
        for holder in self.holders(targets) {
            let to = std::slice::from_ref(&holder);
            let born = copy::copy_chunk(self.state, from, to, range, kind).await;
            self.unless_unable(&holder, born)?;
        }
        Ok(())
    }

    /// The in-sync legs that are no targets, but for those that could not give data a new birth.
    fn holders(&self, targets: LegSet) -> Vec<LegConnection> {
        let skipped = targets.union(self.unable.get());
        match defect::is(Defect::RecoveredBirthsDiffer) {
            true => vec![],
            false => self.connections_of(self.in_sync.difference(skipped)),
        }
    }

    /// Ignores that a leg is too full or damaged for a new birth of data that it has.
    fn unless_unable(
        &self,
        holder: &LegConnection,
        born: Result<(), CopyError>,
    ) -> Result<(), CopyError> {
        match born {
            Err(failure)
                if failure.leg == holder.leg
                    && (failure.error == SliceError::NoSpace || failure.is_damage()) =>
            {
                let unable = self.unable.get();
                self.unable.set(unable.union(LegSet::of(holder.leg)));
                Ok(())
            }
            other => other,
        }
    }

    async fn equalize_run(&self, unequal: DivergentPages) -> Result<(), RecoveryInterrupted> {
        let page = PAGE_BYTES as u64;
        let (start, stop) = (unequal.page * page, (unequal.page + unequal.count) * page);
        let winner = self.connections_of(LegSet::of(unequal.winner));
        for range in chunks(start, stop.min(self.bytes())) {
            let copied = self.copy_chunk(&winner, unequal.outdated, range).await;
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
                let targets = all.difference(LegSet::of(source));
                copied = self.copy_chunk(&from, targets, one).await;
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
        let targets = all.difference(LegSet::of(first.leg));
        let others = self.connections_of(targets);
        for (offset, len) in chunks(0, self.bytes()) {
            for range in differing_ranges(self.state, first, &others, offset, len).await {
                let copied = self.copy_chunk(&sources, targets, range).await;
                self.count_recovered(range.1);
                copied.map_err(|failure| self.copy_failed(failure))?;
            }
        }
        Ok(())
    }
}
