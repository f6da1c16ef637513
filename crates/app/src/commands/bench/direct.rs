//! Direct access to the files of mounts, with synchronous copies and with an asynchronous one.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{
    DIRECT_THREADS, DirectBench, MountServing, MountSpec, exec_prefix,
};
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use clap::Args;
use pagemesh_base::layout::{LegState, VolumeName};
use pagemesh_bench::mirror::{self, Direction, MirrorOptions, MountPlace};
use pagemesh_bench::report::Report;

/// Bytes of directly accessed files, for each number of jobs.
const DIRECT_BYTES: u64 = 512 << 20;

/// Direct access to the files of a mount, with one copy and two, compared with a tmpfs and with
/// the kernel path.
#[derive(Args)]
pub struct DirectArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Bytes of a request.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 4096], value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
    pub sizes: Vec<u32>,
    /// Bytes of each append to a new file.
    #[arg(long, value_delimiter = ',', default_values_t = [100], value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub appends: Vec<u32>,
    /// Number of concurrent programs.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 16], value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: Vec<u32>,
    /// Think time between two requests of a program, in µs.
    #[arg(long, value_delimiter = ',', default_values_t = [0], value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub think_us: Vec<u32>,
    /// Measure instead one program that writes 4096 bytes at a quarter of its maximum rate,
    /// with an asynchronous copy over TCP and with one copy.
    #[arg(long, conflicts_with_all = ["sizes", "jobs", "think_us"])]
    pub followed: bool,
}

impl DirectArgs {
    fn options(&self) -> MirrorOptions {
        MirrorOptions {
            rounds: self.measure.rounds,
            runtime: self.measure.runtime(),
            size_bytes: DIRECT_BYTES,
            sizes: self.sizes.clone(),
            appends: self.appends.clone(),
            jobs: self.jobs.clone(),
            think_us: self.think_us.clone(),
            directions: vec![Direction::Write, Direction::Read],
            processes: true,
            ..MirrorOptions::default()
        }
    }
}

/// Runs the benchmark.
pub fn run(args: &DirectArgs) -> anyhow::Result<Report> {
    if args.followed {
        let options = MirrorOptions {
            sizes: vec![4096],
            jobs: vec![1],
            directions: vec![Direction::Write],
            sync: false,
            ..args.options()
        };
        return async_replica(&args.measure, options);
    }
    synchronous_copies(&args.measure, &args.options())
}

/// Cost of direct access for a program, compared with a tmpfs.
fn synchronous_copies(measure: &MeasureArgs, options: &MirrorOptions) -> anyhow::Result<Report> {
    // Files that fit into CPU caches would not measure memory.
    let files_bytes = DIRECT_BYTES * options.jobs.len() as u64;
    let size_bytes = files_bytes + DIRECT_BYTES / 2;
    let near = DirectBench::start(measure, size_bytes, 2)?;
    // Over TCP, writes use the kernel path.
    let apart = ScratchCluster::with_pools(measure, 2, 1, size_bytes + SPARE_BYTES)?;
    let wish = MountSpec {
        size_bytes,
        serving: MountServing::auto(DIRECT_THREADS),
    };
    let (_daemon, mut far) = apart.mount("map-tcp", 2, "auto", &wish)?;
    far.prefix = exec_prefix()?;
    let by_kernel = MountPlace {
        name: "map, by the kernel".into(),
        prefix: vec![],
        ..near.places[1].clone()
    };
    let places = [&near.places[..], &[far, by_kernel]].concat();
    Ok(mirror::run_mirror(&places, Some(&near.tmpfs), options)?)
}

/// Cost of an asynchronous copy over TCP with direct access: one program writes at a quarter of its
/// maximum rate, compared with one copy.
fn async_replica(measure: &MeasureArgs, options: MirrorOptions) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: DIRECT_BYTES * 3 / 2,
        serving: MountServing::auto(DIRECT_THREADS),
    };
    let near = ScratchCluster::with_pools(measure, 1, 1, wish.size_bytes + SPARE_BYTES)?;
    let apart = ScratchCluster::with_pools(measure, 2, 1, wish.size_bytes + SPARE_BYTES)?;
    let (_unmirrored, mut alone) = near.mount("unmirrored", 1, "map", &wish)?;
    let (_followed, mut followed) = apart.mount_with_async_replica("tcp-async", &wish)?;
    let by_kernel = MountPlace {
        name: "tcp-async, by the kernel".into(),
        ..followed.clone()
    };
    alone.prefix = exec_prefix()?;
    followed.prefix = exec_prefix()?;
    let most = mirror::saturating_iops(&followed, &options)?;
    anyhow::ensure!(most > 0.0, "nothing was written to {}", followed.name);
    let options = MirrorOptions {
        rate_iops: Some((most / 4.0) as u32),
        ..options
    };
    let mut report = mirror::run_mirror(&[alone, followed, by_kernel], None, &options)?;
    let name = "tcp-async".parse::<VolumeName>()?;
    let leg = &apart.manager_client()?.volume(&name)?.layout.segments[0].columns[0].legs[1];
    anyhow::ensure!(
        leg.state == LegState::AsyncReplica,
        "the asynchronous copy is no longer in step"
    );
    report.add_note(format!(
        "without O_SYNC; one program that writes to tcp-async without a pause does {most:.0} \
         writes/s; here it may do a quarter of them"
    ));
    Ok(report)
}
