//! The history of the figures of volumes and bricks (RFD 025).
//!
//! Invariants: the history has a lock of its own, so a report never waits for a commit. It is in memory
//! only, within [`HISTORY_BYTES_MAX`]; a restarted manager starts without it.

use pagemesh_base::layout::{BrickId, VolumeName};
use pagemesh_base::poison;
use pagemesh_telemetry::History;
use std::sync::{Mutex, MutexGuard};

/// Bytes that the history of all series takes, about.
const HISTORY_BYTES_MAX: usize = 128 << 20;

/// The subject of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FigureSubject {
    /// The sum of all volumes.
    Cluster,
    Volume(VolumeName),
    Brick(BrickId),
}

/// The figures of all subjects.
pub(crate) struct Figures(Mutex<History<FigureSubject>>);

impl Default for Figures {
    fn default() -> Figures {
        Figures(Mutex::new(History::new(HISTORY_BYTES_MAX)))
    }
}

impl Figures {
    pub(crate) fn history(&self) -> MutexGuard<'_, History<FigureSubject>> {
        poison::lock(&self.0)
    }

    /// Drops the series of a subject that no longer exists.
    pub(crate) fn remove(&self, subject: &FigureSubject) {
        self.history().remove(subject);
    }
}
