//! Load on the NFS server, beside nfs-ganesha.

mod servers;
mod snapshots;
mod stalled;
mod workers;

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::kill_at_shutdown;
use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use pagemesh_base::fd_limit::raise_fd_limit;
use pagemesh_base::units::Size;
use pagemesh_bench::nfs::compare::{Candidate, CompareOptions, LoadedServer};
use pagemesh_bench::nfs::connections::CONNECTIONS_MAX;
use pagemesh_bench::nfs::file_set::FileSetScale;
use pagemesh_bench::nfs::ganesha::{GaneshaOptions, GaneshaServer};
use pagemesh_bench::nfs::idle_opens::{IdleOpensOptions, make_files, run_idle_opens};
use pagemesh_bench::nfs::mix::OperationMix;
use pagemesh_bench::nfs::overload::run_overload;
use pagemesh_bench::nfs::priority::reserve_generator_processor;
use pagemesh_bench::nfs::rates::{MEAN_MS_MAX, run_rates};
use pagemesh_bench::nfs::schedule::Arrivals;
use pagemesh_bench::nfs::sequential::run_sequential;
use pagemesh_bench::nfs::setup::NfsTarget;
use pagemesh_bench::report::Report;
use servers::{MeasuredServers, ServedFs};
use std::path::PathBuf;
use std::time::Duration;

/// The part of the measured time that comes before it: caches and workers settle.
const WARMUP_DIVISOR: u32 = 4;
/// Connections of the overload, unless stated.
const OVERLOAD_CONNECTIONS: usize = 1000;
/// Connections of other cases.
const CONNECTIONS: usize = 16;
/// Bytes of one write of the source of the sequential case.
const CHUNK_BYTES: usize = 1 << 20;

/// A case of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NfsCase {
    /// The highest rate at a mean latency of 6 ms, found by search.
    Rate,
    /// Latencies at fixed rates: no snapshot, one, 100, and the peer.
    Snapshots,
    /// One client of libnfs that copies a large file to the servers and back.
    Sequential,
    /// Three times the saturation by many connections. A short search finds the saturation first.
    Overload,
    /// The sizing of workers beside the best fixed number of them, in four load shapes.
    Workers,
    /// The latency of an export while the bricks of another export of its server are stopped.
    Stalled,
    /// An idle server with many files open by NFSv4.1: its processor time, and the memory of an open.
    Idle,
}

/// The operation mix of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MixArg {
    /// SPEC SFS97_R1.
    Sfs97,
    /// READ.
    Reads,
    /// WRITE and COMMIT.
    Writes,
    /// Names and attributes.
    Names,
}

impl MixArg {
    fn mix(self) -> OperationMix {
        match self {
            MixArg::Sfs97 => OperationMix::SFS97,
            MixArg::Reads => OperationMix::READS,
            MixArg::Writes => OperationMix::WRITES,
            MixArg::Names => OperationMix::NAMES,
        }
    }
}

/// The gaps between calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArrivalsArg {
    /// Exponential.
    Poisson,
    /// Equal.
    Fixed,
}

/// NFS calls at a schedule that is fixed in advance, to `serve nfs` and to nfs-ganesha on ext4.
///
/// Pools lie in --pools, and the peer's ext4 beside them in an image. nfs-ganesha needs root.
#[derive(Args)]
pub struct NfsArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Case.
    #[arg(long, value_enum, default_value = "rate")]
    pub case: NfsCase,
    /// Operation mix.
    #[arg(long, value_enum, default_value = "sfs97")]
    pub mix: MixArg,
    /// Gaps between calls.
    #[arg(long, value_enum, default_value = "poisson")]
    pub arrivals: ArrivalsArg,
    /// Calls per second: the start of the search of the cases rate and overload, and the load of the case stalled.
    #[arg(long, default_value_t = 1000.0)]
    pub start_rate: f64,
    /// Calls per second of the case snapshots.
    #[arg(long, value_delimiter = ',', default_values_t = [500.0, 1000.0, 2000.0, 4000.0])]
    pub rates: Vec<f64>,
    /// Files for each call per second. SFS97 has about 380.
    #[arg(long, default_value_t = 1.0)]
    pub files_per_op: f64,
    /// Connections to each server, up to 4096; by default 16, or 1000 for the case overload.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=CONNECTIONS_MAX as u64))]
    pub connections: Option<usize>,
    /// Seconds until a call without an answer counts as a time-out.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    pub timeout: u64,
    /// Bytes of each file system, at least 256M.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// Copies of each file system.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub copies: u32,
    /// Bytes of the file of the case sequential, at most half of --size.
    #[arg(long, default_value = "256M")]
    pub file_size: Size,
    /// Seconds of the overload.
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub overload_seconds: u64,
    /// Open files of the case idle.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=OPENS_MAX))]
    pub opens: u32,
    /// Seconds of the case idle.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub idle_seconds: u64,
    /// Directory on a disk for the pools of the 4 KiB reads of the case workers.
    #[arg(long, default_value = "/var/tmp")]
    pub disk_pools: PathBuf,
    /// Seed of the schedules and calls.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Measure without nfs-ganesha.
    #[arg(long)]
    pub no_peer: bool,
}

/// Open files of the case idle: the server allows 200 000.
const OPENS_MAX: i64 = 100_000;
/// The smallest file system.
const SIZE_MIN: u64 = 256 << 20;

impl NfsArgs {
    fn options(&self) -> CompareOptions {
        let connections = match self.case {
            NfsCase::Overload => OVERLOAD_CONNECTIONS,
            _ => CONNECTIONS,
        };
        CompareOptions {
            rounds: self.measure.rounds,
            runtime: self.measure.runtime(),
            warmup: self.measure.runtime() / WARMUP_DIVISOR,
            timeout: Duration::from_secs(self.timeout),
            connections: self.connections.unwrap_or(connections),
            arrivals: match self.arrivals {
                ArrivalsArg::Poisson => Arrivals::Poisson,
                ArrivalsArg::Fixed => Arrivals::Fixed,
            },
            mix: self.mix.mix(),
            scale: FileSetScale::with_room(self.files_per_op, self.size.0),
            seed: self.seed,
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.size.0 >= SIZE_MIN,
            "--size {} is below 256M, too small for a file set",
            self.size
        );
        ensure!(
            self.case != NfsCase::Sequential || self.file_size.0 <= self.size.0 / 2,
            "--file-size {} is above half of --size {}",
            self.file_size,
            self.size
        );
        let are_rates = |rates: &[f64]| rates.iter().all(|it| it.is_finite() && *it >= 1.0);
        ensure!(
            are_rates(&self.rates) && are_rates(&[self.start_rate]),
            "a rate is below 1 call per second"
        );
        Ok(())
    }
}

/// Runs the benchmark.
pub fn run(args: &NfsArgs) -> anyhow::Result<Report> {
    args.check()?;
    let has_generator = !matches!(args.case, NfsCase::Sequential | NfsCase::Idle);
    if has_generator {
        reserve_generator_processor();
    }
    match args.case {
        NfsCase::Rate => rates(args),
        NfsCase::Snapshots => snapshots::run(args),
        NfsCase::Sequential => sequential(args),
        NfsCase::Overload => overload(args),
        NfsCase::Workers => workers::run(args),
        NfsCase::Stalled => stalled::run(args),
        NfsCase::Idle => idle(args),
    }
}

fn rates(args: &NfsArgs) -> anyhow::Result<Report> {
    let options = args.options();
    let scratch = MeasuredServers::start(args, 1)?;
    let served = scratch.serve("pagemesh", args)?;
    let peer = scratch.start_peer(args)?;
    let targets = targets(&[&served], peer.as_ref());
    let opened = targets.into_iter();
    let opened = opened.map(|it| LoadedServer::open(Candidate::new(it), &options));
    let mut servers = opened.collect::<Result<Vec<_>, _>>()?;
    Ok(run_rates(
        &mut servers,
        args.start_rate,
        MEAN_MS_MAX,
        &options,
    )?)
}

fn overload(args: &NfsArgs) -> anyhow::Result<Report> {
    let options = args.options();
    raise_fd_limit().context("cannot open as many connections")?;
    let scratch = MeasuredServers::start(args, 1)?;
    let served = scratch.serve("pagemesh", args)?;
    let mut server = LoadedServer::open(Candidate::new(served.target.clone()), &options)?;
    let length = Duration::from_secs(args.overload_seconds);
    Ok(run_overload(
        &mut server,
        args.start_rate,
        length,
        &options,
    )?)
}

fn idle(args: &NfsArgs) -> anyhow::Result<Report> {
    let scratch = MeasuredServers::start(args, 1)?;
    let served = scratch.serve("pagemesh", args)?;
    make_files(&served.target, args.opens)?;
    let served = scratch.restart(served)?;
    let options = IdleOpensOptions {
        opens: args.opens,
        idle: Duration::from_secs(args.idle_seconds),
    };
    Ok(run_idle_opens(&served.target, options)?)
}

fn sequential(args: &NfsArgs) -> anyhow::Result<Report> {
    let scratch = MeasuredServers::start(args, 1)?;
    let served = scratch.serve("pagemesh", args)?;
    let peer = scratch.start_peer(args)?;
    let targets = targets(&[&served], peer.as_ref());
    let source = scratch.write_source(args.file_size.0)?;
    Ok(run_sequential(&targets, &source, args.measure.rounds)?)
}

/// The targets of the servers, with the peer as the last one.
fn targets(served: &[&ServedFs], peer: Option<&GaneshaServer>) -> Vec<NfsTarget> {
    let own = served.iter().map(|it| it.target.clone());
    own.chain(peer.map(|it| it.target.clone())).collect()
}

impl MeasuredServers {
    /// Starts nfs-ganesha on an ext4 in the directory of the pools, unless it is not wanted.
    fn start_peer(&self, args: &NfsArgs) -> anyhow::Result<Option<GaneshaServer>> {
        if args.no_peer {
            return Ok(None);
        }
        let peer = GaneshaServer::start(&GaneshaOptions {
            name: "ganesha".into(),
            class: "ext4".into(),
            dir: self.scratch.dir.path().to_owned(),
            image_dir: self.scratch.pools.path().to_owned(),
            size_bytes: args.size.0,
        })?;
        kill_at_shutdown(peer.pid());
        Ok(Some(peer))
    }

    /// Writes the source of copies beside the pools.
    fn write_source(&self, bytes: u64) -> anyhow::Result<PathBuf> {
        let path = self.scratch.pools.path().join("source");
        let cannot = || format!("cannot write {}", path.display());
        let mut file = std::fs::File::create_new(&path).with_context(cannot)?;
        let mut rng = pagemesh_base::rng::SplitMix64::new(5);
        let words = (0..CHUNK_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes());
        let chunk: Vec<u8> = words.collect();
        let mut left = bytes as usize;
        while left > 0 {
            let part = left.min(chunk.len());
            std::io::Write::write_all(&mut file, &chunk[..part]).with_context(cannot)?;
            left -= part;
        }
        Ok(path)
    }
}
