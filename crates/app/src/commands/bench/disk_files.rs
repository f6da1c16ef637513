//! Programs on file systems of pools on a disk, compared with the disk's own file system.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{MountServing, MountSpec, is_root};
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use anyhow::bail;
use clap::{Args, ValueEnum};
use pagemesh_base::units::Size;
use pagemesh_bench::database::{DatabaseOptions, DatabasePlace, run_database};
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;
use pagemesh_bench::small_files::{SmallFilesOptions, run_small_files};
use pagemesh_bench::source_trees::{SourceTreeOptions, run_source_trees};
use pagemesh_bench::sqlite::{SqliteOptions, run_sqlite};
use pagemesh_brick::resource_limits;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

/// Bytes of a row of the SQLite table.
const ROW_BYTES: u32 = 100;
/// The scale and the connections of pgbench.
const PGBENCH_SCALE: u32 = 4;
const PGBENCH_CLIENTS: u32 = 4;

/// A program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskWorkload {
    /// Durable inserts by SQLite.
    Sqlite,
    /// `tar x` and `git clone`, with a sync.
    SourceTrees,
    /// Small files: made, read, removed.
    SmallFiles,
    /// pgbench on PostgreSQL.
    Pgbench,
}

/// A program on mounts with one copy and two, on pools on a disk, compared with the file system of that disk. Name a
/// directory there with --pools.
#[derive(Args)]
pub struct DiskFilesArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// The program.
    #[arg(long, value_enum)]
    pub workload: DiskWorkload,
    /// Number of inserts or files of one round.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub count: u32,
    /// Bytes of each file system.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// Seconds of `mount --commit-interval` of two more mounts; 0: without them.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=300))]
    pub commit_interval: u64,
}

/// Runs the benchmark.
pub fn run(args: &DiskFilesArgs) -> anyhow::Result<Report> {
    let pools = &args.measure.pools;
    if resource_limits::is_memory(pools) {
        bail!(
            "{} is in memory; name a directory on a disk with --pools",
            pools.display()
        );
    }
    let spec = MountSpec {
        size_bytes: args.size.0,
        serving: MountServing::auto(4),
    };
    let bytes = 4 * args.size.0 + SPARE_BYTES;
    let scratch = ScratchCluster::with_pools(&args.measure, 2, 2, bytes)?;
    let (_one, unmirrored) = scratch.mount("one-copy", 1, "auto", &spec)?;
    let (_two, mirrored) = scratch.mount("two-copies", 2, "auto", &spec)?;
    // All files of the run lie in the two directories that a signal removes.
    if let Err(other) = tempfile::env::override_temp_dir(scratch.dir.path()) {
        bail!("temporary files go to {} already", other.display());
    }
    let plain = tempfile::tempdir_in(scratch.pools.path())?;
    let plain_place = MountPlace::unserved("the disk's file system", plain.path());
    let mut places = vec![unmirrored, mirrored];
    let mut deferring = Vec::new();
    if args.commit_interval > 0 {
        let mut spec = spec;
        spec.serving.commit_interval = Some(args.commit_interval);
        for (name, copies) in [("one-copy-commit", 1), ("two-copies-commit", 2)] {
            let (daemon, place) = scratch.mount(name, copies, "auto", &spec)?;
            deferring.push(daemon);
            places.push(place);
        }
    }
    let mounts = places.len();
    places.push(plain_place);
    let rounds = args.measure.rounds;
    let report = match args.workload {
        DiskWorkload::Sqlite => {
            let (inserts, row_bytes) = (args.count, ROW_BYTES);
            run_sqlite(
                &places,
                &SqliteOptions {
                    rounds,
                    inserts,
                    row_bytes,
                },
            )?
        }
        DiskWorkload::SourceTrees => {
            let files = args.count;
            run_source_trees(&places, &SourceTreeOptions { rounds, files })?
        }
        DiskWorkload::SmallFiles => {
            let options = SmallFilesOptions {
                rounds,
                files: args.count.into(),
                entries: 0,
            };
            run_small_files(&places[..mounts], &places[mounts..], &options)?
        }
        DiskWorkload::Pgbench => {
            if !is_root() {
                bail!("PostgreSQL is given another user; run it as root");
            }
            for dir in [scratch.dir.path(), scratch.pools.path(), plain.path()] {
                std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
            }
            let options = DatabaseOptions {
                rounds,
                runtime: args.measure.runtime(),
                scale: PGBENCH_SCALE,
                clients: PGBENCH_CLIENTS,
            };
            let places = places.iter().map(|place| DatabasePlace {
                name: place.name.clone(),
                class: place.class.clone(),
                dir: place.dir.clone(),
                standby: None,
                prefix: vec![],
            });
            run_database(&places.collect::<Vec<_>>(), &options)?
        }
    };
    Ok(report)
}
