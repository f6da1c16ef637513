//! `pagemesh backup`: snapshots of volumes in a directory of chunks, for clusters without a second one.

mod create;
mod directory;
mod restore;

use crate::args::{CLASSES, ManagerArgs, Output, Transport};
use crate::commands::Verdict;
use crate::output::{self, bytes, table, time_text};
use crate::snapshot_path::SnapshotPath;
use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use directory::{BackupDirectory, BackupEntry, BackupInfo, DirectoryReport};
use pagemesh_base::layout::VolumeName;
use std::path::PathBuf;

/// Store snapshots in a directory of compressed chunks, verify, prune and restore them.
#[derive(Subcommand)]
pub enum BackupCommand {
    Create(CreateArgs),
    /// List the backups of a directory.
    ///
    /// Exit code 3: the list of chunks of a backup is damaged. The others are listed all the same.
    List(DirectoryArgs),
    /// Read all chunks of the backups of a directory, and compare them with their names.
    ///
    /// Exit code 3: a backup is damaged or incomplete.
    Verify(DirectoryArgs),
    Prune(PruneArgs),
    Restore(RestoreArgs),
}

/// Store a snapshot. Only the chunks that changed since the newest backup of the volume are read.
#[derive(Args)]
pub struct CreateArgs {
    /// Snapshot.
    #[arg(value_name = "VOLUME@NAME")]
    pub snapshot: SnapshotPath,
    /// Directory; made if missing.
    pub dir: PathBuf,
    /// Read all of the snapshot. Chunks that the directory has are checked, and stored again if they are damaged.
    #[arg(long)]
    pub full: bool,
    /// Make no bookmark. The next backup reads all of its snapshot if this one is deleted by then.
    #[arg(long)]
    pub no_bookmark: bool,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// A directory of backups.
#[derive(Args)]
pub struct DirectoryArgs {
    /// Directory.
    pub dir: PathBuf,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Delete backups, and chunks that no backup has.
#[derive(Args)]
pub struct PruneArgs {
    /// Directory.
    pub dir: PathBuf,
    /// Keep this many of the newest backups of each volume. Without it, only chunks that no backup has are deleted.
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub keep: Option<usize>,
    /// Delete this backup; may be repeated.
    #[arg(long = "delete", value_name = "VOLUME@NAME")]
    pub deleted: Vec<SnapshotPath>,
    /// Delete nothing, but print the backups and the number of chunks.
    #[arg(long)]
    pub dry_run: bool,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Make a volume with the content of a backup, in any cluster.
#[derive(Args)]
pub struct RestoreArgs {
    /// Directory.
    pub dir: PathBuf,
    /// Backup.
    #[arg(value_name = "VOLUME@NAME")]
    pub backup: SnapshotPath,
    /// Volume to make.
    pub volume: VolumeName,
    /// Number of copies of the volume, each on its own brick.
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
    pub copies: usize,
    /// Durability class of its bricks; by default the strongest class with room.
    #[arg(long, value_parser = CLASSES)]
    pub class: Option<String>,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Makes, lists, verifies, prunes and restores backups.
pub fn run(command: &BackupCommand) -> anyhow::Result<Verdict> {
    match command {
        BackupCommand::Create(args) => create::run(args)?,
        BackupCommand::List(args) => {
            let found = BackupDirectory::open_to_read(&args.dir)?.list()?;
            output::print(args.output, &found, || backup_table(&found))?;
            if found.iter().any(|it| matches!(it, BackupEntry::Damaged(_))) {
                return Ok(Verdict::Damaged);
            }
        }
        BackupCommand::Verify(args) => {
            let report = BackupDirectory::open_to_read(&args.dir)?.verify()?;
            output::print(args.output, &report, || verify_text(&report))?;
            if !report.problems.is_empty() {
                return Ok(Verdict::Damaged);
            }
        }
        BackupCommand::Prune(args) => {
            let directory = BackupDirectory::open_to_change(&args.dir)?;
            let report = directory.prune(args.keep, &args.deleted, args.dry_run)?;
            output::print(args.output, &report, || {
                let verb = if args.dry_run {
                    "would delete"
                } else {
                    "deleted"
                };
                let names = report.backups.iter();
                let names = names.map(|name| format!("{verb} the backup {name}\n"));
                let (chunks, size) = (report.chunks, bytes(report.bytes));
                names.collect::<String>() + &format!("{verb} {chunks} chunks of {size}")
            })?;
        }
        BackupCommand::Restore(args) => restore::run(args)?,
    }
    Ok(Verdict::Done)
}

fn backup_table(backups: &[BackupEntry]) -> String {
    if backups.is_empty() {
        return "no backups; make one with: pagemesh backup create VOLUME@NAME DIR".into();
    }
    let damaged = backups.iter().filter_map(|it| match it {
        BackupEntry::Whole(_) => None,
        BackupEntry::Damaged(it) => Some(format!(
            "the backup {} is damaged: {}; read what is left with: pagemesh backup verify, delete it with: pagemesh backup prune --delete\n",
            it.backup, it.problem
        )),
    });
    let whole = backups.iter().cloned().filter_map(BackupEntry::whole);
    let rows = whole.map(|it: BackupInfo| {
        vec![
            it.backup.clone(),
            time_text(it.created_unix_ms),
            bytes(it.limit_bytes),
            it.chunks.to_string(),
            bytes(it.chunks * it.chunk_bytes),
        ]
    });
    let head = [
        "BACKUP",
        "SNAPSHOT MADE",
        ">VOLUME SIZE",
        ">CHUNKS",
        ">DATA",
    ];
    let listed = table(&head, rows);
    let damaged: String = damaged.collect();
    match damaged.is_empty() {
        true => listed,
        false => format!("{}\n{damaged}", listed.trim_end()),
    }
}

fn verify_text(report: &DirectoryReport) -> String {
    let problems = report.problems.iter().map(|problem| format!("{problem}\n"));
    let (backups, chunks) = (report.backups, report.chunks);
    let size = bytes(report.stored_bytes);
    problems.collect::<String>()
        + &format!(
            "{backups} backups, {chunks} chunks of {size} in files: {} problems",
            report.problems.len()
        )
}
