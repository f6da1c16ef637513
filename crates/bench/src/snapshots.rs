//! The cost of snapshots: writes to a volume, without a snapshot and while snapshots are taken.
//!
//! Each round measures the same volume without snapshots, then with one each interval, so that load of the machine affects both
//! alike. The caller takes and drops the snapshots.

use crate::error::BenchError;
use crate::load::{LoadResult, LoadWorker, RequestMix, RunLimit};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use pagemesh_base::space::Space;
use serde_json::json;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Options of a run.
#[derive(Clone, Debug)]
pub struct SnapshotOptions {
    /// Rounds, [`crate::session::ROUNDS_MIN`] to [`crate::session::ROUNDS_MAX`].
    pub rounds: usize,
    /// Duration of a measurement.
    pub runtime: Duration,
    /// The time from one snapshot to the next.
    pub interval: Duration,
    /// The durability class of the pools.
    pub class: String,
}

/// Takes and drops snapshots of the measured volume.
pub trait SnapshotTaker: Sync {
    /// Takes one.
    ///
    /// # Errors
    /// Any error ends the run.
    fn take(&self) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Drops all, and waits until their space is free.
    ///
    /// # Errors
    /// Any error ends the run.
    fn drop_all(&self) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// The figures of one case, one of each round.
#[derive(Default)]
struct CaseFigures {
    writes_per_s: Vec<f64>,
    p99_us: Vec<f64>,
    worst_us: Vec<f64>,
}

impl CaseFigures {
    fn record(&mut self, result: &LoadResult) {
        let summary = result.writes.summary();
        self.writes_per_s
            .push(summary.count as f64 / result.wall.as_secs_f64());
        self.p99_us.push(summary.p99_ns as f64 / 1e3);
        self.worst_us.push(summary.max_ns as f64 / 1e3);
    }
}

/// Runs the benchmark; see the module.
///
/// **Data loss:** the measured volume is overwritten.
///
/// # Errors
/// If an option is invalid, or a request or a snapshot fails.
pub fn run_snapshots(
    measured: &dyn Space,
    taker: &dyn SnapshotTaker,
    options: &SnapshotOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let mut worker = LoadWorker::open(measured, &RequestMix::default(), 0, 1)?;
    // Each page gets a frame, so that later writes replace one.
    let pages = measured.size_bytes() / 4096;
    worker.run(RunLimit::Operations(pages * 2))?;
    let (mut cases, mut create_us) = ([CaseFigures::default(), CaseFigures::default()], Vec::new());
    for _ in 0..options.rounds {
        let alone = worker.run(RunLimit::Time(options.runtime))?;
        cases[0].record(&alone);
        let (with, took) = run_with_snapshots(&mut worker, taker, options)?;
        cases[1].record(&with);
        create_us.extend(took.iter().map(|it| it.as_secs_f64() * 1e6));
        taker.drop_all().map_err(BenchError::Mount)?;
    }
    Ok(report(&cases, &create_us, options))
}

fn run_with_snapshots(
    worker: &mut LoadWorker,
    taker: &dyn SnapshotTaker,
    options: &SnapshotOptions,
) -> Result<(LoadResult, Vec<Duration>), BenchError> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let snapshots = scope.spawn(|| {
            let mut took = Vec::new();
            let mut next = Instant::now();
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                taker.take()?;
                took.push(began.elapsed());
                next += options.interval;
                while Instant::now() < next && !is_over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Ok(took)
        });
        let result = worker.run(RunLimit::Time(options.runtime));
        is_over.store(true, Ordering::Relaxed);
        let took: Result<_, Box<dyn Error + Send + Sync>> = match snapshots.join() {
            Ok(took) => took,
            Err(_) => Err("the thread that takes snapshots has panicked".into()),
        };
        Ok((result?, took.map_err(BenchError::Mount)?))
    })
}

fn report(cases: &[CaseFigures; 2], create_us: &[f64], options: &SnapshotOptions) -> Report {
    let columns = [
        ("snapshots", ""),
        ("writes", "1/s"),
        ("to none", "×"),
        ("p99", "µs"),
        ("p99 to none", "×"),
        ("longest write", "µs"),
    ];
    let title = "4 KiB random writes to a mirrored volume, while snapshots are taken";
    let mut report = Report::new("snapshots", title, &options.class, &columns);
    let interval = format!("one each {} ms", options.interval.as_millis());
    for (name, case) in ["none", &interval].into_iter().zip(cases) {
        let row: Vec<ReportCell> = vec![
            name.into(),
            median(&case.writes_per_s).into(),
            median_ratio(&case.writes_per_s, &cases[0].writes_per_s).into(),
            median(&case.p99_us).into(),
            median_ratio(&case.p99_us, &cases[0].p99_us).into(),
            median(&case.worst_us).into(),
        ];
        report.add_row(row);
    }
    report.add_note(format!(
        "medians of {} rounds; a snapshot took {:.0} µs (median of {})",
        options.rounds,
        median(create_us).unwrap_or_default(),
        create_us.len()
    ));
    let of = |get: fn(&CaseFigures) -> &Vec<f64>| cases.iter().map(get).collect::<Vec<_>>();
    report.raw = json!({
        "writes_per_s_by_case_round": of(|case| &case.writes_per_s),
        "p99_us_by_case_round": of(|case| &case.p99_us),
        "longest_us_by_case_round": of(|case| &case.worst_us),
        "create_us": create_us,
    });
    report
}
