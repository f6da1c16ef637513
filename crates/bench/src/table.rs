//! The table of block sizes: a mix of 70 % random reads and 30 % random writes, from small blocks
//! with many in flight to large ones with few. About the same number of bytes is in flight in every
//! row.
//!
//! Every row has its time in every round; the first row moves on by one. Requests in flight are
//! places of few threads, see [`crate::sweep`].

use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::sweep::{self, CaseSamples, SweepCase, SweepSample, sweep};
use pagemesh_base::space::Space;
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

/// One row: a block size and the number of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TableRow {
    /// Bytes per request.
    pub block_bytes: u32,
    /// Requests in flight.
    pub in_flight: usize,
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// The rows, in the order of the report.
    pub rows: Vec<TableRow>,
    /// Reads in a hundred requests.
    pub read_percent: u8,
    /// Rounds, time, threads, and the used part of the space.
    pub sweep_options: sweep::SweepOptions,
}

impl Default for TableOptions {
    /// 4 KiB with 256 in flight to 64 KiB with 16, 70 % reads.
    fn default() -> TableOptions {
        let row = |shift: u32| TableRow {
            block_bytes: 4096 << shift,
            in_flight: 256 >> shift,
        };
        TableOptions {
            rows: (0..=4).map(row).collect(),
            read_percent: 70,
            sweep_options: sweep::SweepOptions::default(),
        }
    }
}

/// Runs the benchmark; see the module. The report has a line per row: operations in 1/s, MB/s of
/// 10^6 bytes, response times in µs, their standard deviation over reads and writes together, the
/// mean queue depth, CPU in µs per operation, and the whole machine's CPU in % of all its cores.
/// Response times are from before the submission until the completion was reaped.
///
/// `brick_cpu` returns the CPU time that all bricks of the space have used so far.
///
/// **Data loss:** the content of the space is overwritten.
///
/// # Errors
/// If an option is invalid or the space fails.
pub fn run_table(
    space: &dyn Space,
    brick_cpu: &mut dyn FnMut() -> Duration,
    options: &TableOptions,
) -> Result<Report, BenchError> {
    let case = |row: &TableRow| SweepCase {
        block_bytes: row.block_bytes,
        read_percent: options.read_percent,
        places: row.in_flight,
    };
    let cases: Vec<SweepCase> = options.rows.iter().map(case).collect();
    let found = sweep(space, &cases, brick_cpu, &options.sweep_options)?;
    Ok(report(&found, options))
}

const COLUMNS: [(&str, &str); 16] = [
    ("block", ""),
    ("in flight", ""),
    ("IOPS", "1/s"),
    ("bandwidth", "MB/s"),
    ("reads", "%"),
    ("read", "µs"),
    ("read p99", "µs"),
    ("write", "µs"),
    ("write p99", "µs"),
    ("both p99.9", "µs"),
    ("stddev", "µs"),
    ("queue depth", "mean"),
    ("CPU", "µs/op"),
    ("brick CPU", "µs/op"),
    ("sys+user", "% of machine"),
    ("sys", "% of machine"),
];

fn report(found: &[CaseSamples], options: &TableOptions) -> Report {
    let title = format!(
        "random requests of growing size, {} % reads, {}",
        options.read_percent, options.sweep_options.space
    );
    let mut report = Report::new("table", &title, &options.sweep_options.class, &COLUMNS);
    for (row, rounds) in options.rows.iter().zip(found) {
        report.add_row(line(row, rounds));
    }
    sweep::add_notes(&mut report, &options.sweep_options);
    report.add_note(
        "read and write are mean response times; stddev is of both together; the queue depth is \
         the rate times the mean of both",
    );
    report.add_note(
        "CPU of the machine is that of everything that ran, other programs included, in ticks \
         of usually 10 ms",
    );
    report.plots = plots(found, options);
    report.raw = json!({
        "rows": options.rows,
        "samples_by_row_round": found.iter().map(|rounds| &rounds.0).collect::<Vec<_>>(),
    });
    report
}

fn line(row: &TableRow, rounds: &CaseSamples) -> Vec<ReportCell> {
    let us = |of: fn(&SweepSample) -> Option<f64>| {
        ReportCell::from(rounds.median_of_known(of).map(|ns| ns / 1000.0))
    };
    vec![
        block_name(row.block_bytes).into(),
        (row.in_flight as u64).into(),
        rounds.median(|s| s.rate).into(),
        rounds.median(|s| s.bytes_rate / 1e6).into(),
        rounds.median(read_percent).into(),
        us(|s| (s.reads.count > 0).then_some(s.reads.mean_ns)),
        us(|s| (s.reads.count > 0).then_some(s.reads.p99_ns as f64)),
        us(|s| (s.writes.count > 0).then_some(s.writes.mean_ns)),
        us(|s| (s.writes.count > 0).then_some(s.writes.p99_ns as f64)),
        us(|s| Some(s.all.p999_ns as f64)),
        us(|s| Some(s.all.stddev_ns)),
        rounds.median(queue_depth).into(),
        us(|s| Some(s.cpu_ns_per_operation)),
        us(|s| Some(s.brick_cpu_ns_per_operation)),
        rounds.median_of_known(|s| s.machine_percent).into(),
        rounds.median_of_known(|s| s.machine_system_percent).into(),
    ]
}

fn read_percent(sample: &SweepSample) -> f64 {
    sample.reads.count as f64 / sample.all.count as f64 * 100.0
}

/// Mean number of requests in the space, by Little's law. It is below those in flight, because
/// completed requests are replaced with a delay.
fn queue_depth(sample: &SweepSample) -> f64 {
    sample.rate * sample.all.mean_ns / 1e9
}

/// 4096 as 4K.
fn block_name(bytes: u32) -> String {
    match bytes {
        kib if kib >= 1024 && kib.is_multiple_of(1024) => format!("{}K", kib >> 10),
        bytes => bytes.to_string(),
    }
}

fn plots(found: &[CaseSamples], options: &TableOptions) -> Vec<Plot> {
    let of_rows = |name: &str, of: fn(&SweepSample) -> f64| PlotSeries {
        name: name.to_owned(),
        points: (0u32..)
            .zip(found)
            .filter_map(|(at, rounds)| Some((f64::from(at), rounds.median(of)?)))
            .collect(),
    };
    let plot = |title: String, y: PlotAxis, series: Vec<PlotSeries>| Plot {
        title,
        kind: PlotKind::Bars,
        x: PlotAxis::linear("block size"),
        y,
        categories: options
            .rows
            .iter()
            .map(|row| format!("{} × {}", block_name(row.block_bytes), row.in_flight))
            .collect(),
        series,
    };
    let mix = format!("{} % random reads", options.read_percent);
    vec![
        plot(
            format!("Operations by block size, {mix}"),
            PlotAxis::linear("operations per second"),
            vec![of_rows("IOPS", |s| s.rate)],
        ),
        plot(
            format!("Bandwidth by block size, {mix}"),
            PlotAxis::linear("MB/s"),
            vec![of_rows("MB/s", |s| s.bytes_rate / 1e6)],
        ),
        plot(
            format!("Mean response time by block size, {mix}"),
            PlotAxis::linear("µs"),
            vec![
                of_rows("read", |s| s.reads.mean_ns / 1e3),
                of_rows("write", |s| s.writes.mean_ns / 1e3),
            ],
        ),
    ]
}
