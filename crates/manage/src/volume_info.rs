//! The answers about a volume: its summary in lists, and its details.

use crate::manager::{Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::slices::{SliceLocation, promised_slices};
use crate::volume_table::{VolumeSummary, VolumeTable};
use crate::wire::{ReplicationStatus, ResyncProgress, VolumeContent, VolumeDetail, VolumeInfo};
use pagemesh_base::layout::{BrickId, LegState, VolumeName};

impl Manager {
    pub(crate) fn volume_detail(&self, book: &ManagerState, record: &VolumeRecord) -> VolumeDetail {
        VolumeDetail {
            info: self.volume_info(book, record),
            bricks: book.addresses(&record.layout_state.layout.segments),
            layout: record.layout_state.layout.clone(),
            notes: record.notes.clone(),
            replication: self.replication_status(book, record),
            lost_snapshots: vec![],
        }
    }

    /// The last report of the attached client about its asynchronous and resyncing copies.
    pub(crate) fn replication_status(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
    ) -> Option<ReplicationStatus> {
        let layout = &record.layout_state.layout;
        let (at, report) = book.replication_reports.get(&layout.name)?;
        let is_present = record.attachment.as_ref()?.epoch == report.attachment;
        let mut legs = layout.columns().flat_map(|column| &column.legs);
        let has_replica = legs.any(|leg| leg.state == LegState::AsyncReplica);
        let is_resyncing = |it: &&ResyncProgress| {
            let mut legs = layout
                .columns()
                .filter_map(|column| column.legs.get(it.copy));
            legs.any(|leg| matches!(leg.state, LegState::Stale | LegState::Syncing))
        };
        let status = ReplicationStatus {
            lag: report.lag.filter(|_| has_replica),
            resyncs: report
                .resyncs
                .iter()
                .filter(is_resyncing)
                .copied()
                .collect(),
            reported_us_ago: (self.clock.elapsed().saturating_sub(*at)).as_micros() as u64,
        };
        let is_something = status.lag.is_some() || !status.resyncs.is_empty();
        (is_present && is_something).then_some(status)
    }

    /// Every volume, by name.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeInfo> {
        let mut book = self.state();
        self.refresh_living(&mut book);
        let entries = book.volumes.entries().values();
        entries
            .map(|entry| summary_info(&entry.record, &entry.summary))
            .collect()
    }

    /// The summary of a volume, by its legs; its record need not be in the table.
    pub(crate) fn volume_info(&self, book: &ManagerState, record: &VolumeRecord) -> VolumeInfo {
        let is_living = |brick| {
            let brick = book.bricks.get(&brick);
            brick.is_some_and(|brick| self.is_alive(brick))
        };
        summary_info(record, &VolumeSummary::new(record, is_living))
    }

    /// Takes over the bricks that died or returned into the summaries of volumes, without a walk
    /// over the legs of others.
    pub(crate) fn refresh_living(&self, book: &mut ManagerState) {
        let ManagerState {
            bricks, volumes, ..
        } = book;
        for (id, brick) in bricks.iter() {
            self.set_living(volumes, *id, self.is_alive(brick));
        }
    }

    /// Counts a brick as living or not, and tells the watching clients.
    pub(crate) fn set_living(&self, volumes: &mut VolumeTable, brick: BrickId, is_living: bool) {
        if volumes.is_living(brick) == is_living {
            return;
        }
        self.feed.mark_brick(brick);
        for volume in volumes.set_living(brick, is_living) {
            self.feed.mark_volume(&volume);
        }
    }

    /// Adds a volume that the store has, or replaces it, and tells the watching clients.
    pub(crate) fn put_volume(&self, book: &mut ManagerState, record: VolumeRecord) {
        let name = record.layout_state.layout.name.clone();
        self.feed.mark_volume(&name);
        let attachment = record.attachment.as_ref().map(|it| it.epoch);
        self.cut_orders.keep_only(&name, attachment);
        let before = book.volumes.get(&name).map(record_slices);
        let (before, after) = (before.unwrap_or_default(), record_slices(&record));
        if before != after {
            self.mark_bricks_of(before.iter().chain(&after));
        }
        book.volumes.insert(name, record);
    }

    /// Removes a volume that the store no longer has, and tells the watching clients.
    pub(crate) fn remove_volume(&self, book: &mut ManagerState, name: &VolumeName) {
        if let Some(record) = book.volumes.get(name) {
            self.mark_bricks_of(&record_slices(record));
        }
        self.feed.mark_volume(name);
        self.cut_orders.keep_only(name, None);
        book.volumes.remove(name);
    }

    /// Tells the watching clients that the slices of bricks have changed.
    pub(crate) fn mark_bricks_of<'a>(&self, slices: impl IntoIterator<Item = &'a SliceLocation>) {
        for slice in slices {
            self.feed.mark_brick(slice.brick);
        }
    }
}

fn record_slices(record: &VolumeRecord) -> Vec<SliceLocation> {
    promised_slices(&record.layout_state.layout.segments, record.files_bytes).collect()
}

/// A volume in a list.
pub(crate) fn summary_info(record: &VolumeRecord, summary: &VolumeSummary) -> VolumeInfo {
    let layout = &record.layout_state.layout;
    VolumeInfo {
        name: layout.name.clone(),
        id: layout.volume,
        content: volume_content(record),
        size_bytes: record.files_bytes.unwrap_or(summary.layout_bytes),
        layout: record.shape.kind,
        columns: record.shape.columns,
        copies: record.shape.copies,
        durability: record.durability,
        epoch: layout.epoch,
        health: summary.health,
        unreachable_legs: summary.unreachable_legs,
        attached: record.attachment.clone(),
        auto_promote: record.auto_promote,
        tier: record.tier,
        received: record.received,
        created_unix_s: record.created_unix_s,
        origin: record.origin.clone(),
        rollback: record.rollback.clone(),
        content_returns: record.content_returns,
        labels: record.labels.clone(),
    }
}

/// The use of a volume.
pub(crate) fn volume_content(record: &VolumeRecord) -> VolumeContent {
    match record.files_bytes {
        None => VolumeContent::Blocks,
        Some(_) => VolumeContent::Files,
    }
}
