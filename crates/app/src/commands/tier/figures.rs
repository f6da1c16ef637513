//! `pagemesh tier stat`: the figures of tiers, as they are shown.

use super::brick_label;
use crate::output::{bytes, table};
use anyhow::bail;
use pagemesh_base::brick_name::{BrickLabel, BrickName, BrickRef};
use pagemesh_base::layout::{BrickId, VolumeName};
use pagemesh_manage::wire::{BrickInfo, BrickTier, ErrorCode, NamedVolumeTier, TierBytes};
use pagemesh_manage::{ManagerClient, ManagerError};
use serde::Serialize;

/// The volumes and bricks that names name.
#[derive(Default)]
pub struct TierSubjects {
    volumes: Vec<NamedVolumeTier>,
    bricks: Vec<BrickInfo>,
}

/// The figures for programs.
#[derive(Serialize)]
pub struct TierStat<'f> {
    bricks: Vec<BrickStat<'f>>,
    volumes: &'f [NamedVolumeTier],
}

/// A brick. The figures are missing if its pool has no disk behind memory.
#[derive(Serialize)]
struct BrickStat<'f> {
    brick: BrickId,
    name: Option<&'f BrickName>,
    alive: bool,
    tier: Option<TierFigures<'f>>,
}

#[derive(Serialize)]
struct TierFigures<'f> {
    #[serde(flatten)]
    tier: &'f BrickTier,
    /// Of the reads over tcp in the last minute, if there were any.
    hit_ratio: Option<f64>,
}

/// Finds volumes and bricks. Without names: the bricks with a tier, and the volumes that have a policy or a leg on them.
pub fn find(manager: &ManagerClient, names: &[String]) -> anyhow::Result<TierSubjects> {
    let mut bricks = manager.bricks()?;
    if names.is_empty() {
        bricks.retain(|brick| brick.tier.is_some());
        let volumes = manager.volume_tiers()?;
        return Ok(TierSubjects { volumes, bricks });
    }
    let mut found = TierSubjects::default();
    for name in names {
        let volume = match name.parse() {
            Ok(volume) => find_volume(manager, volume)?,
            Err(_) => None,
        };
        let brick = find_brick(&bricks, name)?.cloned();
        if volume.is_none() && brick.is_none() {
            bail!(
                "there is no volume and no brick {name}; list what there is with: pagemesh status"
            );
        }
        found.volumes.extend(volume);
        found.bricks.extend(brick);
    }
    Ok(found)
}

/// Finds a brick by its name, its UUID or the first digits of the UUID. A name takes precedence.
fn find_brick<'b>(bricks: &'b [BrickInfo], text: &str) -> anyhow::Result<Option<&'b BrickInfo>> {
    let Ok(asked) = text.parse::<BrickRef>() else {
        return Ok(None);
    };
    let is_named = |it: &&BrickInfo| match &asked {
        BrickRef::Id(id) => it.brick == *id,
        BrickRef::Name(name) => it.name.as_ref() == Some(name),
    };
    if let Some(named) = bricks.iter().find(is_named) {
        return Ok(Some(named));
    }
    let mut similar = bricks.iter().filter(|it| asked.is_short_id_of(it.brick));
    match (similar.next(), similar.next()) {
        (Some(_), Some(_)) => {
            bail!("several bricks have UUIDs that begin with {text}; name more digits")
        }
        (found, _) => Ok(found),
    }
}

fn find_volume(
    manager: &ManagerClient,
    volume: VolumeName,
) -> Result<Option<NamedVolumeTier>, ManagerError> {
    match manager.volume_tier(&volume) {
        Ok(tier) => Ok(Some(NamedVolumeTier { volume, tier })),
        Err(ManagerError::Refused {
            code: ErrorCode::NotFound,
            ..
        }) => Ok(None),
        Err(cause) => Err(cause),
    }
}

impl<'f> TierStat<'f> {
    pub fn new(found: &'f TierSubjects) -> TierStat<'f> {
        let bricks = found.bricks.iter().map(|brick| BrickStat {
            brick: brick.brick,
            name: brick.name.as_ref(),
            alive: brick.alive,
            tier: brick.tier.as_ref().map(|tier| TierFigures {
                tier,
                hit_ratio: tier.hit_ratio(),
            }),
        });
        TierStat {
            bricks: bricks.collect(),
            volumes: &found.volumes,
        }
    }
}

/// The figures for people.
pub fn stat_text(stat: &TierStat<'_>) -> String {
    if stat.bricks.is_empty() && stat.volumes.is_empty() {
        return "no brick has a pool with a disk behind memory; make one with: \
                pagemesh pool create PATH --size 1G --flash DISK"
            .into();
    }
    let mut parts = Vec::new();
    if !stat.bricks.is_empty() {
        parts.push(brick_table(&stat.bricks));
    }
    if !stat.volumes.is_empty() {
        parts.push(volume_table(stat.volumes));
    }
    parts.join("\n\n")
}

fn brick_table(bricks: &[BrickStat<'_>]) -> String {
    let head = [
        "BRICK",
        ">MEMORY USED",
        ">MEMORY",
        ">FLASH USED",
        ">FLASH",
        ">HITS/MIN",
        ">PROMOTED",
        ">DEMOTED",
        ">WAITS",
    ];
    let rows = bricks.iter().map(|brick| {
        let label = BrickLabel {
            id: brick.brick,
            name: brick.name.cloned(),
        };
        let name = match brick.alive {
            true => label.to_string(),
            false => format!("{label}, dead"),
        };
        let Some(TierFigures { tier, hit_ratio }) = &brick.tier else {
            let mut row = vec![name, "no tier".into()];
            row.resize(head.len(), "-".into());
            return row;
        };
        let used = |all: u64, free: u64| bytes(all.saturating_sub(free));
        vec![
            name,
            used(tier.memory_bytes, tier.memory_free_bytes),
            bytes(tier.memory_bytes),
            used(tier.flash_bytes, tier.flash_free_bytes),
            bytes(tier.flash_bytes),
            hit_ratio.map_or_else(|| "-".into(), |ratio| format!("{:.1} %", ratio * 100.0)),
            tier.promoted_pages.to_string(),
            tier.demoted_pages.to_string(),
            tier.waits.to_string(),
        ]
    });
    table(&head, rows)
}

fn volume_table(volumes: &[NamedVolumeTier]) -> String {
    let rows = volumes.iter().map(|NamedVolumeTier { volume, tier }| {
        let held = |part: fn(&TierBytes) -> u64| {
            let held = tier.held.as_ref().map(part);
            held.map_or_else(|| "-".into(), bytes)
        };
        let bricks = tier.bricks.iter();
        let bricks = bricks.map(|it| format!("{} {}", brick_label(it), it.effect.name()));
        vec![
            volume.to_string(),
            tier.policy.name().to_owned(),
            held(|it| it.memory_bytes),
            held(|it| it.flash_bytes),
            bricks.collect::<Vec<_>>().join(", "),
        ]
    });
    table(
        &["VOLUME", "POLICY", ">IN MEMORY", ">ON FLASH", "BRICKS"],
        rows,
    )
}
