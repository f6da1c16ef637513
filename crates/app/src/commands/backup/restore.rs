//! `pagemesh backup restore`.
//!
//! Invariant: until all of the backup is written, the volume is one that receives: no other client attaches it, also after a kill.

use super::RestoreArgs;
use super::directory::BackupDirectory;
use crate::client::{DetachGuard, attach_to_receive, cluster_client};
use crate::commands::mount::life_signs::LifeSigns;
use crate::commands::snapshot::receive::target::{create_request, label};
use crate::commands::snapshot::space_io::SpaceIo;
use crate::output::{self, bytes};
use crate::snapshot_cuts;
use anyhow::Context;
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{CreateSnapshot, DeleteVolumeParams, VolumeInfo};
use pagemesh_stream::backup::CHUNK_BYTES;
use serde::Serialize;
use std::sync::Arc;

/// The result, for programs.
#[derive(Serialize)]
struct Restored {
    volume: VolumeInfo,
    backup: String,
    data_bytes: u64,
}

/// Makes a volume with the content of a backup. A volume that is not whole is deleted.
pub fn run(args: &RestoreArgs) -> anyhow::Result<()> {
    let name = args.backup.to_string();
    let directory = BackupDirectory::open_to_read(&args.dir)?;
    let header = directory.manifest(&name)?.header().clone();
    let manager = cluster_client(&args.client)?;
    let shape = (args.copies, args.class.as_deref());
    let request = create_request(&args.volume, shape, &header, true)?;
    manager.create(&request)?;
    let data_bytes = match write(args, &manager, &directory, &name) {
        Ok(written) => written,
        Err(cause) => return Err(delete_unfinished(args, &manager, cause)),
    };
    let made = promote(args, &manager)?;
    let restored = Restored {
        volume: made,
        backup: name,
        data_bytes,
    };
    output::print(args.client.output, &restored, || {
        let size = bytes(data_bytes);
        format!(
            "restored {} to the volume {}: {size}",
            restored.backup, args.volume
        )
    })
}

/// Deletes the volume of a restore that failed. Returns the error for the user.
fn delete_unfinished(
    args: &RestoreArgs,
    manager: &ManagerClient,
    cause: anyhow::Error,
) -> anyhow::Error {
    let volume = &args.volume;
    let whole = DeleteVolumeParams {
        force: true,
        snapshots: true,
    };
    match manager.delete_with(volume, whole) {
        Ok(_) => cause.context(format!("the unfinished volume {volume} is deleted")),
        Err(why) => cause.context(format!(
            "the volume {volume} is unfinished, and cannot be deleted: {why}"
        )),
    }
}

/// Lets clients attach the volume, which is whole. Nothing deletes it any more.
fn promote(args: &RestoreArgs, manager: &ManagerClient) -> anyhow::Result<VolumeInfo> {
    let (volume, mark) = (&args.volume, whole_mark()?);
    let promoted = manager.promote_volume(volume).with_context(|| {
        format!(
            "the volume {volume} is whole, but no client can attach it yet: run `pagemesh volume promote {volume}`, and then \
             `pagemesh snapshot delete {volume}@{mark}`"
        )
    })?;
    if let Err(cause) = manager.delete_snapshot(volume, &mark) {
        eprintln!(
            "warning: cannot delete the snapshot {volume}@{mark} of the restore, which keeps space: {cause}; delete it with: \
             pagemesh snapshot delete {volume}@{mark}"
        );
    }
    Ok(promoted.info)
}

/// The snapshot that tells the manager that the content is whole.
fn whole_mark() -> anyhow::Result<SnapshotName> {
    Ok("backup-restored".parse()?)
}

/// Writes the chunks of the backup; each is checked before. Returns their bytes.
fn write(
    args: &RestoreArgs,
    manager: &ManagerClient,
    directory: &BackupDirectory,
    name: &str,
) -> anyhow::Result<u64> {
    let new = EpochNumber(0);
    let volume = attach_to_receive(&args.client, args.transport, &args.volume, new)?;
    let volume = Arc::new(volume);
    let _guard = DetachGuard(Arc::clone(&volume));
    let _signs = LifeSigns::start(manager.clone(), &args.volume, &volume)?;
    snapshot_cuts::serve(manager, &[(args.volume.clone(), Arc::downgrade(&volume))])?;
    let mut io = SpaceIo::open(&*volume)?;
    let mut manifest = directory.manifest(name)?;
    let bar = output::progress("restoring");
    bar.set_length(manifest.header().size_bytes);
    let mut written = 0;
    while let Some(entry) = manifest
        .next()
        .with_context(|| format!("the backup {name}"))?
    {
        let data = directory.read_chunk(entry.id)?;
        let offset = entry.index * CHUNK_BYTES as u64;
        written += data.len() as u64;
        bar.set_position(offset + data.len() as u64);
        io.write(offset, data)?;
    }
    io.flush()?;
    bar.finish_and_clear();
    let request = CreateSnapshot {
        name: whole_mark()?,
        labels: vec![label(&manifest.header().to)],
    };
    manager.create_snapshot(&args.volume, &request)?;
    Ok(written)
}
