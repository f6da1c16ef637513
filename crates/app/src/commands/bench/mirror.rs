//! Mirrored files: latency of synchronous writes against throughput.

use crate::args::FuseTransport;
use crate::args::thread_count_parser;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{
    BenchClusters, FILES_BYTES, MountServing, MountSpec, exec_prefix, is_root,
};
use crate::commands::bench::scratch::ChildDaemon;
use anyhow::Context;
use clap::Args;
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::mirror::{self, MirrorOptions, MountPlace};
use pagemesh_bench::report::Report;

/// Mirrored files: latency of synchronous writes against throughput, compared with a null mount
/// and, as root, GlusterFS with two copies.
#[derive(Args)]
pub struct MirrorArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Bytes of a write.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 4096, 65536], value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
    pub sizes: Vec<u32>,
    /// Number of concurrent writers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: Vec<u32>,
    /// Think time between two writes of a writer, in µs.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 50, 200], value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub think_us: Vec<u32>,
    /// Omit `--sync=1`: a write need not be durable when it returns, and does not wait for an
    /// asynchronous copy.
    #[arg(long)]
    pub plain: bool,
    /// Number of server threads of each mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Transport of FUSE requests to every mount.
    #[arg(long, value_enum, default_value = "classic")]
    pub fuse: FuseTransport,
    /// Keep files out of the kernel's page cache on every mount.
    #[arg(long)]
    pub direct_io: bool,
}

impl MirrorArgs {
    fn serving(&self) -> MountServing {
        MountServing {
            threads: self.threads,
            fuse: self.fuse,
            direct_io: self.direct_io,
            commit_interval: None,
        }
    }

    /// The workload. Each number of jobs has its own files, and frames that are not freed yet need
    /// room.
    fn options(&self) -> MirrorOptions {
        MirrorOptions {
            rounds: self.measure.rounds,
            runtime: self.measure.runtime(),
            size_bytes: FILES_BYTES * 3 / 4 / self.jobs.len() as u64,
            sizes: self.sizes.clone(),
            jobs: self.jobs.clone(),
            think_us: self.think_us.clone(),
            sync: !self.plain,
            ..MirrorOptions::default()
        }
    }
}

/// Runs the benchmark.
pub fn run(args: &MirrorArgs) -> anyhow::Result<Report> {
    let serving = args.serving();
    let wish = MountSpec {
        size_bytes: FILES_BYTES,
        serving,
    };
    let clusters = BenchClusters::start(&args.measure, wish.size_bytes)?;
    let null = clusters.mapped.mount_null(serving)?;
    let served = [null].into_iter().chain(clusters.mount(&wish)?);
    let (_daemons, mut places): (Vec<ChildDaemon>, Vec<MountPlace>) = served.unzip();
    let mapped = places.iter().find(|place| place.name == "map");
    let direct = mapped.context("there is a mount over map")?.clone();
    places.push(MountPlace {
        name: "map, directly".into(),
        prefix: exec_prefix()?,
        ..direct
    });
    let glusterfs = match is_root() {
        true => Some(FilePeer::glusterfs(FILES_BYTES)?),
        false => {
            eprintln!("GlusterFS is left out: it needs root");
            None
        }
    };
    let peer = glusterfs.as_ref().map(FilePeer::mount_place);
    let mut report = mirror::run_mirror(&places, peer.as_ref(), &args.options())?;
    report.add_note(format!(
        "mounts are served by {} threads each, --fuse {}{}",
        serving.threads,
        serving.fuse.name(),
        if serving.direct_io {
            " --direct-io"
        } else {
            ""
        }
    ));
    Ok(report)
}
