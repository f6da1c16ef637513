//! A disk, and the block servers on it, in one alternating run.
//!
//! The raw disk is a file or a block device with O_DIRECT; pagemesh and others keep their data on
//! the same disk. Every target is filled once before, and volumes of pagemesh are verified, so that
//! a fast wrong answer is not measured. In each round every row visits every target; the first
//! target moves on by one. The rounds of rows on data in order come first: random writes scatter the
//! pages of a volume. Before each cell the system writes all that earlier cells have left in memory.
//! Ratios are the medians of the rounds' own.

mod bars;
mod report;
pub mod rows;
mod targets;
mod workload;

pub use targets::{DiskTarget, TargetKind};

use crate::error::BenchError;
use crate::fio;
use crate::peers::{RUNTIME_MAX, RUNTIME_MIN};
use crate::process;
use crate::report::Report;
use crate::session::ROUNDS_MAX;
use rows::DiskRow;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Rounds, 1 to [`ROUNDS_MAX`].
    pub rounds: usize,
    /// Time of one cell.
    pub runtime: Duration,
    /// Bytes of each target: whole MiB.
    pub size_bytes: u64,
    /// Bytes of each volume that are written, read and compared before: whole MiB.
    pub verify_bytes: u64,
    /// The rows.
    pub rows: Vec<DiskRow>,
    /// A directory on the disk.
    pub dir: PathBuf,
}

/// The figures of one cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskSample {
    /// Operations per second. A write with its flush is one.
    pub iops: f64,
    /// Mean time of an operation.
    pub mean_ns: f64,
    /// Its median; none for writes with a flush.
    pub p50_ns: Option<f64>,
    /// 99 %.
    pub p99_ns: Option<f64>,
    /// 99.9 %.
    pub p999_ns: Option<f64>,
    /// CPU of fio, % of one core.
    pub fio_cpu_percent: f64,
    /// CPU of the serving processes, % of one core.
    pub server_cpu_percent: f64,
}

/// All samples.
struct DiskSamples {
    rows: Vec<DiskRow>,
    targets: Vec<TargetKind>,
    /// By row, target and round.
    samples: Vec<Vec<Vec<DiskSample>>>,
}

impl DiskSamples {
    /// The rounds of a target in a row.
    fn rounds(&self, row: &str, target: TargetKind) -> Option<&[DiskSample]> {
        let row = self.rows.iter().position(|it| it.id == row)?;
        let target = self.targets.iter().position(|it| *it == target)?;
        Some(&self.samples[row][target])
    }
}

/// Runs the comparison; see the module.
///
/// # Errors
/// If an option is invalid, fio is missing or fails, a target fails a request, or a volume returns
/// other data than was written.
pub fn run_disk(targets: &[DiskTarget], options: &DiskOptions) -> Result<Report, BenchError> {
    check(targets, options)?;
    process::require_program("fio", fio::PACKAGE)?;
    for target in targets {
        if target.is_pagemesh() {
            workload::verify(target, options.verify_bytes)?;
        }
        workload::fill(target, options.size_bytes)?;
        eprintln!("{} is filled", target.kind.title());
    }
    let mut found = DiskSamples {
        rows: options.rows.clone(),
        targets: targets.iter().map(|target| target.kind).collect(),
        samples: vec![vec![Vec::new(); targets.len()]; options.rows.len()],
    };
    let disk = File::open(&options.dir);
    let disk = disk.map_err(BenchError::system(format!(
        "open {}",
        options.dir.display()
    )))?;
    for is_in_order in [true, false] {
        run_rounds(targets, options, &disk, is_in_order, &mut found)?;
    }
    Ok(report::report(targets, options, &found))
}

/// Measures the rows on data in order, or the others, in all rounds.
fn run_rounds(
    targets: &[DiskTarget],
    options: &DiskOptions,
    disk: &File,
    is_in_order: bool,
    found: &mut DiskSamples,
) -> Result<(), BenchError> {
    let is_wanted = |row: &DiskRow| row.is_in_order == is_in_order;
    let count = options.rows.iter().filter(|row| is_wanted(row)).count();
    for round in (0..options.rounds).take_while(|_| count > 0) {
        let rows = options.rows.iter().zip(&mut found.samples);
        for (row, of_row) in rows.filter(|(row, _)| is_wanted(row)) {
            for turn in 0..targets.len() {
                let at = (turn + round) % targets.len();
                let synced = rustix::fs::syncfs(disk).map_err(std::io::Error::from);
                synced.map_err(BenchError::system("sync the file system"))?;
                let seed = round as u64 + 1;
                let (size, time) = (options.size_bytes, options.runtime);
                of_row[at].push(workload::measure(&targets[at], row, size, time, seed)?);
            }
        }
        let (done, all) = (round + 1, options.rounds);
        eprintln!("round {done} of {all} is done: {count} rows");
    }
    Ok(())
}

fn check(targets: &[DiskTarget], options: &DiskOptions) -> Result<(), BenchError> {
    let is_whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(1 << 20);
    let problem = if !(1..=ROUNDS_MAX).contains(&options.rounds) {
        "the number of rounds is not 1 to 1000"
    } else if targets.is_empty() || options.rows.is_empty() {
        "there is nothing to measure; name at least one target and one row"
    } else if !(RUNTIME_MIN..=RUNTIME_MAX).contains(&options.runtime) {
        "the time of a cell is not 100 ms to an hour"
    } else if !is_whole(options.size_bytes) || !is_whole(options.verify_bytes) {
        "the size is not of whole MiB; use at least 1 MiB"
    } else {
        return Ok(());
    };
    Err(BenchError::Option(problem.to_owned()))
}
