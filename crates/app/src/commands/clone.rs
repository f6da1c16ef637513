//! `pagemesh clone`: makes writable volumes from snapshots, lists them, and lets them stand alone.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, bytes, table};
use crate::snapshot_path::SnapshotPath;
use clap::{Args, Subcommand};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::wire::{CreateClone, VolumeInfo};

/// Make, list and promote clones: writable volumes that begin as a snapshot, and share its pages.
#[derive(Subcommand)]
pub enum CloneCommand {
    Create(CreateArgs),
    /// List the volumes that share pages with a snapshot.
    List {
        /// Only clones of this volume.
        volume: Option<VolumeName>,
        #[command(flatten)]
        client: ManagerArgs,
    },
    Promote(PromoteArgs),
}

/// Make a volume from a snapshot. No data is copied: it takes space only as it changes.
///
/// The clone is a volume or a file system like its origin: export it, mount it, take snapshots of it, clone it. The snapshot
/// cannot be deleted as long as the clone shares pages with it.
#[derive(Args)]
pub struct CreateArgs {
    /// Snapshot.
    #[arg(value_name = "VOLUME@NAME")]
    pub snapshot: SnapshotPath,
    /// Name of the new volume.
    pub name: VolumeName,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Copy the pages that a clone still shares. Then the snapshot, and the volume that it belongs to, can be deleted.
///
/// The clone may be in use meanwhile. An interrupted promotion continues with the same command.
#[derive(Args)]
pub struct PromoteArgs {
    /// Clone.
    pub name: VolumeName,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Bytes of a part, as the manager counts promotions.
const PART_BYTES: u64 = 2 << 20;

/// Makes, lists and promotes clones.
pub fn run(command: &CloneCommand) -> anyhow::Result<()> {
    match command {
        CloneCommand::Create(args) => create(args),
        CloneCommand::List {
            volume,
            client: args,
        } => {
            let mut found = manager_client(args)?.volumes()?;
            found.retain(|info| {
                let origin = info.origin.as_ref();
                origin.is_some_and(|it| volume.as_ref().is_none_or(|of| it.volume == *of))
            });
            output::print(args.output, &found, || clone_table(&found))
        }
        CloneCommand::Promote(args) => promote(args),
    }
}

fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let SnapshotPath { volume, name } = &args.snapshot;
    let request = CreateClone {
        name: args.name.clone(),
    };
    let made = manager_client(&args.client)?.create_clone(volume, name, &request)?;
    output::print(args.client.output, &made, || {
        format!("{} is a clone of {}", args.name, args.snapshot)
    })
}

fn promote(args: &PromoteArgs) -> anyhow::Result<()> {
    let manager = manager_client(&args.client)?;
    let bar = output::progress("promoting");
    let progress = loop {
        let progress = manager.promote_clone(&args.name)?;
        bar.set_length(progress.all * PART_BYTES);
        bar.set_position(progress.done * PART_BYTES);
        if progress.done == progress.all {
            break progress;
        }
    };
    bar.finish_and_clear();
    output::print(args.client.output, &progress, || {
        format!("{} shares no pages any more", args.name)
    })
}

fn clone_table(clones: &[VolumeInfo]) -> String {
    if clones.is_empty() {
        return "no clones; make one with: pagemesh clone create VOLUME@SNAPSHOT NAME".into();
    }
    let rows = clones.iter().map(|it| {
        let origin = it.origin.as_ref();
        vec![
            it.name.to_string(),
            origin.map_or_else(String::new, |of| format!("{}@{}", of.volume, of.snapshot)),
            bytes(it.size_bytes),
        ]
    });
    table(&["CLONE", "ORIGIN", ">SIZE"], rows)
}
