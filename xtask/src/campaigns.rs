//! Long runs in an optimized build with assertions: simulation, crash enumeration, fuzzing,
//! interleavings. Each is a test or a program of its crate; this module only starts it.

use crate::{cargo, root};
use anyhow::bail;
use clap::Args;
use std::ffi::OsString;
use std::process::Command;

#[derive(Args)]
pub(crate) struct EnumerateOptions {
    /// Number of images.
    #[arg(long, default_value_t = 1_000_000)]
    images: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Run one seed of the random sequences alone. A sequence depends on the seed and on
    /// `--all-max`.
    #[arg(long, requires = "all_max", conflicts_with_all = ["images", "from"])]
    seed: Option<u64>,
    /// Maximum number of images at a crash point for a full enumeration, as printed with the
    /// seed.
    #[arg(long, requires = "seed")]
    all_max: Option<u64>,
}

#[derive(Args)]
pub(crate) struct FuzzOptions {
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
}

#[derive(Args)]
pub(crate) struct ModelOptions {
    /// Seconds that each model runs, after its exhaustive part.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn simulate(options: &[OsString]) -> anyhow::Result<()> {
    let mut command = cargo();
    command
        .args(["run", "--quiet", "--profile", "sim", "--locked"])
        .args(["--package", "pagemesh-sim", "--bin", "histories", "--"])
        .args(options);
    run(command, "a history is broken, see above")
}

pub(crate) fn models(options: &ModelOptions) -> anyhow::Result<()> {
    run_models(
        options,
        &["--package", "pagemesh-store", "--test", "models"],
    )?;
    run_models(
        options,
        &["--package", "pagemesh-volume", "--test", "models"],
    )
}

fn run_models(options: &ModelOptions, tests: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo();
    command
        .args(["test", "--profile", "sim", "--locked"])
        .args(tests)
        .args(["--", "--nocapture"])
        .env("PAGEMESH_MODELS_SECONDS", options.seconds.to_string())
        .env("PAGEMESH_MODELS_SEED", options.seed.to_string());
    run(command, "a model failed; its schedule is named above")
}

/// Runs the fixed, correction and random workloads of the crash enumeration, or one seed of the
/// random sequences.
pub(crate) fn enumerate(options: &EnumerateOptions) -> anyhow::Result<()> {
    let mut command = cargo();
    command
        .args(["test", "--profile", "sim", "--locked"])
        .args(["--package", "pagemesh-store", "--test", "enumerate"])
        .args(["--", "--nocapture"]);
    match options.seed {
        Some(seed) => command
            .arg("random::random_sequences")
            .env("PAGEMESH_SEED", seed.to_string()),
        None => command
            .args(["fixed::", "correction::", "random::"])
            .env("PAGEMESH_IMAGES", options.images.to_string())
            .env("PAGEMESH_FROM", options.from.to_string()),
    };
    if let Some(all_max) = options.all_max {
        command.env("PAGEMESH_ALL_MAX", all_max.to_string());
    }
    run(
        command,
        "an image is wrong, or the coverage is too low: see above. A random sequence is repeated by \
         its seed; the other workloads have none and are repeated by the name of their test",
    )
}

/// Runs the tests that are fuzz targets, in the profile with overflow checks.
pub(crate) fn fuzz(options: &FuzzOptions) -> anyhow::Result<()> {
    let mut command = cargo();
    let name = format!("fuzz_{}", options.target.as_deref().unwrap_or_default());
    if !has_test(&name) {
        bail!("no fuzz target has this name; docs/rfd/004-fuzzing.md lists the targets");
    }
    command
        .args(["test", "--workspace", "--lib", "--test", "fuzz", "--locked"])
        .arg(&name)
        .args(["--", "--nocapture"])
        .env("PAGEMESH_FUZZ_SECONDS", options.seconds.to_string());
    if let Some(seed) = options.seed {
        command.env("PAGEMESH_FUZZ_SEED", seed.to_string());
    }
    if options.keep {
        command.env("PAGEMESH_FUZZ_KEEP", "1");
    }
    run(
        command,
        "a target failed; its input is in the corpus as failed-…",
    )
}

/// Whether a test has a name that begins so. `cargo test` passes if its filter matches no test.
fn has_test(prefix: &str) -> bool {
    let function = format!("\nfn {prefix}");
    let files = walkdir::WalkDir::new(root().join("crates"));
    files
        .into_iter()
        .filter_map(Result::ok)
        .filter(|file| file.path().extension().is_some_and(|it| it == "rs"))
        .filter_map(|file| std::fs::read_to_string(file.path()).ok())
        .any(|text| text.contains(&function))
}

fn run(mut command: Command, failure: &str) -> anyhow::Result<()> {
    if !command.status()?.success() {
        bail!("{failure}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::has_test;

    #[test]
    fn only_known_fuzz_targets_are_accepted() {
        for known in ["fuzz_", "fuzz_image", "fuzz_direct_parts"] {
            assert!(has_test(known), "{known}");
        }
        assert!(!has_test("fuzz_no_such_target"));
    }
}
