//! `pagemesh backup restore`.

use super::RestoreArgs;
use super::directory::BackupDirectory;
use crate::client::{DetachGuard, attach, cluster_client};
use crate::commands::snapshot::receive::target::create_request;
use crate::commands::snapshot::space_io::SpaceIo;
use crate::output::{self, bytes};
use anyhow::Context;
use pagemesh_manage::wire::VolumeInfo;
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
    let request = create_request(&args.volume, shape, &header, false)?;
    let made = manager.create(&request)?.volume.info;
    let data_bytes = match write(args, &directory, &name) {
        Ok(written) => written,
        Err(cause) => {
            let deleted = manager.delete(&args.volume, true);
            return Err(match deleted {
                Ok(_) => cause.context(format!("the unfinished volume {} is deleted", args.volume)),
                Err(why) => cause.context(format!(
                    "the volume {} is unfinished, and cannot be deleted: {why}",
                    args.volume
                )),
            });
        }
    };
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

/// Writes the chunks of the backup; each is checked before. Returns their bytes.
fn write(args: &RestoreArgs, directory: &BackupDirectory, name: &str) -> anyhow::Result<u64> {
    let volume = Arc::new(attach(&args.client, args.transport, &args.volume)?);
    let _guard = DetachGuard(Arc::clone(&volume));
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
    Ok(written)
}
