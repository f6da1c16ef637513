//! The check: compares the legs of a volume while it is in use.

use super::compare::{compare_page, differing_ranges, differs};
use super::copy::{self, CopyKind, LegConnection, chunks};
use super::leg_errors::lose_leg_if_gone;
use super::replication_sender;
use super::state::{ControllerState, RangeGuard};
use crate::limits::{DAMAGES_MAX, DIFFERENCES_MAX};
use crate::snapshot::{ColumnGate, LegSet};
use crate::status::{CheckReport, Count, Damage, Difference};
use pagemesh_base::layout::BrickId;
use pagemesh_base::poison;
use pagemesh_base::units::PAGE_BYTES;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex};

#[derive(Default)]
pub struct CheckProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub result: Option<Result<CheckReport, String>>,
}

/// A check, shared with the caller that waits for it.
pub struct CheckJob {
    /// The leg that is copied to the others where they differ.
    pub repair_from: Option<usize>,
    pub progress: Mutex<CheckProgress>,
    pub changed: Condvar,
}

impl CheckJob {
    fn update(&self, change: impl FnOnce(&mut CheckProgress)) {
        change(&mut poison::lock(&self.progress));
        self.changed.notify_all();
    }
}

pub(super) async fn check(state: Rc<ControllerState>, job: Arc<CheckJob>) {
    let columns = state.model().columns.len();
    let total = state
        .model()
        .columns
        .iter()
        .map(|column| column.bytes)
        .sum();
    job.update(|progress| progress.total_bytes = total);
    let mut report = CheckReport::default();
    let mut result = Ok(());
    for column in 0..columns {
        result = check_column(&state, &job, column, &mut report).await;
        if result.is_err() {
            break;
        }
    }
    job.update(|progress| progress.result = Some(result.map(|()| report)));
}

async fn check_column(
    state: &ControllerState,
    job: &CheckJob,
    column: usize,
    report: &mut CheckReport,
) -> Result<(), String> {
    let bytes = state.model().columns[column].bytes;
    for (offset, len) in chunks(0, bytes) {
        let _turn = lock_when_serving(state, column, offset, len).await?;
        let legs = state.model().columns[column].sources();
        let parties = copy::leg_connections(state, column, legs).unwrap_or_default();
        let Some((first, others)) = parties.split_first() else {
            return Err(format!("column {column} has no in-sync leg to compare"));
        };
        if differs(state, first, others, offset, len).await {
            let found = report.pages_differing;
            let right = job
                .repair_from
                .map_or(RepairSource::Unknown, RepairSource::Leg);
            compare_chunk(state, column, (offset, len), right, report).await?;
            if job.repair_from.is_some() && report.pages_differing > found {
                // The replica got data that the legs do not hold any more.
                replication_sender::end_replication(
                    state,
                    column,
                    "a page that differed was repaired",
                );
            }
        }
        if replication_sender::replica(state, column).is_some() {
            if !replication_sender::wait_until_caught_up(state, column).await {
                return Err("the asynchronous replica is too far behind; try again later".into());
            }
            compare_replica(state, column, (offset, len), report).await?;
        }
        report.pages_compared += len.div_ceil(PAGE_BYTES as u64);
        job.update(|progress| progress.done_bytes += len);
    }
    Ok(())
}

/// Locks a range of a column once the column serves. By then its legs have heard of the epoch
/// in the stamps of repairs.
async fn lock_when_serving(
    state: &ControllerState,
    column: usize,
    offset: u64,
    len: u64,
) -> Result<RangeGuard<'_>, String> {
    loop {
        let gate = || state.model().columns[column].gate;
        state
            .wait_until(|| state.is_closing() || gate() != ColumnGate::Down)
            .await;
        let turn = state.lock(column, offset, len).await;
        match gate() {
            _ if state.is_closing() => return Err("the volume is detached".into()),
            ColumnGate::Open => return Ok(turn),
            ColumnGate::Failed => return Err(format!("column {column} has no leg in reach")),
            ColumnGate::Down => {}
        }
    }
}

/// The leg with the right data where legs differ.
#[derive(Clone, Copy)]
pub(super) enum RepairSource {
    /// No leg is known to be right.
    Unknown,
    /// This leg is right.
    Leg(usize),
    /// Each leg is right. Direct clients read the last one, so the last readable leg is the
    /// source.
    LastReadable,
}

/// Compares a chunk page by page, and repairs it. A damaged page is copied from a leg that can
/// read it, a differing page from the leg that `right` selects. The caller holds the range
/// lock.
pub(super) async fn compare_chunk(
    state: &ControllerState,
    column: usize,
    (offset, len): (u64, u64),
    right: RepairSource,
    report: &mut CheckReport,
) -> Result<(), String> {
    let page = PAGE_BYTES as u64;
    for (at, len) in page_ranges(offset, len) {
        let legs = state.model().columns[column].sources();
        let parties = copy::leg_connections(state, column, legs).unwrap_or_default();
        let (damaged, differing) = compare_page(state, column, &parties, at).await?;
        report.pages_damaged += u64::from(!damaged.is_empty());
        if differing {
            record_difference(state, column, at / page, report);
        }
        if damaged.is_empty() && !differing {
            continue;
        }
        let bad = if differing {
            let right = match right {
                RepairSource::Unknown => None,
                RepairSource::Leg(leg) => Some(leg),
                RepairSource::LastReadable => legs.difference(damaged).legs().last(),
            };
            right.map(|leg| legs.difference(LegSet::of(leg)))
        } else {
            // Damage is repaired from any leg that can read the page.
            Some(damaged).filter(|damaged| !damaged.is_empty())
        };
        let outcome = match bad {
            None => Err("the other copies differ, and which one is right is not known".into()),
            Some(bad) if bad == legs => Err("no copy is left to repair it from".into()),
            Some(bad) => repair_page(state, column, bad, (at, len)).await?,
        };
        record_repair(state, column, (at, damaged), outcome, report);
    }
    Ok(())
}

/// Records the outcome for a page that was damaged on these legs, or differed.
fn record_repair(
    state: &ControllerState,
    column: usize,
    (at, damaged): (u64, LegSet),
    outcome: Result<(), String>,
    report: &mut CheckReport,
) {
    report.pages_repaired += u64::from(outcome.is_ok());
    if outcome.is_ok() {
        state.shared.counters.add(Count::PagesRepaired, 1);
    }
    if !damaged.is_empty() && report.damages.len() < DAMAGES_MAX {
        let model = state.model();
        let keeps = &model.columns[column].legs;
        let bricks: Vec<BrickId> = damaged.legs().map(|leg| keeps[leg].leg.brick).collect();
        let names = bricks.iter().map(|id| model.names.label(*id).to_string());
        report.damages.push(Damage {
            offset: state.shared.snapshot().1.volume_offset(column, at),
            brick_names: names.collect(),
            bricks,
            repaired: outcome.is_ok(),
            cause: outcome.err().unwrap_or_default(),
        });
    }
}

/// Compares a chunk of the asynchronous replica with an in-sync leg, and rewrites the replica's
/// wrong pages. No read is served from the replica, so its right contents are known. The caller
/// holds the range lock, and the replica has all changes of the range. So the replica stays a
/// state that the volume was in.
pub(super) async fn compare_replica(
    state: &ControllerState,
    column: usize,
    (offset, len): (u64, u64),
    report: &mut CheckReport,
) -> Result<(), String> {
    let Some(follower) = replication_sender::replica(state, column) else {
        return Ok(());
    };
    let legs = state.model().columns[column].sources();
    let sources = copy::leg_connections(state, column, legs).unwrap_or_default();
    let Some(first) = sources.first() else {
        return Err(format!("column {column} has no in-sync leg to compare"));
    };
    let to = std::slice::from_ref(&follower);
    for (start, len) in differing_ranges(state, first, to, offset, len).await {
        for (at, len) in page_ranges(start, len) {
            let both = [first.clone(), follower.clone()];
            let (damaged, differing) = compare_page(state, column, &both, at).await?;
            let is_wrong = differing || damaged.contains(follower.leg);
            // A source that cannot be read was reported already, and is no reason to write.
            if damaged.contains(first.leg) || !is_wrong {
                continue;
            }
            if differing {
                let offset = state.shared.snapshot().1.volume_offset(column, at);
                tracing::error!(volume = %state.name, offset, "a page of the asynchronous replica differed from the data that was sent to it");
            }
            let outcome = rewrite_page(state, column, (&sources, to), (at, len)).await?;
            report.pages_damaged += 1;
            let wrong = LegSet::of(follower.leg);
            record_repair(state, column, (at, wrong), outcome, report);
        }
    }
    Ok(())
}

/// Rewrites a page on the legs in `bad`. A failed repair does not end the check: the inner
/// error has the cause.
async fn repair_page(
    state: &ControllerState,
    column: usize,
    bad: LegSet,
    place: (u64, u64),
) -> Result<Result<(), String>, String> {
    let legs = state.model().columns[column].sources();
    let parties = |legs| {
        let parties =
            copy::leg_connections(state, column, legs).filter(|parties| !parties.is_empty());
        parties.ok_or("a leg was lost meanwhile")
    };
    let (from, to) = (parties(legs.difference(bad))?, parties(bad)?);
    rewrite_page(state, column, (&from, &to), place).await
}

async fn rewrite_page(
    state: &ControllerState,
    column: usize,
    (from, to): (&[LegConnection], &[LegConnection]),
    place: (u64, u64),
) -> Result<Result<(), String>, String> {
    // With the same birth, the damaged page becomes a version of no snapshot.
    let mut repaired = copy::copy_chunk(state, from, to, place, CopyKind::KeepBirths).await;
    // A stale leg must find the page on the repaired leg, too, if the page was in flight at its loss.
    if repaired.is_ok() && state.model().columns[column].has_stale() {
        repaired = copy::copy_chunk(state, from, to, place, CopyKind::BornNow).await;
    }
    let Err(failure) = repaired else {
        return Ok(Ok(()));
    };
    lose_leg_if_gone(state, column, failure.leg, &failure.error);
    state.shared.counters.add(Count::RepairsFailed, 1);
    match failure.is_damage() {
        true => {
            let model = state.model();
            let brick = model.columns[column].legs[failure.leg].leg.brick;
            let brick = model.names.label(brick);
            Ok(Err(format!(
                "the page table above it is damaged on brick {brick}; stop that brick and run \
                 `pagemesh pool check --repair` on its pool"
            )))
        }
        false => Err(format!("repairing failed: {}", failure.error)),
    }
}

/// The pages of a range; the last one may be cut short.
fn page_ranges(offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let page = PAGE_BYTES as u64;
    let starts = (offset..offset + len).step_by(PAGE_BYTES);
    starts.map(move |at| (at, page.min(offset + len - at)))
}

fn record_difference(state: &ControllerState, column: usize, page: u64, report: &mut CheckReport) {
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
