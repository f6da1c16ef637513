//! `pagemesh snapshot rollback`: gives a volume the content of a snapshot, and back.
//!
//! The manager keeps the phase, see `pagemesh_manage::rollback`. Each run of the command takes up where another ended.
//!
//! Invariants: a page is written only after the snapshot of before exists and is held. A page that has its target
//! content already is not written, so a run that was interrupted costs reads alone.

use super::SnapshotPath;
use super::source::{Changes, SnapshotSource};
use super::space_io::{CHANGES_MAX, SpaceIo};
use super::temporary::TemporarySnapshot;
use crate::args::{ManagerArgs, Transport};
use crate::client::{DetachGuard, attach_for_rollback, cluster_client};
use crate::output::{self, bytes, time_text};
use crate::process_identity::ProcessIdentity;
use crate::snapshot_cuts;
use crate::snapshot_path::VolumeOrSnapshot;
use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_base::space::{Space, SpaceError};
use pagemesh_base::units::Size;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::rollback::ROLLBACK_HOLD;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{
    Attachment, BeginRollback, CreateSnapshot, FinishRollback, Rollback, RollbackPhase,
};
use pagemesh_stream::{PAGE_BYTES, is_zero};
use pagemesh_volume::Volume;
use serde::Serialize;
use std::io::{BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an undo waits for room in the pools, and the pause between two tries.
const ROOM_LIMIT: Duration = Duration::from_secs(60);
const ROOM_PAUSE: Duration = Duration::from_millis(200);
/// The attachment of a volume that no client has attached.
const NO_ATTACHMENT: EpochNumber = EpochNumber(0);

/// Give a volume or a file system the content of one of its snapshots.
///
/// The command shows what would be lost, and asks. It keeps the present in a snapshot `before-rollback-NAME`, which a hold
/// keeps, and then copies the changed pages back. All snapshots stay. The volume must not be in use. Until the rollback has
/// ended, other uses of the volume are refused; after an interruption, run the command again.
///
/// `--undo VOLUME` goes back to the state before the last rollback, complete or not.
#[derive(Args)]
pub struct RollbackArgs {
    /// Snapshot; with `--undo` the volume.
    #[arg(value_name = "VOLUME@NAME")]
    pub target: VolumeOrSnapshot,
    /// Go back to the state before the last rollback of the volume.
    #[arg(long)]
    pub undo: bool,
    /// Show what would be lost, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask. Required if standard input is no terminal.
    #[arg(long)]
    pub yes: bool,
    /// Take the volume from the client that has attached it.
    ///
    /// Data loss: the I/O of that client fails, and stores into mapped files that were not synced are lost.
    #[arg(long)]
    pub force: bool,
    /// Bytes per second that are copied, at most.
    #[arg(long, value_name = "BYTES")]
    pub rate: Option<Size>,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The result, for programs.
#[derive(Serialize)]
struct RolledBack {
    volume: VolumeName,
    /// The snapshot with the content that the volume has, or would have.
    content: SnapshotName,
    /// Bytes of the pages that were written since the snapshot, if they were counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    changed_bytes: Option<u64>,
    /// Bytes that were copied or cleared.
    copied_bytes: u64,
    /// The snapshot of the state before.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<SnapshotName>,
    dry_run: bool,
}

/// Rolls a volume back, or undoes that.
pub fn run(args: &RollbackArgs) -> anyhow::Result<()> {
    let manager = cluster_client(&args.client)?;
    let result = match (&args.target, args.undo) {
        (VolumeOrSnapshot::Snapshot(path), false) => roll_back(args, &manager, path)?,
        (VolumeOrSnapshot::Volume(volume), true) => undo(args, &manager, volume)?,
        (VolumeOrSnapshot::Volume(volume), false) => {
            bail!("name the snapshot of {volume}: pagemesh snapshot rollback {volume}@NAME")
        }
        (VolumeOrSnapshot::Snapshot(path), true) => bail!(
            "--undo takes the volume alone: pagemesh snapshot rollback --undo {}",
            path.volume
        ),
    };
    output::print(args.client.output, &result, || text(&result))
}

fn text(result: &RolledBack) -> String {
    let RolledBack {
        volume, content, ..
    } = result;
    if result.dry_run {
        return format!(
            "nothing was changed; a rollback gives {volume} the content of {volume}@{content}"
        );
    }
    let copied = bytes(result.copied_bytes);
    let mut text = format!("{volume} has the content of {volume}@{content}: {copied} were copied");
    if let Some(before) = &result.before {
        text += &format!(
            "\nthe state before is held as {volume}@{before}; go back with: pagemesh snapshot rollback --undo {volume}\n\
             give it up with: pagemesh snapshot release {ROLLBACK_HOLD} {volume}@{before}, and delete it"
        );
    }
    text
}

fn roll_back(
    args: &RollbackArgs,
    manager: &ManagerClient,
    path: &SnapshotPath,
) -> anyhow::Result<RolledBack> {
    let SnapshotPath { volume, name } = path;
    let info = manager.volume(volume)?.info;
    let mut changed_bytes = None;
    // A rollback that was interrupted needs no second confirmation.
    if info.rollback.is_none() {
        let to = SnapshotSource::open(&args.client, args.transport, manager, path)?;
        if args.dry_run || !args.force {
            refuse_in_use(volume, info.attached.as_ref(), args)?;
        }
        changed_bytes = show_losses(args, manager, path, &to)?;
        if !args.dry_run && !args.yes && !confirm(path)? {
            bail!("nothing was changed");
        }
    }
    if args.dry_run {
        return Ok(RolledBack {
            volume: volume.clone(),
            content: name.clone(),
            changed_bytes,
            copied_bytes: 0,
            before: None,
            dry_run: true,
        });
    }
    let replaces = replaced(volume, info.attached.as_ref(), args)?;
    let request = BeginRollback {
        snapshot: name.clone(),
        force: replaces != NO_ATTACHMENT,
    };
    let rollback = manager.begin_rollback(volume, &request)?;
    let copied_bytes = complete(args, manager, volume, &rollback, replaces)
        .with_context(|| unfinished(volume, &rollback))?;
    Ok(RolledBack {
        volume: volume.clone(),
        content: name.clone(),
        changed_bytes,
        copied_bytes,
        before: Some(rollback.undo),
        dry_run: false,
    })
}

fn unfinished(volume: &VolumeName, rollback: &Rollback) -> String {
    format!(
        "the rollback of {volume} is unfinished, and nothing is lost: run the command again, or go back to {volume}@{} with: \
         pagemesh snapshot rollback --undo {volume}",
        rollback.undo
    )
}

/// Undoes the rollback that has not ended, or rolls back to the newest snapshot of before.
fn undo(
    args: &RollbackArgs,
    manager: &ManagerClient,
    volume: &VolumeName,
) -> anyhow::Result<RolledBack> {
    let info = manager.volume(volume)?.info;
    if info.rollback.is_none() {
        let is_held = |holds: &[_]| {
            holds
                .iter()
                .any(|it: &pagemesh_manage::snapshots::HoldTag| it.to_string() == ROLLBACK_HOLD)
        };
        let snapshots = manager.snapshots(Some(volume), None)?;
        let newest = snapshots.into_iter().find(|it| is_held(&it.holds));
        let newest = newest.ok_or_else(|| {
            anyhow!(
                "{volume} was not rolled back: it has no snapshot with the hold '{ROLLBACK_HOLD}'"
            )
        })?;
        let path = SnapshotPath {
            volume: volume.clone(),
            name: newest.name,
        };
        return roll_back(args, manager, &path);
    }
    ensure!(
        !args.dry_run,
        "a rollback of {volume} is unfinished, so its losses are not known; leave out --dry-run"
    );
    let replaces = replaced(volume, info.attached.as_ref(), args)?;
    let undone = manager.undo_rollback(volume)?;
    let rollback = undone
        .rollback
        .ok_or_else(|| anyhow!("the manager names no rollback"))?;
    let mut copied_bytes = 0;
    if undone.ended {
        // Nothing was changed, and nobody needs the snapshot of the present.
        let snapshots = manager.snapshots(Some(volume), None)?;
        if snapshots.iter().any(|it| it.name == rollback.undo) {
            manager.delete_snapshot(volume, &rollback.undo)?;
        }
    } else {
        copied_bytes = complete(args, manager, volume, &rollback, replaces).with_context(|| {
            format!("the undo is unfinished, and nothing is lost: run it again, {volume} stays as it is until then")
        })?;
    }
    Ok(RolledBack {
        volume: volume.clone(),
        content: rollback.undo,
        changed_bytes: None,
        copied_bytes,
        before: None,
        dry_run: false,
    })
}

fn refuse_in_use(
    volume: &VolumeName,
    attached: Option<&Attachment>,
    args: &RollbackArgs,
) -> anyhow::Result<()> {
    match attached {
        Some(_) if args.dry_run => Ok(()),
        _ => replaced(volume, attached, args).map(drop),
    }
}

/// The attachment that the attach for the rollback may end.
fn replaced(
    volume: &VolumeName,
    attached: Option<&Attachment>,
    args: &RollbackArgs,
) -> anyhow::Result<EpochNumber> {
    let Some(attached) = attached else {
        return Ok(NO_ATTACHMENT);
    };
    let process = attached.process.as_deref();
    let process = process.and_then(|text| text.parse::<ProcessIdentity>().ok());
    let here = ProcessIdentity::own();
    let has_ended = process
        .zip(here)
        .is_some_and(|(it, here)| it.has_ended(&here));
    ensure!(
        args.force || has_ended,
        "the volume {volume} is in use by {}; end that first, or take the volume with --force: the I/O of that client then fails",
        attached.client
    );
    Ok(attached.epoch)
}

/// Shows what a rollback would lose, and returns the bytes of the changed pages if they could be counted.
fn show_losses(
    args: &RollbackArgs,
    manager: &ManagerClient,
    path: &SnapshotPath,
    to: &SnapshotSource,
) -> anyhow::Result<Option<u64>> {
    let count = || -> anyhow::Result<u64> {
        let present =
            TemporarySnapshot::create(&args.client, args.transport, manager, &path.volume)?;
        let source = SnapshotSource::open(&args.client, args.transport, manager, &present.path)?;
        Changes::between(&source, to)?.count_bytes(0)
    };
    let volume = &path.volume;
    let newer = manager.snapshots(Some(volume), None)?;
    let newer = newer.iter().filter(|it| it.epoch > to.info.epoch).count();
    let since = time_text(to.info.created_unix_ms);
    let counted = match count() {
        Ok(changed) => {
            let changed_text = bytes(changed);
            eprintln!("{volume} loses the changes since {path} ({since}): {changed_text} of pages");
            Some(changed)
        }
        // A client that is gone cannot cut the volume.
        Err(cause) if args.force => {
            eprintln!(
                "{volume} loses the changes since {path} ({since}); they cannot be counted: {cause:#}"
            );
            None
        }
        Err(cause) => return Err(cause),
    };
    if newer > 0 {
        eprintln!("{newer} newer snapshots stay");
    }
    Ok(counted)
}

fn confirm(path: &SnapshotPath) -> anyhow::Result<bool> {
    ensure!(
        std::io::stdin().is_terminal(),
        "nothing was changed: standard input is no terminal to ask at; add --yes"
    );
    let mut out = std::io::stderr().lock();
    write!(out, "roll {} back to {path}? [y/N] ", path.volume)?;
    out.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "yes"))
}

/// Attaches the volume, and brings its rollback to the end from any phase. Returns the bytes that were copied.
fn complete(
    args: &RollbackArgs,
    manager: &ManagerClient,
    volume: &VolumeName,
    rollback: &Rollback,
    replaces: EpochNumber,
) -> anyhow::Result<u64> {
    let attached = attach_for_rollback(&args.client, args.transport, volume, replaces)?;
    let attached = Arc::new(attached);
    let _guard = DetachGuard(Arc::clone(&attached));
    let attachment = EpochNumber(attached.attachment().0);
    let mut rollback = rollback.clone();
    if matches!(
        rollback.phase,
        RollbackPhase::Requested | RollbackPhase::Preparing
    ) {
        keep_present(manager, &attached, volume, &rollback)?;
        rollback = manager.start_rollback_copy(volume, attachment)?;
    }
    let copied = copy_back(args, manager, &attached, volume, &rollback)?;
    let request = FinishRollback {
        attachment,
        phase: rollback.phase,
    };
    manager.finish_rollback(volume, &request)?;
    Ok(copied)
}

/// Makes the snapshot of before, unless an earlier run has made it.
fn keep_present(
    manager: &ManagerClient,
    attached: &Arc<Volume>,
    volume: &VolumeName,
    rollback: &Rollback,
) -> anyhow::Result<()> {
    let snapshots = manager.snapshots(Some(volume), None)?;
    if snapshots.iter().any(|it| it.name == rollback.undo) {
        return Ok(());
    }
    snapshot_cuts::serve(manager, &[(volume.clone(), Arc::downgrade(attached))])?;
    let request = CreateSnapshot {
        name: rollback.undo.clone(),
        labels: vec![format!("before-rollback={}", rollback.to)],
    };
    let made = manager.create_snapshot(volume, &request);
    made.with_context(|| format!("cannot keep the present state of {volume} in a snapshot"))?;
    Ok(())
}

/// Copies the changed pages from the snapshot that the phase names.
fn copy_back(
    args: &RollbackArgs,
    manager: &ManagerClient,
    attached: &Arc<Volume>,
    volume: &VolumeName,
    rollback: &Rollback,
) -> anyhow::Result<u64> {
    let open = |name: &SnapshotName| {
        let path = SnapshotPath {
            volume: volume.clone(),
            name: name.clone(),
        };
        SnapshotSource::open(&args.client, args.transport, manager, &path)
    };
    let (to, before) = (open(&rollback.to)?, open(&rollback.undo)?);
    // Only pages that differ between the two are changed, so an undo has to look at no other.
    let mut changes = Changes::between(&before, &to)?;
    let bar = output::progress("rolling back");
    bar.set_length(changes.count_bytes(0)?);
    let is_undone = rollback.phase == RollbackPhase::Undoing;
    let mut copier = PageCopier {
        io: SpaceIo::open(&**attached)?,
        size_bytes: attached.size_bytes(),
        copied: 0,
        rate: args.rate.map(|rate| rate.0.max(1)),
        began: Instant::now(),
    };
    if is_undone {
        // The pages that the rollback wrote: the snapshot that they came from has them, too. They are freed first, so that
        // a full pool has room for the others.
        changes.visit(0, |part| copier.clear_different(part.offset, &part.new))?;
        copier.io.flush()?;
    }
    changes.visit(0, |part| {
        let content = match is_undone {
            true => &part.new,
            false => &part.old,
        };
        copier.put_with_patience(part.offset, content, is_undone)?;
        bar.inc(content.len() as u64);
        Ok(())
    })?;
    copier.io.flush()?;
    bar.finish_and_clear();
    Ok(copier.copied)
}

/// Writes the pages that differ from those of the volume.
struct PageCopier {
    io: SpaceIo,
    size_bytes: u64,
    copied: u64,
    rate: Option<u64>,
    began: Instant,
}

impl PageCopier {
    /// Writes a part. Bricks return freed pages some time later: an undo waits for that.
    fn put_with_patience(
        &mut self,
        offset: u64,
        content: &[u8],
        is_undone: bool,
    ) -> anyhow::Result<()> {
        let until = Instant::now() + ROOM_LIMIT;
        loop {
            let Err(cause) = self.put(offset, content) else {
                return Ok(());
            };
            let is_full = matches!(cause.downcast_ref(), Some(SpaceError::NoSpace(_)));
            // The other changes of the part end, whether well or not.
            let mut ends = (0..CHANGES_MAX).map(|_| self.io.wait());
            ends.find(Result::is_ok).unwrap_or(Ok(()))?;
            if !is_undone || !is_full || Instant::now() >= until {
                return Err(cause);
            }
            std::thread::sleep(ROOM_PAUSE);
        }
    }

    /// Clears the pages that differ.
    fn clear_different(&mut self, offset: u64, content: &[u8]) -> anyhow::Result<()> {
        let present = self.io.read(offset, content.len() as u32)?;
        let pages = content.chunks(PAGE_BYTES).zip(present.chunks(PAGE_BYTES));
        let differ: Vec<bool> = pages.map(|(wanted, present)| wanted != present).collect();
        let mut at = offset;
        for run in differ.chunk_by(|a, b| a == b) {
            let len = (run.len() * PAGE_BYTES) as u64;
            if run[0] {
                self.io.clear(at, len)?;
            }
            at += len;
        }
        self.io.wait()
    }

    fn put(&mut self, offset: u64, content: &[u8]) -> anyhow::Result<()> {
        // A volume does not shrink.
        ensure!(
            offset + content.len() as u64 <= self.size_bytes,
            "the snapshot is larger than the volume"
        );
        let present = self.io.read(offset, content.len() as u32)?;
        let pages = content.chunks(PAGE_BYTES).zip(present.chunks(PAGE_BYTES));
        let kinds: Vec<PageChange> = pages
            .map(|(wanted, present)| match wanted == present {
                true => PageChange::None,
                false if is_zero(wanted) => PageChange::Clear,
                false => PageChange::Write,
            })
            .collect();
        let mut at = 0;
        for run in kinds.chunk_by(|a, b| a == b) {
            let len = (run.len() * PAGE_BYTES).min(content.len() - at);
            let place = offset + at as u64;
            match run[0] {
                PageChange::None => {}
                PageChange::Clear => self.io.clear(place, len as u64)?,
                PageChange::Write => self.io.write(place, content[at..at + len].to_vec())?,
            }
            if run[0] != PageChange::None {
                self.copied += len as u64;
            }
            at += len;
        }
        // Reads of the next part must not meet changes in flight.
        self.io.wait()?;
        self.pace();
        Ok(())
    }

    fn pace(&self) {
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(self.copied as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum PageChange {
    None,
    Clear,
    Write,
}
