//! `pagemesh bench`: benchmarks, each on a scratch cluster.
//!
//! Invariants: a benchmark changes no existing data; scratch pools, sockets and processes are gone
//! when the command ends.

mod amplification;
mod attached;
mod database;
mod direct;
mod disk;
mod disk_files;
mod everyday;
mod failover;
mod idle;
mod many_files;
mod metadata;
mod mirror;
mod mounts;
mod native;
mod nfs;
mod null;
mod peers;
mod recovery;
mod scratch;
mod session;
mod small_files;
mod snapshots;
mod sqlite;
mod sweep;
mod tier;
mod xattrs;

use crate::args::Output;
use crate::output;
use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use pagemesh_bench::report::Report;
use pagemesh_bench::session::{ROUNDS_MAX, ROUNDS_MIN};
use pagemesh_bench::sweep::RUNTIME_MAX;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Seconds of the longest measurement: the limit of the workloads.
const SECONDS_MAX: u64 = RUNTIME_MAX.as_secs();

/// The length of a benchmark, and the place of its results.
#[derive(Args, Clone)]
pub struct MeasureArgs {
    /// Number of rounds, 5 to 1000; results are medians over them.
    #[arg(long, default_value_t = 5, value_parser = round_count_parser())]
    pub rounds: usize,
    /// Seconds of each measurement, up to an hour.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub seconds: u64,
    /// Directory for raw results and plots.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
    /// Directory for pools: on tmpfs, hugetlbfs or DAX. A tmpfs with huge pages (mount -o
    /// huge=always) is fastest.
    #[arg(long, default_value = "/dev/shm")]
    pub pools: PathBuf,
}

impl MeasureArgs {
    /// The length of each measurement.
    fn runtime(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

fn round_count_parser() -> RangedU64ValueParser<usize> {
    round_count_parser_from(ROUNDS_MIN)
}

fn round_count_parser_from(least: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least as u64..=ROUNDS_MAX as u64)
}

/// Run benchmarks.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// 4 KiB writes and reads of a mirrored volume mapped into this process, compared with two
    /// plain non-temporal copies.
    Session(MeasureArgs),
    /// 8 KiB reads by 1 to 128 readers.
    Ramp(sweep::SweepArgs),
    /// 70 % reads and 30 % writes, by block size.
    Table(sweep::SweepArgs),
    /// fio on this and other block servers, in turn.
    Peers(MeasureArgs),
    Recovery(recovery::RecoveryArgs),
    Amplification(amplification::AmplificationArgs),
    Attached(attached::AttachedArgs),
    Snapshots(snapshots::SnapshotsArgs),
    Mirror(mirror::MirrorArgs),
    Direct(direct::DirectArgs),
    Disk(disk::DiskArgs),
    DiskFiles(disk_files::DiskFilesArgs),
    Tier(tier::TierArgs),
    /// Calls of libpagemesh on a file with two copies, compared with the kernel's.
    Native(MeasureArgs),
    Metadata(metadata::MetadataArgs),
    SmallFiles(small_files::SmallFilesArgs),
    Everyday(everyday::EverydayArgs),
    #[command(hide = true)]
    EverydayStep(everyday::EverydayStepArgs),
    Many(many_files::ManyArgs),
    Xattrs(xattrs::XattrsArgs),
    Failover(failover::FailoverArgs),
    Database(database::DatabaseArgs),
    Sqlite(sqlite::SqliteArgs),
    Nfs(nfs::NfsArgs),
    /// Mount a null file system, the baseline of other benchmarks.
    #[command(hide = true)]
    Null(null::NullMountArgs),
    /// CPU time and disk writes of three idle bricks, a manager and an export.
    Idle(MeasureArgs),
}

/// Runs a benchmark.
pub fn run(command: &BenchCommand) -> anyhow::Result<()> {
    use BenchCommand as Bench;
    let (report, measure) = match command {
        Bench::Disk(args) => {
            let report = disk::run(args)?;
            return print_report(&report, args.output, args.save.as_deref());
        }
        Bench::DiskFiles(args) => (disk_files::run(args)?, &args.measure),
        Bench::Tier(args) => {
            let report = tier::run(args)?;
            return print_report(&report, args.output, args.save.as_deref());
        }
        Bench::Session(measure) => (session::run(measure)?, measure),
        Bench::Ramp(args) => (sweep::ramp(args)?, &args.measure),
        Bench::Table(args) => (sweep::table(args)?, &args.measure),
        Bench::Peers(measure) => (peers::run(measure)?, measure),
        Bench::Recovery(args) => (recovery::run(args)?, &args.measure),
        Bench::Amplification(args) => (amplification::run(args)?, &args.measure),
        Bench::Attached(args) => (attached::run(args)?, &args.measure),
        Bench::Snapshots(args) => (snapshots::run(args)?, &args.measure),
        Bench::Mirror(args) => (mirror::run(args)?, &args.measure),
        Bench::Direct(args) => (direct::run(args)?, &args.measure),
        Bench::Native(measure) => (native::run(measure)?, measure),
        Bench::Metadata(args) => (metadata::run(args)?, &args.measure),
        Bench::SmallFiles(args) => (small_files::run(args)?, &args.measure),
        Bench::Everyday(args) => (everyday::run(args)?, &args.measure),
        Bench::EverydayStep(args) => return everyday::run_file_step(args),
        Bench::Many(args) => (many_files::run(args)?, &args.measure),
        Bench::Xattrs(args) => (xattrs::run(args)?, &args.measure),
        Bench::Failover(args) => (failover::run(args)?, &args.measure),
        Bench::Database(args) => (database::run(args)?, &args.measure),
        Bench::Sqlite(args) => (sqlite::run(args)?, &args.measure),
        Bench::Nfs(args) => (nfs::run(args)?, &args.measure),
        Bench::Null(args) => return null::run(args),
        Bench::Idle(measure) => (idle::run(measure)?, measure),
    };
    print_report(&report, measure.output, measure.save.as_deref())
}

fn print_report(report: &Report, format: Output, save: Option<&Path>) -> anyhow::Result<()> {
    match format {
        Output::Json => output::print_text(&report.json())?,
        Output::Table => output::print_text(&report.text())?,
    }
    if let Some(dir) = save {
        for path in report.save(dir)? {
            eprintln!("wrote {}", path.display());
        }
    }
    Ok(())
}
