//! The cost of snapshots, case by case.

mod deletion;
mod files;
mod many;
mod media;
mod peer;
mod reads;
mod sends;
mod taker;
mod writes;

use crate::args::Transport;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use crate::snapshot_cuts;
use clap::{Args, ValueEnum};
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::Space;
use pagemesh_base::units::Size;
use pagemesh_bench::BenchError;
use pagemesh_bench::load::{self, LoadWorker, RequestMix, RunLimit};
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::ComparisonTexts;
use pagemesh_volume::Volume;
use std::sync::Arc;
use std::time::Duration;
use taker::ManagerSnapshots;

/// Versions that snapshots keep during one second of writes.
const KEPT_BYTES_PER_S: u64 = 3 << 30;

/// A case of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SnapshotCase {
    /// Writes to a volume, without snapshots and with one each interval.
    Writes,
    /// The same on the direct path to a file.
    Files,
    /// Writes and recovery with many snapshots and with one.
    Many,
    /// Bytes to media for each user byte, and metadata of kept versions.
    Media,
    /// Reads of a volume, a snapshot of it, and a clone.
    Reads,
    /// Writes while a snapshot with changes of 1 % is deleted.
    Deletion,
    /// An incremental stream of 1 % changed pages, and a copy of as many bytes.
    Sends,
    /// Writes after a snapshot, and writes to a qcow2 image after one.
    Peer,
}

/// The cost of snapshots, on a volume of a scratch cluster.
#[derive(Args)]
pub struct SnapshotsArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Case.
    #[arg(long, value_enum, default_value = "writes")]
    pub case: SnapshotCase,
    /// Bytes of the volume.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// Copies of the volume.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub copies: u32,
    /// Milliseconds from one snapshot to the next.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub interval_ms: u64,
    /// Snapshots of the case with many.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=60_000))]
    pub snapshots: u32,
    /// Transport of the volume.
    #[arg(long, value_enum, default_value = "map")]
    pub transport: Transport,
}

impl SnapshotsArgs {
    fn interval(&self) -> Duration {
        Duration::from_millis(self.interval_ms)
    }
}

/// Runs the benchmark.
pub fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    match args.case {
        SnapshotCase::Writes => writes::run(args),
        SnapshotCase::Files => files::run(args),
        SnapshotCase::Many => many::run(args),
        SnapshotCase::Media => media::run(args),
        SnapshotCase::Reads => reads::run(args),
        SnapshotCase::Deletion => deletion::run(args),
        SnapshotCase::Sends => sends::run(args),
        SnapshotCase::Peer => peer::run(args),
    }
}

/// A volume of a scratch cluster whose snapshots this process cuts.
struct MeasuredVolume {
    class: String,
    // In drop order.
    volume: Arc<Volume>,
    taker: ManagerSnapshots,
    scratch: ScratchCluster,
}

impl MeasuredVolume {
    /// Starts a cluster with room for the volume and for so many bytes of other volumes and of versions, writes the whole volume, and
    /// attaches it.
    fn start(
        args: &SnapshotsArgs,
        other_bytes: u64,
        kept_bytes: u64,
    ) -> anyhow::Result<MeasuredVolume> {
        let pool_bytes = args.size.0 + args.size.0 / 64 + other_bytes + SPARE_BYTES + kept_bytes;
        let copies = args.copies;
        let live_bytes = (args.size.0 + other_bytes) * u64::from(copies);
        let scratch = ScratchCluster::with_pools(&args.measure, copies, copies, pool_bytes)?;
        let name: VolumeName = "snapshots".parse()?;
        let class = scratch.create_sized_volume(&name, args.size.0, copies)?;
        let volume = Arc::new(scratch.attach(&name, args.transport)?);
        let client = scratch.manager_client()?;
        snapshot_cuts::serve(&client, &[(name.clone(), Arc::downgrade(&volume))])?;
        fill(&volume)?;
        Ok(MeasuredVolume {
            class,
            volume,
            taker: ManagerSnapshots::new(client, name, live_bytes),
            scratch,
        })
    }

    fn texts<'t>(
        &'t self,
        title: &'t str,
        operations: &'t str,
        unit: &'t str,
    ) -> ComparisonTexts<'t> {
        ComparisonTexts {
            title,
            class: &self.class,
            operations,
            unit,
        }
    }
}

/// Writes all of a volume once, in order.
fn fill(volume: &Volume) -> Result<(), BenchError> {
    load::fill(volume, volume.size_bytes())
}

/// Writes 1 % of the pages of a volume, spread over all of it.
fn write_percent(volume: &Volume, seed: u64) -> Result<u64, BenchError> {
    let pages = volume.size_bytes() / 4096;
    let mix = RequestMix {
        seed,
        ..RequestMix::default()
    };
    let mut worker = LoadWorker::open(volume, &mix, 0, 1)?;
    let result = worker.run(RunLimit::Operations(pages / 100))?;
    Ok(result.bytes)
}
