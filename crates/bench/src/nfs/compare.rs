//! Comparisons of NFS servers in alternating rounds: servers with their file sets, and latencies at fixed rates.
//!
//! Invariants:
//! - All servers of a comparison have equal file sets, and at one rate equal schedules and calls. In each round the first
//!   server moves on by one. Servers at fixed rates share bricks, so [`turn_order`] also changes the server before each one.
//! - A void point is a row with its reason. It is no figure of a median.
//! - An answer with an unexpected status ends the run.

use super::bar::{Bar, add_bars};
use super::connections::LoadConnections;
use super::file_set::{FileSet, FileSetScale};
use super::generator::{LoadKind, LoadOptions, run_load};
use super::mix::OperationMix;
use super::point::PointFigures;
use super::progress;
use super::rows::{COLUMNS, add_notes, latency_plot, middle_point, operation_rows, row};
use super::schedule::Arrivals;
use super::setup::{NfsTarget, SetupClient};
use crate::error::BenchError;
use crate::plot::PlotSeries;
use crate::report::Report;
use crate::session::check_rounds;
use crate::stats::median_ratio;
use serde_json::json;
use std::time::{Duration, Instant};

/// Limit of the time that makes the file set of one server, over a whole run. The set stays smaller then.
const SETUP_LIMIT: Duration = Duration::from_secs(180);
/// From the seed of a measured load to the one of its warm-up: more than any number of rounds.
const WARMUP_SEED_STEP: u64 = 1 << 32;
/// The most that the mean latency with snapshots may be, as a multiple of the latency without snapshots.
const SNAPSHOTS_RATIO_MAX: f64 = 1.1;

/// A server of a comparison.
pub struct Candidate<'c> {
    /// The server.
    pub target: NfsTarget,
    /// Work before the measured time of a point at a fixed rate, such as a snapshot.
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

impl CompareOptions {
    fn load(&self, kind: LoadKind, rate_per_s: f64, round: usize) -> LoadOptions {
        LoadOptions {
            kind,
            rate_per_s,
            arrivals: self.arrivals,
            mix: self.mix,
            seed: self.seed + round as u64,
            warmup: self.warmup,
            runtime: self.runtime,
            timeout: self.timeout,
        }
    }
}

/// A server with its file set and connections.
pub struct LoadedServer<'c> {
    candidate: Candidate<'c>,
    set: FileSet,
    connections: LoadConnections,
    setup_left: Duration,
    /// The size at which the time for the setup was over.
    files_limit: Option<u32>,
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
            setup_left: SETUP_LIMIT,
            files_limit: None,
        })
    }

    /// Connects to another server of the same export, which has the same files.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn move_to(&mut self, target: NfsTarget) -> Result<(), BenchError> {
        self.connections.reopen_at(target.server)?;
        self.candidate.target = target;
        Ok(())
    }

    /// The server.
    #[must_use]
    pub fn target(&self) -> &NfsTarget {
        &self.candidate.target
    }

    /// Makes the missing files for a rate, and flushes them. The set stays smaller if that takes too long.
    ///
    /// # Errors
    /// If a call fails.
    pub fn grow(&mut self, files: u32) -> Result<(), BenchError> {
        let before = self.set.files.len();
        if files as usize <= before || self.files_limit.is_some() {
            return Ok(());
        }
        progress(&format!("{}: making {files} files", self.target().name));
        let began = Instant::now();
        let mut client = SetupClient::connect(&self.candidate.target)?;
        let until = began + self.setup_left;
        if !client.grow(&mut self.set, files, until)? {
            self.files_limit = Some(self.set.files.len() as u32);
        }
        client.commit(&self.set, before)?;
        self.setup_left = self.setup_left.saturating_sub(began.elapsed());
        Ok(())
    }

    /// The number of files beyond which the set does not grow, since that took too long.
    #[must_use]
    pub fn files_limit(&self) -> Option<u32> {
        self.files_limit
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
        self.measure_load(LoadKind::Scheduled, rate_per_s, round, options)
    }

    /// Measures a load of any kind with the present file set.
    ///
    /// # Errors
    /// If the server ends a connection.
    pub fn measure_load(
        &mut self,
        kind: LoadKind,
        rate_per_s: f64,
        round: usize,
        options: &CompareOptions,
    ) -> Result<PointFigures, BenchError> {
        let load = options.load(kind, rate_per_s, round);
        let pids = &self.candidate.target.pids;
        run_load(&mut self.connections, &mut self.set, &load, pids)
    }

    /// A load of [`LoadKind::Beside`] for another thread.
    pub fn load_beside(
        &mut self,
        rate_per_s: f64,
        round: usize,
        options: &CompareOptions,
    ) -> impl FnOnce() -> Result<PointFigures, BenchError> + Send {
        let load = options.load(LoadKind::Beside, rate_per_s, round);
        let (connections, set) = (&mut self.connections, &mut self.set);
        move || run_load(connections, set, &load, &[])
    }

    /// Measures a point after the work before it. The warm-up is a load of its own with other calls before that work, so that the
    /// measured calls are the first ones after a snapshot. Unexpected answers are an error.
    ///
    /// # Errors
    /// If the work fails, or the server ends a connection or refuses a call.
    pub fn measure_prepared(
        &mut self,
        rate_per_s: f64,
        round: usize,
        options: &CompareOptions,
    ) -> Result<PointFigures, BenchError> {
        let warmup = CompareOptions {
            runtime: options.warmup,
            warmup: Duration::ZERO,
            seed: options.seed.wrapping_add(WARMUP_SEED_STEP),
            ..options.clone()
        };
        if !warmup.runtime.is_zero() {
            let figures = self.measure(rate_per_s, round, &warmup)?;
            self.check_answers(&figures)?;
        }
        (self.candidate.prepare)()?;
        let measured = CompareOptions {
            warmup: Duration::ZERO,
            ..options.clone()
        };
        let figures = self.measure(rate_per_s, round, &measured)?;
        self.check_answers(&figures)?;
        Ok(figures)
    }

    /// Makes an unexpected answer an error.
    ///
    /// # Errors
    /// If there is one.
    pub fn check_answers(&self, figures: &PointFigures) -> Result<(), BenchError> {
        match figures.failed.first() {
            None => Ok(()),
            Some(first) => Err(BenchError::Nfs {
                during: format!("{} of {}", first.operation, self.target().name),
                cause: format!("{} calls have the status {}", first.count, first.status).into(),
            }),
        }
    }
}

pub(super) fn check_servers(
    servers: &[LoadedServer<'_>],
    options: &CompareOptions,
) -> Result<(), BenchError> {
    check_rounds(options.rounds)?;
    match servers.is_empty() {
        false => Ok(()),
        true => Err(BenchError::Option(
            "there is no server to measure; name at least one".into(),
        )),
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
    check_servers(servers, options)?;
    if rates.is_empty() {
        let text = "there is no rate to measure; name at least one".to_owned();
        return Err(BenchError::Option(text));
    }
    let mut points: Vec<Vec<Vec<PointFigures>>> =
        vec![vec![Vec::new(); rates.len()]; servers.len()];
    for round in 0..options.rounds {
        for (number, rate) in rates.iter().enumerate() {
            for at in turn_order(servers.len(), round) {
                let figures = servers[at].measure_prepared(*rate, round, options)?;
                print_point(servers[at].target(), round, &figures);
                points[at][number].push(figures);
            }
        }
    }
    let targets: Vec<NfsTarget> = servers.iter().map(|it| it.target().clone()).collect();
    Ok(ladder_report((name, title), &targets, &points, options))
}

/// The order of servers in a round. The first one moves on by one every other round, and each second round is in reverse. So no
/// server always follows the same one: its deleted snapshot may still occupy the bricks.
fn turn_order(servers: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..servers).collect();
    order.rotate_left(round / 2 % servers.max(1));
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// A line about a measured point.
pub(super) fn print_point(target: &NfsTarget, round: usize, figures: &PointFigures) {
    let void = figures.void.map(|it| format!(", {it}"));
    progress(&format!(
        "{}: round {}, {:.0} calls/s offered, {:.0} achieved, mean {:.2} ms, generator late by {:.0} µs at its p99{}",
        target.name,
        round + 1,
        figures.offered_per_s,
        figures.achieved_per_s,
        figures.mean_ms(),
        figures.lateness.p99_ns as f64 / 1e3,
        void.unwrap_or_default()
    ));
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
    add_notes(&mut report, options, points.iter().flatten().flatten());
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
    let bars = (0..rates).flat_map(|at| snapshot_bars(targets, points, at));
    add_bars(&mut report, &bars.collect::<Vec<_>>());
    report
}

/// Latencies of the file systems of one process kind against the first of them; peers have another medium.
fn snapshot_bars(
    targets: &[NfsTarget],
    points: &[Vec<Vec<PointFigures>>],
    rate: usize,
) -> Vec<Bar> {
    let with_snapshots = targets.iter().zip(points).skip(1);
    let same_class = with_snapshots.filter(|(target, _)| target.class == targets[0].class);
    let bar = |(target, of): (&NfsTarget, &Vec<Vec<PointFigures>>)| {
        let per_s = points[0][rate].first().map_or(0.0, |it| it.rate_per_s);
        let name = format!(
            "mean latency of {} to {} at {per_s:.0} calls/s",
            target.name, targets[0].name
        );
        let ratio = mean_ratio(&of[rate], &points[0][rate]);
        Bar::ratio_at_most(name, SNAPSHOTS_RATIO_MAX, ratio)
    };
    same_class.map(bar).collect()
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::nfs::point::VoidReason;
    use crate::report::ReportCell;

    pub(in crate::nfs) fn options() -> CompareOptions {
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

    pub(in crate::nfs) fn target(name: &str) -> NfsTarget {
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

    pub(in crate::nfs) fn point(rate: f64, mean_ms: f64, void: Option<VoidReason>) -> PointFigures {
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
    fn servers_follow_different_ones_in_turn() {
        assert_eq!(turn_order(3, 0), [0, 1, 2]);
        let mut before = [[0; 3]; 3];
        let mut firsts = [0; 3];
        for round in 0..6 {
            let order = turn_order(3, round);
            firsts[order[0]] += 1;
            for pair in order.windows(2) {
                before[pair[0]][pair[1]] += 1;
            }
        }
        assert_eq!(firsts, [2; 3]);
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            assert_eq!(before[one][other], 2, "{before:?}");
            assert_eq!(before[other][one], 2, "{before:?}");
        }
        assert!(turn_order(0, 1).is_empty());
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
        let bar = "bar: missed: mean latency of other to one at 100 calls/s is 1.200 ×";
        assert!(text.contains(bar), "{text}");
    }
}
