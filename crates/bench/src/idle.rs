//! CPU time of idle processes.
//!
//! Each round watches all groups of processes at the same time, so they need no turns. A group's
//! figure is the CPU time of its processes divided by the elapsed time.

use crate::error::BenchError;
use crate::process::process_cpu;
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::median;
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
    let mut shares: Vec<Vec<f64>> = vec![Vec::new(); groups.len()];
    let read =
        || -> Result<Vec<Duration>, BenchError> { groups.iter().map(ProcessGroup::cpu).collect() };
    for _ in 0..options.rounds {
        let (start, before) = (Instant::now(), read()?);
        std::thread::sleep(options.runtime);
        let (after, wall) = (read()?, start.elapsed());
        for (at, share) in shares.iter_mut().enumerate() {
            let used = after[at].saturating_sub(before[at]);
            share.push(100.0 * used.as_secs_f64() / wall.as_secs_f64());
        }
    }
    Ok(report(groups, &shares, options))
}

fn report(groups: &[ProcessGroup], shares: &[Vec<f64>], options: &IdleOptions) -> Report {
    let title = "CPU time of a cluster that has nothing to do";
    let columns = [
        ("processes", ""),
        ("median", "% of one processor"),
        ("min", "%"),
        ("max", "%"),
    ];
    let mut report = Report::new("idle", title, &options.class, &columns);
    for (group, shares) in groups.iter().zip(shares) {
        let row: Vec<ReportCell> = vec![
            group.name.clone().into(),
            median(shares).into(),
            shares.iter().copied().reduce(f64::min).into(),
            shares.iter().copied().reduce(f64::max).into(),
        ];
        report.add_row(row);
    }
    report.add_note(format!(
        "{} rounds of {:.0} s",
        options.rounds,
        options.runtime.as_secs_f64()
    ));
    let names: Vec<&String> = groups.iter().map(|group| &group.name).collect();
    report.raw = json!({ "groups": names, "percent_by_group_round": shares });
    report
}
