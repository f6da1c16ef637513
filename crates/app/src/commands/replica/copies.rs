//! The state of each copy of a volume, over all of its columns.

use crate::output::{bytes, json_word, table};
use anyhow::Context;
use pagemesh_base::layout::{BrickId, Column, LegState};
use pagemesh_manage::wire::{ReplicaLag, ReplicationStatus, ResyncProgress, VolumeDetail};
use serde::Serialize;

/// One copy, over all columns of a volume.
#[derive(Serialize)]
pub struct CopyStatus {
    copy: usize,
    state: LegState,
    /// Whether the copy is asynchronous, and becomes `following` instead of in-sync.
    asynchronous: bool,
    /// Number of columns by the state of their leg.
    in_sync: usize,
    following: usize,
    syncing: usize,
    stale: usize,
    /// Reported lag of an asynchronous copy.
    lag: Option<ReplicaLag>,
    /// Reported progress of a resync.
    progress: Option<CopyProgress>,
    /// Age of the client's report.
    told_us_ago: Option<u64>,
    bricks: Vec<BrickId>,
    /// The names of these bricks, in the same order.
    brick_names: Vec<String>,
}

#[derive(Serialize)]
struct CopyProgress {
    /// Bytes to copy or compare, as far as known.
    bytes_todo: u64,
    bytes_done: u64,
    elapsed_ms: u64,
    /// Estimated time to the end at the average rate; `None` before there is a rate.
    eta_ms: Option<u64>,
}

impl CopyProgress {
    fn new(told: ResyncProgress) -> CopyProgress {
        let left = told.bytes_todo.saturating_sub(told.bytes_done);
        let takes = u128::from(left) * u128::from(told.elapsed_ms);
        let eta = takes.checked_div(u128::from(told.bytes_done));
        CopyProgress {
            bytes_todo: told.bytes_todo,
            bytes_done: told.bytes_done,
            elapsed_ms: told.elapsed_ms,
            eta_ms: eta.and_then(|ms| u64::try_from(ms).ok()),
        }
    }
}

/// The copies of a volume, in the order of their numbers.
pub fn copy_statuses(detail: &VolumeDetail) -> anyhow::Result<Vec<CopyStatus>> {
    let columns = || detail.layout.columns();
    let count = columns().map(|column| column.legs.len()).max();
    let count = count.context("the volume has no columns")?;
    let one = |copy| {
        let mut status = copy_status(copy, columns(), detail.told.as_ref());
        let names = status.bricks.iter().map(|id| detail.label(*id).to_string());
        status.brick_names = names.collect();
        status
    };
    Ok((0..count).map(one).collect())
}

fn copy_status<'a>(
    copy: usize,
    columns: impl Iterator<Item = &'a Column>,
    told: Option<&ReplicationStatus>,
) -> CopyStatus {
    let legs: Vec<_> = columns.filter_map(|column| column.legs.get(copy)).collect();
    let count = |state| legs.iter().filter(|leg| leg.state == state).count();
    let mut bricks: Vec<BrickId> = legs.iter().map(|leg| leg.brick).collect();
    bricks.sort_unstable();
    bricks.dedup();
    let (in_sync, following, syncing, stale) = (
        count(LegState::InSync),
        count(LegState::Following),
        count(LegState::Syncing),
        count(LegState::Stale),
    );
    let state = match (following, syncing, stale) {
        (0, 0, 0) => LegState::InSync,
        (_, 0, 0) => LegState::Following,
        (_, _, 0) => LegState::Syncing,
        _ => LegState::Stale,
    };
    let lag = told.and_then(|told| told.lag);
    let lag = lag.filter(|_| state == LegState::Following);
    let mut returns = told.into_iter().flat_map(|told| &told.returns);
    let progress = returns.find(|it| it.copy == copy);
    let progress = progress.map(|&it| CopyProgress::new(it));
    let is_told = lag.is_some() || progress.is_some();
    CopyStatus {
        copy,
        state,
        asynchronous: legs.iter().any(|leg| leg.asynchronous),
        in_sync,
        following,
        syncing,
        stale,
        told_us_ago: told.filter(|_| is_told).map(|told| told.told_us_ago),
        lag,
        progress,
        bricks,
        brick_names: Vec::new(),
    }
}

/// The lag or the resync progress of a copy, and the age of the report.
fn lag_text(copy: &CopyStatus) -> String {
    let what = match (&copy.lag, &copy.progress) {
        (Some(lag), _) => format!(
            "{} in {} changes, the oldest of {} µs",
            bytes(lag.bytes),
            lag.changes,
            lag.age_us,
        ),
        (None, Some(progress)) => {
            let left = match progress.eta_ms {
                Some(ms) => format!("{:.0} s left", (ms as f64 / 1e3).ceil()),
                None => "time left not known yet".into(),
            };
            let (done, todo) = (bytes(progress.bytes_done), bytes(progress.bytes_todo));
            format!("{done} of {todo} done, {left}")
        }
        (None, None) if copy.state == LegState::Following => return "not reported yet".into(),
        (None, None) => return String::new(),
    };
    let ago = copy.told_us_ago.unwrap_or_default();
    format!("{what}; reported {:.1} s ago", ago as f64 / 1e6)
}

/// Copies as a table.
pub fn copy_table(copies: &[CopyStatus]) -> String {
    let rows = copies.iter().map(|copy| {
        vec![
            copy.copy.to_string(),
            json_word(&copy.state),
            match copy.asynchronous {
                true => "async".into(),
                false => "sync".into(),
            },
            format!(
                "{}/{}",
                copy.in_sync,
                copy.in_sync + copy.following + copy.syncing + copy.stale
            ),
            lag_text(copy),
            copy.brick_names.join(", "),
        ]
    });
    table(
        &[
            ">COPY",
            "STATE",
            "MODE",
            ">IN-SYNC COLUMNS",
            "BEHIND",
            "BRICKS",
        ],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eta_follows_current_rate() {
        let told = |bytes_todo, bytes_done, elapsed_ms| {
            let told = ResyncProgress {
                copy: 1,
                bytes_todo,
                bytes_done,
                elapsed_ms,
            };
            CopyProgress::new(told).eta_ms
        };
        assert_eq!(told(4000, 1000, 500), Some(1500));
        assert_eq!(told(4000, 4000, 500), Some(0));
        assert_eq!(told(4000, 0, 500), None);
        assert_eq!(told(u64::MAX, 1, u64::MAX), None);
        assert_eq!(
            told(1, 2, 3),
            Some(0),
            "what is known may be less than what is done"
        );
    }
}
