//! Reports the figures of this process to the manager: the operations of its volumes, or of its brick
//! (RFD 025).
//!
//! Invariants: an operation is reported once the manager has confirmed it, and then never again. A
//! manager without an answer costs nothing but its history: the operations go with the next report.

use anyhow::Context;
use pagemesh_base::layout::{BrickId, EpochNumber, VolumeName};
use pagemesh_brick::brick::Brick;
use pagemesh_manage::wire::{ReportBrickFigures, ReportFigures};
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_pmem::Media;
use pagemesh_telemetry::{Report, Totals};
use pagemesh_volume::Volume;
use std::sync::Weak;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

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
    confirmed: Totals,
}

/// Reads the counters; none once their subject is gone.
type ReadTotals = Box<dyn Fn() -> Option<Totals> + Send>;
/// Sends a report.
type SendReport = Box<dyn Fn(Report) -> Result<(), ManagerError> + Send>;

impl FigureReporter {
    /// Reports volumes that this process has attached.
    pub fn of_volumes(
        manager: ManagerClient,
        volumes: Vec<(VolumeName, Weak<Volume>)>,
    ) -> anyhow::Result<FigureReporter> {
        let source = |(name, volume): (VolumeName, Weak<Volume>)| {
            let (manager, attached) = (manager.clone(), volume.clone());
            Source {
                read: Box::new(move || Some(volume.upgrade()?.meters().totals())),
                send: Box::new(move |report| {
                    let Some(volume) = attached.upgrade() else {
                        return Ok(());
                    };
                    let attachment = EpochNumber(volume.attachment().0);
                    manager.report_volume_figures(&name, &ReportFigures { attachment, report })
                }),
                confirmed: Totals::default(),
            }
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
        FigureReporter::start(vec![Source {
            read: Box::new(move || Some(brick.upgrade()?.meters().totals())),
            send: Box::new(move |report| send_brick_report(&manager, id, report)),
            confirmed: Totals::default(),
        }])
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
) -> Result<(), ManagerError> {
    manager.report_brick_figures(brick, &ReportBrickFigures { report })
}

impl Source {
    /// Sends the difference to the last confirmed report; an idle subject sends an empty one.
    ///
    /// # Errors
    /// When the manager does not answer.
    fn report(&mut self) -> Result<(), ManagerError> {
        let Some(totals) = (self.read)() else {
            return Ok(());
        };
        match (self.send)(totals.since(&self.confirmed)) {
            Ok(()) => self.confirmed = totals,
            Err(cause) => {
                tracing::debug!(%cause, "figures were not reported");
                if let ManagerError::Unreachable { .. } = cause {
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
