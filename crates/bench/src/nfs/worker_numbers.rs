//! A server that sizes its workers itself beside one with a fixed number of them, in several load shapes.
//!
//! Each shape has two file systems with equal files, with a server each. A search measures the fixed server with each of
//! [`NUMBERS`], and then the best of them meets the other server in alternating rounds. The measured figure is the calls per
//! second that a server answers while clients keep [`CALLS_IN_FLIGHT`] calls in flight: fewer than the longest queues, and more
//! than the most workers.

use super::bar::{Bar, add_bars};
use super::compare::{CompareOptions, LoadedServer};
use super::generator::LoadKind;
use super::mix::OperationMix;
use super::point::PointFigures;
use super::progress;
use super::setup::NfsTarget;
use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;

/// The fixed numbers of workers of the search.
pub const NUMBERS: [usize; 7] = [1, 2, 4, 8, 16, 32, 40];
/// Calls in flight, by all connections.
pub const CALLS_IN_FLIGHT: usize = 128;
/// Rounds of each number in the search. Its best number is measured again.
const SEARCH_ROUNDS: usize = 3;
/// The least ratio of the sizing to the best number.
const RATIO_MIN: f64 = 0.95;

/// Starts the server of a file system with a fixed number of workers again.
pub type RestartServer<'s> = Box<dyn FnMut(usize) -> Result<NfsTarget, BenchError> + 's>;

/// A load shape.
#[derive(Clone, Copy, Debug)]
pub struct WorkerShape {
    /// Its name in the report.
    pub name: &'static str,
    /// The operations.
    pub mix: OperationMix,
}

/// Two servers of equal file systems, with the load shapes for them.
pub struct WorkerServers<'s> {
    /// The load shapes.
    pub shapes: Vec<WorkerShape>,
    /// Files of each set.
    pub files: u32,
    /// The server that sizes itself.
    pub sized: LoadedServer<'s>,
    /// The server with a fixed number of workers.
    pub fixed: LoadedServer<'s>,
    /// Starts the latter again.
    pub restart: RestartServer<'s>,
}

/// The figures of one shape.
struct ShapeResult {
    name: &'static str,
    class: String,
    /// The rounds of each number in the search.
    search: Vec<(usize, Vec<PointFigures>)>,
    best: usize,
    sized: Vec<PointFigures>,
    fixed: Vec<PointFigures>,
}

fn per_s(rounds: &[PointFigures]) -> Vec<f64> {
    rounds.iter().map(|it| it.achieved_per_s).collect()
}

impl ShapeResult {
    fn ratio(&self) -> Option<f64> {
        median_ratio(&per_s(&self.sized), &per_s(&self.fixed))
    }
}

/// Compares the servers with all shapes.
///
/// # Errors
/// If an option is invalid, or a server refuses a call.
pub fn run_worker_numbers(
    servers: &mut [WorkerServers<'_>],
    options: &CompareOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let mut results = Vec::new();
    for servers in servers {
        servers.sized.grow(servers.files)?;
        servers.fixed.grow(servers.files)?;
        for shape in servers.shapes.clone() {
            results.push(measure_shape(servers, shape, options)?);
        }
    }
    Ok(report(&results, options))
}

fn measure_shape(
    servers: &mut WorkerServers<'_>,
    shape: WorkerShape,
    options: &CompareOptions,
) -> Result<ShapeResult, BenchError> {
    let options = CompareOptions {
        mix: shape.mix,
        ..options.clone()
    };
    let mut search = Vec::new();
    for number in NUMBERS {
        servers.fixed.move_to((servers.restart)(number)?)?;
        let rounds = 0..SEARCH_ROUNDS;
        let rounds = rounds.map(|round| measure(&mut servers.fixed, round, &options));
        let rounds = rounds.collect::<Result<Vec<_>, _>>()?;
        let rate = median(&per_s(&rounds)).unwrap_or(0.0);
        progress(&format!(
            "{}: {number} workers: {rate:.0} calls/s",
            shape.name
        ));
        search.push((number, rounds));
    }
    let best = best_number(&search);
    servers.fixed.move_to((servers.restart)(best)?)?;
    let (mut sized, mut fixed) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        for turn in 0..2 {
            match (turn + round) % 2 {
                0 => sized.push(measure(&mut servers.sized, round, &options)?),
                _ => fixed.push(measure(&mut servers.fixed, round, &options)?),
            }
        }
    }
    let result = ShapeResult {
        name: shape.name,
        class: servers.sized.target().class.clone(),
        search,
        best,
        sized,
        fixed,
    };
    let ratio = result.ratio().unwrap_or(0.0);
    progress(&format!(
        "{}: {ratio:.3} × the rate with {best} workers",
        shape.name
    ));
    Ok(result)
}

fn measure(
    server: &mut LoadedServer<'_>,
    round: usize,
    options: &CompareOptions,
) -> Result<PointFigures, BenchError> {
    let kind = LoadKind::InFlight(CALLS_IN_FLIGHT);
    let figures = server.measure_load(kind, 0.0, round, options)?;
    server.check_answers(&figures)?;
    Ok(figures)
}

/// The number with the highest median rate.
fn best_number(search: &[(usize, Vec<PointFigures>)]) -> usize {
    let rate = |rounds: &[PointFigures]| median(&per_s(rounds)).unwrap_or(0.0);
    let best = search
        .iter()
        .max_by(|a, b| rate(&a.1).total_cmp(&rate(&b.1)));
    best.map_or(NUMBERS[0], |it| it.0)
}

fn report(results: &[ShapeResult], options: &CompareOptions) -> Report {
    let columns = [
        ("load", ""),
        ("workers", ""),
        ("rounds of", ""),
        ("calls", "1/s"),
        ("to the best number", "×"),
        ("mean", "ms"),
        ("p99", "ms"),
        ("generator CPU", "% of a core"),
        ("server CPU", "% of a core"),
    ];
    let classes: Vec<&str> = results.iter().map(|it| it.class.as_str()).collect();
    let mut report = Report::new(
        "nfs-workers",
        "NFS workers that size themselves, beside the best fixed number",
        classes.first().copied().unwrap_or_default(),
        &columns,
    );
    for result in results {
        let load = format!("{} ({})", result.name, result.class);
        let best = result.best.to_string();
        report.add_row(row(&load, "by the load", &result.sized, result.ratio()));
        report.add_row(row(&load, &best, &result.fixed, Some(1.0)));
        for (number, rounds) in &result.search {
            let mut cells = row(&load, &number.to_string(), rounds, None);
            cells[2] = "the search".into();
            report.add_row(cells);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds of {:.1} s after {:.1} s, of {SEARCH_ROUNDS} rounds in the search; {CALLS_IN_FLIGHT} calls in \
         flight by {} connections without a schedule; seeds from {}",
        options.rounds,
        options.runtime.as_secs_f64(),
        options.warmup.as_secs_f64(),
        options.connections,
        options.seed
    ));
    report.add_note(
        "polling threads of the server run single calls themselves, with both kinds of sizing",
    );
    report.plots.push(plot(results));
    let shape = |it: &ShapeResult| {
        json!({
            "load": it.name,
            "class": it.class,
            "best_number": it.best,
            "ratio": it.ratio(),
            "sized_rounds": it.sized,
            "fixed_rounds": it.fixed,
            "search_rounds_by_number": it.search,
        })
    };
    report.raw = json!({ "shapes": results.iter().map(shape).collect::<Vec<_>>() });
    let bar = |it: &ShapeResult| {
        let name = format!("{}: sizing to the best fixed number, {}", it.name, it.best);
        Bar::ratio_at_least(name, RATIO_MIN, it.ratio())
    };
    add_bars(&mut report, &results.iter().map(bar).collect::<Vec<_>>());
    report
}

fn row(load: &str, workers: &str, rounds: &[PointFigures], ratio: Option<f64>) -> Vec<ReportCell> {
    let middle = |of: fn(&PointFigures) -> f64| -> ReportCell {
        median(&rounds.iter().map(of).collect::<Vec<_>>()).into()
    };
    let server = rounds.iter().filter_map(|it| it.server_cpu_percent);
    vec![
        load.into(),
        workers.into(),
        "the comparison".into(),
        middle(|it| it.achieved_per_s),
        ratio.into(),
        middle(PointFigures::mean_ms),
        middle(|it| it.latencies.p99_ns as f64 / 1e6),
        middle(|it| it.generator_cpu_percent),
        median(&server.collect::<Vec<_>>()).into(),
    ]
}

/// Rates of the search, as parts of the best one, so that all shapes fit into one chart.
fn plot(results: &[ShapeResult]) -> Plot {
    let series = results.iter().map(|result| {
        let rates = result.search.iter();
        let rates: Vec<(f64, f64)> = rates
            .filter_map(|(number, rounds)| Some((*number as f64, median(&per_s(rounds))?)))
            .collect();
        let best = rates.iter().map(|it| it.1).fold(1.0, f64::max);
        PlotSeries {
            name: result.name.to_owned(),
            points: rates.iter().map(|(x, rate)| (*x, rate / best)).collect(),
        }
    });
    Plot {
        title: "Calls per second with fixed numbers of workers".to_owned(),
        kind: PlotKind::Lines,
        x: PlotAxis::log("workers"),
        y: PlotAxis::linear("part of the best number's rate"),
        categories: Vec::new(),
        series: series.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::compare::tests::{options, point};

    fn result() -> ShapeResult {
        let rounds = |rate: f64| vec![point(rate, 1.0, None); 3];
        ShapeResult {
            name: "shape",
            class: "process".into(),
            search: vec![(1, rounds(100.0)), (4, rounds(220.0)), (8, rounds(200.0))],
            best: 4,
            sized: rounds(198.0),
            fixed: rounds(220.0),
        }
    }

    #[test]
    fn best_number_has_the_highest_median() {
        let mut search = result().search;
        assert_eq!(best_number(&search), 4);
        // One lucky round does not count.
        search[2].1[0] = point(900.0, 1.0, None);
        assert_eq!(best_number(&search), 4);
        assert_eq!(best_number(&[]), 1);
    }

    #[test]
    fn sizing_is_compared_with_the_best_number() {
        let report = report(&[result()], &options());
        let ratio = report.cell("shape (process)", "to the best number");
        assert_eq!(ratio, Some(&ReportCell::Number(0.9)));
        let text = report.text();
        assert!(text.contains("bar: missed: shape: sizing"), "{text}");
        assert_eq!(report.plots[0].series[0].points[1], (4.0, 1.0));
        assert_eq!(report.rows.len(), 5);
    }
}
