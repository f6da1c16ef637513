//! `pagemesh replica`: a copy more of a volume, one less, and the one that goes on
//! alone.

use crate::args::{self, Replica as Command, ReplicaMode};
use crate::output::{self, bytes, table};
use crate::status::word;
use crate::volume::client;
use anyhow::Context;
use pagemesh_base::layout::{BrickId, Column, LegState, Name};
use pagemesh_manage::Client;
use pagemesh_manage::wire::{AttachReplica, ChooseReplica, Lag, VolumeDetail};
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
    volume: &Name,
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

fn next(volume: &Name, detail: &VolumeDetail) -> String {
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
    /// What one that follows had yet to get, and how long ago its client said so.
    lag: Option<Lag>,
    bricks: Vec<BrickId>,
}

fn copies(detail: &VolumeDetail) -> anyhow::Result<Vec<Copy>> {
    let columns = || detail.layout.columns();
    let count = columns().map(|column| column.legs.len()).max();
    let count = count.context("the volume has no columns")?;
    let one = |copy| one(copy, columns(), detail.lag);
    Ok((0..count).map(one).collect())
}

fn one<'a>(copy: usize, columns: impl Iterator<Item = &'a Column>, lag: Option<Lag>) -> Copy {
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
    Copy {
        copy,
        state,
        asynchronous: legs.iter().any(|leg| leg.asynchronous),
        in_sync,
        following,
        syncing,
        stale,
        lag: lag.filter(|_| state == LegState::Following),
        bricks,
    }
}

/// How far a copy is behind, and how old that is.
fn behind(copy: &Copy) -> String {
    match copy.lag {
        Some(lag) => format!(
            "{} in {} changes, the oldest of {} µs; told {:.1} s ago",
            bytes(lag.bytes),
            lag.changes,
            lag.age_us,
            lag.told_us_ago as f64 / 1e6
        ),
        None if copy.state == LegState::Following => "not told yet".into(),
        None => String::new(),
    }
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
