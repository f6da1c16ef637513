//! Tasks of the repository: `cargo xtask sim`, `cargo xtask enumerate`, `cargo xtask fuzz`, `cargo
//! xtask models`.

use anyhow::bail;
use clap::{Parser, Subcommand};
use pagemesh_sim::{HistoryReport, run, run_direct_clients, run_files};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

#[derive(Parser)]
#[command(about = "Chores of the repository")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Run histories of the cluster simulation.
    Sim {
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
        /// Histories of a volume with a file system and direct clients.
        #[arg(long, conflicts_with = "files")]
        guests: bool,
    },
    /// Enumerate crash images, see docs/rfd/005-defects.md.
    Enumerate {
        /// Number of images.
        #[arg(long, default_value_t = 1_000_000)]
        images: u64,
        /// The first seed.
        #[arg(long, default_value_t = 1)]
        from: u64,
        /// Run one seed of the random sequences alone.
        #[arg(long, conflicts_with_all = ["images", "from"])]
        seed: Option<u64>,
        /// Maximum number of images at a crash point for a full enumeration, as printed with the
        /// seed.
        #[arg(long, requires = "seed")]
        all_max: Option<u64>,
    },
    /// Fuzz the decoders, see docs/rfd/004-fuzzing.md.
    Fuzz {
        /// Seconds that each target runs; about two run at a time.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Run one target alone.
        #[arg(long)]
        target: Option<String>,
        /// Seed of the mutations; random if missing.
        #[arg(long)]
        seed: Option<u64>,
        /// Add inputs with new outcomes to the corpus.
        #[arg(long)]
        keep: bool,
    },
    /// Run random interleavings, see docs/rfd/008-concurrency-models.md.
    Models {
        /// Seconds that each model runs, after its exhaustive part.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().chore {
        Chore::Sim {
            seed: Some(seed),
            files,
            guests,
            ..
        } => match history_runner(files, guests).0(seed, true) {
            Ok(outcome) => {
                println!("{outcome:#?}");
                Ok(())
            }
            Err(broken) => bail!("seed {seed}: {broken}"),
        },
        Chore::Sim {
            seeds,
            from,
            files,
            guests,
            ..
        } => run_histories(from, seeds, history_runner(files, guests)),
        Chore::Enumerate {
            images,
            from,
            seed,
            all_max,
        } => enumerate(images, from, seed, all_max),
        Chore::Fuzz {
            seconds,
            target,
            seed,
            keep,
        } => fuzz(seconds, target.as_deref(), seed, keep),
        Chore::Models { seconds, seed } => models(seconds, seed),
    }
}

/// Runs the concurrency models in an optimized build.
fn models(seconds: u64, seed: u64) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["test", "--profile", "sim", "--locked", "--lib"])
        .args(["--package", "pagemesh-store"])
        .args(["--package", "pagemesh-volume", "models::"])
        .args(["--", "--nocapture"])
        .env("PAGEMESH_MODELS_SECONDS", seconds.to_string())
        .env("PAGEMESH_MODELS_SEED", seed.to_string());
    match command.status()?.success() {
        true => Ok(()),
        false => bail!("a model failed; its schedule is named above"),
    }
}

/// Runs the crash enumeration in an optimized build: all workloads, or one seed of the random
/// sequences.
fn enumerate(
    images: u64,
    from: u64,
    seed: Option<u64>,
    all_max: Option<u64>,
) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["test", "--profile", "sim", "--locked", "--lib"])
        .args(["--package", "pagemesh-store", "--", "--nocapture"]);
    match seed {
        Some(seed) => command
            .arg("enumerate::random::random_sequences")
            .env("PAGEMESH_SEED", seed.to_string()),
        None => command
            .args([
                "enumerate::fixed",
                "enumerate::correction",
                "enumerate::random",
            ])
            .env("PAGEMESH_IMAGES", images.to_string())
            .env("PAGEMESH_FROM", from.to_string()),
    };
    if let Some(all_max) = all_max {
        command.env("PAGEMESH_ALL_MAX", all_max.to_string());
    }
    match command.status()?.success() {
        true => Ok(()),
        false => bail!(
            "an image is wrong (the seed above reproduces it), or the coverage is too low (see above)"
        ),
    }
}

/// Runs the tests that are fuzz targets, in the profile with overflow checks.
fn fuzz(seconds: u64, target: Option<&str>, seed: Option<u64>, keep: bool) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    let name = format!("fuzz_{}", target.unwrap_or_default());
    command
        .args(["test", "--workspace", "--lib", "--test", "fuzz", "--locked"])
        .arg(&name)
        .args(["--", "--nocapture"])
        .env("PAGEMESH_FUZZ_SECONDS", seconds.to_string());
    if let Some(seed) = seed {
        command.env("PAGEMESH_FUZZ_SEED", seed.to_string());
    }
    if keep {
        command.env("PAGEMESH_FUZZ_KEEP", "1");
    }
    match command.status()?.success() {
        true => Ok(()),
        false => bail!("a target failed; its input is in the corpus as failed-…"),
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
fn history_runner(files: bool, guests: bool) -> (HistoryRun, &'static str) {
    match (files, guests) {
        (_, true) => (run_direct_clients, "--guests "),
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
