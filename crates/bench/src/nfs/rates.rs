//! The highest rate that each server holds at a mean latency, by a search of its own in rounds that alternate between servers.
//!
//! Invariants:
//! - The majority of the rounds decides on a rate. A round holds it if at least 99 % of the offered calls were answered, the mean
//!   latency is within its limit, and the generator was on time.
//! - A round with a late generator is repeated. If the generator stays late, the report says so, and the best valid rate is a
//!   lower bound.

use super::bar::{Bar, add_bars};
use super::compare::{CompareOptions, LoadedServer, check_servers, print_point};
use super::mix::OperationMix;
use super::point::PointFigures;
use super::progress;
use super::rows::{COLUMNS, add_notes, latency_plot, middle_point, operation_rows, row};
use super::search::{PointVote, RateSearch, RateVerdict, SearchLimit};
use super::setup::NfsTarget;
use crate::error::BenchError;
use crate::plot::PlotSeries;
use crate::report::Report;
use crate::stats::median;
use serde_json::json;

/// The mean latency of the search, in ms.
pub const MEAN_MS_MAX: f64 = 6.0;
/// The factor between rates until one is not held.
const FACTOR: f64 = 2.0;
/// The precision of a search for a figure.
pub const PRECISION: f64 = 0.05;
/// NFS3ERR_JUKEBOX: the server has no room for the call now.
const JUKEBOX: &str = "JUKEBOX";
/// The class of pools in memory.
const MEMORY_CLASS: &str = "process";
/// The least ratio to nfs-ganesha, of pools in memory and of others.
const RATIO_MIN: [f64; 2] = [3.0, 1.5];

/// A measured rate of one server.
#[derive(Clone, Debug)]
pub struct RatePoint {
    /// The rate, in calls per second.
    pub rate_per_s: f64,
    /// The verdict of its rounds.
    pub verdict: RateVerdict,
    /// The rounds, with void ones.
    pub rounds: Vec<PointFigures>,
}

/// The search of one server.
#[derive(Clone, Debug)]
pub struct RateResult {
    /// All rates, in the order of the search.
    pub points: Vec<RatePoint>,
    /// The highest rate that was held.
    pub best: Option<f64>,
    /// The reason that there is no higher one.
    pub limit: SearchLimit,
}

impl RateResult {
    /// The rounds of the best rate that are not void.
    #[must_use]
    pub fn best_rounds(&self) -> Vec<&PointFigures> {
        let best = |it: &&RatePoint| Some(it.rate_per_s) == self.best;
        let rounds = self.points.iter().filter(best).flat_map(|it| &it.rounds);
        rounds.filter(|it| !it.is_generator_late()).collect()
    }

    /// The rate that was held, as answered calls per second.
    #[must_use]
    pub fn achieved_per_s(&self) -> Option<f64> {
        let achieved = self
            .best_rounds()
            .iter()
            .map(|it| it.achieved_per_s)
            .collect::<Vec<_>>();
        median(&achieved)
    }
}

/// The verdict of one round.
fn round_verdict(figures: &PointFigures, mean_ms_max: f64) -> RateVerdict {
    if figures.is_generator_late() {
        RateVerdict::Void
    } else if figures.void.is_none()
        && figures.failed.is_empty()
        && figures.mean_ms() <= mean_ms_max
    {
        RateVerdict::Held
    } else {
        RateVerdict::Missed
    }
}

/// Searches the rates of all servers, round by round in turn.
///
/// # Errors
/// If a server ends a connection, or refuses a call for another reason than its load.
pub fn search_rates(
    servers: &mut [LoadedServer<'_>],
    (start_rate, precision): (f64, f64),
    mean_ms_max: f64,
    options: &CompareOptions,
) -> Result<Vec<RateResult>, BenchError> {
    let mut options = options.clone();
    let mut searches = vec![RateSearch::new(start_rate, FACTOR, precision); servers.len()];
    let mut points: Vec<Vec<RatePoint>> = vec![Vec::new(); servers.len()];
    while searches.iter().any(|it| it.next_rate().is_some()) {
        let rates: Vec<Option<f64>> = searches.iter().map(RateSearch::next_rate).collect();
        let mut votes = vec![PointVote::new(options.rounds); servers.len()];
        let mut rounds: Vec<Vec<PointFigures>> = vec![Vec::new(); servers.len()];
        let is_open = |vote: &PointVote, at: usize| vote.verdict().is_none() && rates[at].is_some();
        let mut round = 0;
        while votes.iter().enumerate().any(|(at, vote)| is_open(vote, at)) {
            for turn in 0..servers.len() {
                let at = (turn + round) % servers.len();
                let Some(rate) = rates[at].filter(|_| is_open(&votes[at], at)) else {
                    continue;
                };
                let figures = measure_round(&mut servers[at], rate, round, &mut options)?;
                votes[at].record(round_verdict(&figures, mean_ms_max));
                rounds[at].push(figures);
            }
            round += 1;
        }
        for (at, rate) in rates.iter().enumerate() {
            if let (Some(rate_per_s), Some(verdict)) = (*rate, votes[at].verdict()) {
                searches[at].record(rate_per_s, verdict);
                print_verdict(&servers[at].target().name, rate_per_s, verdict);
                let rounds = std::mem::take(&mut rounds[at]);
                points[at].push(RatePoint {
                    rate_per_s,
                    verdict,
                    rounds,
                });
            }
        }
    }
    let results = searches
        .iter()
        .zip(points)
        .map(|(search, points)| RateResult {
            points,
            best: search.best(),
            limit: search.limit(),
        });
    Ok(results.collect())
}

fn print_verdict(name: &str, rate_per_s: f64, verdict: RateVerdict) {
    let verdict = match verdict {
        RateVerdict::Held => "held",
        RateVerdict::Missed => "not held",
        RateVerdict::Void => "void, the generator was late in too many rounds",
    };
    progress(&format!("{name}: {rate_per_s:.0} calls/s: {verdict}"));
}

/// Measures one round. A set that takes too long to make bounds the sets of the other servers, too.
fn measure_round(
    server: &mut LoadedServer<'_>,
    rate_per_s: f64,
    round: usize,
    options: &mut CompareOptions,
) -> Result<PointFigures, BenchError> {
    let figures = server.measure(rate_per_s, round, options)?;
    print_point(server.target(), round, &figures);
    if figures.failed.iter().any(|it| it.status != JUKEBOX) {
        server.check_answers(&figures)?;
    }
    if let Some(limit) = server.files_limit() {
        options.scale.files_max = options.scale.files_max.min(limit);
    }
    Ok(figures)
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
    check_servers(servers, options)?;
    let results = search_rates(servers, (start_rate, PRECISION), mean_ms_max, options)?;
    let targets: Vec<NfsTarget> = servers.iter().map(|it| it.target().clone()).collect();
    Ok(rates_report(&targets, &results, mean_ms_max, options))
}

fn rates_report(
    targets: &[NfsTarget],
    results: &[RateResult],
    mean_ms_max: f64,
    options: &CompareOptions,
) -> Report {
    let title = format!("NFS operations held at a mean latency of at most {mean_ms_max} ms");
    let mut report = Report::new("nfs-rate", &title, &targets[0].class, &COLUMNS);
    // A server without any held rate counts as 0.
    let rate = |of: &RateResult| of.achieved_per_s().unwrap_or(0.0);
    let last = results.last().map(rate).filter(|it| *it > 0.0);
    let ratio = |of: &RateResult| last.map(|last| rate(of) / last);
    for (target, of) in targets.iter().zip(results) {
        let name = format!("{} ({})", target.name, target.class);
        let name = match of.limit {
            SearchLimit::Server => name,
            SearchLimit::Generator | SearchLimit::Search => format!("{name}, at least"),
        };
        report.add_row(row(&name, &of.best_rounds(), ratio(of)));
    }
    for (target, of) in targets.iter().zip(results) {
        for cells in operation_rows(&target.name, &of.best_rounds()) {
            report.add_row(cells);
        }
    }
    for (target, of) in targets.iter().zip(results) {
        if let Some(text) = limit_note(of) {
            report.add_note(format!("{}: {text}", target.name));
        }
    }
    let all = || results.iter().flat_map(|it| &it.points);
    add_notes(&mut report, options, all().flat_map(|it| &it.rounds));
    report.add_note(
        "each rate is decided by the majority of its rounds; rounds with a late generator are repeated, as often as there are rounds",
    );
    report.add_note("points of the chart are medians of the valid rounds of each rate");
    add_rate_plot(&mut report, targets, results);
    report.raw = json!({
        "servers": targets.iter().map(|it| &it.name).collect::<Vec<_>>(),
        "classes": targets.iter().map(|it| &it.class).collect::<Vec<_>>(),
        "searches_by_server": results.iter().map(search_json).collect::<Vec<_>>(),
    });
    let is_compared = targets.len() > 1 && options.mix == OperationMix::SFS97;
    if let Some(first) = results.first().filter(|_| is_compared) {
        let of_class = usize::from(targets[0].class != MEMORY_CLASS);
        let name = format!("rate to the one of {}", targets[targets.len() - 1].name);
        // The ratio to a lower bound of the peer would be too high.
        let is_known = results
            .last()
            .is_some_and(|it| it.limit == SearchLimit::Server);
        let of_peer = ratio(first).filter(|_| is_known);
        let bar = Bar::ratio_at_least(name, RATIO_MIN[of_class], of_peer);
        add_bars(&mut report, &[bar]);
    }
    report
}

fn search_json(of: &RateResult) -> serde_json::Value {
    let point = |it: &RatePoint| {
        json!({
            "rate_per_s": it.rate_per_s,
            "verdict": format!("{:?}", it.verdict).to_lowercase(),
            "rounds": it.rounds,
        })
    };
    json!({
        "best_rate_per_s": of.best,
        "limit": format!("{:?}", of.limit).to_lowercase(),
        "points": of.points.iter().map(point).collect::<Vec<_>>(),
    })
}

/// The reason that a search ended, unless it is the server.
fn limit_note(of: &RateResult) -> Option<String> {
    let void = of
        .points
        .iter()
        .filter(|it| it.verdict == RateVerdict::Void);
    let void = void.min_by(|a, b| a.rate_per_s.total_cmp(&b.rate_per_s));
    match (of.limit, of.best, void) {
        (SearchLimit::Generator, Some(best), Some(void)) => Some(format!(
            "at least {best:.0} calls/s: at {:.0} calls/s the generator itself was late (p99 {:.0} µs), so that the server's limit is \
             not known",
            void.rate_per_s,
            lateness_us(void)
        )),
        (SearchLimit::Generator, None, Some(void)) => Some(format!(
            "no figure: the generator was late at all rates down to {:.0} calls/s (p99 {:.0} µs); end other programs of this machine",
            void.rate_per_s,
            lateness_us(void)
        )),
        (SearchLimit::Search, Some(best), _) => {
            Some(format!("at least {best:.0} calls/s: the search ends here"))
        }
        (SearchLimit::Server, None, _) => Some("it holds no rate at this mean latency".to_owned()),
        _ => None,
    }
}

/// The median of the lateness of the generator in void rounds.
fn lateness_us(point: &RatePoint) -> f64 {
    let void = point.rounds.iter().filter(|it| it.is_generator_late());
    let late: Vec<f64> = void.map(|it| it.lateness.p99_ns as f64 / 1e3).collect();
    median(&late).unwrap_or(0.0)
}

fn add_rate_plot(report: &mut Report, targets: &[NfsTarget], results: &[RateResult]) {
    let series = targets.iter().zip(results).map(|(target, of)| PlotSeries {
        name: target.name.clone(),
        points: of
            .points
            .iter()
            .filter_map(|it| middle_point(&it.rounds))
            .collect(),
    });
    let title = "Mean latency over NFS operations";
    report.plots.push(latency_plot(title, series.collect()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::compare::tests::{options, point, target};
    use crate::nfs::point::{FailedCalls, VoidReason};
    use crate::report::ReportCell;

    fn result(rates: &[(f64, RateVerdict)], best: Option<f64>, limit: SearchLimit) -> RateResult {
        let of = |(rate, verdict): &(f64, RateVerdict)| RatePoint {
            rate_per_s: *rate,
            verdict: *verdict,
            rounds: vec![match verdict {
                RateVerdict::Void => point(*rate, 1.0, Some(VoidReason::GeneratorLate(1300.0))),
                _ => point(*rate, 5.0, None),
            }],
        };
        RateResult {
            points: rates.iter().map(of).collect(),
            best,
            limit,
        }
    }

    fn report(results: &[RateResult; 2]) -> Report {
        let targets = [target("ours"), target("peer")];
        rates_report(&targets, results, 6.0, &options())
    }

    #[test]
    fn held_rates_are_compared_with_the_last_server() {
        let ours = [(300.0, RateVerdict::Held), (600.0, RateVerdict::Missed)];
        let peer = [(100.0, RateVerdict::Held)];
        let report = report(&[
            result(&ours, Some(300.0), SearchLimit::Server),
            result(&peer, Some(100.0), SearchLimit::Server),
        ]);
        let ratio = report.cell("ours (process)", "to the last");
        assert_eq!(ratio, Some(&ReportCell::Number(3.0)));
        assert!(
            report.text().contains("bar: met: rate"),
            "{}",
            report.text()
        );
    }

    #[test]
    fn late_generator_is_named_beside_a_lower_bound() {
        let ours = [(300.0, RateVerdict::Held), (600.0, RateVerdict::Void)];
        let peer = [(100.0, RateVerdict::Held)];
        let report = report(&[
            result(&ours, Some(300.0), SearchLimit::Generator),
            result(&peer, Some(100.0), SearchLimit::Server),
        ]);
        let ratio = report.cell("ours (process), at least", "to the last");
        assert_eq!(ratio, Some(&ReportCell::Number(3.0)));
        let text = report.text();
        assert!(text.contains("ours: at least 300 calls/s"), "{text}");
        assert!(text.contains("at 600 calls/s the generator"), "{text}");
    }

    #[test]
    fn server_that_holds_no_rate_has_a_ratio_of_zero() {
        let ours = [(10.0, RateVerdict::Missed)];
        let peer = [(100.0, RateVerdict::Held)];
        let report = report(&[
            result(&ours, None, SearchLimit::Server),
            result(&peer, Some(100.0), SearchLimit::Server),
        ]);
        let ratio = report.cell("ours (process)", "to the last");
        assert_eq!(ratio, Some(&ReportCell::Number(0.0)));
        let text = report.text();
        assert!(text.contains("ours: it holds no rate"), "{text}");
        assert!(text.contains("bar: missed"), "{text}");
    }

    #[test]
    fn round_holds_a_rate_only_if_all_is_right() {
        let verdict = |figures: &PointFigures| round_verdict(figures, 6.0);
        assert_eq!(verdict(&point(100.0, 6.0, None)), RateVerdict::Held);
        assert_eq!(verdict(&point(100.0, 6.1, None)), RateVerdict::Missed);
        let behind = point(100.0, 1.0, Some(VoidReason::Behind(0.98)));
        assert_eq!(verdict(&behind), RateVerdict::Missed);
        let late = point(100.0, 9.0, Some(VoidReason::GeneratorLate(1300.0)));
        assert_eq!(verdict(&late), RateVerdict::Void);
        let mut refused = point(100.0, 1.0, None);
        refused.failed.push(FailedCalls {
            operation: "READ".into(),
            status: JUKEBOX.into(),
            count: 1,
        });
        assert_eq!(verdict(&refused), RateVerdict::Missed);
    }
}
