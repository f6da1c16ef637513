//! Two exports of one server, of which one stalls, since its bricks are stopped: the latencies of the other one before, during
//! and after that.
//!
//! Both exports are loaded all the time. The load of the stalled one goes on with its schedule, so that its calls take what the
//! server gives them.

use super::bar::{Bar, add_bars};
use super::compare::{CompareOptions, LoadedServer, print_point};
use super::generator::LoadKind;
use super::point::PointFigures;
use super::progress;
use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;
use std::time::{Duration, Instant};

/// Calls per second to the export that stalls.
pub const STALLED_RATE_PER_S: f64 = 100.0;
/// The most that the p99 may be, as a multiple of that before.
const P99_RATIO_MAX: f64 = 1.5;
/// Limit of the time after which the stalled export answers again.
const RETURN_LIMIT: Duration = Duration::from_secs(60);
/// The measured time of one look whether it does.
const LOOK: Duration = Duration::from_millis(200);
/// The names of the phases.
const PHASES: [&str; 3] = ["before", "during", "after"];

/// Stops or continues the bricks of the export that stalls.
pub trait BrickStopper {
    /// Stops them: no call to them returns.
    ///
    /// # Errors
    /// Any error ends the run.
    fn stop(&mut self) -> Result<(), BenchError>;

    /// Lets them go on.
    ///
    /// # Errors
    /// Any error ends the run.
    fn go_on(&mut self) -> Result<(), BenchError>;
}

/// Measures an export while another one of its server is served, stalled, and served again.
///
/// # Errors
/// If an option is invalid, a server ends a connection, or the stalled export does not come back.
pub fn run_stalled(
    measured: &mut LoadedServer<'_>,
    stalled: &mut LoadedServer<'_>,
    stopper: &mut dyn BrickStopper,
    rate_per_s: f64,
    options: &CompareOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    measured.grow(options.scale.files_at(rate_per_s))?;
    stalled.grow(options.scale.files_at(STALLED_RATE_PER_S))?;
    let mut rounds: [Vec<PhaseFigures>; 3] = Default::default();
    for round in 0..options.rounds {
        for (phase, of_phase) in rounds.iter_mut().enumerate() {
            let mut of_run = options.clone();
            if phase == 1 {
                stopper.stop()?;
                // The begin of the stall counts.
                of_run.warmup = Duration::ZERO;
            }
            let figures = measure_both(measured, stalled, (rate_per_s, round), &of_run);
            if phase == 1 {
                stopper.go_on()?;
                await_return(stalled, options)?;
            }
            of_phase.push(figures?);
        }
    }
    Ok(report(measured, &rounds, options))
}

/// Figures of both exports in one phase of one round.
#[derive(Clone, Debug, Default)]
struct PhaseFigures {
    measured: PointFigures,
    stalled: PointFigures,
}

fn measure_both(
    measured: &mut LoadedServer<'_>,
    stalled: &mut LoadedServer<'_>,
    (rate_per_s, round): (f64, usize),
    options: &CompareOptions,
) -> Result<PhaseFigures, BenchError> {
    let beside = CompareOptions {
        // Calls without an answer end soon after the measurement.
        timeout: options.runtime.min(options.timeout),
        ..options.clone()
    };
    let load = stalled.load_beside(STALLED_RATE_PER_S, round, &beside);
    std::thread::scope(|scope| {
        let beside = scope.spawn(load);
        let figures = measured.measure_load(LoadKind::Scheduled, rate_per_s, round, options);
        let stalled = beside.join().unwrap_or_else(|_| {
            let text = "the thread that loads the stalled export has panicked".into();
            Err(BenchError::Option(text))
        });
        let figures = figures?;
        print_point(measured.target(), round, &figures);
        measured.check_answers(&figures)?;
        Ok(PhaseFigures {
            measured: figures,
            stalled: stalled?,
        })
    })
}

/// Waits until the stalled export answers all calls of a short load.
fn await_return(
    stalled: &mut LoadedServer<'_>,
    options: &CompareOptions,
) -> Result<(), BenchError> {
    let look = CompareOptions {
        runtime: LOOK,
        warmup: Duration::ZERO,
        ..options.clone()
    };
    let until = Instant::now() + RETURN_LIMIT;
    loop {
        let figures = stalled.measure_load(LoadKind::Beside, STALLED_RATE_PER_S, 0, &look)?;
        if figures.answered == figures.scheduled {
            return Ok(());
        }
        if Instant::now() > until {
            let text = format!(
                "{} does not answer {} s after its bricks went on",
                stalled.target().name,
                RETURN_LIMIT.as_secs()
            );
            return Err(BenchError::Option(text));
        }
        progress("the stalled export does not answer all calls yet");
    }
}

fn p99_ms(rounds: &[PhaseFigures]) -> Vec<f64> {
    let p99 = |it: &PhaseFigures| it.measured.latencies.p99_ns as f64 / 1e6;
    rounds.iter().map(p99).collect()
}

fn report(
    measured: &LoadedServer<'_>,
    rounds: &[Vec<PhaseFigures>; 3],
    options: &CompareOptions,
) -> Report {
    phases_report(&measured.target().class, rounds, options)
}

fn phases_report(class: &str, rounds: &[Vec<PhaseFigures>; 3], options: &CompareOptions) -> Report {
    let columns = [
        ("phase", ""),
        ("offered", "1/s"),
        ("achieved", "1/s"),
        ("mean", "ms"),
        ("p50", "ms"),
        ("p99", "ms"),
        ("p99 to before", "×"),
        ("p99.9", "ms"),
        ("void rounds", ""),
        ("answers of the other", "%"),
    ];
    let title = "an export while another one of the same server stalls";
    let mut report = Report::new("nfs-stalled", title, class, &columns);
    let ratio = |of: &[PhaseFigures]| median_ratio(&p99_ms(of), &p99_ms(&rounds[0]));
    for (phase, of) in PHASES.iter().zip(rounds) {
        report.add_row(row(phase, of, ratio(of)));
    }
    report.add_note(format!(
        "medians of {} rounds of {:.1} s after {:.1} s; the bricks of the other export are stopped by SIGSTOP during the second phase of \
         each round; it has a load of {STALLED_RATE_PER_S} calls/s all the time; schedule {:?}, mix {}",
        options.rounds,
        options.runtime.as_secs_f64(),
        options.warmup.as_secs_f64(),
        options.arrivals,
        options.mix.name
    ));
    let categories = PHASES.iter().map(|it| (*it).to_owned());
    let bars = (0u32..).zip(rounds);
    let points = bars.filter_map(|(at, of)| Some((f64::from(at), median(&p99_ms(of))?)));
    report.plots.push(Plot {
        title: "p99 of an export while another one stalls".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear(""),
        y: PlotAxis::linear("ms"),
        categories: categories.collect(),
        series: vec![PlotSeries {
            name: "p99".to_owned(),
            points: points.collect(),
        }],
    });
    let figures = |of: &PhaseFigures| json!({"measured": of.measured, "stalled": of.stalled});
    let raw = rounds
        .iter()
        .map(|of| of.iter().map(figures).collect::<Vec<_>>());
    report.raw = json!({ "phases": PHASES, "rounds_by_phase": raw.collect::<Vec<_>>() });
    let bar = |phase: usize| {
        let name = format!("p99 {} the stall, relative to before", PHASES[phase]);
        Bar::ratio_at_most(name, P99_RATIO_MAX, ratio(&rounds[phase]))
    };
    add_bars(&mut report, &[bar(1), bar(2)]);
    report
}

fn row(phase: &str, rounds: &[PhaseFigures], ratio: Option<f64>) -> Vec<ReportCell> {
    let middle = |of: fn(&PointFigures) -> f64| -> ReportCell {
        median(&rounds.iter().map(|it| of(&it.measured)).collect::<Vec<_>>()).into()
    };
    let void = rounds
        .iter()
        .filter(|it| it.measured.void.is_some())
        .count();
    let answers = rounds.iter().map(|it| {
        let all = it.stalled.scheduled.max(1) as f64;
        it.stalled.answered as f64 / all * 100.0
    });
    vec![
        phase.into(),
        middle(|it| it.offered_per_s),
        middle(|it| it.achieved_per_s),
        middle(PointFigures::mean_ms),
        middle(|it| it.latencies.p50_ns as f64 / 1e6),
        middle(|it| it.latencies.p99_ns as f64 / 1e6),
        ratio.into(),
        middle(|it| it.latencies.p999_ns as f64 / 1e6),
        (void as u64).into(),
        median(&answers.collect::<Vec<_>>()).into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::compare::tests::{options, point};

    #[test]
    fn latencies_are_compared_with_those_before() {
        let phase = |p99_ms: u64, answered| {
            let mut figures = PhaseFigures {
                measured: point(100.0, 1.0, None),
                stalled: point(100.0, 1.0, None),
            };
            figures.measured.latencies.p99_ns = p99_ms * 1_000_000;
            (figures.stalled.scheduled, figures.stalled.answered) = (100, answered);
            vec![figures; 5]
        };
        let rounds = [phase(2, 100), phase(4, 0), phase(2, 100)];
        let report = phases_report("process", &rounds, &options());
        let ratio = report.cell("during", "p99 to before");
        assert_eq!(ratio, Some(&ReportCell::Number(2.0)));
        let answers = report.cell("during", "answers of the other");
        assert_eq!(answers, Some(&ReportCell::Number(0.0)));
        let text = report.text();
        assert!(text.contains("bar: missed: p99 during"), "{text}");
        assert!(text.contains("bar: met: p99 after"), "{text}");
    }
}
