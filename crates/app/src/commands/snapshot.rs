//! `pagemesh snapshot`: makes, lists, compares, holds, deletes, sends and receives snapshots of volumes.

mod check;
mod diff;
mod file_changes;
pub mod receive;
mod rollback;
pub mod send;
pub mod source;
mod space;
pub mod space_io;
mod temporary;

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::commands::Verdict;
use crate::output::{self, bytes, table, time_text};
use crate::snapshot_path::{self, SnapshotPath};
use anyhow::{anyhow, bail, ensure};
use clap::{Args, Subcommand};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::schedules::{is_volume_pattern, pattern_matches};
use pagemesh_manage::snapshots::{HoldTag, SnapshotName};
use pagemesh_manage::wire::{
    CreateSnapshot, CreateSnapshots, CreatedSnapshots, SnapshotDetail, SnapshotInfo,
};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead, IsTerminal, Write};

/// Make, list, compare, hold, roll back to, delete, send and receive snapshots of volumes.
#[derive(Subcommand)]
pub enum SnapshotCommand {
    Create(CreateArgs),
    /// List the snapshots of a volume or of all volumes, the newest first.
    List {
        /// Volume; all if missing.
        volume: Option<VolumeName>,
        /// Only snapshots with this label.
        #[arg(long, value_name = "TEXT")]
        label: Option<String>,
        /// Show the bytes that each snapshot keeps. The bricks count them now.
        #[arg(long, requires = "volume", conflicts_with = "label")]
        space: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show a snapshot, its holds, and the legs that have it.
    Show {
        /// Snapshot.
        #[arg(value_name = "VOLUME@NAME")]
        snapshot: SnapshotPath,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Hold a snapshot by a tag. It cannot be deleted until each of its tags is released.
    Hold(HoldArgs),
    /// Release a hold of a snapshot.
    Release(HoldArgs),
    Delete(DeleteArgs),
    Check(check::CheckArgs),
    Diff(diff::DiffArgs),
    Rollback(rollback::RollbackArgs),
    Send(send::SendArgs),
    Receive(receive::ReceiveArgs),
}

/// Make a snapshot of a volume: it has every write that was acknowledged before the command began.
///
/// The volume may be in use. Writers do not wait.
#[derive(Args)]
pub struct CreateArgs {
    /// The snapshot to make. Further volumes may stand before it, without a name: `A B C@NAME` makes A@NAME, B@NAME and
    /// C@NAME at one moment, all or none. A `*` in a volume stands for any text: `'db-*@NAME'`.
    #[arg(required = true, value_name = "VOLUME@NAME")]
    pub snapshots: Vec<String>,
    /// A text that `list --label` finds; up to 8.
    #[arg(long = "label", value_name = "TEXT")]
    pub labels: Vec<String>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The tag of a hold, and its snapshot.
#[derive(Args)]
pub struct HoldArgs {
    /// Tag of the hold.
    pub tag: HoldTag,
    /// Snapshot.
    #[arg(value_name = "VOLUME@NAME")]
    pub snapshot: SnapshotPath,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Delete snapshots. Their space is free after the bricks have dropped them, in the background.
#[derive(Args)]
pub struct DeleteArgs {
    /// Snapshots. `VOLUME@A%B` stands for all from A to B, in the order in which they were made.
    #[arg(required = true, value_name = "VOLUME@NAME")]
    pub snapshots: Vec<String>,
    /// Do not ask. Required if standard input is no terminal.
    #[arg(long)]
    pub yes: bool,
    /// Delete nothing, but print the bytes that the deletion would free. The bricks count them now.
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Makes, lists, holds, deletes, sends and receives snapshots.
pub fn run(command: &SnapshotCommand) -> anyhow::Result<Verdict> {
    match command {
        SnapshotCommand::Check(args) => return check::run(args),
        SnapshotCommand::Create(args) => create(args),
        SnapshotCommand::List {
            volume: Some(volume),
            space: true,
            client: args,
            ..
        } => space::list(args, volume),
        SnapshotCommand::List {
            volume,
            label,
            client: args,
            ..
        } => {
            let found = manager_client(args)?.snapshots(volume.as_ref(), label.as_deref())?;
            output::print(args.output, &found, || snapshot_table(&found))
        }
        SnapshotCommand::Show {
            snapshot,
            client: args,
        } => {
            let SnapshotPath { volume, name } = snapshot;
            let found = manager_client(args)?.snapshot(volume, name)?;
            output::print(args.output, &found, || show(&found))
        }
        SnapshotCommand::Hold(args) => {
            let SnapshotPath { volume, name } = &args.snapshot;
            let held = manager_client(&args.client)?.hold_snapshot(volume, name, &args.tag)?;
            output::print(args.client.output, &held, || {
                format!("{} is held by {}", args.snapshot, words(&held.holds))
            })
        }
        SnapshotCommand::Release(args) => {
            let SnapshotPath { volume, name } = &args.snapshot;
            let released =
                manager_client(&args.client)?.release_snapshot(volume, name, &args.tag)?;
            output::print(args.client.output, &released, || {
                match released.holds.is_empty() {
                    true => format!("{} has no hold", args.snapshot),
                    false => format!(
                        "{} is still held by {}",
                        args.snapshot,
                        words(&released.holds)
                    ),
                }
            })
        }
        SnapshotCommand::Delete(args) => delete(args),
        SnapshotCommand::Diff(args) => diff::run(args),
        SnapshotCommand::Rollback(args) => rollback::run(args),
        SnapshotCommand::Send(args) => send::run(args),
        SnapshotCommand::Receive(args) => receive::run(args),
    }?;
    Ok(Verdict::Done)
}

fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let (patterns, name) = group(&args.snapshots)?;
    let manager = manager_client(&args.client)?;
    let volumes = volumes_of(&manager, &patterns)?;
    let labels = args.labels.clone();
    let created = match volumes.as_slice() {
        [volume] => {
            let request = CreateSnapshot { name, labels };
            CreatedSnapshots {
                snapshots: vec![manager.create_snapshot(volume, &request)?],
                consistent: true,
                held_us: None,
            }
        }
        _ => manager.create_snapshots(&CreateSnapshots {
            volumes,
            name,
            labels,
        })?,
    };
    output::print(args.client.output, &created, || {
        let made = created.snapshots.iter();
        let made = made.map(|it| format!("made {}@{}\n", it.volume, it.name));
        let note = match created.snapshots.len() {
            1 => String::new(),
            _ => one_moment_text(created.held_us),
        };
        made.collect::<String>() + &note
    })
}

fn one_moment_text(held_us: Option<u64>) -> String {
    match held_us {
        None => "they show one moment\n".to_owned(),
        Some(held_us) => format!(
            "they show one moment; writes waited for {:.1} ms\n",
            held_us as f64 / 1000.0
        ),
    }
}

/// The volumes of names and patterns, each once.
fn volumes_of(manager: &ManagerClient, patterns: &[String]) -> anyhow::Result<Vec<VolumeName>> {
    let is_pattern = |text: &String| text.contains('*');
    let all = match patterns.iter().any(is_pattern) {
        true => manager.volumes()?,
        false => vec![],
    };
    let mut volumes = Vec::new();
    for text in patterns {
        if !is_pattern(text) {
            volumes.push(text.parse()?);
            continue;
        }
        let names = all.iter().map(|it| it.name.clone());
        let found: Vec<VolumeName> = names
            .filter(|name| pattern_matches(text, name.as_str()))
            .collect();
        ensure!(
            !found.is_empty(),
            "no volume has a name like {text}; see them with: pagemesh volume list"
        );
        volumes.extend(found);
    }
    let mut seen = BTreeSet::new();
    volumes.retain(|volume| seen.insert(volume.clone()));
    Ok(volumes)
}

/// The volumes or patterns and the name of `A B C@NAME`, or of `A@NAME B@NAME C@NAME`.
fn group(texts: &[String]) -> anyhow::Result<(Vec<String>, SnapshotName)> {
    let mut volumes = Vec::new();
    let mut name: Option<SnapshotName> = None;
    for (at, text) in texts.iter().enumerate() {
        let (volume, of_text) = match text.split_once('@') {
            None if at + 1 < texts.len() => {
                volumes.push(volume_or_pattern(text)?);
                continue;
            }
            Some((pattern, name)) if pattern.contains('*') => {
                (volume_or_pattern(pattern)?, name.parse()?)
            }
            _ => {
                let path: SnapshotPath = text.parse()?;
                (path.volume.to_string(), path.name)
            }
        };
        ensure!(
            name.as_ref().is_none_or(|name| *name == of_text),
            "snapshots that are made together have one name; make {text} by a command of its own"
        );
        volumes.push(volume);
        name = Some(of_text);
    }
    let name = name.ok_or_else(|| anyhow!("name a snapshot: VOLUME@NAME"))?;
    Ok((volumes, name))
}

/// Checks the name of a volume, or a pattern of names.
fn volume_or_pattern(text: &str) -> anyhow::Result<String> {
    if !text.contains('*') {
        return Ok(text.parse::<VolumeName>()?.to_string());
    }
    ensure!(
        is_volume_pattern(text),
        "{text} is no pattern of names of volumes: use letters, digits, `_`, `.`, `-` and `*`"
    );
    Ok(text.to_owned())
}

/// A deleted snapshot.
#[derive(Serialize)]
struct Deleted {
    #[serde(flatten)]
    path: SnapshotPath,
    pending_slices: usize,
}

fn delete(args: &DeleteArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    let mut paths: Vec<SnapshotPath> = Vec::new();
    for text in &args.snapshots {
        for path in expand(&manager, text)? {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
    }
    if args.dry_run {
        return space::print_freed(&args.client, &manager, &paths);
    }
    if !args.yes && !confirm(&paths)? {
        bail!("nothing was deleted");
    }
    let mut deleted = Vec::new();
    for path in paths {
        let reply = manager.delete_snapshot(&path.volume, &path.name)?;
        deleted.push(Deleted {
            path,
            pending_slices: reply.pending_slices,
        });
    }
    output::print(args.client.output, &deleted, || {
        let line = |it: &Deleted| match it.pending_slices {
            0 => format!("{} is deleted\n", it.path),
            count => format!(
                "{} is deleted; {count} slices drop it when their bricks return\n",
                it.path
            ),
        };
        deleted.iter().map(line).collect()
    })
}

fn confirm(paths: &[SnapshotPath]) -> anyhow::Result<bool> {
    ensure!(
        std::io::stdin().is_terminal(),
        "nothing was deleted: standard input is no terminal to ask at; add --yes"
    );
    let mut out = std::io::stderr().lock();
    for path in paths {
        writeln!(out, "{path}")?;
    }
    write!(out, "delete these {} snapshots? [y/N] ", paths.len())?;
    out.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "yes"))
}

/// The snapshots that an argument names.
fn expand(manager: &ManagerClient, text: &str) -> anyhow::Result<Vec<SnapshotPath>> {
    let (volume, names) = snapshot_path::split(text)?;
    let Some((first, last)) = names.split_once('%') else {
        return Ok(vec![text.parse()?]);
    };
    let parse = |name: &str| -> anyhow::Result<SnapshotName> {
        name.parse()
            .map_err(|cause| snapshot_path::bad_name(text, &cause))
    };
    let (first, last) = (parse(first)?, parse(last)?);
    // The newest come first.
    let all = manager.snapshots(Some(&volume), None)?;
    let position = |name: &SnapshotName| {
        let at = all.iter().position(|it| it.name == *name);
        at.ok_or_else(|| anyhow!("there is no snapshot {volume}@{name}"))
    };
    let (oldest, newest) = (position(&first)?, position(&last)?);
    ensure!(
        newest <= oldest,
        "{volume}@{first} was made after {volume}@{last}; name the older one first"
    );
    let range = all[newest..=oldest].iter().rev();
    Ok(range
        .map(|it| SnapshotPath {
            volume: volume.clone(),
            name: it.name.clone(),
        })
        .collect())
}

fn words<T: fmt::Display>(all: &[T]) -> String {
    let words: Vec<String> = all.iter().map(ToString::to_string).collect();
    words.join(", ")
}

/// The copies that lack parts of a snapshot.
fn missing_text(snapshot: &SnapshotInfo) -> String {
    let on_replica = usize::from(snapshot.missing_on_replica);
    let others = match snapshot.missing_copies.saturating_sub(on_replica) {
        0 => None,
        1 => Some("1 copy".to_owned()),
        more => Some(format!("{more} copies")),
    };
    let replica = snapshot.missing_on_replica.then(|| "replica".to_owned());
    let all: Vec<String> = others.into_iter().chain(replica).collect();
    match all.is_empty() {
        true => "-".into(),
        false => all.join(", "),
    }
}

fn snapshot_table(snapshots: &[SnapshotInfo]) -> String {
    if snapshots.is_empty() {
        return "no snapshots; make one with: pagemesh snapshot create VOLUME@NAME".into();
    }
    let dash = |text: String| if text.is_empty() { "-".into() } else { text };
    let rows = snapshots.iter().map(|it| {
        vec![
            format!("{}@{}", it.volume, it.name),
            time_text(it.created_unix_ms),
            bytes(it.size_bytes),
            dash(words(&it.holds)),
            dash(words(&it.labels)),
            dash(words(&it.clones)),
            missing_text(it),
        ]
    });
    table(
        &[
            "SNAPSHOT",
            "CREATED",
            ">VOLUME SIZE",
            "HOLDS",
            "LABELS",
            "CLONES",
            "MISSING ON",
        ],
        rows,
    )
}

fn show(detail: &SnapshotDetail) -> String {
    let info = &detail.info;
    let mut rows = Vec::new();
    for (at, segment) in detail.layout.segments.iter().enumerate() {
        for (column, legs) in segment.columns.iter().enumerate() {
            for leg in &legs.legs {
                let address = detail.bricks.get(&leg.brick);
                let name = address.and_then(|address| address.name.clone());
                let label = pagemesh_base::brick_name::BrickLabel {
                    id: leg.brick,
                    name,
                };
                rows.push(vec![format!("{at}.{column}"), label.to_string()]);
            }
        }
    }
    format!(
        "{}\n\nepoch {}, made by {}\n\n{}",
        snapshot_table(std::slice::from_ref(info)),
        info.epoch.0,
        info.made_by,
        table(&["COLUMN", "BRICK"], rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(words: &str) -> Vec<String> {
        words.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn groups_have_one_name() {
        let names = |words: &str| {
            let (volumes, name) = group(&texts(words)).unwrap();
            (super::words(&volumes), name.to_string())
        };
        assert_eq!(names("a@n"), ("a".into(), "n".into()));
        assert_eq!(names("a b c@n"), ("a, b, c".into(), "n".into()));
        assert_eq!(names("a@n b@n"), ("a, b".into(), "n".into()));
        assert_eq!(names("a db-*@n"), ("a, db-*".into(), "n".into()));
        assert_eq!(names("db-* a@n"), ("db-*, a".into(), "n".into()));
        for bad in ["a", "a@n b", "a@n b@m", "a/b c@n", "a/*@n", "db-*"] {
            assert!(group(&texts(bad)).is_err(), "{bad}");
        }
    }
}
