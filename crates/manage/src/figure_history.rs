//! The history of the figures of volumes and bricks (RFD 025).
//!
//! Invariants: the history and the sums have locks of their own, which are taken after the manager's and never before
//! it. They are in memory only, the history within [`HISTORY_BYTES_MAX`]; a restarted manager starts without them.

use pagemesh_base::layout::{BrickId, VolumeName};
use pagemesh_base::poison;
use pagemesh_metrics::{BusiestSeries, OpSums};
use pagemesh_telemetry::{History, Report};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

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
pub(crate) struct Figures {
    history: Mutex<History<FigureSubject>>,
    sums: Mutex<FigureSums>,
}

/// Sums since the manager started, for `/metrics`.
pub(crate) struct FigureSums {
    /// Of all volumes.
    pub cluster: OpSums,
    pub volumes: BusiestSeries<VolumeName>,
    pub bricks: BTreeMap<BrickId, OpSums>,
}

impl Figures {
    /// Figures without a report. At most this many volumes have sums of their own.
    pub(crate) fn new(metric_volumes: usize) -> Figures {
        Figures {
            history: Mutex::new(History::new(HISTORY_BYTES_MAX)),
            sums: Mutex::new(FigureSums {
                cluster: OpSums::default(),
                volumes: BusiestSeries::new(metric_volumes),
                bricks: BTreeMap::new(),
            }),
        }
    }

    pub(crate) fn history(&self) -> MutexGuard<'_, History<FigureSubject>> {
        poison::lock(&self.history)
    }

    pub(crate) fn sums(&self) -> MutexGuard<'_, FigureSums> {
        poison::lock(&self.sums)
    }

    /// Adds a checked report of a volume's client.
    pub(crate) fn record_volume(&self, name: &VolumeName, now: Duration, report: &Report) {
        {
            let mut sums = self.sums();
            sums.cluster.add(report);
            sums.volumes.add(name, now, report);
        }
        let mut history = self.history();
        history.record(&FigureSubject::Volume(name.clone()), now, report);
        history.record(&FigureSubject::Cluster, now, report);
    }

    /// Adds a checked report of a brick.
    pub(crate) fn record_brick(&self, brick: BrickId, now: Duration, report: &Report) {
        self.sums().bricks.entry(brick).or_default().add(report);
        self.history()
            .record(&FigureSubject::Brick(brick), now, report);
    }

    /// Drops the figures of a subject that no longer exists.
    pub(crate) fn remove(&self, subject: &FigureSubject) {
        self.history().remove(subject);
        match subject {
            FigureSubject::Volume(name) => self.sums().volumes.remove(name),
            FigureSubject::Brick(brick) => {
                self.sums().bricks.remove(brick);
            }
            FigureSubject::Cluster => {}
        }
    }
}
