//! `pagemesh status`.

use crate::args::Client;
use crate::output::{self, bytes, table};
use crate::volume::client;
use pagemesh_manage::wire::{BrickInfo, Status, VolumeInfo};
use serde::Serialize;

#[derive(Serialize)]
struct Cluster {
    manager: String,
    status: Status,
    bricks: Vec<BrickInfo>,
    volumes: Vec<VolumeInfo>,
}

/// Shows the cluster.
pub fn run(args: &Client) -> anyhow::Result<()> {
    let manager = client(args)?;
    let cluster = Cluster {
        manager: manager.url().to_owned(),
        status: manager.status()?,
        bricks: manager.bricks()?,
        volumes: manager.volumes()?,
    };
    output::print(args.output, &cluster, || {
        let status = &cluster.status;
        format!(
            "manager {} {}\n{} of {} bricks alive, {} of {} used, {} promised to volumes\n\n{}\n\n{}",
            cluster.manager,
            status.version,
            status.bricks_alive,
            status.bricks,
            bytes(status.used_bytes),
            bytes(status.capacity_bytes),
            bytes(status.provisioned_bytes),
            bricks(&cluster.bricks),
            volumes(&cluster.volumes)
        )
    })
}

fn bricks(bricks: &[BrickInfo]) -> String {
    let rows = bricks.iter().map(|brick| {
        vec![
            brick.brick.to_string(),
            match brick.alive {
                true => "alive".to_owned(),
                false => "dead".to_owned(),
            },
            brick.domain.clone(),
            brick.durability.to_string(),
            brick.address.clone(),
            bytes(brick.used_bytes),
            bytes(brick.capacity_bytes),
            brick.slices.to_string(),
            brick.sessions.to_string(),
        ]
    });
    let head = [
        "BRICK",
        "STATE",
        "DOMAIN",
        "CLASS",
        "ADDRESS",
        ">USED",
        ">SIZE",
        ">SLICES",
        ">SESSIONS",
    ];
    table(&head, rows)
}

/// Volumes as a table.
pub fn volumes(volumes: &[VolumeInfo]) -> String {
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
            format!("{}{shape}", word(&volume.layout)),
            volume.durability.to_string(),
            word(&volume.health),
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

/// The word that an enumeration has in JSON.
pub fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => format!("{other:?}"),
    }
}
