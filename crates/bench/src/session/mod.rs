//! The cost of a mirrored write, compared with the raw cost of its two copies.
//!
//! Rounds alternate: raw copies, writes, reads, and again. Writes and reads go one at a time
//! through one channel of the space. Ratios are of the same round. The report shows the brick's CPU
//! time over the space's part of each round, and the client's.

mod raw;

pub use raw::{RawCopies, RawMemory};

use crate::error::BenchError;
use crate::load::{LoadResult, LoadWorker, RequestMix, RunLimit, thread_cpu};
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::stats::{Latencies, median, median_ratio};
use pagemesh_base::space::Space;
use serde::Serialize;
use serde_json::json;
use std::time::{Duration, Instant};

/// Least rounds: a median of fewer says little.
pub const ROUNDS_MIN: usize = 5;
/// Most rounds.
pub const ROUNDS_MAX: usize = 1000;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Alternating rounds, [`ROUNDS_MIN`] to [`ROUNDS_MAX`].
    pub rounds: usize,
    /// Operations of each kind in a round.
    pub operations: u64,
    /// The mix; its share of reads is not used.
    pub mix: RequestMix,
    /// The pools' durability class.
    pub class: String,
    /// A description of the space, such as `mirror over map`.
    pub space: String,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            rounds: 7,
            operations: 200_000,
            mix: RequestMix::default(),
            class: "process".to_owned(),
            space: "volume".to_owned(),
        }
    }
}

/// The result of one part of one round.
#[derive(Clone, Debug, Default, Serialize)]
struct PartSamples {
    wall_ns: Vec<f64>,
    cpu_ns: Vec<f64>,
    brick_share: Vec<f64>,
}

impl PartSamples {
    fn push(&mut self, count: u64, wall: Duration, cpu: Duration, brick: Option<Duration>) {
        self.wall_ns.push(wall.as_nanos() as f64 / count as f64);
        self.cpu_ns.push(cpu.as_nanos() as f64 / count as f64);
        if let Some(brick) = brick {
            self.brick_share
                .push(brick.as_secs_f64() / cpu.as_secs_f64());
        }
    }
}

/// Runs the benchmark; see the module. `brick_cpu` returns the CPU time that all bricks of the
/// space have used so far.
///
/// # Errors
/// If an option is invalid or the space fails.
pub fn run_session(
    space: &dyn Space,
    raw: &mut dyn RawCopies,
    brick_cpu: &mut dyn FnMut() -> Duration,
    options: &SessionOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if options.operations == 0 {
        let text = "0 operations measure nothing; ask for at least one per round";
        return Err(BenchError::Option(text.to_owned()));
    }
    let mut worker = LoadWorker::open(space, &options.mix, 0, 1)?;
    let [mut copies, mut writes, mut reads] = [(); 3].map(|()| PartSamples::default());
    let [mut write_latencies, mut read_latencies] = [(); 2].map(|()| Latencies::new());
    // The first round does not count: it maps memory on first use.
    for round in 0..=options.rounds {
        let (wall, cpu) = time_copies(raw, options.operations);
        let (write, write_brick) = run_worker(&mut worker, 0, brick_cpu, options.operations)?;
        let (read, read_brick) = run_worker(&mut worker, 100, brick_cpu, options.operations)?;
        if round == 0 {
            continue;
        }
        copies.push(options.operations, wall, cpu, None);
        writes.push(write.operations(), write.wall, write.cpu, Some(write_brick));
        reads.push(read.operations(), read.wall, read.cpu, Some(read_brick));
        write_latencies.merge(&write.writes);
        read_latencies.merge(&read.reads);
    }
    let parts = [
        ("two raw copies", &copies, None),
        ("write", &writes, Some(&write_latencies)),
        ("read", &reads, Some(&read_latencies)),
    ];
    Ok(report(&parts, raw, options))
}

pub(crate) fn check_rounds(rounds: usize) -> Result<(), BenchError> {
    if (ROUNDS_MIN..=ROUNDS_MAX).contains(&rounds) {
        return Ok(());
    }
    let text = format!("{rounds} rounds are not {ROUNDS_MIN} to {ROUNDS_MAX}");
    Err(BenchError::Option(text))
}

fn time_copies(raw: &mut dyn RawCopies, count: u64) -> (Duration, Duration) {
    let cpu = thread_cpu();
    let start = Instant::now();
    raw.copy_pages(count);
    (start.elapsed(), thread_cpu().saturating_sub(cpu))
}

fn run_worker(
    worker: &mut LoadWorker,
    read_percent: u8,
    brick_cpu: &mut dyn FnMut() -> Duration,
    count: u64,
) -> Result<(LoadResult, Duration), BenchError> {
    worker.set_read_percent(read_percent);
    let before = brick_cpu();
    let outcome = worker.run(RunLimit::Operations(count))?;
    Ok((outcome, brick_cpu().saturating_sub(before)))
}

fn report(
    parts: &[(&str, &PartSamples, Option<&Latencies>)],
    raw: &dyn RawCopies,
    options: &SessionOptions,
) -> Report {
    let title = format!(
        "{} B random writes and reads, one at a time, {} against raw copies to memory",
        options.mix.block_bytes, options.space
    );
    let columns = [
        ("what", ""),
        ("wall", "ns/op"),
        ("CPU", "ns/op"),
        ("to raw", "×"),
        ("CPU to raw", "×"),
        ("brick CPU", "% of client"),
        ("p50", "ns"),
        ("p90", "ns"),
        ("p99", "ns"),
        ("p99.9", "ns"),
        ("max", "ns"),
    ];
    let mut report = Report::new("session", &title, &options.class, &columns);
    let copies = parts[0].1;
    for (name, part, latencies) in parts {
        let share = median(&part.brick_share).map(|share| share * 100.0);
        let mut row: Vec<ReportCell> = vec![
            (*name).into(),
            median(&part.wall_ns).into(),
            median(&part.cpu_ns).into(),
            median_ratio(&part.wall_ns, &copies.wall_ns).into(),
            median_ratio(&part.cpu_ns, &copies.cpu_ns).into(),
            share.into(),
        ];
        row.extend(percentiles(*latencies));
        report.add_row(row);
    }
    describe(&mut report, raw, options);
    report.plots.push(plot(parts));
    let rounds = |(name, part, _): &(&str, &PartSamples, _)| ((*name).to_owned(), json!(part));
    report.raw = serde_json::Value::Object(parts.iter().map(rounds).collect());
    report
}

fn percentiles(latencies: Option<&Latencies>) -> [ReportCell; 5] {
    let Some(latencies) = latencies else {
        return [(); 5].map(|()| ReportCell::Missing);
    };
    let summary = latencies.summary();
    [
        summary.p50_ns.into(),
        summary.p90_ns.into(),
        summary.p99_ns.into(),
        summary.p999_ns.into(),
        summary.max_ns.into(),
    ]
}

fn describe(report: &mut Report, raw: &dyn RawCopies, options: &SessionOptions) {
    report.add_note(format!(
        "medians of {} alternating rounds of {} operations each after one that does not count; \
         ratios are taken within rounds, percentiles over all rounds",
        options.rounds, options.operations
    ));
    report.add_note(format!(
        "two raw copies: a random 4 KiB page to two mapped memories of class {} with \
         non-temporal stores, its sums in the same pass, and one fence",
        raw.class()
    ));
    report
        .add_note("one operation in eight is timed for the percentiles, a clock reading included");
}

fn plot(parts: &[(&str, &PartSamples, Option<&Latencies>)]) -> Plot {
    let bars = |name: &str, pick: fn(&PartSamples) -> &Vec<f64>| PlotSeries {
        name: name.to_owned(),
        points: (0u32..)
            .zip(parts)
            .filter_map(|(at, (_, part, _))| Some((f64::from(at), median(pick(part))?)))
            .collect(),
    };
    Plot {
        title: "Time per 4 KiB operation".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear(""),
        y: PlotAxis::linear("ns per operation"),
        categories: parts.iter().map(|(name, ..)| (*name).to_owned()).collect(),
        series: vec![bars("wall", |p| &p.wall_ns), bars("CPU", |p| &p.cpu_ns)],
    }
}
