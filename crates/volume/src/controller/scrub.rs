//! The scrub: reads every copy of the volume from time to time, slowly, to find damage while
//! another copy can still repair it.
//!
//! A pass walks all columns by chunks. The bricks sum the copies of a chunk locally, without
//! any lock. Only if a sum differs or fails, the range is locked and each page is compared, as
//! a check does. Nothing about passes is stored on media: [`start_of`] has the reason.
//!
//! Invariants: a page that is being written is never reported. No repair overwrites newer data.
//! A batch never starts sooner than the pace allows.

use super::check::{RepairSource, compare_chunk, compare_replica};
use super::compare::differs;
use super::copy::{self, LegConnection};
use super::replication_sender;
use super::scrub_schedule::ScrubProgress;
use super::state::ControllerState;
use crate::limits::{
    DAMAGES_MAX, RESYNC_CHUNK_BYTES, SCRUB_BATCH_BYTES, SCRUB_BUSY_SHARE, SCRUB_REPORT_EVERY,
    SCRUB_RETRY, SCRUB_TRIES_MAX,
};
use crate::snapshot::ColumnGate;
use crate::status::{CheckReport, Count, Damage};
use pagemesh_base::units::PAGE_BYTES;
use std::rc::Rc;
use std::time::Duration;

/// Starts passes on schedule, until the volume is detached.
pub(super) async fn run_scrubs(state: Rc<ControllerState>) {
    loop {
        state
            .wait_until(|| state.is_closing() || is_due(&state))
            .await;
        if state.is_closing() {
            return;
        }
        begin_pass(&state);
        run_pass(&state).await;
    }
}

fn is_due(state: &ControllerState) -> bool {
    let Some(at) = state.scrub().next_at else {
        return false;
    };
    state.wake_at(at);
    at <= state.now()
}

fn begin_pass(state: &ControllerState) {
    let (total, epoch, columns) = {
        let model = state.model();
        let total = model.columns.iter().map(|column| column.bytes).sum();
        (total, model.epoch().0, model.columns.len())
    };
    let now = state.now();
    let start = start_of(epoch, total);
    let within = chunk_at(state, columns, start).map_or(0, |(_, within)| within);
    let mut scrub = state.scrub_mut();
    scrub.next_at = scrub.every().map(|every| now + every);
    scrub.pass = Some(ScrubProgress {
        columns,
        start: start - within,
        total,
        done: 0,
        begun: now,
        report: CheckReport::default(),
        skipped: 0,
    });
    drop(scrub);
    state.status_changed.set(true);
    tracing::info!(volume = %state.name, bytes = total, "a scrub begins");
}

/// The byte at which a pass starts. The position of a pass is not stored, so a client with a
/// shorter life than a pass would only ever read the first part of the volume. The epoch rises
/// with each attach, and multiples of the golden ratio fall evenly over the volume.
fn start_of(epoch: u32, total: u64) -> u64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let share = u64::from(epoch).wrapping_mul(GOLDEN);
    ((u128::from(share) * u128::from(total)) >> 64) as u64
}

/// A part of a column that is read at once.
struct ScrubChunk {
    column: usize,
    offset: u64,
    len: u64,
}

/// The chunk of a byte, and the byte's position in it.
fn chunk_at(state: &ControllerState, columns: usize, at: u64) -> Option<(ScrubChunk, u64)> {
    let mut offset = at;
    for (column, keep) in state.model().columns.iter().take(columns).enumerate() {
        if offset < keep.bytes {
            let within = offset % RESYNC_CHUNK_BYTES;
            let offset = offset - within;
            let len = RESYNC_CHUNK_BYTES.min(keep.bytes - offset);
            let chunk = ScrubChunk {
                column,
                offset,
                len,
            };
            return Some((chunk, within));
        }
        offset -= keep.bytes;
    }
    None
}

async fn run_pass(state: &ControllerState) {
    let (columns, mut at, total) = {
        let scrub = state.scrub();
        let Some(pass) = scrub.pass.as_ref() else {
            return;
        };
        (pass.columns, pass.start, pass.total)
    };
    let (mut done, mut batch, mut told) = (0, 0, Duration::ZERO);
    let mut ops = state.channel_ops();
    let mut may_go_on = state.now();
    while done < total {
        let Some((chunk, _)) = chunk_at(state, columns, at) else {
            at = 0;
            continue;
        };
        let goes_on = || !state.scrub().is_stopped && is_serving(state, chunk.column);
        let calm = || state.is_closing() || goes_on();
        state.wait_until(calm).await;
        if state.is_closing() {
            return;
        }
        let hole = hole_len(state, &chunk).await.min(total - done);
        let len = if hole > 0 {
            record_findings(
                state,
                CheckReport::of_pages(hole.div_ceil(PAGE_BYTES as u64)),
            );
            // A hole costs no read.
            batch += PAGE_BYTES as u64;
            hole
        } else {
            scrub_chunk(state, &chunk).await;
            batch += chunk.len;
            chunk.len
        };
        (at, done) = (at + len, done + len);
        if let Some(pass) = &mut state.scrub_mut().pass {
            pass.done = done;
        }
        if state.now() >= told + SCRUB_REPORT_EVERY {
            told = state.now();
            state.status_changed.set(true);
        }
        if batch >= SCRUB_BATCH_BYTES || done >= total {
            // Counts from the last look, which includes the sleep before this batch.
            let before = std::mem::replace(&mut ops, state.channel_ops());
            let is_busy = ops > before;
            may_go_on = may_go_on.max(state.now()) + batch_duration(state, batch, is_busy);
            state.sleep(may_go_on.saturating_sub(state.now())).await;
            batch = 0;
        }
    }
    end_pass(state);
}

/// The least duration of a batch. Requests of channels come first.
fn batch_duration(state: &ControllerState, bytes: u64, is_busy: bool) -> Duration {
    let share = if is_busy { SCRUB_BUSY_SHARE } else { 1 };
    let nanos = u128::from(bytes) * u128::from(share) * 1_000_000_000;
    let nanos = nanos / u128::from(state.scrub().bytes_per_s());
    Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX))
}

/// Whether the column serves and no leg of it is in resync.
fn is_serving(state: &ControllerState, column: usize) -> bool {
    let model = state.model();
    let column = &model.columns[column];
    let returns = column.legs.iter().any(|leg| leg.resync.is_some());
    column.gate == ColumnGate::Open && column.has_source() && !returns
}

/// Scrubs one chunk on all its legs, and repairs it where possible.
async fn scrub_chunk(state: &ControllerState, chunk: &ScrubChunk) {
    let &ScrubChunk {
        column,
        offset,
        len,
    } = chunk;
    let pages = len.div_ceil(PAGE_BYTES as u64);
    for _ in 0..SCRUB_TRIES_MAX {
        if is_consistent(state, chunk).await {
            return record_findings(state, CheckReport::of_pages(pages));
        }
        let turn = state.lock(column, offset, len).await;
        let is_level = replication_sender::wait_until_caught_up(state, column).await;
        // Differing sums may come from a write in flight.
        if is_consistent(state, chunk).await {
            return record_findings(state, CheckReport::of_pages(pages));
        }
        let mut report = CheckReport::default();
        match compare_pages(state, chunk, is_level, &mut report).await {
            Ok(()) => {
                report.pages_compared = pages;
                return record_findings(state, report);
            }
            Err(why) => {
                tracing::debug!(volume = %state.name, column, offset, why, "scrub tries again");
            }
        }
        drop(turn);
        // A leg was lost, or the epoch rose. The column is reconfigured first.
        state.sleep(SCRUB_RETRY).await;
        state
            .wait_until(|| state.is_closing() || is_serving(state, column))
            .await;
        if state.is_closing() {
            return;
        }
    }
    let (_, view) = state.shared.snapshot();
    let at = view.volume_offset(column, offset);
    tracing::warn!(volume = %state.name, offset = at, bytes = len, "a scrub skips a part of the volume, because its bricks do not return it");
    if let Some(pass) = &mut state.scrub_mut().pass {
        pass.skipped += len;
    }
}

/// Compares page by page on all legs. The caller holds the range lock, and the replica is up to
/// date.
async fn compare_pages(
    state: &ControllerState,
    chunk: &ScrubChunk,
    is_level: bool,
    report: &mut CheckReport,
) -> Result<(), String> {
    let place = (chunk.offset, chunk.len);
    compare_chunk(state, chunk.column, place, RepairSource::Unknown, report).await?;
    match is_level {
        true => compare_replica(state, chunk.column, place, report).await,
        false => Err("the asynchronous replica is too far behind".into()),
    }
}

/// The compared legs of a column; none if none is in-sync.
fn compared_legs(state: &ControllerState, column: usize) -> Vec<LegConnection> {
    let legs = state.model().columns[column].sources();
    let mut parties = copy::leg_connections(state, column, legs).unwrap_or_default();
    if !parties.is_empty() {
        parties.extend(replication_sender::replica(state, column));
    }
    parties
}

/// The number of bytes from a chunk on that are holes on every leg: whole chunks, or up to the
/// end of the column. A file system has many times more addresses than pages.
async fn hole_len(state: &ControllerState, chunk: &ScrubChunk) -> u64 {
    let end = state.model().columns[chunk.column].bytes;
    let mut least = end - chunk.offset;
    let parties = compared_legs(state, chunk.column);
    for party in &parties {
        let Ok(extents) = copy::extents(state, party, chunk.offset, end).await else {
            return 0;
        };
        let unmapped = extents.iter().take_while(|extent| !extent.mapped);
        least = least.min(unmapped.map(|extent| extent.len).sum());
    }
    match (parties.is_empty(), chunk.offset + least == end) {
        (true, _) => 0,
        (_, true) => least,
        _ => least - least % RESYNC_CHUNK_BYTES,
    }
}

async fn is_consistent(state: &ControllerState, chunk: &ScrubChunk) -> bool {
    let parties = compared_legs(state, chunk.column);
    match parties.split_first() {
        Some((first, others)) => !differs(state, first, others, chunk.offset, chunk.len).await,
        None => false,
    }
}

fn record_findings(state: &ControllerState, found: CheckReport) {
    let tally = &state.shared.counters;
    tally.add(Count::PagesScrubbed, found.pages_compared);
    let is_clean = found.pages_damaged + found.pages_differing == 0;
    if !is_clean {
        state.status_changed.set(true);
    }
    let mut scrub = state.scrub_mut();
    let Some(pass) = &mut scrub.pass else {
        return;
    };
    let room = DAMAGES_MAX - pass.report.damages.len();
    for damage in found.damages.iter().take(room) {
        log_damage(state, damage);
    }
    let few = pass.report.differences.len() < DAMAGES_MAX;
    for run in found.differences.iter().filter(|_| few) {
        tracing::error!(
            volume = %state.name, segment = run.segment, column = run.column, page = run.page,
            pages = run.count, "copies differ, and which one is right is not known; \
             choose one: `pagemesh volume check --repair-from`"
        );
    }
    pass.report.add(found);
}

/// Logs one damaged page.
fn log_damage(state: &ControllerState, damage: &Damage) {
    let (volume, offset) = (&state.name, damage.offset);
    let bricks = damage.brick_names.join(", ");
    match damage.repaired {
        true => tracing::warn!(%volume, offset, bricks, "a damaged page was repaired"),
        false => tracing::error!(
            %volume, offset, bricks, "a damaged page was not repaired: {}", damage.cause
        ),
    }
}

fn end_pass(state: &ControllerState) {
    let now = state.now();
    state.status_changed.set(true);
    let mut scrub = state.scrub_mut();
    let told = scrub.status(now).pass;
    scrub.pass = None;
    scrub.is_stopped = false;
    scrub.passes += 1;
    let Some(pass) = told else {
        return;
    };
    scrub.last = Some((pass.clone(), now));
    drop(scrub);
    let found = &pass.found;
    if found.pages_damaged + found.pages_differing == 0 {
        tracing::info!(volume = %state.name, pages = found.pages_compared, "a scrub found nothing wrong");
    } else {
        tracing::warn!(
            volume = %state.name, pages = found.pages_compared, damaged = found.pages_damaged,
            differing = found.pages_differing, repaired = found.pages_repaired,
            "a scrub found damage; a medium that loses bits should be replaced"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that never finish a pass still scrub every part over time.
    #[test]
    fn start_offsets_of_consecutive_epochs_are_spread() {
        let total = 1 << 40;
        for first in [1, 77, 100_000] {
            let mut starts: Vec<u64> = (first..first + 32).map(|it| start_of(it, total)).collect();
            starts.sort_unstable();
            let gaps = starts.windows(2).map(|pair| pair[1] - pair[0]);
            let widest = gaps.max().unwrap();
            assert!(widest < total / 12, "{widest} of {total}");
            assert!(starts.iter().all(|&start| start < total));
        }
    }
}
