//! Bytes written to a disk for each byte that a user writes.
//!
//! Each case is a volume that fills a part of its pool. The volume is written once in order, then random
//! blocks are written, with a flush at the end. The serving processes write the disk's bytes, by the
//! kernel's count (`write_bytes` in proc_pid_io(5)), which excludes the device's own amplification.

use crate::error::BenchError;
use crate::load::{AccessOrder, LoadWorker, RequestMix, RunLimit, fill};
use crate::process::written_bytes;
use crate::report::{Report, ReportCell};
use crate::stats::median;
use pagemesh_base::space::Space;
use serde_json::json;
use std::time::Duration;

/// Bytes of a random write.
const BLOCK_BYTES: u32 = 4096;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct AmplificationOptions {
    /// Rounds of each case; the reported figures are medians.
    pub rounds: usize,
    /// Duration of a round.
    pub runtime: Duration,
    /// Queue depths.
    pub depths: Vec<usize>,
    /// The durability class of the pools.
    pub class: String,
}

/// A volume, and the processes that write its bytes to the disk.
pub struct FilledVolume<'v> {
    /// The volume.
    pub space: &'v dyn Space,
    /// The part of the pool that the volume fills, in percent.
    pub fill_percent: u64,
    /// Copies of each byte.
    pub copies: u64,
    /// The processes.
    pub pids: Vec<u32>,
}

/// Runs the benchmark; see the module. The report has a row per volume and queue depth.
///
/// **Data loss:** the volumes are overwritten.
///
/// # Errors
/// If an option is invalid, a process has ended, or a request fails.
pub fn run_amplification(
    volumes: &[FilledVolume<'_>],
    options: &AmplificationOptions,
) -> Result<Report, BenchError> {
    let columns = [
        ("pool in use", "%"),
        ("queue depth", ""),
        ("written by users", "MiB"),
        ("written to the disk", "MiB"),
        ("ratio, all copies", "×"),
        ("ratio, each copy", "×"),
    ];
    let title = "bytes written to the disk, random writes of 4 KiB";
    let mut report = Report::new("amplification", title, &options.class, &columns);
    let mut raw = Vec::new();
    for volume in volumes {
        let whole = volume.space.size_bytes() / 4096 * 4096;
        fill(volume.space, whole)?;
        for &depth in &options.depths {
            let rounds: Result<Vec<[u64; 2]>, BenchError> = (0..options.rounds)
                .map(|round| write_round(volume, depth, round as u64 + 1, options.runtime))
                .collect();
            let rounds = rounds?;
            report.add_row(row(volume, depth, &rounds));
            raw.push(json!({
                "fill_percent": volume.fill_percent,
                "depth": depth,
                "user_and_disk_bytes_by_round": rounds,
            }));
        }
    }
    report.add_note(format!("medians of {} rounds", options.rounds));
    report.raw = json!(raw);
    Ok(report)
}

/// Returns the bytes of the user, and of the disk.
fn write_round(
    volume: &FilledVolume<'_>,
    depth: usize,
    seed: u64,
    runtime: Duration,
) -> Result<[u64; 2], BenchError> {
    let mix = RequestMix {
        queue_depth: depth,
        block_bytes: BLOCK_BYTES,
        order: AccessOrder::Random,
        seed,
        ..RequestMix::default()
    };
    let mut worker = LoadWorker::open(volume.space, &mix, 0, 1)?;
    let before = written_by(volume)?;
    let result = worker.run(RunLimit::Time(runtime))?;
    worker.flush()?;
    Ok([result.bytes, written_by(volume)?.saturating_sub(before)])
}

fn written_by(volume: &FilledVolume<'_>) -> Result<u64, BenchError> {
    volume.pids.iter().map(|pid| written_bytes(*pid)).sum()
}

fn row(volume: &FilledVolume<'_>, depth: usize, rounds: &[[u64; 2]]) -> Vec<ReportCell> {
    let mib = |at: usize| {
        let all: Vec<f64> = rounds
            .iter()
            .map(|it| it[at] as f64 / 1_048_576.0)
            .collect();
        median(&all)
    };
    let ratios: Vec<f64> = rounds
        .iter()
        .map(|[user, disk]| *disk as f64 / *user as f64)
        .collect();
    let ratio = median(&ratios);
    vec![
        volume.fill_percent.into(),
        (depth as u64).into(),
        mib(0).into(),
        mib(1).into(),
        ratio.into(),
        ratio.map(|ratio| ratio / volume.copies as f64).into(),
    ]
}
