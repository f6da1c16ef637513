//! The ramp of readers: rate and latency as the number of readers grows. Each reader makes single
//! random reads in a closed loop, without writers.
//!
//! **A reader** is a place (see [`crate::sweep`]), not a thread: one read in flight, followed by
//! the next as soon as it has completed, through few threads. SLOB's readers load a storage in the
//! same way, but 128 processes on few cores cost scheduling.
//!
//! Every step has its time in every round; the first step moves on by one.

use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::sweep::{self, CaseSamples, SweepCase, SweepSample, sweep};
use pagemesh_base::space::Space;
use serde_json::json;
use std::time::Duration;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct RampOptions {
    /// Readers of each step, in the order of the report.
    pub readers: Vec<usize>,
    /// Bytes per read.
    pub block_bytes: u32,
    /// Rounds, time, threads, and the used part of the space.
    pub sweep_options: sweep::SweepOptions,
}

impl Default for RampOptions {
    /// 1 to 128 readers of 8 KiB.
    fn default() -> RampOptions {
        RampOptions {
            readers: vec![1, 2, 4, 8, 16, 32, 64, 128],
            block_bytes: 8192,
            sweep_options: sweep::SweepOptions::default(),
        }
    }
}

/// Runs the benchmark; see the module. The report has a row per step: IOPS in 1/s, MB/s of 10^6
/// bytes, latencies in µs from before the submission until the completion was reaped, CPU in µs per
/// operation.
///
/// `brick_cpu` returns the CPU time that all bricks of the space have used so far.
///
/// **Data loss:** the content of the space is overwritten, unless `fill` is off.
///
/// # Errors
/// If an option is invalid or the space fails.
pub fn run_ramp(
    space: &dyn Space,
    brick_cpu: &mut dyn FnMut() -> Duration,
    options: &RampOptions,
) -> Result<Report, BenchError> {
    let case = |places: &usize| SweepCase {
        block_bytes: options.block_bytes,
        read_percent: 100,
        places: *places,
    };
    let cases: Vec<SweepCase> = options.readers.iter().map(case).collect();
    let found = sweep(space, &cases, brick_cpu, &options.sweep_options)?;
    Ok(report(&found, options))
}

fn report(found: &[CaseSamples], options: &RampOptions) -> Report {
    let title = format!(
        "random reads of {} B by a growing number of readers, {}",
        options.block_bytes, options.sweep_options.space
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
    let mut report = Report::new("ramp", &title, &options.sweep_options.class, &columns);
    for (readers, rounds) in options.readers.iter().zip(found) {
        let us = |of: fn(&SweepSample) -> f64| ReportCell::from(rounds.median_us(of));
        report.add_row(vec![
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
    sweep::add_notes(&mut report, &options.sweep_options);
    report.plots = plots(found, options);
    report.raw = json!({
        "readers": options.readers,
        "samples_by_step_round": found.iter().map(|rounds| &rounds.0).collect::<Vec<_>>(),
    });
    report
}

fn plots(found: &[CaseSamples], options: &RampOptions) -> Vec<Plot> {
    let line = |name: &str, of: fn(&SweepSample) -> f64| PlotSeries {
        name: name.to_owned(),
        points: options
            .readers
            .iter()
            .zip(found)
            .filter_map(|(readers, rounds)| Some((*readers as f64, rounds.median(of)?)))
            .collect(),
    };
    let plot = |title: &str, y: PlotAxis, series: Vec<PlotSeries>| Plot {
        title: title.to_owned(),
        kind: PlotKind::Lines,
        x: PlotAxis::log("readers"),
        y,
        categories: Vec::new(),
        series,
    };
    vec![
        plot(
            "Random reads by readers",
            PlotAxis::linear("operations per second"),
            vec![line("IOPS", |s| s.rate)],
        ),
        plot(
            "Latency of random reads by readers",
            PlotAxis::log("µs"),
            vec![
                line("mean", |s| s.reads.mean_ns / 1e3),
                line("p50", |s| s.reads.p50_ns as f64 / 1e3),
                line("p99", |s| s.reads.p99_ns as f64 / 1e3),
                line("p99.9", |s| s.reads.p999_ns as f64 / 1e3),
            ],
        ),
    ]
}
