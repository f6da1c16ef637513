//! The state of each copy of a volume, over all of its columns.

use crate::output::{bytes, table};
use anyhow::Context;
use pagemesh_base::layout::{BrickId, Column, LegState};
use pagemesh_manage::wire::{ReplicaLag, ReplicationStatus, ResyncProgress, VolumeDetail};
use serde::Serialize;

/// One copy, over all columns of a volume.
#[derive(Serialize)]
pub struct CopyStatus {
    copy: usize,
    #[serde(serialize_with = "LegState::serialize_shown")]
    state: LegState,
    /// Whether the copy is asynchronous, and becomes `async-replica` instead of in-sync.
    asynchronous: bool,
    /// Number of columns by the state of their leg.
    in_sync: usize,
    async_replica: usize,
    syncing: usize,
    stale: usize,
    /// Reported lag of an asynchronous copy.
    lag: Option<ReplicaLag>,
    /// Reported progress of a resync.
    progress: Option<CopyProgress>,
    /// Age of the client's report.
    reported_us_ago: Option<u64>,
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
    fn new(resync: ResyncProgress) -> CopyProgress {
        let left = resync.bytes_todo.saturating_sub(resync.bytes_done);
        let takes = u128::from(left) * u128::from(resync.elapsed_ms);
        let eta = takes.checked_div(u128::from(resync.bytes_done));
        CopyProgress {
            bytes_todo: resync.bytes_todo,
            bytes_done: resync.bytes_done,
            elapsed_ms: resync.elapsed_ms,
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
        let mut status = copy_status(copy, columns(), detail.replication.as_ref());
        let names = status.bricks.iter().map(|id| detail.label(*id).to_string());
        status.brick_names = names.collect();
        status
    };
    Ok((0..count).map(one).collect())
}

fn copy_status<'a>(
    copy: usize,
    columns: impl Iterator<Item = &'a Column>,
    replication: Option<&ReplicationStatus>,
) -> CopyStatus {
    let legs: Vec<_> = columns.filter_map(|column| column.legs.get(copy)).collect();
    let count = |state| legs.iter().filter(|leg| leg.state == state).count();
    let mut bricks: Vec<BrickId> = legs.iter().map(|leg| leg.brick).collect();
    bricks.sort_unstable();
    bricks.dedup();
    let (in_sync, async_replica, syncing, stale) = (
        count(LegState::InSync),
        count(LegState::AsyncReplica),
        count(LegState::Syncing),
        count(LegState::Stale),
    );
    let state = match (async_replica, syncing, stale) {
        (0, 0, 0) => LegState::InSync,
        (_, 0, 0) => LegState::AsyncReplica,
        (_, _, 0) => LegState::Syncing,
        _ => LegState::Stale,
    };
    let lag = replication.and_then(|status| status.lag);
    let lag = lag.filter(|_| state == LegState::AsyncReplica);
    let mut resyncs = replication.into_iter().flat_map(|status| &status.resyncs);
    let progress = resyncs.find(|it| it.copy == copy);
    let progress = progress.map(|&it| CopyProgress::new(it));
    let is_reported = lag.is_some() || progress.is_some();
    CopyStatus {
        copy,
        state,
        asynchronous: legs.iter().any(|leg| leg.asynchronous),
        in_sync,
        async_replica,
        syncing,
        stale,
        reported_us_ago: replication
            .filter(|_| is_reported)
            .map(|status| status.reported_us_ago),
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
        (None, None) if copy.state == LegState::AsyncReplica => return "not reported yet".into(),
        (None, None) => return String::new(),
    };
    let ago = copy.reported_us_ago.unwrap_or_default();
    format!("{what}; reported {:.1} s ago", ago as f64 / 1e6)
}

/// Copies as a table.
pub fn copy_table(copies: &[CopyStatus]) -> String {
    let rows = copies.iter().map(|copy| {
        vec![
            copy.copy.to_string(),
            copy.state.to_string(),
            match copy.asynchronous {
                true => "async".into(),
                false => "sync".into(),
            },
            format!(
                "{}/{}",
                copy.in_sync,
                copy.in_sync + copy.async_replica + copy.syncing + copy.stale
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
        let eta = |bytes_todo, bytes_done, elapsed_ms| {
            let resync = ResyncProgress {
                copy: 1,
                bytes_todo,
                bytes_done,
                elapsed_ms,
            };
            CopyProgress::new(resync).eta_ms
        };
        assert_eq!(eta(4000, 1000, 500), Some(1500));
        assert_eq!(eta(4000, 4000, 500), Some(0));
        assert_eq!(eta(4000, 0, 500), None);
        assert_eq!(eta(u64::MAX, 1, u64::MAX), None);
        assert_eq!(
            eta(1, 2, 3),
            Some(0),
            "what is known may be less than what is done"
        );
    }
}
