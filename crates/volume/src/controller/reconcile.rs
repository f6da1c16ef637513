//! Reconciles an operation that a dead direct client left torn. Each brick rolls the operation
//! forward or drops it, so the legs may differ. A slot that the client had claimed in the ring
//! and not filled gets the final data.
//!
//! The caller keeps requests through the kernel from reading or changing the pages meanwhile.
//! This module blocks other direct clients of the file. It takes no range lock: a holder of one
//! may be waiting for the reconciliation.

use super::check::{RepairSource, compare_chunk};
use super::compare::compare_page;
use super::copy::{self, CopyError, LegConnection, leg_connections};
use super::leg_errors::lose_leg_if_gone;
use super::model::LegEntry;
use super::replication_sender;
use super::state::ControllerState;
use crate::direct_access::{DirectAccess, FileRange, TornOp};
use crate::limits::{RECONCILE_RETRY, RECONCILE_WARN_TRIES_MIN};
use crate::replication::ring::{RingEntry, UnfilledClaim, record_len, slots_of};
use crate::snapshot::{ColumnGate, LegSet};
use crate::status::CheckReport;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::slice::{PageRun, SliceReply, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::mpsc::Sender;

/// The only column of a volume with direct clients.
const DIRECT_COLUMN: usize = 0;
/// The reason for which replication ends.
const REPAIRED_CAUSE: &str = "a page that differed was repaired";

/// Makes the legs equal in the range of the torn operation, with the data of the leg that
/// direct clients read. The row stays active until that is done.
pub(super) async fn reconcile(
    state: Rc<ControllerState>,
    row: usize,
    wound: TornOp,
    done: Sender<()>,
) {
    state.reconciles.set(state.reconciles.get() + 1);
    state.reconciling.set(state.reconciling.get() + 1);
    let guests = state.shared.direct_access.get();
    if let Some(guests) = guests {
        guests.record_dead_row(row);
    }
    // The block lasts until the end of all tries: changes of a failed try may complete late.
    let _out = match defect::is(Defect::ReconciledDuringClientWrites) {
        true => None,
        false => Some(
            state
                .block_live_direct_clients(|file| file == wound.file())
                .await,
        ),
    };
    let mut tries = 0u64;
    loop {
        let gate = || {
            state
                .model()
                .columns
                .get(DIRECT_COLUMN)
                .map(|column| column.gate)
        };
        state
            .wait_until(|| state.is_closing() || gate() == Some(ColumnGate::Open))
            .await;
        let healed = match state.is_closing() {
            true => Ok(()),
            false => try_reconcile(&state, row, &wound).await,
        };
        if healed.is_ok() {
            if let Some(guests) = guests {
                guests.clear_dead_row(row);
            }
            state.reconciling.set(state.reconciling.get() - 1);
            // The caller may have stopped waiting.
            let _ = done.send(());
            return;
        }
        tries += 1;
        if let Err(cause) = healed
            && tries >= RECONCILE_WARN_TRIES_MIN
            && tries.is_power_of_two()
        {
            let volume = &state.name;
            tracing::warn!(%volume, row, tries, cause, "a torn direct operation is not reconciled yet");
        }
        state.sleep(RECONCILE_RETRY).await;
    }
}

/// Tries once. The error is the reason for another try.
async fn try_reconcile(
    state: &ControllerState,
    row: usize,
    wound: &TornOp,
) -> Result<(), &'static str> {
    let epoch = state.model().epoch();
    // A lost leg is in-sync until the loss is recorded, and may come back unchanged.
    let Some(written) = written_legs(state) else {
        return Err("a leg is lost");
    };
    if !raise_barrier(state, &written).await {
        return Err("a brick has not retired its session");
    }
    let mut report = CheckReport::default();
    let compared = match wound {
        _ if defect::is(Defect::NotReconciled) => Ok(()),
        TornOp::PerPage(place) => {
            equalize_pages(state, (place.offset, place.len), &mut report).await
        }
        TornOp::Atomic { runs, .. } => equalize_atomically(state, runs, &mut report).await,
    };
    if let Err(cause) = &compared {
        tracing::warn!(volume = %state.name, %cause, "pages of a torn operation differ between legs");
    }
    let is_alike = report.pages_repaired >= report.pages_differing;
    let is_same = |all: Vec<LegConnection>| {
        let mut both = all.iter().zip(&written);
        let is_one = |(one, other): (&LegConnection, &LegConnection)| {
            Rc::ptr_eq(&one.control, &other.control)
        };
        all.len() == written.len() && both.all(is_one)
    };
    let are_all_here = self::written_legs(state).is_some_and(is_same);
    if compared.is_err() || !is_alike {
        return Err("its pages differ, and cannot be made equal");
    }
    if !are_all_here || state.model().epoch() != epoch {
        return Err("legs came or went meanwhile");
    }
    let differed = report.pages_differing > 0;
    match (state.shared.direct_access.get(), wound) {
        (Some(guests), TornOp::PerPage(place)) => {
            match resolve_claim(state, guests, (row, *place), differed).await {
                true => Ok(()),
                false => Err("its claim in the replication ring is not filled yet"),
            }
        }
        (Some(_), TornOp::Atomic { .. }) => {
            // An atomic operation claims no slots.
            if differed {
                replication_sender::end_replication(state, DIRECT_COLUMN, REPAIRED_CAUSE);
            }
            Ok(())
        }
        (None, _) => Ok(()),
    }
}

/// Makes the pages of a range equal, page by page.
async fn equalize_pages(
    state: &ControllerState,
    (offset, len): (u64, u64),
    report: &mut CheckReport,
) -> Result<(), String> {
    let page = PAGE_BYTES as u64;
    let start = offset / page * page;
    // The range comes from a dead client's row, and may be anything.
    let end = (offset + len).next_multiple_of(page).min(bytes(state));
    let len = end.saturating_sub(start);
    let (start, len) = match defect::is(Defect::ReconciledInPart) {
        true => (start + page.min(len), len.saturating_sub(page)),
        false => (start, len),
    };
    compare_chunk(
        state,
        DIRECT_COLUMN,
        (start, len),
        RepairSource::LastReadable,
        report,
    )
    .await
}

/// Makes all pages equal, or none, from the last leg that can read all of them. The pages are
/// copied one by one if no leg can read all of them, or if a slot on a target is damaged.
async fn equalize_atomically(
    state: &ControllerState,
    runs: &[PageRun],
    report: &mut CheckReport,
) -> Result<(), String> {
    let page = PAGE_BYTES as u64;
    let end = bytes(state) / page;
    let pages = runs
        .iter()
        .flat_map(|run| run.page.0..run.page.0 + run.count);
    let within = pages.filter(|&page| page < end);
    // The runs come from a dead client's row, and may be anything.
    let offsets: BTreeSet<u64> = within.map(|at| at * page).collect();
    let offsets = Vec::from_iter(offsets);
    let legs = state.model().columns[DIRECT_COLUMN].sources();
    let all = leg_connections(state, DIRECT_COLUMN, legs).unwrap_or_default();
    if all.is_empty() {
        return Err("no leg is in-sync".into());
    }
    let (mut differing, mut damaged) = (0, LegSet::default());
    for &offset in &offsets {
        let (found, differs) = compare_page(state, DIRECT_COLUMN, &all, offset).await?;
        differing += u64::from(differs);
        damaged = damaged.union(found);
    }
    if differing == 0 && damaged.is_empty() {
        return Ok(());
    }
    // These pages are repaired by one of the copies below; the copies page by page add their
    // own counts.
    report.pages_differing += differing;
    report.pages_repaired += differing;
    if let Some(from) = all.iter().rposition(|party| !damaged.contains(party.leg)) {
        let mut others = all;
        let from = others.remove(from);
        match copy::copy_operation(state, &[from], others, &offsets).await {
            Ok(true) => return Ok(()),
            // A page became unreadable meanwhile.
            Ok(false) => {}
            Err(failure) if failure.is_damage() => {}
            Err(CopyError { leg, error }) => {
                lose_leg_if_gone(state, DIRECT_COLUMN, leg, &error);
                return Err(error.to_string());
            }
        }
    }
    for offset in offsets {
        equalize_pages(state, (offset, page), report).await?;
    }
    Ok(())
}

fn bytes(state: &ControllerState) -> u64 {
    state.model().columns[DIRECT_COLUMN].bytes
}

/// Resolves the claim of a dead direct client in the ring. False: it has to be tried again.
async fn resolve_claim(
    state: &ControllerState,
    guests: &DirectAccess,
    (row, place): (usize, FileRange),
    differed: bool,
) -> bool {
    let ring = guests.segment.ring();
    match ring.unfilled_claim_of(guests.segment.row(row)) {
        UnfilledClaim::Absent if differed => {
            // The replica got data that the legs do not hold any more, or got no data.
            replication_sender::end_replication(state, DIRECT_COLUMN, REPAIRED_CAUSE);
            true
        }
        UnfilledClaim::Absent => true,
        UnfilledClaim::Unknown => {
            ring.mark_incomplete();
            replication_sender::end_replication(
                state,
                DIRECT_COLUMN,
                "a direct client died before it recorded its claim",
            );
            ring.fill_unowned_claims(&guests.segment, |row| guests.is_dead_row(row))
        }
        UnfilledClaim::FromSlot(first) => {
            let Some(left) = read_claimed_bytes(state, first, place).await else {
                return false;
            };
            let is_known = record_len(place.offset, place.len) == place.len && place.len > 0;
            if !is_known || ring.has_later_overlap(&guests.segment, &left) {
                ring.mark_incomplete();
                replication_sender::end_replication(
                    state,
                    DIRECT_COLUMN,
                    "a direct client died, and others wrote over its pages",
                );
            }
            // The controller polls the sender's task after this.
            let _ = ring.fill(first, left.offset, &left.data, left.epoch);
            state.record_activity();
            true
        }
    }
}

/// Reads the data of the claimed range from a leg, as the entry that the dead client would have
/// filled.
async fn read_claimed_bytes(
    state: &ControllerState,
    first: u64,
    place: FileRange,
) -> Option<RingEntry> {
    let len = record_len(place.offset, place.len);
    let (leg, control) = {
        let model = state.model();
        let column = &model.columns[DIRECT_COLUMN];
        let leg = column.sources().legs().next()?;
        (leg, column.legs[leg].control.clone()?)
    };
    let (offset, wanted) = (place.offset, len as u32);
    let request = SliceRequest::Read {
        offset,
        len: wanted,
    };
    match control.call(state, request).await {
        Ok(SliceReply::Data(data)) if data.len() as u64 == len => Some(RingEntry {
            slot: first,
            slot_count: slots_of(offset, len).max(1),
            offset,
            data: data.into(),
            // A cut during which a client died fails, so each cut is before or after all of the change.
            epoch: state.shared.newest_stamp(state.model().epoch()),
        }),
        Ok(_) => None,
        Err(error) => {
            lose_leg_if_gone(state, DIRECT_COLUMN, leg, &error);
            None
        }
    }
}

/// The connections of all written legs; none if one is not in reach.
fn written_legs(state: &ControllerState) -> Option<Vec<LegConnection>> {
    let is_written = {
        let model = state.model();
        let legs = &model.columns[DIRECT_COLUMN].legs;
        LegSet::from_fn(|leg| legs.get(leg).is_some_and(LegEntry::is_written))
    };
    leg_connections(state, DIRECT_COLUMN, is_written)
}

/// Raises the barrier. After it each brick has retired the sessions of clients that died
/// before.
async fn raise_barrier(state: &ControllerState, written: &[LegConnection]) -> bool {
    let (epoch, barrier) = {
        let model = state.model();
        (model.epoch(), model.barrier(DIRECT_COLUMN))
    };
    // The epoch may be so new that no leg has heard of it.
    state.shared.hold_epoch(epoch);
    let asked = written
        .iter()
        .map(|party| (party, party.control.submit(state, barrier.clone())));
    let asked: Vec<_> = asked.collect();
    let mut all = true;
    for (party, tag) in asked {
        if let Err(error) = party.control.answer(state, tag).await {
            lose_leg_if_gone(state, DIRECT_COLUMN, party.leg, &error);
            all = false;
        }
    }
    all
}
