//! Pages of volumes and bricks, and the states that `If-Match` expects.

use crate::call::RecordTag;
use crate::fault::Fault;
use crate::manager::Manager;
use crate::records::{BrickRecord, VolumeRecord};
use crate::volume_info::{summary_info, volume_content};
use crate::wire::{BrickHealth, BrickInfo, ListBricks, ListVolumes, VolumeDetail, VolumeInfo};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use std::ops::Bound;

impl Manager {
    /// The volumes of a list, by name, and whether more follow.
    #[must_use]
    pub fn list_volumes(&self, asked: &ListVolumes) -> (Vec<VolumeInfo>, bool) {
        let mut book = self.state();
        self.refresh_living(&mut book);
        let behind = asked
            .after
            .as_ref()
            .map_or(Bound::Unbounded, Bound::Excluded);
        let entries = book.volumes.entries();
        let entries = entries.range::<VolumeName, _>((behind, Bound::Unbounded));
        let mut matching = entries.filter(|(name, entry)| {
            let health = asked.health.is_none_or(|it| it == entry.summary.health);
            let content = asked
                .content
                .is_none_or(|it| it == volume_content(&entry.record));
            let search = asked.search.as_ref();
            health && content && search.is_none_or(|text| name.as_str().contains(text))
        });
        let page = matching.by_ref().take(asked.limit.unwrap_or(usize::MAX));
        let page = page
            .map(|(_, entry)| summary_info(&entry.record, &entry.summary))
            .collect();
        (page, matching.next().is_some())
    }

    /// The bricks of a list, by name, and whether more follow.
    #[must_use]
    pub fn list_bricks(&self, asked: &ListBricks) -> (Vec<BrickInfo>, bool) {
        let named = self
            .bricks()
            .into_iter()
            .map(|brick| (brick_key(&brick), brick));
        let mut found: Vec<(String, BrickInfo)> = named
            .filter(|(name, brick)| {
                let health = asked
                    .health
                    .is_none_or(|it| (it == BrickHealth::Alive) == brick.alive);
                let search = asked.search.as_ref();
                let later = asked.after.as_ref().is_none_or(|after| name > after);
                health && later && search.is_none_or(|text| name.contains(text))
            })
            .collect();
        found.sort_by(|(name, _), (other, _)| name.cmp(other));
        let limit = asked.limit.unwrap_or(usize::MAX);
        let has_more = found.len() > limit;
        let page = found.into_iter().take(limit).map(|(_, brick)| brick);
        (page.collect(), has_more)
    }

    /// The details of a volume, and the tag of its record.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn show_tagged(&self, name: &VolumeName) -> Result<(VolumeDetail, RecordTag), Fault> {
        let book = self.state();
        let record = book.volume(name)?;
        Ok((self.volume_detail(&book, record), volume_tag(record)))
    }

    /// A brick, and the tag of its record.
    ///
    /// # Errors
    /// When there is no such brick.
    pub fn show_brick(&self, asked: impl Into<BrickRef>) -> Result<(BrickInfo, RecordTag), Fault> {
        let book = self.state();
        let brick = book.find_brick(&asked.into())?;
        Ok((
            self.brick_info(&book, &book.provisioned(), brick),
            brick_tag(&brick.record),
        ))
    }

    /// Refuses a change of a volume that is not in a state that the request expects.
    pub(crate) fn check_volume_unchanged(&self, record: &VolumeRecord) -> Result<(), Fault> {
        let name = &record.layout_state.layout.name;
        self.check_unchanged(|| volume_tag(record), || format!("the volume {name}"))
    }

    /// Refuses a change of a brick that is not in a state that the request expects.
    pub(crate) fn check_brick_unchanged(&self, record: &BrickRecord) -> Result<(), Fault> {
        self.check_unchanged(
            || brick_tag(record),
            || format!("the brick {}", record.label()),
        )
    }

    pub(crate) fn check_unchanged(
        &self,
        tag: impl FnOnce() -> RecordTag,
        name: impl FnOnce() -> String,
    ) -> Result<(), Fault> {
        match &self.call.expected {
            Some(expected) if !expected.contains(&tag()) => Err(Fault::ChangedMeanwhile(name())),
            _ => Ok(()),
        }
    }
}

/// The name by which lists order a brick.
pub(crate) fn brick_key(brick: &BrickInfo) -> String {
    let name = brick.name.as_ref();
    name.map_or_else(|| brick.brick.to_string(), ToString::to_string)
}

/// The epochs of snapshots are no change of the volume: a snapshot each minute must not fail the change that an operator
/// has decided on.
pub(crate) fn volume_tag(record: &VolumeRecord) -> RecordTag {
    let mut record = record.clone();
    record.layout_state.reserved = EpochNumber(0);
    RecordTag::new(&record)
}

/// The used bytes and the reported loss change with heartbeats, and are no change of the brick.
fn brick_tag(record: &BrickRecord) -> RecordTag {
    RecordTag::new(&BrickRecord {
        used_bytes: 0,
        reported_lost: false,
        ..record.clone()
    })
}
