//! `pagemesh status`.

use crate::args::ManagerArgs;
use crate::commands::brick::list;
use crate::commands::volume::manager_client;
use crate::output::{self, bytes, table};
use pagemesh_manage::wire::{BrickInfo, ClusterStatus, VolumeInfo};
use serde::Serialize;

#[derive(Serialize)]
struct ClusterOutput {
    manager: String,
    status: ClusterStatus,
    bricks: Vec<BrickInfo>,
    volumes: Vec<VolumeInfo>,
}

/// Shows the cluster.
pub fn run(args: &ManagerArgs) -> anyhow::Result<()> {
    let manager = manager_client(args)?;
    let cluster = ClusterOutput {
        manager: manager.url().to_owned(),
        status: manager.status()?,
        bricks: manager.bricks()?,
        volumes: manager.volumes()?,
    };
    output::print(args.output, &cluster, || {
        let status = &cluster.status;
        let scrubs = match (status.scrubs_mended, status.scrubs_damaged) {
            (0, 0) => String::new(),
            (mended, damaged) => {
                format!(
                    "\nscrubs of pools have corrected {mended} places, {damaged} are still damaged"
                )
            }
        };
        format!(
            "manager {} {}\n{} of {} bricks alive, {} of {} used, {} promised to volumes{scrubs}\n\n{}\n\n{}",
            cluster.manager,
            status.version,
            status.bricks_alive,
            status.bricks,
            bytes(status.used_bytes),
            bytes(status.capacity_bytes),
            bytes(status.provisioned_bytes),
            list::brick_table(&cluster.bricks),
            volume_table(&cluster.volumes)
        )
    })
}

/// Volumes as a table.
pub fn volume_table(volumes: &[VolumeInfo]) -> String {
    if volumes.is_empty() {
        return "no volumes; make one with: pagemesh volume create NAME --size 1G".into();
    }
    let rows = volumes.iter().map(|volume| {
        let shape = match (volume.columns, volume.copies) {
            (1, 1) => String::new(),
            (1, copies) => format!(" {copies} copies"),
            (columns, 1) => format!(" {columns} columns"),
            (columns, copies) => format!(" {columns} columns of {copies}"),
        };
        vec![
            volume.name.to_string(),
            bytes(volume.size_bytes),
            format!("{}{shape}", json_word(&volume.layout)),
            volume.durability.to_string(),
            json_word(&volume.health),
            volume.epoch.0.to_string(),
            volume
                .attached
                .as_ref()
                .map_or_else(|| "-".into(), |by| by.client.clone()),
        ]
    });
    let head = [
        "VOLUME",
        ">SIZE",
        "LAYOUT",
        "CLASS",
        "HEALTH",
        ">EPOCH",
        "ATTACHED BY",
    ];
    table(&head, rows)
}

/// The JSON name of an enumeration's value.
pub fn json_word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => format!("{other:?}"),
    }
}
