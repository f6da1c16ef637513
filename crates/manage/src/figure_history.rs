//! The history of the figures of volumes and bricks (RFD 025).
//!
//! Invariants: the history and the sums have locks of their own, which are taken after the manager's and never before
//! it. A report counts once. They are in memory only, the history within [`HISTORY_BYTES_MAX`]; a restarted manager starts without them.

use crate::wire::ReportDelivery;
use pagemesh_base::layout::{BrickId, VolumeName};
use pagemesh_base::poison;
use pagemesh_metrics::{BusiestSeries, OpSums};
use pagemesh_telemetry::{History, MediaBytes, Report};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use uuid::Uuid;

/// Bytes that the history of all series takes, about: enough for a day and an hour of 4 096 volumes and 100 bricks that
/// are never idle, at most 40 KiB each with the reports of the last minute.
const HISTORY_BYTES_MAX: usize = 224 << 20;

/// A report that covers more than this is left out of the histories: it contains operations from before the present
/// step, as after an outage of the manager. One that is late by a round still counts.
const COVERED_MAX: Duration = Duration::from_secs(25);

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

/// A checked report, as it arrived.
#[derive(Clone, Copy)]
pub(crate) struct ReceivedReport<'r> {
    pub now: Duration,
    pub report: &'r Report,
    pub delivery: Option<ReportDelivery>,
}

/// Sums since the manager started, for `/metrics`.
pub(crate) struct FigureSums {
    /// Of all volumes.
    pub cluster: OpSums,
    pub volumes: BusiestSeries<VolumeName>,
    pub bricks: BTreeMap<BrickId, BrickSums>,
    /// The last report of each subject: its sender and number.
    delivered: BTreeMap<FigureSubject, (Uuid, u64)>,
}

/// Sums of the reports of a brick.
#[derive(Default)]
pub(crate) struct BrickSums {
    pub operations: OpSums,
    /// None until a report has them.
    pub media: Option<MediaBytes>,
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
                delivered: BTreeMap::new(),
            }),
        }
    }

    pub(crate) fn history(&self) -> MutexGuard<'_, History<FigureSubject>> {
        poison::lock(&self.history)
    }

    pub(crate) fn sums(&self) -> MutexGuard<'_, FigureSums> {
        poison::lock(&self.sums)
    }

    /// Adds the report of a volume's client.
    pub(crate) fn record_volume(&self, name: &VolumeName, received: ReceivedReport<'_>) {
        let subject = FigureSubject::Volume(name.clone());
        {
            let mut sums = self.sums();
            if !sums.is_first_delivery(&subject, received.delivery) {
                return;
            }
            sums.cluster.add(received.report);
            sums.volumes.add(name, received.now, received.report);
        }
        if received.belongs_to_present_step() {
            let mut history = self.history();
            history.record(&subject, received.now, received.report);
            history.record(&FigureSubject::Cluster, received.now, received.report);
        }
    }

    /// Adds the report of a brick.
    pub(crate) fn record_brick(&self, brick: BrickId, received: ReceivedReport<'_>) {
        let subject = FigureSubject::Brick(brick);
        {
            let mut sums = self.sums();
            if !sums.is_first_delivery(&subject, received.delivery) {
                return;
            }
            let sums = sums.bricks.entry(brick).or_default();
            sums.operations.add(received.report);
            if let Some(media) = received.report.media {
                sums.media.get_or_insert_default().add(media);
            }
        }
        if received.belongs_to_present_step() {
            self.history()
                .record(&subject, received.now, received.report);
        }
    }

    /// Drops the figures of a subject that no longer exists.
    pub(crate) fn remove(&self, subject: &FigureSubject) {
        self.history().remove(subject);
        let mut sums = self.sums();
        sums.delivered.remove(subject);
        match subject {
            FigureSubject::Volume(name) => sums.volumes.remove(name),
            FigureSubject::Brick(brick) => {
                sums.bricks.remove(brick);
            }
            FigureSubject::Cluster => {}
        }
    }
}

impl FigureSums {
    /// Notes a delivery. False if its report was taken before.
    fn is_first_delivery(
        &mut self,
        subject: &FigureSubject,
        delivery: Option<ReportDelivery>,
    ) -> bool {
        let Some(ReportDelivery {
            reporter, number, ..
        }) = delivery
        else {
            return true;
        };
        let last = self.delivered.get(subject);
        let is_first = last.is_none_or(|&(of, last)| of != reporter || number > last);
        // A late duplicate must not make the last report look new again.
        if is_first {
            self.delivered.insert(subject.clone(), (reporter, number));
        }
        is_first
    }
}

impl ReceivedReport<'_> {
    fn belongs_to_present_step(&self) -> bool {
        let covered = |delivery: ReportDelivery| Duration::from_millis(delivery.covers_ms);
        self.delivery.is_none_or(|it| covered(it) <= COVERED_MAX)
    }
}
