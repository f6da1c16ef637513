//! pgbench on PostgreSQL, by the kernel and with direct access.

use crate::args::thread_count_parser;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{
    BenchClusters, DirectBench, MountServing, MountSpec, is_root,
};
use clap::Args;
use pagemesh_bench::database::{DatabaseOptions, DatabasePlace, run_database};
use pagemesh_bench::report::Report;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

/// Bytes of a file system for a database.
const DATABASE_BYTES: u64 = 1 << 30;

/// pgbench on PostgreSQL, with its files on mounts with one and two copies, compared with
/// PostgreSQL's own synchronous replication. Needs root.
#[derive(Args)]
pub struct DatabaseArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Give the server direct access to its files, and compare with the kernel path and a
    /// tmpfs.
    #[arg(long)]
    pub direct: bool,
    /// Number of concurrent connections.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=240))]
    pub clients: u32,
    /// Scale factor of pgbench: units of 100 000 accounts.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub scale: u32,
    /// Number of server threads of each mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
}

/// Runs the benchmark.
pub fn run(args: &DatabaseArgs) -> anyhow::Result<Report> {
    let options = DatabaseOptions {
        rounds: args.measure.rounds,
        runtime: args.measure.runtime(),
        scale: args.scale,
        clients: args.clients,
    };
    if args.direct {
        direct_access(&args.measure, &options)
    } else {
        mounts(&args.measure, &options, args.threads)
    }
}

/// A database server with direct access to its files.
fn direct_access(measure: &MeasureArgs, options: &DatabaseOptions) -> anyhow::Result<Report> {
    anyhow::ensure!(
        is_root(),
        "PostgreSQL is given another user; run it as root"
    );
    let mut near = DirectBench::start(measure, DATABASE_BYTES, 3)?;
    near.mount_for_kernel(DATABASE_BYTES)?;
    let scratch = &near.scratch;
    // PostgreSQL runs as another user.
    for dir in [scratch.dir.path(), scratch.pools.path(), &near.tmpfs.dir] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    let places = near.places.iter().chain([&near.tmpfs]);
    let places = places.map(|place| DatabasePlace {
        name: place.name.clone(),
        class: place.class.clone(),
        dir: place.dir.clone(),
        standby: None,
        prefix: place.prefix.clone(),
    });
    Ok(run_database(&places.collect::<Vec<_>>(), options)?)
}

/// Databases on mounts.
fn mounts(
    measure: &MeasureArgs,
    options: &DatabaseOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: DATABASE_BYTES,
        serving: MountServing::auto(threads),
    };
    let clusters = BenchClusters::start(measure, wish.size_bytes)?;
    // PostgreSQL runs as another user.
    for dir in [
        &clusters.mapped.dir,
        &clusters.mapped.pools,
        &clusters.mixed.dir,
    ] {
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711))?;
    }
    let (mut _daemons, mut places) = (vec![], vec![]);
    for (daemon, place) in clusters.mount(&wish)? {
        _daemons.push(daemon);
        places.push(DatabasePlace {
            name: place.name,
            class: place.class,
            dir: place.dir,
            standby: None,
            prefix: vec![],
        });
    }
    let pools = clusters.mapped.pools.path();
    let [first, second] = ["first", "second"].map(|name| pools.join(name));
    std::fs::create_dir(&first)?;
    std::fs::create_dir(&second)?;
    places.push(DatabasePlace {
        name: "its own replication".into(),
        class: "none".into(),
        dir: first,
        standby: Some(second),
        prefix: vec![],
    });
    Ok(run_database(&places, options)?)
}
