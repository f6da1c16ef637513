//! Time to open pools after their brick was killed, compared by size: recovery must not depend on
//! the size of the pool.
//!
//! The caller supplies the recoveries: a pool of the given size, load, a kill, and the time from
//! the start of opening until it serves. In each round every size has its recovery; the first size
//! moves on by one. Every recovery counts, the first one too, because in operation each one is a
//! first.
//!
//! This module opens and kills no pool itself.

use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde::Serialize;
use serde_json::json;
use std::error::Error;
use std::time::Duration;

/// Most sizes of one comparison: a chart cannot show more.
pub const SIZES_MAX: usize = 16;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct RecoveryOptions {
    /// Recoveries per size, [`crate::session::ROUNDS_MIN`] to [`crate::session::ROUNDS_MAX`].
    pub rounds: usize,
    /// Pool sizes in bytes; ratios are to the first.
    pub sizes_bytes: Vec<u64>,
    /// The pools' durability class.
    pub class: String,
    /// The load on the pools, such as `kill -9 under 4 KiB random writes`.
    pub load: String,
}

impl Default for RecoveryOptions {
    /// 8 GiB and eight times as much.
    fn default() -> RecoveryOptions {
        RecoveryOptions {
            rounds: 5,
            sizes_bytes: vec![8 << 30, 64 << 30],
            class: "process".to_owned(),
            load: "kill -9 under 4 KiB random writes".to_owned(),
        }
    }
}

/// One measured recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RecoverySample {
    /// From the start of opening until the pool could serve.
    #[serde(rename = "wall_ns", serialize_with = "as_ns")]
    pub wall: Duration,
    /// Records that were replayed.
    pub records: u64,
    /// Bytes in the pool when its brick was killed.
    pub held_bytes: u64,
    /// Memory of the brick before it was killed, beyond that of a brick with an empty pool and the budget of its cache: tables,
    /// journals and buffers of the connection.
    pub table_bytes: u64,
}

fn as_ns<S: serde::Serializer>(wall: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX))
}

/// Makes one measured recovery at a time.
pub trait RecoverPool {
    /// Loads a pool of this size, kills its server, opens the pool again and returns the time.
    /// `round` counts from 1. A pool may be used again in the next round.
    ///
    /// # Errors
    /// Any error ends the run.
    fn recover(
        &mut self,
        size_bytes: u64,
        round: usize,
    ) -> Result<RecoverySample, Box<dyn Error + Send + Sync>>;
}

impl<F> RecoverPool for F
where
    F: FnMut(u64, usize) -> Result<RecoverySample, Box<dyn Error + Send + Sync>>,
{
    fn recover(
        &mut self,
        size_bytes: u64,
        round: usize,
    ) -> Result<RecoverySample, Box<dyn Error + Send + Sync>> {
        self(size_bytes, round)
    }
}

/// Runs the benchmark; see the module. The report has a row per size, times in ms; the ratio is the
/// median of the rounds' own ratios to the first size.
///
/// # Errors
/// If an option is invalid, or a recovery fails.
pub fn run_recovery(
    recover: &mut dyn RecoverPool,
    options: &RecoveryOptions,
) -> Result<Report, BenchError> {
    check(options)?;
    let sizes = &options.sizes_bytes;
    let mut found: Vec<Vec<RecoverySample>> = vec![Vec::new(); sizes.len()];
    for round in 0..options.rounds {
        for turn in 0..sizes.len() {
            let at = (turn + round) % sizes.len();
            let recovered = recover.recover(sizes[at], round + 1);
            found[at].push(recovered.map_err(|cause| BenchError::Recovery {
                size_bytes: sizes[at],
                round: round + 1,
                cause,
            })?);
        }
    }
    Ok(report(&found, options))
}

fn check(options: &RecoveryOptions) -> Result<(), BenchError> {
    check_rounds(options.rounds)?;
    let sizes = &options.sizes_bytes;
    if !(1..=SIZES_MAX).contains(&sizes.len()) {
        let text = format!("{} pool sizes are not 1 to {SIZES_MAX}", sizes.len());
        return Err(BenchError::Option(text));
    }
    if sizes.contains(&0) {
        let text = "a pool of 0 bytes cannot be opened; use a larger one";
        return Err(BenchError::Option(text.to_owned()));
    }
    Ok(())
}

fn report(found: &[Vec<RecoverySample>], options: &RecoveryOptions) -> Report {
    let title = format!("opening a pool again, {}", options.load);
    let columns = [
        ("pool", ""),
        ("median", "ms"),
        ("min", "ms"),
        ("max", "ms"),
        ("to the first", "×"),
        ("records replayed", "median"),
        ("held", "MiB, median"),
        ("memory for tables", "% of held, max"),
    ];
    let mut report = Report::new("recovery", &title, &options.class, &columns);
    let first = walls_ms(&found[0]);
    for (size, rounds) in options.sizes_bytes.iter().zip(found) {
        report.add_row(row(*size, rounds, &first));
    }
    report.add_note(format!(
        "{} recoveries per size, alternating; the ratio is the median of the rounds' own ratios",
        options.rounds
    ));
    warn_of_empty_recovery(&mut report, found);
    report.plots.push(plot(found, options));
    report.raw = json!({
        "sizes_bytes": options.sizes_bytes,
        "recoveries_by_size_round": found,
    });
    report
}

fn walls_ms(rounds: &[RecoverySample]) -> Vec<f64> {
    rounds.iter().map(|r| r.wall.as_secs_f64() * 1e3).collect()
}

fn row(size_bytes: u64, rounds: &[RecoverySample], first_ms: &[f64]) -> Vec<ReportCell> {
    let walls = walls_ms(rounds);
    let share = |r: &RecoverySample| r.table_bytes as f64 * 100.0 / r.held_bytes.max(1) as f64;
    let shares = rounds.iter().map(share);
    let middle =
        |of: fn(&RecoverySample) -> f64| median(&rounds.iter().map(of).collect::<Vec<_>>());
    vec![
        size_name(size_bytes).into(),
        median(&walls).into(),
        walls.iter().copied().reduce(f64::min).into(),
        walls.iter().copied().reduce(f64::max).into(),
        median_ratio(&walls, first_ms).into(),
        middle(|r| r.records as f64).into(),
        middle(|r| r.held_bytes as f64 / 1_048_576.0).into(),
        shares.reduce(f64::max).into(),
    ]
}

/// 8589934592 as 8 GiB.
fn size_name(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = units
        .iter()
        .find(|(shift, _)| bytes.trailing_zeros() >= *shift);
    match whole {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

/// Notes that a recovery without records to replay proves less than it seems to.
fn warn_of_empty_recovery(report: &mut Report, found: &[Vec<RecoverySample>]) {
    let all: Vec<&RecoverySample> = found.iter().flatten().collect();
    let idle = all.iter().filter(|r| r.records == 0).count();
    if idle > 0 {
        report.add_note(format!(
            "beware: {idle} of {} recoveries had nothing to replay",
            all.len()
        ));
    }
}

fn plot(found: &[Vec<RecoverySample>], options: &RecoveryOptions) -> Plot {
    let bars = |name: &str, of: fn(&[f64]) -> Option<f64>| PlotSeries {
        name: name.to_owned(),
        points: (0u32..)
            .zip(found)
            .filter_map(|(at, rounds)| Some((f64::from(at), of(&walls_ms(rounds))?)))
            .collect(),
    };
    Plot {
        title: "Opening a pool after a kill".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear("pool"),
        y: PlotAxis::linear("ms"),
        categories: options
            .sizes_bytes
            .iter()
            .map(|size| size_name(*size))
            .collect(),
        series: vec![
            bars("median", median),
            bars("max", |walls| walls.iter().copied().reduce(f64::max)),
        ],
    }
}
