//! Creation and removal of small files on mounts.

use crate::args::thread_count_parser;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{
    BenchClusters, FILES_BYTES, MountServing, MountSpec, is_root,
};
use crate::commands::bench::scratch::ChildDaemon;
use clap::Args;
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::metadata::{MetadataOptions, run_metadata};
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;

/// Creation and removal of small files on mounts with one and two copies, compared with
/// GlusterFS with two copies and ext4 with synchronous writes. Needs root.
#[derive(Args)]
pub struct MetadataArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Number of programs that create files concurrently.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: Vec<u32>,
    /// Bytes of a file.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=65536))]
    pub bytes: u32,
    /// Number of server threads of each mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
}

/// Runs the benchmark.
pub fn run(args: &MetadataArgs) -> anyhow::Result<Report> {
    let options = MetadataOptions {
        rounds: args.measure.rounds,
        runtime: args.measure.runtime(),
        jobs: args.jobs.clone(),
        bytes: args.bytes as usize,
    };
    anyhow::ensure!(is_root(), "GlusterFS and ext4 need root; run it as root");
    let wish = MountSpec {
        size_bytes: FILES_BYTES,
        serving: MountServing::auto(args.threads),
    };
    let clusters = BenchClusters::start(&args.measure, wish.size_bytes)?;
    let served = clusters.mount(&wish)?.into_iter();
    let (_daemons, places): (Vec<ChildDaemon>, Vec<MountPlace>) = served.unzip();
    let peers = [
        FilePeer::glusterfs(FILES_BYTES)?,
        FilePeer::ext4_sync(FILES_BYTES)?,
    ];
    let peers = peers.each_ref().map(FilePeer::mount_place);
    Ok(run_metadata(&places, &peers, &options)?)
}
