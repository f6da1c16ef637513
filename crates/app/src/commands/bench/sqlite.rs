//! Durable inserts by SQLite.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{DirectBench, FILES_BYTES};
use clap::Args;
use pagemesh_bench::report::Report;
use pagemesh_bench::sqlite::{SqliteOptions, run_sqlite};

/// Durable inserts by SQLite with direct access, on one copy and two, compared with the kernel
/// path and a tmpfs.
#[derive(Args)]
pub struct SqliteArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Number of inserts in one round on one mount.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub inserts: u32,
    /// Bytes of a row.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub row_bytes: u32,
}

/// Runs the benchmark.
pub fn run(args: &SqliteArgs) -> anyhow::Result<Report> {
    let options = SqliteOptions {
        rounds: args.measure.rounds,
        inserts: args.inserts,
        row_bytes: args.row_bytes,
    };
    let mut near = DirectBench::start(&args.measure, FILES_BYTES, 3)?;
    near.mount_for_kernel(FILES_BYTES)?;
    let places = [&near.places[..], &[near.tmpfs.clone()]].concat();
    Ok(run_sqlite(&places, &options)?)
}
