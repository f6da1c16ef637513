//! A server below a load that it cannot serve: whether it goes on, keeps its memory, and is as fast as before afterwards.

use super::compare::{CompareOptions, LoadedServer};
use super::point::PointFigures;
use crate::error::BenchError;
use crate::report::{Report, ReportCell};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The overload, as a multiple of the saturation.
pub const OVERLOAD_FACTOR: f64 = 3.0;
/// The load before and after, as a part of the saturation.
const LIGHT_FACTOR: f64 = 0.3;
/// From one look at the memory to the next.
const MEMORY_INTERVAL: Duration = Duration::from_millis(250);
/// Time from the last answer below the overload to the load that must be answered as before.
const RECOVERY: Duration = Duration::from_secs(1);

/// Resident anonymous memory of processes in bytes: `Anonymous` of /proc/PID/smaps_rollup, since pools are mapped, too.
fn memory_bytes(pids: &[u32]) -> u64 {
    let of = |pid: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find_map(|it| it.strip_prefix("Anonymous:"))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    pids.iter().filter_map(of).sum::<u64>() * 1024
}

/// Runs a measurement, and looks at the memory of processes meanwhile.
fn with_memory<T>(pids: &[u32], measure: impl FnOnce() -> T) -> (T, Vec<u64>) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let (mut samples, mut next) = (Vec::new(), Instant::now());
            while !is_over.load(Ordering::Relaxed) {
                if Instant::now() >= next {
                    samples.push(memory_bytes(pids));
                    next += MEMORY_INTERVAL;
                }
                std::thread::sleep(MEMORY_INTERVAL / 10);
            }
            samples
        });
        let result = measure();
        is_over.store(true, Ordering::Relaxed);
        (result, sampler.join().unwrap_or_default())
    })
}

/// Loads a server with three times its saturation for `length`, and with a light load before and after.
///
/// # Errors
/// If the server ends a connection.
pub fn run_overload(
    server: &mut LoadedServer<'_>,
    saturation: f64,
    length: Duration,
    options: &CompareOptions,
) -> Result<Report, BenchError> {
    let light = LIGHT_FACTOR * saturation;
    server.grow(options.scale.files_at(OVERLOAD_FACTOR * saturation))?;
    let before = server.measure(light, 0, options)?;
    let overload = CompareOptions {
        runtime: length,
        warmup: Duration::ZERO,
        ..options.clone()
    };
    let pids = server.target().pids.clone();
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
    Ok(report(
        (&title, &server.target().class),
        &[("before", before), ("overload", during), ("after", after)],
        &memory,
        options,
    ))
}

fn report(
    (title, class): (&str, &str),
    phases: &[(&str, PointFigures)],
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
        "{} connections; memory of the server below the overload, without mapped files: first {:.1} MiB, middle {:.1} MiB, last \
         {:.1} MiB, most {:.1} MiB",
        options.connections,
        mib(memory.first()),
        mib(memory.get(memory.len() / 2)),
        mib(memory.last()),
        mib(memory.iter().max())
    ));
    report.add_note(
        "one run; the overload is void by its purpose; the measurement after it begins 1 s after the last answer or time-out",
    );
    let phases = phases
        .iter()
        .map(|(phase, figures)| json!({"phase": phase, "figures": figures}));
    report.raw = json!({
        "phases": phases.collect::<Vec<_>>(),
        "memory_bytes_each_250_ms": memory,
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_is_sampled() {
        let pid = std::process::id();
        let ((), samples) = with_memory(&[pid], || {
            // The sampler has looked at least once when it has been joined.
            while memory_bytes(&[pid]) == 0 {}
        });
        assert!(samples.iter().all(|bytes| *bytes > 0), "{samples:?}");
        assert_eq!(memory_bytes(&[u32::MAX]), 0);
    }
}
