//! The bytes that all bricks wrote to their media, for each byte that users wrote to volumes.
//!
//! Invariant: no ratio without the reports of all that may have written. A missing report of a volume would raise
//! the ratio, one of a brick would lower it.

use crate::figure_history::FigureSubject;
use crate::manager::{Manager, ManagerState};
use crate::wire::ClusterMediaFigures;
use pagemesh_base::layout::{BrickId, VolumeName};
use pagemesh_telemetry::{History, MediaBytes, OpKind};
use std::time::Duration;

/// A client of an attached volume that is silent for longer has ended without a detach, and writes no more.
const SILENT_CLIENT_MAX: Duration = Duration::from_secs(600);

/// The processes that should report.
pub(crate) struct Reporters {
    /// All bricks; true: it is alive.
    bricks: Vec<(BrickId, bool)>,
    attached_volumes: Vec<VolumeName>,
    manager_started_at: Duration,
}

impl Manager {
    pub(crate) fn reporters(&self, book: &ManagerState) -> Reporters {
        let bricks = book.bricks.iter();
        let volumes = book.volumes.entries().iter();
        let attached = volumes.filter(|(_, entry)| entry.record.attachment.is_some());
        Reporters {
            bricks: bricks
                .map(|(id, brick)| (*id, self.is_alive(brick)))
                .collect(),
            attached_volumes: attached.map(|(name, _)| name.clone()).collect(),
            manager_started_at: self.started_at,
        }
    }
}

/// The bytes of the last minute; none if no brick has reported any.
pub(crate) fn cluster_media(
    history: &History<FigureSubject>,
    reporters: &Reporters,
    now: Duration,
) -> Option<ClusterMediaFigures> {
    let (mut sum, mut is_complete) = (None, true);
    for (brick, is_alive) in &reporters.bricks {
        match history
            .recent_summary(&FigureSubject::Brick(*brick), now)
            .media
        {
            Some(media) => sum.get_or_insert_with(MediaBytes::default).add(media),
            None => is_complete &= !is_alive,
        }
    }
    let written: MediaBytes = sum?;
    let window = history.recent_window(now);
    let is_missing = |volume: &VolumeName| {
        let series = history.series(&FigureSubject::Volume(volume.clone()));
        let heard = series.map_or(reporters.manager_started_at, |series| series.heard());
        let silence = now.saturating_sub(heard);
        silence < SILENT_CLIENT_MAX && (silence > window || series.is_none())
    };
    is_complete &= !reporters.attached_volumes.iter().any(is_missing);
    let users = history.recent_summary(&FigureSubject::Cluster, now);
    let user_bytes = users.kinds[OpKind::Write as usize].bytes;
    let ratio =
        |bytes: u64| (is_complete && user_bytes > 0).then(|| bytes as f64 / user_bytes as f64);
    Some(ClusterMediaFigures {
        written: written.into(),
        per_user_byte: ratio(written.total()),
        metadata_per_user_byte: ratio(written.metadata()),
    })
}
