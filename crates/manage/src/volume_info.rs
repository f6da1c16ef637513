//! The answers about a volume: its summary in lists, and its details.

use crate::manager::{Manager, ManagerState};
use crate::records::VolumeRecord;
use crate::slices::{SliceLocation, slice_locations};
use crate::wire::{
    ReplicationStatus, ResyncProgress, VolumeContent, VolumeDetail, VolumeHealth, VolumeInfo,
};
use pagemesh_base::layout::{Layout, LegState};

impl Manager {
    pub(crate) fn volume_detail(&self, book: &ManagerState, record: &VolumeRecord) -> VolumeDetail {
        VolumeDetail {
            info: self.volume_info(book, record),
            bricks: book.addresses(&record.layout_state.layout.segments),
            layout: record.layout_state.layout.clone(),
            notes: record.notes.clone(),
            replication: self.replication_status(book, record),
        }
    }

    /// The last report of the attached client about its asynchronous and resyncing copies.
    fn replication_status(
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

    pub(crate) fn volume_info(&self, book: &ManagerState, record: &VolumeRecord) -> VolumeInfo {
        let layout = &record.layout_state.layout;
        let is_dead = |place: &SliceLocation| {
            let brick = book.bricks.get(&place.brick);
            !brick.is_some_and(|brick| self.is_alive(brick))
        };
        VolumeInfo {
            name: layout.name.clone(),
            id: layout.volume,
            content: match record.files_bytes {
                None => VolumeContent::Blocks,
                Some(_) => VolumeContent::Files,
            },
            size_bytes: record.files_bytes.unwrap_or(layout.size_bytes()),
            layout: record.shape.kind,
            columns: record.shape.columns,
            copies: record.shape.copies,
            durability: record.durability,
            epoch: layout.epoch,
            health: health(layout),
            unreachable_legs: slice_locations(&layout.segments).filter(is_dead).count(),
            attached: record.attachment.clone(),
            auto_promote: record.auto_promote,
            created_unix_s: record.created_unix_s,
        }
    }
}

fn health(layout: &Layout) -> VolumeHealth {
    let columns = layout.columns();
    let has = |state| {
        let mut legs = columns.clone().flat_map(|column| &column.legs);
        legs.any(|leg| leg.state == state)
    };
    if has(LegState::Stale) {
        VolumeHealth::Degraded
    } else if has(LegState::Syncing) {
        VolumeHealth::Syncing
    } else {
        VolumeHealth::InSync
    }
}
