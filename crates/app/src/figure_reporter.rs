//! Reports the figures of this process to the manager: the operations of its volumes, or of its brick
//! (RFD 025).
//!
//! Invariants: each operation is in one report. A report without an answer is sent again unchanged, so the manager
//! knows it by its number. A manager without an answer costs nothing but its history: the operations of the meantime
//! go with the next report.

use anyhow::Context;
use pagemesh_base::layout::{BrickId, EpochNumber, VolumeName};
use pagemesh_brick::brick::Brick;
use pagemesh_manage::wire::{ReportBrickFigures, ReportDelivery, ReportFigures};
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_pmem::Media;
use pagemesh_telemetry::{Report, Totals};
use pagemesh_volume::Volume;
use std::sync::Weak;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The time between two reports: a step of the manager's history.
const REPORT_INTERVAL: Duration = pagemesh_telemetry::SHORT_STEP;

/// A thread that reports until this is dropped, and then once more.
pub struct FigureReporter {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Counters of this process, with the last values that the manager knows.
struct Source {
    read: ReadTotals,
    send: SendReport,
    reporter: Uuid,
    /// The last report that the manager took.
    taken: ReportMark,
    /// A report that was sent, and may or may not have arrived.
    unanswered: Option<(Report, ReportMark)>,
}

/// The end of a report.
struct ReportMark {
    number: u64,
    totals: Totals,
    at: Instant,
}

/// Reads the counters; none once their subject is gone.
type ReadTotals = Box<dyn Fn() -> Option<Totals> + Send>;
/// Sends a report.
type SendReport = Box<dyn Fn(Report, ReportDelivery) -> Result<(), ManagerError> + Send>;

impl FigureReporter {
    /// Reports volumes that this process has attached.
    pub fn of_volumes(
        manager: ManagerClient,
        volumes: Vec<(VolumeName, Weak<Volume>)>,
    ) -> anyhow::Result<FigureReporter> {
        let source = |(name, volume): (VolumeName, Weak<Volume>)| {
            let (manager, attached) = (manager.clone(), volume.clone());
            Source::new(
                Box::new(move || Some(volume.upgrade()?.meters().totals())),
                Box::new(move |report, delivery| {
                    let Some(volume) = attached.upgrade() else {
                        return Ok(());
                    };
                    let figures = ReportFigures {
                        attachment: EpochNumber(volume.attachment().0),
                        report,
                        delivery: Some(delivery),
                    };
                    manager.report_volume_figures(&name, &figures)
                }),
            )
        };
        FigureReporter::start(volumes.into_iter().map(source).collect())
    }

    /// Reports the brick of this process.
    pub fn of_brick<M: Media + Send + Sync + 'static>(
        manager: ManagerClient,
        brick: &Weak<Brick<M>>,
    ) -> anyhow::Result<FigureReporter> {
        let Some(id) = brick.upgrade().map(|brick| brick.id()) else {
            return FigureReporter::start(Vec::new());
        };
        let brick = brick.clone();
        FigureReporter::start(vec![Source::new(
            Box::new(move || {
                let brick = brick.upgrade()?;
                let mut totals = brick.meters().totals();
                totals.media = Some(brick.media_bytes());
                Some(totals)
            }),
            Box::new(move |report, delivery| send_brick_report(&manager, id, report, delivery)),
        )])
    }

    fn start(mut sources: Vec<Source>) -> anyhow::Result<FigureReporter> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("figures".into())
            .spawn(move || {
                loop {
                    let waited = stopped.recv_timeout(REPORT_INTERVAL);
                    // A manager that does not answer delays the round, and an end, only once.
                    let _ = sources.iter_mut().try_for_each(Source::report);
                    if waited != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            })
            .context("cannot start the thread that reports figures")?;
        Ok(FigureReporter {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

fn send_brick_report(
    manager: &ManagerClient,
    brick: BrickId,
    report: Report,
    delivery: ReportDelivery,
) -> Result<(), ManagerError> {
    let figures = ReportBrickFigures {
        report,
        delivery: Some(delivery),
    };
    manager.report_brick_figures(brick, &figures)
}

impl Source {
    fn new(read: ReadTotals, send: SendReport) -> Source {
        Source {
            read,
            send,
            reporter: Uuid::new_v4(),
            taken: ReportMark {
                number: 0,
                totals: Totals::default(),
                at: Instant::now(),
            },
            unanswered: None,
        }
    }

    /// Sends the report without an answer again, and then the operations since its end; an idle subject
    /// sends an empty report.
    ///
    /// # Errors
    /// When the manager does not answer.
    fn report(&mut self) -> Result<(), ManagerError> {
        if let Some((report, end)) = self.unanswered.take() {
            self.send(report, end)?;
        }
        let Some(totals) = (self.read)() else {
            return Ok(());
        };
        let report = totals.since(&self.taken.totals);
        let end = ReportMark {
            number: self.taken.number + 1,
            totals,
            at: Instant::now(),
        };
        self.send(report, end)
    }

    fn send(&mut self, report: Report, end: ReportMark) -> Result<(), ManagerError> {
        let covered = self.taken.at.elapsed();
        let delivery = ReportDelivery {
            reporter: self.reporter,
            number: end.number,
            covers_ms: u64::try_from(covered.as_millis()).unwrap_or(u64::MAX),
        };
        match (self.send)(report.clone(), delivery) {
            Ok(()) => self.taken = end,
            Err(cause) => {
                tracing::debug!(%cause, "figures were not reported");
                if let ManagerError::Unreachable { .. } = cause {
                    self.unanswered = Some((report, end));
                    return Err(cause);
                }
            }
        }
        Ok(())
    }
}

impl Drop for FigureReporter {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that reports figures panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_telemetry::{ChannelMeter, OpKind};
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    fn unreachable() -> ManagerError {
        ManagerError::Unreachable {
            url: "http://manager".into(),
            cause: "the answer was lost".into(),
        }
    }

    #[test]
    fn report_with_lost_answer_keeps_its_number() {
        let meter = Arc::new(ChannelMeter::default());
        let arrived: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
        // The manager takes each report; the answer to the second one is lost twice.
        let (read, log) = (meter.clone(), arrived.clone());
        let send = move |report: Report, delivery: ReportDelivery| {
            let mut log = log.lock().unwrap();
            log.push((delivery.number, report.kinds[0].ops));
            let is_lost = log.len() == 2 || log.len() == 3;
            if is_lost { Err(unreachable()) } else { Ok(()) }
        };
        let mut source = Source::new(Box::new(move || Some(read.totals())), Box::new(send));
        for round in 1..=4 {
            for _ in 0..round {
                meter.count(OpKind::Read, 1);
            }
            let _ = source.report();
        }
        let arrived = arrived.lock().unwrap();
        assert_eq!(*arrived, [(1, 1), (2, 2), (2, 2), (2, 2), (3, 7)]);
        let by_number: BTreeMap<u64, u64> = arrived.iter().copied().collect();
        assert_eq!(by_number.values().sum::<u64>(), 10, "each operation once");
    }
}
