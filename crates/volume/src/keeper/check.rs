//! Comparing the legs of a volume while it is in use.

use super::copy::{self, Holes, Party, chunks};
use super::follow;
use super::reform::lost_if_gone;
use super::settle::{differing, differs};
use super::state::{RangeGuard, State};
use crate::hub::guard;
use crate::limits::{DAMAGES_MAX, DIFFERENCES_MAX};
use crate::status::{CheckReport, Count, Damage, Difference};
use crate::view::{Gate, Mask};
use pagemesh_base::slice::SliceError;
use pagemesh_base::units::PAGE_BYTES;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex};

#[derive(Default)]
pub(crate) struct CheckProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub result: Option<Result<CheckReport, String>>,
}

/// A check that someone waits for.
pub(crate) struct CheckJob {
    /// Make the others like this leg where they differ.
    pub repair_from: Option<usize>,
    pub progress: Mutex<CheckProgress>,
    pub changed: Condvar,
}

impl CheckJob {
    fn tell(&self, change: impl FnOnce(&mut CheckProgress)) {
        change(&mut guard(&self.progress));
        self.changed.notify_all();
    }
}

pub(super) async fn check(state: Rc<State>, job: Arc<CheckJob>) {
    let columns = state.model().columns.len();
    let total = state
        .model()
        .columns
        .iter()
        .map(|column| column.bytes)
        .sum();
    job.tell(|progress| progress.total_bytes = total);
    let mut report = CheckReport::default();
    let mut result = Ok(());
    for column in 0..columns {
        result = check_column(&state, &job, column, &mut report).await;
        if result.is_err() {
            break;
        }
    }
    job.tell(|progress| progress.result = Some(result.map(|()| report)));
}

async fn check_column(
    state: &State,
    job: &CheckJob,
    column: usize,
    report: &mut CheckReport,
) -> Result<(), String> {
    let bytes = state.model().columns[column].bytes;
    for (offset, len) in chunks(0, bytes) {
        let _turn = lock_at_ease(state, column, offset, len).await?;
        let legs = state.model().columns[column].sources();
        let parties = copy::parties(state, column, legs).unwrap_or_default();
        let Some((first, others)) = parties.split_first() else {
            return Err(format!("column {column} has no in-sync leg to compare"));
        };
        if differs(state, first, others, offset, len).await {
            let found = report.pages_differing;
            let right = job.repair_from.map_or(Right::Unknown, Right::Leg);
            compare_chunk(state, column, (offset, len), right, report).await?;
            if job.repair_from.is_some() && report.pages_differing > found {
                // It got what the others have no more.
                follow::end(state, column, "a page that differed was repaired");
            }
        }
        if follow::follower(state, column).is_some() {
            if !follow::caught_up(state, column).await {
                return Err("the copy that follows is too far behind; try again later".into());
            }
            compare_follower(state, column, (offset, len), report).await?;
        }
        report.pages_compared += len.div_ceil(PAGE_BYTES as u64);
        job.tell(|progress| progress.done_bytes += len);
    }
    Ok(())
}

/// Locks a range of a column that serves: its legs have heard of the epoch that repairs
/// are stamped with.
async fn lock_at_ease(
    state: &State,
    column: usize,
    offset: u64,
    len: u64,
) -> Result<RangeGuard<'_>, String> {
    loop {
        let gate = || state.model().columns[column].gate;
        state
            .until(|| state.is_over() || gate() != Gate::Down)
            .await;
        let turn = state.lock(column, offset, len).await;
        match gate() {
            _ if state.is_over() => return Err("the volume is detached".into()),
            Gate::Open => return Ok(turn),
            Gate::Failed => return Err(format!("column {column} has no leg in reach")),
            Gate::Down => {}
        }
    }
}

/// Which copy is right where they differ.
#[derive(Clone, Copy)]
pub(super) enum Right {
    /// Nobody knows.
    Unknown,
    /// That of this leg.
    Leg(usize),
    /// Each; guests read the last, so it is that one if it can be read.
    Last,
}

/// Compares a chunk page by page, and repairs it: what is damaged from a leg
/// that has it right, what differs from the one that is `right`. Its range must
/// be locked.
pub(super) async fn compare_chunk(
    state: &State,
    column: usize,
    (offset, len): (u64, u64),
    right: Right,
    report: &mut CheckReport,
) -> Result<(), String> {
    let page = PAGE_BYTES as u64;
    for (at, len) in pages(offset, len) {
        let legs = state.model().columns[column].sources();
        let parties = copy::parties(state, column, legs).unwrap_or_default();
        let (damaged, differing) = compare_page(state, column, &parties, at).await?;
        report.pages_damaged += u64::from(!damaged.is_empty());
        if differing {
            note(state, column, at / page, report);
        }
        if damaged.is_empty() && !differing {
            continue;
        }
        let bad = if differing {
            let right = match right {
                Right::Unknown => None,
                Right::Leg(leg) => Some(leg),
                Right::Last => legs.without(damaged).legs().last(),
            };
            right.map(|leg| legs.without(Mask::of(leg)))
        } else {
            // Damage is repaired from whoever has the page right.
            Some(damaged).filter(|damaged| !damaged.is_empty())
        };
        let outcome = match bad {
            None => Err("the other copies differ, and which one is right is not known".into()),
            Some(bad) if bad == legs => Err("no copy is left to repair it from".into()),
            Some(bad) => repair(state, column, bad, (at, len)).await?,
        };
        note_repair(state, column, (at, damaged), outcome, report);
    }
    Ok(())
}

/// What came of a page that was damaged on these legs, or differed.
fn note_repair(
    state: &State,
    column: usize,
    (at, damaged): (u64, Mask),
    outcome: Result<(), String>,
    report: &mut CheckReport,
) {
    report.pages_repaired += u64::from(outcome.is_ok());
    if outcome.is_ok() {
        state.hub.tally.add(Count::PagesRepaired, 1);
    }
    if !damaged.is_empty() && report.damages.len() < DAMAGES_MAX {
        let keeps = &state.model().columns[column].legs;
        report.damages.push(Damage {
            offset: state.hub.view().1.volume_offset(column, at),
            bricks: damaged.legs().map(|leg| keeps[leg].leg.brick).collect(),
            repaired: outcome.is_ok(),
            cause: outcome.err().unwrap_or_default(),
        });
    }
}

/// Compares a chunk of the leg that follows with one that is in-sync, and copies what it
/// has wrong: nobody reads it, so what it should hold is known. Its range must be locked,
/// and the leg have all that was changed in it; so the leg stays what the volume was at
/// some moment.
pub(super) async fn compare_follower(
    state: &State,
    column: usize,
    (offset, len): (u64, u64),
    report: &mut CheckReport,
) -> Result<(), String> {
    let Some(follower) = follow::follower(state, column) else {
        return Ok(());
    };
    let legs = state.model().columns[column].sources();
    let sources = copy::parties(state, column, legs).unwrap_or_default();
    let Some(first) = sources.first() else {
        return Err(format!("column {column} has no in-sync leg to compare"));
    };
    let to = std::slice::from_ref(&follower);
    for (start, len) in differing(state, first, to, offset, len).await {
        for (at, len) in pages(start, len) {
            let both = [first.clone(), follower.clone()];
            let (damaged, differing) = compare_page(state, column, &both, at).await?;
            let is_wrong = differing || damaged.has(follower.leg);
            // A source that cannot be read was told of, and is no reason to write.
            if damaged.has(first.leg) || !is_wrong {
                continue;
            }
            if differing {
                let offset = state.hub.view().1.volume_offset(column, at);
                tracing::error!(volume = %state.name, offset, "a page of the copy that follows was not what was sent to it");
            }
            let outcome = rewrite(state, column, (&sources, to), (at, len), damaged).await?;
            report.pages_damaged += 1;
            let wrong = Mask::of(follower.leg);
            note_repair(state, column, (at, wrong), outcome, report);
        }
    }
    Ok(())
}

/// Rewrites a page on the legs that have it wrong. What cannot be repaired is
/// no reason to end: the inner error says why.
async fn repair(
    state: &State,
    column: usize,
    bad: Mask,
    place: (u64, u64),
) -> Result<Result<(), String>, String> {
    let legs = state.model().columns[column].sources();
    let parties = |legs| {
        let parties = copy::parties(state, column, legs).filter(|parties| !parties.is_empty());
        parties.ok_or("a leg was lost meanwhile")
    };
    let (from, to) = (parties(legs.without(bad))?, parties(bad)?);
    rewrite(state, column, (&from, &to), place, bad).await
}

async fn rewrite(
    state: &State,
    column: usize,
    (from, to): (&[Party], &[Party]),
    place: (u64, u64),
    bad: Mask,
) -> Result<Result<(), String>, String> {
    let mut repaired = copy::copy_chunk(state, from, to, place, Holes::Cleared).await;
    if matches!(&repaired, Err(failure) if failure.is_damage() && bad.has(failure.leg)) {
        // A hole, over a slot that does not say what it was.
        repaired = copy::copy_chunk(state, from, to, place, Holes::Written).await;
    }
    let Err(failure) = repaired else {
        return Ok(Ok(()));
    };
    lost_if_gone(state, column, failure.leg, &failure.error);
    state.hub.tally.add(Count::RepairsFailed, 1);
    match failure.is_damage() {
        true => {
            let keeps = &state.model().columns[column].legs;
            let brick = keeps[failure.leg].leg.brick;
            Ok(Err(format!(
                "the page table above it is damaged on brick {brick}; stop that brick and run \
                 `pagemesh pool check --repair` on its pool"
            )))
        }
        false => Err(format!("repairing failed: {}", failure.error)),
    }
}

/// The pages of a range; the last one may be cut short.
fn pages(offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let page = PAGE_BYTES as u64;
    let starts = (offset..offset + len).step_by(PAGE_BYTES);
    starts.map(move |at| (at, page.min(offset + len - at)))
}

/// Which legs cannot read a page, and whether the others differ.
pub(super) async fn compare_page(
    state: &State,
    column: usize,
    parties: &[Party],
    at: u64,
) -> Result<(Mask, bool), String> {
    let mut damaged = Mask::NONE;
    let mut seen = None;
    let mut differing = false;
    for party in parties {
        let request = pagemesh_base::slice::SliceRequest::Checksums {
            page: pagemesh_base::ids::PageNo(at / PAGE_BYTES as u64),
            count: 1,
        };
        match party.control.ask(state, request).await {
            Ok(sum) => differing |= *seen.get_or_insert(sum.clone()) != sum,
            Err(SliceError::Damaged { .. }) => damaged.add(party.leg),
            Err(error) => {
                lost_if_gone(state, column, party.leg, &error);
                return Err(error.to_string());
            }
        }
    }
    Ok((damaged, differing))
}

fn note(state: &State, column: usize, page: u64, report: &mut CheckReport) {
    report.pages_differing += 1;
    let (segment, number) = {
        let model = state.model();
        (model.columns[column].segment, model.columns[column].number)
    };
    if let Some(last) = report.differences.last_mut()
        && (last.segment, last.column, last.page + last.count) == (segment, number, page)
    {
        last.count += 1;
    } else if report.differences.len() < DIFFERENCES_MAX {
        report.differences.push(Difference {
            segment,
            column: number,
            page,
            count: 1,
        });
    }
}
