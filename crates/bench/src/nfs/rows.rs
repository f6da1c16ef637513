//! Rows, notes and charts that the reports of comparisons share.

use super::compare::CompareOptions;
use super::point::PointFigures;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::stats::median;

pub(super) const COLUMNS: [(&str, &str); 16] = [
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
    ("generator late", "p99, µs"),
    ("generator CPU", "% of a core"),
    ("generator polls", "% of a core"),
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
pub(super) fn row(server: &str, rounds: &[&PointFigures], ratio: Option<f64>) -> Vec<ReportCell> {
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
        middle(|it| it.lateness.p99_ns as f64 / 1e3).into(),
        middle(|it| it.generator_cpu_percent).into(),
        middle(|it| it.generator_polling_percent).into(),
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
pub(super) fn operation_rows(server: &str, rounds: &[&PointFigures]) -> Vec<Vec<ReportCell>> {
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

/// The notes of all comparisons.
pub(super) fn add_notes<'p>(
    report: &mut Report,
    options: &CompareOptions,
    points: impl Iterator<Item = &'p PointFigures> + Clone,
) {
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
    let files = points.clone().map(|it| it.files);
    if let (Some(least), Some(most)) = (files.clone().min(), files.max()) {
        report.add_note(format!("file sets of {least} to {most} files"));
    }
    let mut scheduling: Vec<_> = points.map(|it| it.generator_scheduling.as_str()).collect();
    scheduling.sort_unstable();
    scheduling.dedup();
    report.add_note(format!(
        "thread of the generator, alike for all servers: {}, timer slack 1 ns; it polls through the last part before a due call; \
         its processor time is listed with the polls apart",
        scheduling.join("; ")
    ));
    report.add_note(
        "a round is void below 99 % of the offered rate, or if the generator itself was more than 1 ms late at its p99",
    );
}

/// The figure of source measurements: latency over throughput.
pub(super) fn latency_plot(title: &str, series: Vec<PlotSeries>) -> Plot {
    Plot {
        title: title.to_owned(),
        kind: PlotKind::Lines,
        x: PlotAxis::linear("operations per second, achieved"),
        y: PlotAxis::log("mean latency in ms"),
        categories: Vec::new(),
        series,
    }
}

/// The place of a point in the chart: medians of its valid rounds.
pub(super) fn middle_point(rounds: &[PointFigures]) -> Option<(f64, f64)> {
    let valid = || rounds.iter().filter(|it| it.void.is_none());
    let rate = median(&valid().map(|it| it.achieved_per_s).collect::<Vec<_>>())?;
    let mean = median(&valid().map(PointFigures::mean_ms).collect::<Vec<_>>())?;
    Some((rate, mean))
}
