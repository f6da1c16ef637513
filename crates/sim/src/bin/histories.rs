//! Runs histories of the simulation by seeds; `cargo xtask sim` starts it in the right profile.

use anyhow::bail;
use clap::Parser;
use pagemesh_sim::{HistoryReport, run, run_direct_clients, run_disks, run_files, run_snapshots};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Histories of the cluster simulation.
#[derive(Parser)]
#[command(name = "cargo xtask sim")]
struct Arguments {
    /// Number of histories.
    #[arg(long, default_value_t = 2000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Run one seed alone, and print its history.
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Histories of a volume with a file system.
    #[arg(long)]
    files: bool,
    /// Histories of bricks with disks.
    #[arg(long, conflicts_with_all = ["files", "direct_clients"])]
    disks: bool,
    /// Histories of a volume with snapshots.
    #[arg(long, conflicts_with_all = ["files", "disks", "direct_clients"])]
    snapshots: bool,
    /// Histories of a volume with a file system and direct clients.
    #[arg(long, conflicts_with = "files", alias = "guests")]
    direct_clients: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let runner = match (arguments.disks, arguments.snapshots) {
        (true, _) => (run_disks as HistoryRun, "--disks "),
        (_, true) => (run_snapshots as HistoryRun, "--snapshots "),
        _ => history_runner(arguments.files, arguments.direct_clients),
    };
    let Some(seed) = arguments.seed else {
        return run_histories(arguments.from, arguments.seeds, runner);
    };
    match runner.0(seed, true) {
        Ok(outcome) => {
            println!("{outcome:#?}");
            Ok(())
        }
        Err(broken) => bail!("seed {seed}: {broken}"),
    }
}

/// The combined results of histories.
#[derive(Default)]
struct HistoryTotals {
    outcome: HistoryReport,
    failures: Vec<(u64, String)>,
}

type HistoryRun = fn(u64, bool) -> Result<HistoryReport, String>;

/// The function that runs a history, and its command line flag.
fn history_runner(files: bool, direct_clients: bool) -> (HistoryRun, &'static str) {
    match (files, direct_clients) {
        (_, true) => (run_direct_clients, "--direct-clients "),
        (true, false) => (run_files, "--files "),
        (false, false) => (run, ""),
    }
}

fn run_histories(from: u64, seeds: u64, (history, flag): (HistoryRun, &str)) -> anyhow::Result<()> {
    let began = Instant::now();
    let (next, sums) = (AtomicU64::new(from), Mutex::new(HistoryTotals::default()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + seeds {
                        return;
                    }
                    let result = history(seed, false);
                    let mut sums = sums.lock().expect("no panic");
                    match result {
                        Ok(outcome) => sums.outcome.add(outcome),
                        Err(broken) => {
                            let first = broken.lines().next().unwrap_or_default();
                            println!("seed {seed}: {first}\n  cargo xtask sim {flag}--seed {seed}");
                            sums.failures.push((seed, broken));
                        }
                    }
                }
            });
        }
    });
    let HistoryTotals {
        outcome,
        failures: broken,
    } = sums.into_inner().expect("no panic");
    println!(
        "{seeds} histories in {:.1} s: {} requests acknowledged, {} failed, {} messages, {} pages \
         repaired, {} s simulated; {} sectors searched, {} given up",
        began.elapsed().as_secs_f64(),
        outcome.acknowledged,
        outcome.failed,
        outcome.messages,
        outcome.pages_repaired,
        outcome.simulated_time.as_secs(),
        outcome.sectors_searched,
        outcome.sectors_skipped,
    );
    for (fault, count) in &outcome.event_counts {
        println!("{count:>9} {fault}");
    }
    if !broken.is_empty() {
        bail!("{} of {seeds} histories are broken", broken.len());
    }
    let missing = outcome.missing_events();
    if !missing.is_empty() {
        bail!("expected events did not happen: {}", missing.join("; "));
    }
    Ok(())
}
