//! The cost of single calls: some kinds of them, one at a time, by one thread.
//!
//! Rounds alternate between the kinds, so that other load of the machine affects all equally.

use crate::error::BenchError;
use crate::load::thread_cpu;
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::median;
use serde_json::json;
use std::io;
use std::time::{Duration, Instant};

/// Calls between two clock readings.
const BATCH: u64 = 256;

/// A kind of call.
pub struct BenchCall<'c> {
    /// Its name.
    pub name: &'static str,
    /// Makes the call; the argument counts the calls.
    pub run: Box<dyn FnMut(u64) -> io::Result<()> + 'c>,
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct CallOptions {
    /// Alternating rounds.
    pub rounds: usize,
    /// Time of each kind in a round.
    pub runtime: Duration,
    /// The pools' durability class.
    pub class: String,
    /// The title of the report.
    pub title: String,
}

/// The samples of a kind, by round.
#[derive(Default)]
struct CallTimes {
    wall_ns: Vec<f64>,
    cpu_ns: Vec<f64>,
}

/// Runs the benchmark; see the module.
///
/// # Errors
/// If an option is invalid or a call fails.
pub fn run_calls(calls: &mut [BenchCall<'_>], options: &CallOptions) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let mut figures: Vec<CallTimes> = calls.iter().map(|_| CallTimes::default()).collect();
    // The first round does not count: it maps memory on first use.
    for round in 0..=options.rounds {
        for (call, figures) in calls.iter_mut().zip(&mut figures) {
            let (wall, cpu) = time_calls(call, options.runtime)?;
            if round > 0 {
                figures.wall_ns.push(wall);
                figures.cpu_ns.push(cpu);
            }
        }
    }
    let columns = [("call", ""), ("wall", "ns/call"), ("CPU", "ns/call")];
    let mut report = Report::new("native", &options.title, &options.class, &columns);
    for (call, figures) in calls.iter().zip(&figures) {
        let row: Vec<ReportCell> = vec![
            call.name.into(),
            median(&figures.wall_ns).into(),
            median(&figures.cpu_ns).into(),
        ];
        report.add_row(row);
    }
    report.add_note(format!(
        "medians of {} alternating rounds of {:?} each after one that does not count; one thread, \
         random places",
        options.rounds, options.runtime
    ));
    let raw = calls.iter().zip(&figures).map(|(call, figures)| {
        let figures = json!({"wall_ns": figures.wall_ns, "cpu_ns": figures.cpu_ns});
        (call.name.to_owned(), figures)
    });
    report.raw = serde_json::Value::Object(raw.collect());
    Ok(report)
}

/// Time and CPU time of one call, in nanoseconds.
fn time_calls(call: &mut BenchCall<'_>, runtime: Duration) -> Result<(f64, f64), BenchError> {
    let (cpu, began) = (thread_cpu(), Instant::now());
    let mut count = 0;
    while began.elapsed() < runtime {
        for _ in 0..BATCH {
            (call.run)(count).map_err(BenchError::system(call.name))?;
            count += 1;
        }
    }
    let (wall, cpu) = (began.elapsed(), thread_cpu().saturating_sub(cpu));
    let per_call = |time: Duration| time.as_nanos() as f64 / count as f64;
    Ok((per_call(wall), per_call(cpu)))
}
