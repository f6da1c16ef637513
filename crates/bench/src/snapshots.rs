//! The cost of snapshots: cases that alternate in each round, so that load of the machine affects all alike.
//!
//! The first case is the base of the ratios. The caller takes and drops snapshots, and starts peers.

use crate::error::BenchError;
use crate::fio::{self, FileCase, FioSample};
use crate::load::LoadResult;
use crate::mirror::MountPlace;
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde::Serialize;
use serde_json::json;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The pause between two looks of the thread that takes snapshots.
const TAKER_POLL: Duration = Duration::from_millis(1);

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

/// The figures of one measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CaseSample {
    /// Operations per second.
    pub per_s: f64,
    /// 99 % of the latencies, in µs.
    pub p99_us: Option<f64>,
    /// The longest operation, in µs.
    pub longest_us: Option<f64>,
}

impl CaseSample {
    /// The sample of a closed loop of reads or writes.
    #[must_use]
    pub fn of_load(result: &LoadResult) -> CaseSample {
        let latencies = match result.writes.count() {
            0 => &result.reads,
            _ => &result.writes,
        };
        let summary = latencies.summary();
        CaseSample {
            per_s: result.operations() as f64 / result.wall.as_secs_f64(),
            p99_us: Some(summary.p99_ns as f64 / 1e3),
            longest_us: Some(summary.max_ns as f64 / 1e3),
        }
    }

    /// The sample of work that took this time.
    #[must_use]
    pub fn of_time(amount: u64, took: Duration) -> CaseSample {
        CaseSample {
            per_s: amount as f64 / took.as_secs_f64(),
            ..CaseSample::default()
        }
    }

    fn of_fio(sample: &FioSample) -> CaseSample {
        CaseSample {
            per_s: sample.iops,
            p99_us: Some(sample.clat_p99_ns / 1e3),
            longest_us: None,
        }
    }
}

/// A case: measures once in each round.
pub struct ComparedCase<'c> {
    /// Its name in the report.
    pub name: String,
    /// The measurement. Its work before and after is its own.
    pub measure: Box<dyn FnMut() -> Result<CaseSample, BenchError> + 'c>,
}

impl<'c> ComparedCase<'c> {
    /// A case.
    pub fn new(
        name: impl Into<String>,
        measure: impl FnMut() -> Result<CaseSample, BenchError> + 'c,
    ) -> ComparedCase<'c> {
        ComparedCase {
            name: name.into(),
            measure: Box::new(measure),
        }
    }
}

/// The texts of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct ComparisonTexts<'t> {
    /// The title of the report.
    pub title: &'t str,
    /// The durability class of the pools.
    pub class: &'t str,
    /// The operations: `writes`.
    pub operations: &'t str,
    /// Their unit: `1/s`.
    pub unit: &'t str,
}

/// Measures all cases in each round, and compares them with the first.
///
/// # Errors
/// If the number of rounds is invalid, or a measurement fails.
pub fn compare(
    texts: &ComparisonTexts<'_>,
    rounds: usize,
    cases: &mut [ComparedCase<'_>],
) -> Result<Report, BenchError> {
    check_rounds(rounds)?;
    let mut samples: Vec<Vec<CaseSample>> = vec![Vec::new(); cases.len()];
    for _ in 0..rounds {
        for (case, samples) in cases.iter_mut().zip(&mut samples) {
            samples.push((case.measure)()?);
        }
    }
    let columns = [
        ("case", ""),
        (texts.operations, texts.unit),
        ("to the first", "×"),
        ("p99", "µs"),
        ("p99 to the first", "×"),
        ("longest", "µs"),
    ];
    let mut report = Report::new("snapshots", texts.title, texts.class, &columns);
    let figures = |samples: &[CaseSample], of: fn(&CaseSample) -> Option<f64>| -> Vec<f64> {
        samples.iter().filter_map(of).collect()
    };
    for (case, of_case) in cases.iter().zip(&samples) {
        let per_s = |samples| figures(samples, |it| Some(it.per_s));
        let p99 = |samples| figures(samples, |it| it.p99_us);
        let row: Vec<ReportCell> = vec![
            case.name.as_str().into(),
            median(&per_s(of_case)).into(),
            median_ratio(&per_s(of_case), &per_s(&samples[0])).into(),
            median(&p99(of_case)).into(),
            median_ratio(&p99(of_case), &p99(&samples[0])).into(),
            median(&figures(of_case, |it| it.longest_us)).into(),
        ];
        report.add_row(row);
    }
    report.add_note(format!("medians of {rounds} alternating rounds"));
    report.raw = json!({
        "cases": cases.iter().map(|it| &it.name).collect::<Vec<_>>(),
        "samples_by_case_round": samples,
    });
    Ok(report)
}

/// Measures while a snapshot is taken each interval. Returns the durations of the snapshots, too.
///
/// # Errors
/// If the measurement or a snapshot fails.
pub fn with_snapshots<T>(
    taker: &dyn SnapshotTaker,
    interval: Duration,
    measure: impl FnOnce() -> Result<T, BenchError>,
) -> Result<(T, Vec<Duration>), BenchError> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let snapshots = scope.spawn(|| {
            let mut took = Vec::new();
            let mut next = Instant::now();
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                taker.take()?;
                took.push(began.elapsed());
                next += interval;
                while Instant::now() < next && !is_over.load(Ordering::Relaxed) {
                    std::thread::sleep(TAKER_POLL);
                }
            }
            Ok(took)
        });
        let result = measure();
        is_over.store(true, Ordering::Relaxed);
        let took: Result<_, Box<dyn Error + Send + Sync>> = match snapshots.join() {
            Ok(took) => took,
            Err(_) => Err("the thread that takes snapshots has panicked".into()),
        };
        Ok((result?, took.map_err(BenchError::Mount)?))
    })
}

/// The file of [`measure_file_writes`].
const FILE_CASE: FileCase = FileCase {
    direction: fio::Direction::Write,
    bytes: 4096,
    jobs: 1,
    think_us: 0,
    rate_iops: None,
    sync: true,
    processes: false,
};

/// Writes the file of [`measure_file_writes`] once.
///
/// # Errors
/// If fio is missing or fails.
pub fn fill_file(place: &MountPlace, size_bytes: u64) -> Result<(), BenchError> {
    crate::process::require_program("fio", fio::PACKAGE)?;
    fio::fill_files(&place.dir, FILE_CASE.jobs, size_bytes)
}

/// Random synchronous writes of 4 KiB to a file by one program.
///
/// # Errors
/// If fio fails.
pub fn measure_file_writes(
    place: &MountPlace,
    size_bytes: u64,
    runtime: Duration,
) -> Result<CaseSample, BenchError> {
    let sample = fio::measure_files(&place.prefix, &place.dir, FILE_CASE, size_bytes, runtime)?;
    Ok(CaseSample::of_fio(&sample))
}
