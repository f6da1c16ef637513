//! Comparisons of NFS servers in alternating rounds: the rate that each holds at a mean latency, and latencies at fixed rates.
//!
//! Invariants:
//! - All servers of a comparison have equal file sets, and at one rate equal schedules and calls. In each round the first
//!   server moves on by one.
//! - A void point is a row with its reason. It is no figure of a median, and no answer of a search but "not held".
//! - An answer with an unexpected status ends the run.

use super::connections::LoadConnections;
use super::file_set::{FileSet, FileSetScale};
use super::generator::{LoadOptions, run_load};
use super::mix::OperationMix;
use super::point::PointFigures;
use super::schedule::Arrivals;
use super::search::RateSearch;
use super::setup::{NfsTarget, SetupClient};
use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;
use std::time::Duration;

/// The mean latency of the search, in ms.
pub const MEAN_MS_MAX: f64 = 6.0;
/// Factors between rates of the first round and of later ones, which start at the result of the round before.
const FACTORS: [f64; 2] = [1.5, 1.15];
/// The precision of a search.
const PRECISION: f64 = 0.05;

/// A server of a comparison.
pub struct Candidate<'c> {
    /// The server.
    pub target: NfsTarget,
    /// Work before each point, such as a snapshot.
    pub prepare: Box<dyn FnMut() -> Result<(), BenchError> + 'c>,
}

impl<'c> Candidate<'c> {
    /// A server without work before points.
    #[must_use]
    pub fn new(target: NfsTarget) -> Candidate<'c> {
        Candidate {
            target,
            prepare: Box::new(|| Ok(())),
        }
    }
}

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// Rounds.
    pub rounds: usize,
    /// The measured time of a point.
    pub runtime: Duration,
    /// The time before it.
    pub warmup: Duration,
    /// Limit of the wait for an answer.
    pub timeout: Duration,
    /// Connections to each server.
    pub connections: usize,
    /// The gaps of the schedule.
    pub arrivals: Arrivals,
    /// The operations.
    pub mix: OperationMix,
    /// The number of files for a rate.
    pub scale: FileSetScale,
    /// The seed of the first round.
    pub seed: u64,
}

/// A server with its file set and connections.
pub struct LoadedServer<'c> {
    candidate: Candidate<'c>,
    set: FileSet,
    connections: LoadConnections,
}

impl<'c> LoadedServer<'c> {
    /// Connects, and mounts the export.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn open(
        candidate: Candidate<'c>,
        options: &CompareOptions,
    ) -> Result<LoadedServer<'c>, BenchError> {
        let connections = LoadConnections::open(candidate.target.server, options.connections)?;
        let set = SetupClient::connect(&candidate.target)?.mount()?;
        Ok(LoadedServer {
            candidate,
            set,
            connections,
        })
    }

    /// The server.
    #[must_use]
    pub fn target(&self) -> &NfsTarget {
        &self.candidate.target
    }

    /// Makes the missing files for a rate, and flushes them.
    ///
    /// # Errors
    /// If a call fails.
    pub fn grow(&mut self, files: u32) -> Result<(), BenchError> {
        let before = self.set.files.len();
        if files as usize <= before {
            return Ok(());
        }
        let mut client = SetupClient::connect(&self.candidate.target)?;
        client.grow(&mut self.set, files)?;
        client.commit(&self.set, before)
    }

    /// Measures a point, with all answers.
    ///
    /// # Errors
    /// If the server ends a connection.
    pub fn measure(
        &mut self,
        rate_per_s: f64,
        round: usize,
        options: &CompareOptions,
    ) -> Result<PointFigures, BenchError> {
        self.grow(options.scale.files_at(rate_per_s))?;
        (self.candidate.prepare)()?;
        let load = LoadOptions {
            rate_per_s,
            arrivals: options.arrivals,
            mix: options.mix,
            seed: options.seed + round as u64,
            warmup: options.warmup,
            runtime: options.runtime,
            timeout: options.timeout,
        };
        let pids = &self.candidate.target.pids;
        run_load(&mut self.connections, &mut self.set, &load, pids)
    }

    /// The same, but unexpected answers are an error.
    ///
    /// # Errors
    /// If the server ends a connection, or refuses a call.
    pub fn measure_strictly(
        &mut self,
        rate_per_s: f64,
        round: usize,
        options: &CompareOptions,
    ) -> Result<PointFigures, BenchError> {
        let figures = self.measure(rate_per_s, round, options)?;
        match figures.failed.first() {
            None => Ok(figures),
            Some(first) => Err(BenchError::Nfs {
                during: format!("{} of {}", first.operation, self.target().name),
                cause: format!("{} calls have the status {}", first.count, first.status).into(),
            }),
        }
    }
}

fn check(servers: &[LoadedServer<'_>], options: &CompareOptions) -> Result<(), BenchError> {
    check_rounds(options.rounds)?;
    match servers.is_empty() {
        false => Ok(()),
        true => Err(BenchError::Option(
            "there is no server to measure; name at least one".into(),
        )),
    }
}

const COLUMNS: [(&str, &str); 14] = [
    ("server", ""),
    ("operation", ""),
    ("offered", "1/s"),
    ("achieved", "1/s"),
    ("to the last", "×"),
    ("mean", "ms"),
    ("p50", "ms"),
    ("p90", "ms"),
    ("p99", "ms"),
    ("p99.9", "ms"),
    ("timeouts", ""),
    ("generator CPU", "% of a core"),
    ("server CPU", "% of a core"),
    ("void rounds", ""),
];

/// The latencies of a row in ms, from figures of several rounds.
fn latency_cells(summaries: &[crate::stats::LatencySummary]) -> Vec<ReportCell> {
    let of = |pick: fn(&crate::stats::LatencySummary) -> f64| -> ReportCell {
        let values: Vec<f64> = summaries.iter().map(pick).collect();
        median(&values).map(|ns| ns / 1e6).into()
    };
    vec![
        of(|it| it.mean_ns),
        of(|it| it.p50_ns as f64),
        of(|it| it.p90_ns as f64),
        of(|it| it.p99_ns as f64),
        of(|it| it.p999_ns as f64),
    ]
}

/// A row of all operations. Void rounds count in the last column only, unless all are void.
fn row(server: &str, rounds: &[&PointFigures], ratio: Option<f64>) -> Vec<ReportCell> {
    let valid: Vec<&PointFigures> = rounds
        .iter()
        .copied()
        .filter(|it| it.void.is_none())
        .collect();
    let shown = if valid.is_empty() { rounds } else { &valid };
    let middle =
        |of: fn(&PointFigures) -> f64| median(&shown.iter().map(|it| of(it)).collect::<Vec<f64>>());
    let server_cpu: Vec<f64> = shown
        .iter()
        .filter_map(|it| it.server_cpu_percent)
        .collect();
    let latencies: Vec<_> = shown.iter().map(|it| it.latencies).collect();
    let mut cells: Vec<ReportCell> = vec![
        server.into(),
        "all".into(),
        middle(|it| it.offered_per_s).into(),
        middle(|it| it.achieved_per_s).into(),
        ratio.into(),
    ];
    cells.extend(latency_cells(&latencies));
    cells.extend([
        rounds.iter().map(|it| it.timeouts).sum::<u64>().into(),
        middle(|it| it.generator_cpu_percent).into(),
        median(&server_cpu).into(),
        void_cell(rounds),
    ]);
    cells
}

/// The number of void rounds, and the reason of the first one.
fn void_cell(rounds: &[&PointFigures]) -> ReportCell {
    let mut reasons = rounds.iter().filter_map(|it| it.void);
    match reasons.next() {
        None => "0".into(),
        Some(first) => {
            let count = 1 + reasons.count();
            format!("{count} of {}, {first}", rounds.len())
                .as_str()
                .into()
        }
    }
}

/// A row of one operation.
fn operation_rows(server: &str, rounds: &[&PointFigures]) -> Vec<Vec<ReportCell>> {
    let Some(first) = rounds.first() else {
        return Vec::new();
    };
    let of = |name: &str| -> Vec<ReportCell> {
        let all = rounds.iter().flat_map(|it| &it.operations);
        let found: Vec<_> = all
            .filter(|it| it.operation == name)
            .map(|it| it.latencies)
            .collect();
        let mut cells = vec![server.into(), name.into()];
        cells.extend([
            ReportCell::Missing,
            ReportCell::Missing,
            ReportCell::Missing,
        ]);
        cells.extend(latency_cells(&found));
        cells.resize(COLUMNS.len(), ReportCell::Missing);
        cells
    };
    let names = first.operations.iter().map(|it| it.operation.as_str());
    names.map(of).collect()
}

fn add_notes(report: &mut Report, options: &CompareOptions) {
    report.add_note(format!(
        "medians of {} alternating rounds of {:.1} s after {:.1} s; schedule {:?} with seeds from {}, fixed in advance; \
         latencies count from the time at which each call was due",
        options.rounds,
        options.runtime.as_secs_f64(),
        options.warmup.as_secs_f64(),
        options.arrivals,
        options.seed
    ));
    report.add_note(format!(
        "mix {}, {} connections, {} files for each operation per second (SFS97: 10 MB, about 380 files), at least {} and at most \
         {}; a hot tenth takes 99 % of the accesses; WRITEs are UNSTABLE",
        options.mix.name,
        options.connections,
        options.scale.files_per_op,
        options.scale.files_min,
        options.scale.files_max
    ));
    report.add_note(
        "a round is void below 99 % of the offered rate, or if the generator itself was more than 1 ms late at its p99",
    );
}

/// Searches the highest rate at which each server keeps a mean latency of `mean_ms_max`. Ratios are to the last server.
///
/// # Errors
/// If an option is invalid, or a server refuses a call.
pub fn run_rates(
    servers: &mut [LoadedServer<'_>],
    start_rate: f64,
    mean_ms_max: f64,
    options: &CompareOptions,
) -> Result<Report, BenchError> {
    check(servers, options)?;
    let mut points: Vec<Vec<Vec<PointFigures>>> = vec![Vec::new(); servers.len()];
    let mut best: Vec<Vec<Option<PointFigures>>> = vec![Vec::new(); servers.len()];
    for round in 0..options.rounds {
        for turn in 0..servers.len() {
            let at = (turn + round) % servers.len();
            let before = best[at].iter().rev().flatten().next();
            let start = before.map_or(start_rate, |it| it.rate_per_s);
            let factor = FACTORS[usize::from(before.is_some())];
            let mut search = RateSearch::new(start, factor, PRECISION);
            let mut measured = Vec::new();
            while let Some(rate) = search.next_rate() {
                let figures = servers[at].measure_strictly(rate, round, options)?;
                let is_held = figures.void.is_none() && figures.mean_ms() <= mean_ms_max;
                search.record(rate, is_held);
                measured.push(figures);
            }
            let found = measured
                .iter()
                .find(|it| Some(it.rate_per_s) == search.best());
            best[at].push(found.cloned());
            points[at].push(measured);
        }
    }
    let targets: Vec<NfsTarget> = servers.iter().map(|it| it.target().clone()).collect();
    Ok(rates_report(&targets, &points, &best, mean_ms_max, options))
}

fn rates_report(
    targets: &[NfsTarget],
    points: &[Vec<Vec<PointFigures>>],
    best: &[Vec<Option<PointFigures>>],
    mean_ms_max: f64,
    options: &CompareOptions,
) -> Report {
    let title = format!("NFS operations held at a mean latency of at most {mean_ms_max} ms");
    let mut report = Report::new("nfs-rate", &title, &targets[0].class, &COLUMNS);
    // A round without any held rate counts as 0.
    let rates = |of: &[Option<PointFigures>]| -> Vec<f64> {
        let rate = |it: &Option<PointFigures>| it.as_ref().map_or(0.0, |it| it.achieved_per_s);
        of.iter().map(rate).collect()
    };
    let last = best.last().map(|it| rates(it)).unwrap_or_default();
    for (target, of) in targets.iter().zip(best) {
        let held: Vec<&PointFigures> = of.iter().flatten().collect();
        let name = format!("{} ({})", target.name, target.class);
        report.add_row(row(&name, &held, median_ratio(&rates(of), &last)));
    }
    for (target, of) in targets.iter().zip(best) {
        let held: Vec<&PointFigures> = of.iter().flatten().collect();
        for cells in operation_rows(&target.name, &held) {
            report.add_row(cells);
        }
    }
    add_notes(&mut report, options);
    report.add_note("points of the chart are all of all rounds that are not void");
    let series = targets.iter().zip(points).map(|(target, rounds)| {
        let valid = rounds.iter().flatten().filter(|it| it.void.is_none());
        PlotSeries {
            name: target.name.clone(),
            points: valid.map(|it| (it.achieved_per_s, it.mean_ms())).collect(),
        }
    });
    report.plots.push(latency_plot(
        "Mean latency over NFS operations",
        series.collect(),
    ));
    report.raw = json!({
        "servers": targets.iter().map(|it| &it.name).collect::<Vec<_>>(),
        "classes": targets.iter().map(|it| &it.class).collect::<Vec<_>>(),
        "points_by_server_round": points,
        "best_by_server_round": best,
    });
    report
}

/// The figure of source measurements: latency over throughput.
fn latency_plot(title: &str, series: Vec<PlotSeries>) -> Plot {
    Plot {
        title: title.to_owned(),
        kind: PlotKind::Lines,
        x: PlotAxis::linear("operations per second, achieved"),
        y: PlotAxis::log("mean latency in ms"),
        categories: Vec::new(),
        series,
    }
}

/// Measures all servers at fixed rates. Ratios are of mean latencies, to the first server.
///
/// # Errors
/// If an option is invalid, or a server refuses a call.
pub fn run_ladder(
    (name, title): (&str, &str),
    servers: &mut [LoadedServer<'_>],
    rates: &[f64],
    options: &CompareOptions,
) -> Result<Report, BenchError> {
    check(servers, options)?;
    if rates.is_empty() {
        let text = "there is no rate to measure; name at least one".to_owned();
        return Err(BenchError::Option(text));
    }
    let mut points: Vec<Vec<Vec<PointFigures>>> =
        vec![vec![Vec::new(); rates.len()]; servers.len()];
    for round in 0..options.rounds {
        for (number, rate) in rates.iter().enumerate() {
            for turn in 0..servers.len() {
                let at = (turn + round) % servers.len();
                let figures = servers[at].measure_strictly(*rate, round, options)?;
                points[at][number].push(figures);
            }
        }
    }
    let targets: Vec<NfsTarget> = servers.iter().map(|it| it.target().clone()).collect();
    Ok(ladder_report((name, title), &targets, &points, options))
}

fn ladder_report(
    (name, title): (&str, &str),
    targets: &[NfsTarget],
    points: &[Vec<Vec<PointFigures>>],
    options: &CompareOptions,
) -> Report {
    let mut columns = COLUMNS;
    columns[4] = ("mean to the first", "×");
    let mut report = Report::new(name, title, &targets[0].class, &columns);
    let rates = points[0].len();
    for number in 0..rates {
        for (target, of) in targets.iter().zip(points) {
            let name = format!("{} ({})", target.name, target.class);
            let ratio = mean_ratio(&of[number], &points[0][number]);
            let rounds: Vec<&PointFigures> = of[number].iter().collect();
            report.add_row(row(&name, &rounds, ratio));
        }
    }
    let is_valid = |rounds: &[PointFigures]| rounds.iter().all(|it| it.void.is_none());
    let highest = (0..rates)
        .rev()
        .find(|at| points.iter().all(|of| is_valid(&of[*at])));
    if let Some(at) = highest {
        for (target, of) in targets.iter().zip(points) {
            let rounds: Vec<&PointFigures> = of[at].iter().collect();
            for cells in operation_rows(&target.name, &rounds) {
                report.add_row(cells);
            }
        }
        report.add_note("rows of operations are of the highest rate without a void round");
    }
    add_notes(&mut report, options);
    let series = targets.iter().zip(points).map(|(target, of)| PlotSeries {
        name: target.name.clone(),
        points: of.iter().filter_map(|it| middle_point(it)).collect(),
    });
    report.plots.push(latency_plot(title, series.collect()));
    report.raw = json!({
        "servers": targets.iter().map(|it| &it.name).collect::<Vec<_>>(),
        "classes": targets.iter().map(|it| &it.class).collect::<Vec<_>>(),
        "points_by_server_rate_round": points,
    });
    report
}

/// The median of the ratios of means, of rounds that are valid in both.
fn mean_ratio(values: &[PointFigures], base: &[PointFigures]) -> Option<f64> {
    let valid = values.iter().zip(base);
    let valid = valid.filter(|(one, other)| one.void.is_none() && other.void.is_none());
    let (values, base): (Vec<f64>, Vec<f64>) = valid
        .map(|(one, other)| (one.mean_ms(), other.mean_ms()))
        .unzip();
    median_ratio(&values, &base)
}

/// The place of a point in the chart: medians of its valid rounds.
fn middle_point(rounds: &[PointFigures]) -> Option<(f64, f64)> {
    let valid = || rounds.iter().filter(|it| it.void.is_none());
    let rate = median(&valid().map(|it| it.achieved_per_s).collect::<Vec<_>>())?;
    let mean = median(&valid().map(PointFigures::mean_ms).collect::<Vec<_>>())?;
    Some((rate, mean))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::point::VoidReason;

    fn options() -> CompareOptions {
        CompareOptions {
            rounds: 5,
            runtime: Duration::from_secs(1),
            warmup: Duration::ZERO,
            timeout: Duration::from_secs(1),
            connections: 1,
            arrivals: Arrivals::Poisson,
            mix: OperationMix::SFS97,
            scale: FileSetScale::with_room(1.0, 1 << 30),
            seed: 1,
        }
    }

    fn target(name: &str) -> NfsTarget {
        let server = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        NfsTarget {
            name: name.into(),
            class: "process".into(),
            server,
            mount_server: server,
            export: "/".into(),
            pids: vec![],
        }
    }

    fn point(rate: f64, mean_ms: f64, void: Option<VoidReason>) -> PointFigures {
        PointFigures {
            rate_per_s: rate,
            offered_per_s: rate,
            achieved_per_s: rate,
            latencies: crate::stats::LatencySummary {
                mean_ns: mean_ms * 1e6,
                ..Default::default()
            },
            void,
            ..PointFigures::default()
        }
    }

    #[test]
    fn void_point_is_shown_and_counts_nowhere() {
        let void = Some(VoidReason::Behind(0.5));
        let points = [
            vec![vec![point(100.0, 1.0, None), point(100.0, 1.0, None)]],
            vec![vec![point(100.0, 1.2, None), point(100.0, 90.0, void)]],
        ];
        let targets = [target("one"), target("other")];
        let report = ladder_report(("nfs", "title"), &targets, &points, &options());
        let text = report.text();
        assert!(text.contains("1 of 2, void: 50.0 % achieved"), "{text}");
        let ratio = report.cell("other (process)", "mean to the first");
        assert_eq!(ratio, Some(&ReportCell::Number(1.2)));
        assert_eq!(report.plots[0].series[1].points, [(100.0, 1.2)]);
    }

    #[test]
    fn held_rates_are_compared_with_the_last_server() {
        let best = [
            vec![Some(point(300.0, 5.0, None)), Some(point(330.0, 5.0, None))],
            vec![Some(point(100.0, 5.0, None)), Some(point(110.0, 5.0, None))],
        ];
        let points = [
            vec![vec![point(300.0, 5.0, None)], vec![]],
            vec![vec![point(100.0, 5.0, None)], vec![]],
        ];
        let targets = [target("ours"), target("peer")];
        let report = rates_report(&targets, &points, &best, 6.0, &options());
        let ratio = report.cell("ours (process)", "to the last");
        assert_eq!(ratio, Some(&ReportCell::Number(3.0)));
    }

    #[test]
    fn server_that_holds_no_rate_has_a_ratio_of_zero() {
        let best = [vec![None], vec![Some(point(100.0, 5.0, None))]];
        let points = [vec![vec![]], vec![vec![]]];
        let targets = [target("ours"), target("peer")];
        let report = rates_report(&targets, &points, &best, 6.0, &options());
        let ratio = report.cell("ours (process)", "to the last");
        assert_eq!(ratio, Some(&ReportCell::Number(0.0)));
    }
}
