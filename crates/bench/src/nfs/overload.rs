//! A server below a load that it cannot serve: whether it goes on, keeps its memory, and is as fast as before afterwards.

use super::bar::{Bar, BarSide, add_bars};
use super::compare::{CompareOptions, LoadedServer};
use super::memory::{MEMORY_INTERVAL, with_memory};
use super::point::PointFigures;
use super::progress;
use super::rates::{MEAN_MS_MAX, search_rates};
use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::stats::median;
use serde_json::json;
use std::time::Duration;

/// The overload, as a multiple of the saturation.
pub const OVERLOAD_FACTOR: f64 = 3.0;
/// The load before and after, as a part of the saturation.
const LIGHT_FACTOR: f64 = 0.3;
/// Time from the last answer below the overload to the load that must be answered as before.
const RECOVERY: Duration = Duration::from_secs(1);
/// Rounds and precision of the search for the saturation: a rough figure is enough for its triple.
const SEARCH_ROUNDS: usize = 3;
const SEARCH_PRECISION: f64 = 0.25;
/// The measured time of a round of the search, and of the light load.
const SHORT_RUN: Duration = Duration::from_secs(2);
const SHORT_WARMUP: Duration = Duration::from_millis(500);
/// The most that the mean of the light load may be afterwards, as a multiple of that before.
const RECOVERED_RATIO_MAX: f64 = 2.0;
/// The most that memory may grow from the second quarter of the overload to the last, in MiB.
const GROWTH_MIB_MAX: f64 = 16.0;

/// Searches the saturation of a server, loads it with three times as much for `length`, and with a light load before and after.
///
/// # Errors
/// If the server holds no rate, or ends a connection.
pub fn run_overload(
    server: &mut LoadedServer<'_>,
    start_rate: f64,
    length: Duration,
    options: &CompareOptions,
) -> Result<Report, BenchError> {
    let options = CompareOptions {
        runtime: options.runtime.min(SHORT_RUN),
        warmup: options.warmup.min(SHORT_WARMUP),
        ..options.clone()
    };
    let saturation = find_saturation(server, start_rate, &options)?;
    let light = LIGHT_FACTOR * saturation;
    server.grow(options.scale.files_at(OVERLOAD_FACTOR * saturation))?;
    let before = server.measure(light, 0, &options)?;
    let overload = CompareOptions {
        runtime: length,
        warmup: Duration::ZERO,
        ..options.clone()
    };
    let pids = server.target().pids.clone();
    progress(&format!(
        "{:.0} calls/s for {} s",
        OVERLOAD_FACTOR * saturation,
        length.as_secs()
    ));
    let (during, memory) = with_memory(&pids, || {
        server.measure(OVERLOAD_FACTOR * saturation, 0, &overload)
    });
    let during = during?;
    let recovered = CompareOptions {
        warmup: RECOVERY,
        ..options.clone()
    };
    let after = server.measure(light, 0, &recovered)?;
    let name = &server.target().name;
    let title =
        format!("{name} below {OVERLOAD_FACTOR} × its saturation of {saturation:.0} calls/s");
    let phases = [("before", before), ("overload", during), ("after", after)];
    let class = &server.target().class;
    Ok(report((&title, class), &phases, &memory, &options))
}

/// A rough search for the highest rate that the server holds.
fn find_saturation(
    server: &mut LoadedServer<'_>,
    start_rate: f64,
    options: &CompareOptions,
) -> Result<f64, BenchError> {
    let options = CompareOptions {
        rounds: SEARCH_ROUNDS,
        ..options.clone()
    };
    let servers = std::slice::from_mut(server);
    let search = (start_rate, SEARCH_PRECISION);
    let results = search_rates(servers, search, MEAN_MS_MAX, &options)?;
    let found = results.first().and_then(|it| it.best);
    found.ok_or_else(|| {
        let text = format!("the server holds no rate at a mean latency of {MEAN_MS_MAX} ms");
        BenchError::Option(text)
    })
}

/// Growth of the median memory from the second quarter of the samples to the last one, in MiB.
fn growth_mib(memory: &[u64]) -> Option<f64> {
    let quarter = memory.len() / 4;
    let median_of = |from: usize, until: usize| {
        let part = memory.get(from..until).unwrap_or_default();
        median(&part.iter().map(|bytes| *bytes as f64).collect::<Vec<_>>())
    };
    let early = median_of(quarter, 2 * quarter)?;
    let late = median_of(3 * quarter, memory.len())?;
    Some((late - early) / f64::from(1 << 20))
}

fn report(
    (title, class): (&str, &str),
    phases: &[(&str, PointFigures); 3],
    memory: &[u64],
    options: &CompareOptions,
) -> Report {
    let columns = [
        ("phase", ""),
        ("offered", "1/s"),
        ("achieved", "1/s"),
        ("mean", "ms"),
        ("p99", "ms"),
        ("p99.9", "ms"),
        ("timeouts", ""),
        ("failed", ""),
        ("void", ""),
    ];
    let mut report = Report::new("nfs-overload", title, class, &columns);
    for (phase, figures) in phases {
        let ms = |ns: u64| ReportCell::from(ns as f64 / 1e6);
        let void = figures.void.map_or("no".into(), |it| it.to_string());
        report.add_row(vec![
            (*phase).into(),
            figures.offered_per_s.into(),
            figures.achieved_per_s.into(),
            figures.mean_ms().into(),
            ms(figures.latencies.p99_ns),
            ms(figures.latencies.p999_ns),
            figures.timeouts.into(),
            figures.failed_count().into(),
            void.as_str().into(),
        ]);
    }
    let mib = |bytes: Option<&u64>| *bytes.unwrap_or(&0) as f64 / f64::from(1 << 20);
    report.add_note(format!(
        "{} connections; memory of server and bricks below the overload, without mapped files: first {:.1} MiB, middle {:.1} MiB, \
         last {:.1} MiB, most {:.1} MiB",
        options.connections,
        mib(memory.first()),
        mib(memory.get(memory.len() / 2)),
        mib(memory.last()),
        mib(memory.iter().max())
    ));
    report.add_note(
        "one run; the overload is void by its purpose; the measurement after it begins 1 s after the last answer or time-out",
    );
    report.plots.push(memory_plot(memory));
    let figures = phases
        .iter()
        .map(|(phase, figures)| json!({"phase": phase, "figures": figures}));
    report.raw = json!({
        "phases": figures.collect::<Vec<_>>(),
        "memory_interval_ms": MEMORY_INTERVAL.as_millis() as u64,
        "memory_bytes": memory,
    });
    add_bars(&mut report, &bars(phases, memory));
    report
}

fn bars(phases: &[(&str, PointFigures); 3], memory: &[u64]) -> [Bar; 4] {
    let [(_, before), (_, during), (_, after)] = phases;
    let is_late = before.is_generator_late() || after.is_generator_late();
    let recovered = (!is_late).then(|| after.mean_ms() / before.mean_ms());
    let answered = match after.scheduled {
        0 => None,
        all => Some(after.answered as f64 * 100.0 / all as f64),
    };
    [
        Bar::new(
            "answers below the overload",
            "calls/s",
            (BarSide::AtLeast, 1.0),
            Some(during.achieved_per_s),
        ),
        Bar::new(
            "growth of memory from the second quarter to the last",
            "MiB",
            (BarSide::AtMost, GROWTH_MIB_MAX),
            growth_mib(memory),
        ),
        Bar::new(
            "answers from 1 s after the overload on",
            "%",
            (BarSide::AtLeast, 99.0),
            answered,
        ),
        Bar::ratio_at_most(
            "mean latency from 1 s after the overload on, relative to the one before",
            RECOVERED_RATIO_MAX,
            recovered,
        ),
    ]
}

fn memory_plot(memory: &[u64]) -> Plot {
    let seconds = |at: usize| at as f64 * MEMORY_INTERVAL.as_secs_f64();
    let points = memory.iter().enumerate();
    let points = points.map(|(at, bytes)| (seconds(at), *bytes as f64 / f64::from(1 << 20)));
    Plot {
        title: "Memory of server and bricks below three times the saturation".to_owned(),
        kind: PlotKind::Lines,
        x: PlotAxis::linear("seconds"),
        y: PlotAxis::linear("MiB without mapped files"),
        categories: Vec::new(),
        series: vec![PlotSeries {
            name: "server and bricks".to_owned(),
            points: points.collect(),
        }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::compare::tests::{options, point};
    use crate::nfs::point::VoidReason;

    const MIB: u64 = 1 << 20;

    #[test]
    fn growth_compares_the_last_quarter_with_the_second() {
        let flat: Vec<u64> = (0..100).map(|at| 50 * MIB + at % 3).collect();
        assert!(growth_mib(&flat).expect("samples") < 0.1);
        let steady: Vec<u64> = (0..100).map(|at| at * MIB).collect();
        assert_eq!(growth_mib(&steady), Some(50.0));
        // The first seconds have the memory of new connections.
        let early: Vec<u64> = (0..100).map(|at| at.min(20) * MIB).collect();
        assert_eq!(growth_mib(&early), Some(0.0));
        assert_eq!(growth_mib(&[]), None);
    }

    #[test]
    fn report_says_whether_the_server_recovered() {
        let mut after = point(100.0, 3.0, None);
        (after.scheduled, after.answered) = (200, 200);
        let behind = Some(VoidReason::Behind(0.4));
        let phases = [
            ("before", point(100.0, 1.0, None)),
            ("overload", point(1000.0, 900.0, behind)),
            ("after", after),
        ];
        let memory = vec![MIB; 40];
        let report = report(("title", "process"), &phases, &memory, &options());
        let text = report.text();
        assert!(
            text.contains("bar: missed: mean latency from 1 s"),
            "{text}"
        );
        assert!(text.contains("bar: met: growth of memory"), "{text}");
        assert!(text.contains("bar: met: answers from 1 s"), "{text}");
        assert_eq!(report.plots[0].series[0].points.len(), 40);
    }
}
