//! `pagemesh replica`: a copy more of a volume, one less, and the one that goes on
//! alone.

use crate::args::{self, Replica as Command, ReplicaMode};
use crate::output::{self, bytes, table};
use crate::status::word;
use crate::volume::client;
use anyhow::Context;
use pagemesh_base::layout::{BrickId, Column, LegState, VolumeName};
use pagemesh_manage::Client;
use pagemesh_manage::wire::{
    AttachReplica, ChooseReplica, CopiesTold, CopyReturn, Lag, VolumeDetail,
};
use serde::Serialize;

/// Attaches, detaches, promotes and shows replicas.
pub fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Attach {
            volume,
            brick,
            mode,
            auto_promote,
            client: args,
        } => {
            let wish = AttachReplica {
                brick: brick.map(BrickId),
                asynchronous: *mode == ReplicaMode::Async,
                auto_promote: *auto_promote,
            };
            let detail = client(args)?.attach_replica(volume, wish)?;
            let copy = detail.info.copies - 1;
            tell(
                args,
                &detail,
                &format!("{volume} has copy {copy} now; {}", filling(&detail)),
            )
        }
        Command::Detach {
            volume,
            copy,
            force,
            client: args,
        } => {
            let client = client(args)?;
            let choice = choose(&client, volume, *copy, *force)?;
            let detail = client.detach_replica(volume, choice)?;
            tell(
                args,
                &detail,
                &format!("{volume} has no copy {copy} any more"),
            )
        }
        Command::Promote {
            volume,
            copy,
            force,
            client: args,
        } => {
            let client = client(args)?;
            let choice = choose(&client, volume, *copy, *force)?;
            let detail = client.promote_replica(volume, choice)?;
            tell(
                args,
                &detail,
                &format!(
                    "{volume} goes on with copy {copy}; {}",
                    next(volume, &detail)
                ),
            )
        }
        Command::Status {
            volume,
            client: args,
        } => {
            let detail = client(args)?.volume(volume)?;
            let copies = copies(&detail)?;
            output::print(args.output, &copies, || show(&copies))
        }
    }
}

/// Names a copy by its number in the present layout: were the answer lost, and the
/// command given again, the number would be another copy's.
fn choose(
    client: &Client,
    volume: &VolumeName,
    copy: usize,
    force: bool,
) -> anyhow::Result<ChooseReplica> {
    let expected = Some(client.volume(volume)?.layout.epoch);
    Ok(ChooseReplica {
        copy,
        force,
        expected,
    })
}

fn tell(args: &args::Client, detail: &VolumeDetail, what: &str) -> anyhow::Result<()> {
    let copies = copies(detail)?;
    output::print(args.output, &copies, || {
        format!("{what}\n\n{}", show(&copies))
    })
}

fn filling(detail: &VolumeDetail) -> &'static str {
    match detail.info.attached {
        Some(_) => "the client that has it will fill the copy, and tells how far it is",
        None => "the next client that attaches it fills the copy",
    }
}

fn next(volume: &VolumeName, detail: &VolumeDetail) -> String {
    let verb = match detail.info.content {
        pagemesh_manage::wire::Content::Blocks => format!("pagemesh export nbd {volume}"),
        pagemesh_manage::wire::Content::Files => format!("pagemesh mount {volume} DIR"),
    };
    format!("use it with: {verb}")
}

/// One copy of all columns of a volume.
#[derive(Serialize)]
struct Copy {
    copy: usize,
    state: LegState,
    /// Whether it is to follow, and not to become in-sync.
    asynchronous: bool,
    /// Columns by the states of their legs.
    in_sync: usize,
    following: usize,
    syncing: usize,
    stale: usize,
    /// What one that follows had yet to get.
    lag: Option<Lag>,
    /// How far one that returns, or is filled, had come.
    progress: Option<Progress>,
    /// How long ago the client said so.
    told_us_ago: Option<u64>,
    bricks: Vec<BrickId>,
}

#[derive(Serialize)]
struct Progress {
    /// To copy or to compare, as far as that is known.
    bytes_todo: u64,
    bytes_done: u64,
    elapsed_ms: u64,
    /// Until it is done, at the pace so far; none before there is one.
    eta_ms: Option<u64>,
}

impl Progress {
    fn new(told: CopyReturn) -> Progress {
        let left = told.bytes_todo.saturating_sub(told.bytes_done);
        let takes = u128::from(left) * u128::from(told.elapsed_ms);
        let eta = takes.checked_div(u128::from(told.bytes_done));
        Progress {
            bytes_todo: told.bytes_todo,
            bytes_done: told.bytes_done,
            elapsed_ms: told.elapsed_ms,
            eta_ms: eta.and_then(|ms| u64::try_from(ms).ok()),
        }
    }
}

fn copies(detail: &VolumeDetail) -> anyhow::Result<Vec<Copy>> {
    let columns = || detail.layout.columns();
    let count = columns().map(|column| column.legs.len()).max();
    let count = count.context("the volume has no columns")?;
    let one = |copy| one(copy, columns(), detail.told.as_ref());
    Ok((0..count).map(one).collect())
}

fn one<'a>(
    copy: usize,
    columns: impl Iterator<Item = &'a Column>,
    told: Option<&CopiesTold>,
) -> Copy {
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
    let progress = progress.map(|&it| Progress::new(it));
    let is_told = lag.is_some() || progress.is_some();
    Copy {
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
    }
}

/// How far a copy is behind, or in its return, and how old that is.
fn behind(copy: &Copy) -> String {
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
                None => "pace not known yet".into(),
            };
            let (done, todo) = (bytes(progress.bytes_done), bytes(progress.bytes_todo));
            format!("{done} of {todo} done, {left}")
        }
        (None, None) if copy.state == LegState::Following => return "not told yet".into(),
        (None, None) => return String::new(),
    };
    let ago = copy.told_us_ago.unwrap_or_default();
    format!("{what}; told {:.1} s ago", ago as f64 / 1e6)
}

fn show(copies: &[Copy]) -> String {
    let rows = copies.iter().map(|copy| {
        let bricks: Vec<String> = copy.bricks.iter().map(ToString::to_string).collect();
        vec![
            copy.copy.to_string(),
            word(&copy.state),
            match copy.asynchronous {
                true => "async".into(),
                false => "sync".into(),
            },
            format!(
                "{}/{}",
                copy.in_sync,
                copy.in_sync + copy.following + copy.syncing + copy.stale
            ),
            behind(copy),
            bricks.join(", "),
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
    fn the_time_left_goes_by_the_pace_so_far() {
        let told = |bytes_todo, bytes_done, elapsed_ms| {
            let told = CopyReturn {
                copy: 1,
                bytes_todo,
                bytes_done,
                elapsed_ms,
            };
            Progress::new(told).eta_ms
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
