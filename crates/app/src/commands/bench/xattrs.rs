//! Calls for extended attributes on mounts.

use crate::args::thread_count_parser;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{BenchClusters, FILES_BYTES, MountServing, MountSpec};
use crate::commands::bench::scratch::ChildDaemon;
use clap::Args;
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;
use pagemesh_bench::xattrs::{ATTRIBUTES_MAX, XattrOptions, run_xattrs};

/// Calls for extended attributes of a file with few and with many attributes, on mounts with one and two copies, and on a tmpfs.
#[derive(Args)]
pub struct XattrsArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Numbers of attributes of the file. The first one is the reference of the ratios.
    #[arg(
        long, value_delimiter = ',', default_values_t = [16, 1024, 3300],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(ATTRIBUTES_MAX))
    )]
    pub counts: Vec<u32>,
    /// Number of server threads of each mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
}

/// Runs the benchmark.
pub fn run(args: &XattrsArgs) -> anyhow::Result<Report> {
    let options = XattrOptions {
        rounds: args.measure.rounds,
        counts: args.counts.clone(),
    };
    let spec = MountSpec {
        size_bytes: FILES_BYTES,
        serving: MountServing::auto(args.threads),
    };
    let clusters = BenchClusters::start(&args.measure, spec.size_bytes)?;
    let served = clusters.mount(&spec)?.into_iter();
    let (_daemons, mut places): (Vec<ChildDaemon>, Vec<MountPlace>) = served.unzip();
    let memory = tempfile::tempdir_in(&args.measure.pools)?;
    places.push(MountPlace::unserved("tmpfs", memory.path()));
    Ok(run_xattrs(&places, &options)?)
}
