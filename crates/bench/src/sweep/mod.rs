//! One space under several cases of load, in one alternating run: the common part of the ramp and
//! the table.
//!
//! The used part of the space is written once before, unless `fill` is off. Then, round by round,
//! every case has its time; the first case moves on by one. One round before the first does not
//! count. All cases of a round start with the same seed.
//!
//! **A place** is one request in flight, followed by the next as soon as it has completed. Places
//! are spread over few threads with a channel each, because more threads than cores would measure
//! the scheduler. The places of a thread share its core. If a space answers within `submit`, as
//! over `map`, a request's latency includes the requests that its thread submitted after it. It
//! then grows with the number of places although no request waits in the space.
//!
//! CPU time is measured for the submitting threads and, separately, for `brick_cpu`. The machine's
//! CPU time includes all its processes.

mod machine;

pub(crate) use machine::CpuTicks;

use crate::error::BenchError;
use crate::load::{RequestMix, RunLimit, fill, open_loops, run_workers};
use crate::report::Report;
use crate::session::check_rounds;
use crate::stats::{LatencySummary, median};
use pagemesh_base::space::Space;
use pagemesh_base::units::PAGE_BYTES;
use serde::Serialize;
use std::time::Duration;

/// The shortest time of a case: a shorter one would measure the start of threads.
pub const RUNTIME_MIN: Duration = Duration::from_millis(10);
/// The longest time of a case.
pub const RUNTIME_MAX: Duration = Duration::from_secs(3600);
/// Most cases of one sweep: a chart cannot show more.
pub const CASES_MAX: usize = 64;

/// Options for any cases.
#[derive(Clone, Debug)]
pub struct SweepOptions {
    /// Alternating rounds, [`crate::session::ROUNDS_MIN`] to [`crate::session::ROUNDS_MAX`].
    pub rounds: usize,
    /// Time of one case in one round, [`RUNTIME_MIN`] to [`RUNTIME_MAX`].
    pub runtime: Duration,
    /// Threads that places are spread over; a case with fewer places uses as
    /// many as it has places.
    pub threads: usize,
    /// Length of the used part of the space, from its start, rounded down to whole pages; `None`:
    /// all of it.
    pub span_bytes: Option<u64>,
    /// Whether to write the used part once before. Without it, unwritten parts are read from holes.
    ///
    /// **Data loss:** the fill overwrites the content of the used part.
    pub fill: bool,
    /// Whether writes complete only when they are durable.
    pub durable: bool,
    /// The pools' durability class.
    pub class: String,
    /// A description of the space, such as `mirror over map`.
    pub space: String,
}

impl Default for SweepOptions {
    fn default() -> SweepOptions {
        SweepOptions {
            rounds: 5,
            runtime: Duration::from_secs(1),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            span_bytes: Some(1 << 30),
            fill: true,
            durable: false,
            class: "process".to_owned(),
            space: "volume".to_owned(),
        }
    }
}

/// One kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SweepCase {
    pub block_bytes: u32,
    pub read_percent: u8,
    pub places: usize,
}

/// The result of a case in one round.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct SweepSample {
    /// Operations per second.
    pub rate: f64,
    /// Bytes per second.
    pub bytes_rate: f64,
    pub reads: LatencySummary,
    pub writes: LatencySummary,
    pub all: LatencySummary,
    /// CPU time of the submitting threads.
    pub cpu_ns_per_operation: f64,
    pub brick_cpu_ns_per_operation: f64,
    /// Share of all cores, user and system; `None` if the kernel does not report it.
    pub machine_percent: Option<f64>,
    /// System alone.
    pub machine_system_percent: Option<f64>,
}

/// The samples of one case, by round.
pub(crate) struct CaseSamples(pub Vec<SweepSample>);

impl CaseSamples {
    /// The median of one figure over the rounds.
    pub(crate) fn median(&self, of: impl Fn(&SweepSample) -> f64) -> Option<f64> {
        median(&self.0.iter().map(of).collect::<Vec<f64>>())
    }

    /// The median of a figure that some rounds lack.
    pub(crate) fn median_of_known(&self, of: impl Fn(&SweepSample) -> Option<f64>) -> Option<f64> {
        median(&self.0.iter().filter_map(of).collect::<Vec<f64>>())
    }

    /// The median of a time in ns, as µs.
    pub(crate) fn median_us(&self, of: impl Fn(&SweepSample) -> f64) -> Option<f64> {
        self.median(of).map(|ns| ns / 1000.0)
    }
}

/// Runs the cases; see the module. Returns one entry per case.
pub(crate) fn sweep(
    space: &dyn Space,
    cases: &[SweepCase],
    brick_cpu: &mut dyn FnMut() -> Duration,
    options: &SweepOptions,
) -> Result<Vec<CaseSamples>, BenchError> {
    let span = check_span(space, cases, options)?;
    if options.fill {
        fill(space, span)?;
    }
    let mut found: Vec<CaseSamples> = cases.iter().map(|_| CaseSamples(Vec::new())).collect();
    for round in 0..=options.rounds {
        for turn in 0..cases.len() {
            let at = (turn + round) % cases.len();
            let mix = RequestMix {
                block_bytes: cases[at].block_bytes,
                read_percent: cases[at].read_percent,
                durable: options.durable,
                seed: round as u64 + 1,
                span_bytes: Some(span),
                ..RequestMix::default()
            };
            let sample = measure(space, &mix, cases[at].places, brick_cpu, options)?;
            if round > 0 {
                found[at].0.push(sample);
            }
        }
    }
    Ok(found)
}

/// The length of the used part.
fn check_span(
    space: &dyn Space,
    cases: &[SweepCase],
    options: &SweepOptions,
) -> Result<u64, BenchError> {
    check_rounds(options.rounds)?;
    let refuse = |text: String| Err(BenchError::Option(text));
    if !(1..=CASES_MAX).contains(&cases.len()) {
        return refuse(format!("{} steps are not 1 to {CASES_MAX}", cases.len()));
    }
    if !(RUNTIME_MIN..=RUNTIME_MAX).contains(&options.runtime) {
        return refuse(format!(
            "{:?} per step and round is not {RUNTIME_MIN:?} to {RUNTIME_MAX:?}",
            options.runtime
        ));
    }
    let size = space.size_bytes();
    let page = PAGE_BYTES as u64;
    let span = options.span_bytes.unwrap_or(size).min(size) / page * page;
    let longest = cases.iter().map(|case| u64::from(case.block_bytes)).max();
    match longest {
        Some(bytes) if bytes <= span => Ok(span),
        _ => refuse(format!(
            "the {span} bytes to be used do not hold the largest block; use a larger volume or part"
        )),
    }
}

fn measure(
    space: &dyn Space,
    mix: &RequestMix,
    places: usize,
    brick_cpu: &mut dyn FnMut() -> Duration,
    options: &SweepOptions,
) -> Result<SweepSample, BenchError> {
    let workers = open_loops(space, mix, places, options.threads)?;
    let limit = RunLimit::Time(options.runtime);
    let workers = workers.into_iter().map(|worker| (worker, limit)).collect();
    let (brick, machine) = (brick_cpu(), CpuTicks::now());
    let outcome = run_workers(workers)?;
    let machine = machine.zip(CpuTicks::now());
    let brick = brick_cpu().saturating_sub(brick);
    let share = machine.and_then(|(before, after)| after.share_since(&before));
    Ok(SweepSample {
        rate: outcome.rate(),
        bytes_rate: outcome.bytes as f64 / outcome.wall.as_secs_f64(),
        reads: outcome.reads.summary(),
        writes: outcome.writes.summary(),
        all: outcome.all_latencies().summary(),
        cpu_ns_per_operation: outcome.cpu_ns_per_operation(),
        brick_cpu_ns_per_operation: brick.as_nanos() as f64 / outcome.operations() as f64,
        machine_percent: share.map(|share| share.busy_percent),
        machine_system_percent: share.map(|share| share.system_percent),
    })
}

/// Adds notes on the method.
pub(crate) fn add_notes(report: &mut Report, options: &SweepOptions) {
    let filled = match options.fill {
        true => "a part of the space that was written once before",
        false => "a part of the space that was not written before: holes may have been read",
    };
    report.add_note(format!(
        "medians of {} alternating rounds of {} ms per step after one that does not count, over {}",
        options.rounds,
        options.runtime.as_millis(),
        filled
    ));
    report.add_note(format!(
        "requests in flight are places in the queues of at most {} threads; where the space answers \
         at once, latency includes what the same thread submitted after the request",
        options.threads
    ));
    report
        .add_note("CPU is of the submitting threads; brick CPU is of the bricks, divided likewise");
}
