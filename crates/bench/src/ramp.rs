//! The ramp of readers: how rate and latency grow with the readers, each one
//! making single random reads in a closed loop, without writers.
//!
//! **A reader** is a place (see [`crate::sweep`]), not a thread: one read in
//! flight, followed by the next as soon as it has completed, through few
//! threads. It is what SLOB's readers are to a storage, without the cost of
//! scheduling 128 processes on few cores.
//!
//! Every step has its time in every round; which comes first moves on by one.

use crate::error::BenchError;
use crate::plot::{Axis, Kind, Plot, Series};
use crate::report::{Cell, Report};
use crate::sweep::{self, Case, Rounds, Sample, sweep};
use pagemesh_base::space::Space;
use serde_json::json;
use std::time::Duration;

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Readers of each step, in the order of the report.
    pub readers: Vec<usize>,
    /// Bytes per read.
    pub block_bytes: u32,
    /// Rounds, time, threads, and what is used of the space.
    pub sweep: sweep::Options,
}

impl Default for Options {
    /// 1 to 128 readers of 8 KiB.
    fn default() -> Options {
        Options {
            readers: vec![1, 2, 4, 8, 16, 32, 64, 128],
            block_bytes: 8192,
            sweep: sweep::Options::default(),
        }
    }
}

/// Measures; see the module. The report has a row per step: IOPS in 1/s, MB/s
/// of 10^6 bytes, latencies in µs from before the submission until the
/// completion was reaped, CPU in µs per operation.
///
/// `brick_cpu` tells the CPU time that all bricks of the space have used so
/// far. **What the space holds is lost** unless `fill` is turned off.
///
/// # Errors
/// When an option makes no sense or the space fails.
pub fn run_ramp(
    space: &dyn Space,
    brick_cpu: &mut dyn FnMut() -> Duration,
    options: &Options,
) -> Result<Report, BenchError> {
    let case = |places: &usize| Case {
        block_bytes: options.block_bytes,
        read_percent: 100,
        places: *places,
    };
    let cases: Vec<Case> = options.readers.iter().map(case).collect();
    let found = sweep(space, &cases, brick_cpu, &options.sweep)?;
    Ok(report(&found, options))
}

fn report(found: &[Rounds], options: &Options) -> Report {
    let title = format!(
        "random reads of {} B by a growing number of readers, {}",
        options.block_bytes, options.sweep.space
    );
    let columns = [
        ("readers", ""),
        ("IOPS", "1/s"),
        ("bandwidth", "MB/s"),
        ("mean", "µs"),
        ("p50", "µs"),
        ("p99", "µs"),
        ("p99.9", "µs"),
        ("CPU", "µs/op"),
        ("brick CPU", "µs/op"),
    ];
    let mut report = Report::new("ramp", &title, &options.sweep.class, &columns);
    for (readers, rounds) in options.readers.iter().zip(found) {
        let us = |of: fn(&Sample) -> f64| Cell::from(rounds.median_us(of));
        report.push(vec![
            (*readers as u64).into(),
            rounds.median(|s| s.rate).into(),
            rounds.median(|s| s.bytes_rate / 1e6).into(),
            us(|s| s.reads.mean_ns),
            us(|s| s.reads.p50_ns as f64),
            us(|s| s.reads.p99_ns as f64),
            us(|s| s.reads.p999_ns as f64),
            us(|s| s.cpu_ns_per_operation),
            us(|s| s.brick_cpu_ns_per_operation),
        ]);
    }
    sweep::describe(&mut report, &options.sweep);
    report.plots = plots(found, options);
    report.raw = json!({
        "readers": options.readers,
        "samples_by_step_round": found.iter().map(|rounds| &rounds.0).collect::<Vec<_>>(),
    });
    report
}

fn plots(found: &[Rounds], options: &Options) -> Vec<Plot> {
    let line = |name: &str, of: fn(&Sample) -> f64| Series {
        name: name.to_owned(),
        points: options
            .readers
            .iter()
            .zip(found)
            .filter_map(|(readers, rounds)| Some((*readers as f64, rounds.median(of)?)))
            .collect(),
    };
    let plot = |title: &str, y: Axis, series: Vec<Series>| Plot {
        title: title.to_owned(),
        kind: Kind::Lines,
        x: Axis::log("readers"),
        y,
        categories: Vec::new(),
        series,
    };
    vec![
        plot(
            "Random reads by readers",
            Axis::linear("operations per second"),
            vec![line("IOPS", |s| s.rate)],
        ),
        plot(
            "Latency of random reads by readers",
            Axis::log("µs"),
            vec![
                line("mean", |s| s.reads.mean_ns / 1e3),
                line("p50", |s| s.reads.p50_ns as f64 / 1e3),
                line("p99", |s| s.reads.p99_ns as f64 / 1e3),
                line("p99.9", |s| s.reads.p999_ns as f64 / 1e3),
            ],
        ),
    ]
}
