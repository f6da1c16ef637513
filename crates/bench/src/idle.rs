//! CPU time of idle processes, and their writes to disks.
//!
//! Each round watches all groups of processes at the same time, so they need no turns. A group's
//! figure is the CPU time of its processes divided by the elapsed time.

use crate::error::BenchError;
use crate::process::{process_cpu, written_bytes};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::median;
use serde::Serialize;
use serde_json::json;
use std::time::{Duration, Instant};

/// Options of a run.
#[derive(Clone, Debug)]
pub struct IdleOptions {
    /// Rounds, [`crate::session::ROUNDS_MIN`] to [`crate::session::ROUNDS_MAX`].
    pub rounds: usize,
    /// Duration of a round.
    pub runtime: Duration,
    /// The durability class of the pools that are served.
    pub class: String,
}

/// Processes that are measured together.
#[derive(Clone, Debug)]
pub struct ProcessGroup {
    /// Their name in the report.
    pub name: String,
    /// The processes.
    pub pids: Vec<u32>,
}

impl ProcessGroup {
    fn cpu(&self) -> Result<Duration, BenchError> {
        let of = |pid: &u32| {
            process_cpu(*pid).ok_or_else(|| {
                let text = format!("process {pid} of {} is gone", self.name);
                BenchError::Option(text)
            })
        };
        self.pids.iter().map(of).sum()
    }

    fn written(&self) -> Result<u64, BenchError> {
        self.pids.iter().map(|pid| written_bytes(*pid)).sum()
    }
}

/// The use of a group in one round.
#[derive(Clone, Copy, Debug, Serialize)]
struct IdleSample {
    cpu_percent: f64,
    written_bytes: u64,
}

/// Runs the benchmark; see the module. The report has a row per group, in per cent of one
/// processor.
///
/// # Errors
/// If an option is invalid, or a process has ended.
pub fn run_idle(groups: &[ProcessGroup], options: &IdleOptions) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if options.runtime.is_zero() {
        let text = "rounds of no time measure nothing; give them some seconds";
        return Err(BenchError::Option(text.to_owned()));
    }
    let mut samples: Vec<Vec<IdleSample>> = vec![Vec::new(); groups.len()];
    let read = || -> Result<Vec<(Duration, u64)>, BenchError> {
        let used = |group: &ProcessGroup| Ok((group.cpu()?, group.written()?));
        groups.iter().map(used).collect()
    };
    for _ in 0..options.rounds {
        let (start, before) = (Instant::now(), read()?);
        std::thread::sleep(options.runtime);
        let (after, wall) = (read()?, start.elapsed());
        for (group, samples) in samples.iter_mut().enumerate() {
            let ((cpu_before, bytes_before), (cpu, bytes)) = (before[group], after[group]);
            let used = cpu.saturating_sub(cpu_before);
            samples.push(IdleSample {
                cpu_percent: 100.0 * used.as_secs_f64() / wall.as_secs_f64(),
                written_bytes: bytes.saturating_sub(bytes_before),
            });
        }
    }
    Ok(report(groups, &samples, options))
}

fn report(groups: &[ProcessGroup], samples: &[Vec<IdleSample>], options: &IdleOptions) -> Report {
    let title = "CPU time and disk writes of a cluster that has nothing to do";
    let columns = [
        ("processes", ""),
        ("median", "% of one processor"),
        ("min", "%"),
        ("max", "%"),
        ("written to disks", "KiB in all rounds"),
    ];
    let mut report = Report::new("idle", title, &options.class, &columns);
    for (group, samples) in groups.iter().zip(samples) {
        let shares: Vec<f64> = samples.iter().map(|sample| sample.cpu_percent).collect();
        let written: u64 = samples.iter().map(|sample| sample.written_bytes).sum();
        let row: Vec<ReportCell> = vec![
            group.name.clone().into(),
            median(&shares).into(),
            shares.iter().copied().reduce(f64::min).into(),
            shares.iter().copied().reduce(f64::max).into(),
            (written / 1024).into(),
        ];
        report.add_row(row);
    }
    report.add_note(format!(
        "{} rounds of {:.0} s",
        options.rounds,
        options.runtime.as_secs_f64()
    ));
    let names: Vec<&String> = groups.iter().map(|group| &group.name).collect();
    report.raw = json!({ "groups": names, "samples_by_group_round": samples });
    report
}
