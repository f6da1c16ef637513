//! The space of snapshots: `snapshot list --space` and `snapshot delete --dry-run`.

use super::SnapshotPath;
use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, bytes, table};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::VolumeSpaceReply;
use serde::Serialize;
use std::collections::BTreeMap;

/// Lists the bytes of the snapshots of a volume, the newest first.
pub fn list(args: &ManagerArgs, volume: &VolumeName) -> anyhow::Result<()> {
    let found = manager_client(args)?.snapshot_space(volume, &[])?;
    output::print(args.output, &found, || text(&found))
}

fn text(found: &VolumeSpaceReply) -> String {
    let rows = found.snapshots.iter().rev().map(|it| {
        vec![
            match it.complete {
                true => format!("{}@{}", found.volume, it.name),
                false => format!("{}@{} (incomplete)", found.volume, it.name),
            },
            bytes(it.exclusive_bytes),
            bytes(it.shared_bytes),
            bytes(it.referenced_bytes),
            bytes(it.written_bytes),
        ]
    });
    let columns = [
        "SNAPSHOT",
        ">FREED ALONE",
        ">SHARED",
        ">REFERENCED",
        ">WRITTEN",
    ];
    format!(
        "{}\n{} has {}, {} of them written since the newest snapshot; its snapshots keep {} more, each in one copy",
        table(&columns, rows).trim_end(),
        found.volume,
        bytes(found.volume_bytes),
        bytes(found.written_bytes),
        bytes(found.snapshot_bytes)
    )
}

/// Bytes that a deletion frees in one volume.
#[derive(Serialize)]
struct Freed {
    volume: VolumeName,
    snapshots: Vec<SnapshotName>,
    freed_bytes: u64,
}

/// Prints the bytes that a deletion of snapshots would free.
pub fn print_freed(
    args: &ManagerArgs,
    manager: &ManagerClient,
    paths: &[SnapshotPath],
) -> anyhow::Result<()> {
    let mut by_volume: BTreeMap<&VolumeName, Vec<SnapshotName>> = BTreeMap::new();
    for path in paths {
        let names = by_volume.entry(&path.volume).or_default();
        names.push(path.name.clone());
    }
    let mut freed = Vec::new();
    for (volume, snapshots) in by_volume {
        let found = manager.snapshot_space(volume, &snapshots)?;
        freed.push(Freed {
            volume: volume.clone(),
            snapshots,
            freed_bytes: found.freed_bytes,
        });
    }
    output::print(args.output, &freed, || {
        let line = |it: &Freed| {
            format!(
                "deleting {} snapshots of {} would free {} in each copy\n",
                it.snapshots.len(),
                it.volume,
                bytes(it.freed_bytes)
            )
        };
        freed.iter().map(line).collect()
    })
}
