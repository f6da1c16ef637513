//! Latency of the writes to one volume while its bricks serve many others that are idle.
//!
//! Each round measures the one volume alone, then beside the idle ones, so that load of the machine affects
//! both alike. The caller attaches and detaches the idle volumes.

use crate::error::BenchError;
use crate::load::{LoadWorker, RequestMix, RunLimit};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use pagemesh_base::space::Space;
use serde_json::json;
use std::error::Error;
use std::time::Duration;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct AttachedOptions {
    /// Rounds, [`crate::session::ROUNDS_MIN`] to [`crate::session::ROUNDS_MAX`].
    pub rounds: usize,
    /// Duration of a measurement.
    pub runtime: Duration,
    /// Idle volumes.
    pub idle_volumes: usize,
    /// The durability class of the pools.
    pub class: String,
}

/// Attaches and detaches the idle volumes.
pub trait IdleVolumes {
    /// Attaches all of them.
    ///
    /// # Errors
    /// Any error ends the run.
    fn attach(&mut self) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Detaches them.
    fn detach(&mut self);
}

/// Runs the benchmark; see the module.
///
/// **Data loss:** the measured volume is overwritten.
///
/// # Errors
/// If an option is invalid, a volume cannot be attached, or a request fails.
pub fn run_attached(
    measured: &dyn Space,
    idle: &mut dyn IdleVolumes,
    options: &AttachedOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let mut worker = LoadWorker::open(measured, &RequestMix::default(), 0, 1)?;
    let mut medians_us: [Vec<f64>; 2] = Default::default();
    let mut measure = |worker: &mut LoadWorker, at: usize| -> Result<(), BenchError> {
        let result = worker.run(RunLimit::Time(options.runtime))?;
        medians_us[at].push(result.writes.summary().p50_ns as f64 / 1e3);
        Ok(())
    };
    // The first writes allocate.
    worker.run(RunLimit::Time(options.runtime))?;
    for _ in 0..options.rounds {
        measure(&mut worker, 0)?;
        idle.attach().map_err(BenchError::Mount)?;
        let measured = measure(&mut worker, 1);
        idle.detach();
        measured?;
    }
    let columns = [
        ("attached volumes", ""),
        ("median of a write", "µs"),
        ("to one alone", "×"),
    ];
    let title = "4 KiB writes to one volume, beside idle ones";
    let mut report = Report::new("attached", title, &options.class, &columns);
    for (count, medians) in [1, options.idle_volumes as u64 + 1]
        .into_iter()
        .zip(&medians_us)
    {
        let row: Vec<ReportCell> = vec![
            count.into(),
            median(medians).into(),
            median_ratio(medians, &medians_us[0]).into(),
        ];
        report.add_row(row);
    }
    report.add_note(format!("medians of {} rounds", options.rounds));
    report.raw = json!({ "median_us_by_case_round": medians_us });
    Ok(report)
}
