//! Writes to a mirrored volume while snapshots of it are taken.

use crate::args::Transport;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster, VOLUME_BYTES};
use crate::snapshot_cuts;
use anyhow::Context;
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{SnapshotOptions, SnapshotTaker, run_snapshots};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::CreateSnapshot;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Versions that snapshots keep during one measurement, for each second of it.
const KEPT_BYTES_PER_S: u64 = 2 << 30;
/// The limit of the wait for the space of dropped snapshots.
const SPACE_LIMIT: Duration = Duration::from_secs(120);
/// The pools are as before once so much is in use beyond: sessions hold frames, and tables of versions stay.
const SPACE_SLACK: u64 = 256 << 20;

/// 4 KiB random writes to a mirrored volume of 1 GiB, without snapshots and while they are taken.
#[derive(Args)]
pub struct SnapshotsArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Milliseconds from one snapshot to the next.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub interval_ms: u64,
    /// Transport of the volume.
    #[arg(long, value_enum, default_value = "map")]
    pub transport: Transport,
}

/// Runs the benchmark.
pub fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let kept_bytes = KEPT_BYTES_PER_S * args.measure.seconds;
    let pool_bytes = VOLUME_BYTES + SPARE_BYTES + kept_bytes;
    let scratch = ScratchCluster::with_pools(&args.measure, 2, 2, pool_bytes)?;
    let name: VolumeName = "snapshots".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = Arc::new(scratch.attach(&name, args.transport)?);
    let client = scratch.manager_client()?;
    snapshot_cuts::serve(&client, &[(name.clone(), Arc::downgrade(&volume))])?;
    let taker = ManagerSnapshots {
        client,
        name,
        taken: AtomicU64::new(0),
        before: OnceLock::new(),
    };
    let options = SnapshotOptions {
        rounds: args.measure.rounds,
        runtime: args.measure.runtime(),
        interval: Duration::from_millis(args.interval_ms),
        class,
    };
    Ok(run_snapshots(&*volume, &taker, &options)?)
}

/// Snapshots by way of the manager, as the command takes them.
struct ManagerSnapshots {
    client: ManagerClient,
    name: VolumeName,
    taken: AtomicU64,
    /// Bytes in use before the first snapshot.
    before: OnceLock<u64>,
}

impl ManagerSnapshots {
    fn used_bytes(&self) -> anyhow::Result<u64> {
        let bricks = self.client.bricks()?;
        Ok(bricks.iter().map(|brick| brick.used_bytes).sum())
    }

    fn create(&self) -> anyhow::Result<()> {
        if self.before.get().is_none() {
            let used = self.used_bytes()?;
            self.before.get_or_init(|| used);
        }
        let number = self.taken.fetch_add(1, Ordering::Relaxed);
        let request = CreateSnapshot {
            name: format!("s{number}").parse()?,
            labels: vec![],
        };
        self.client.create_snapshot(&self.name, &request)?;
        Ok(())
    }

    fn delete_all(&self) -> anyhow::Result<()> {
        for snapshot in self.client.snapshots(Some(&self.name), None)? {
            self.client.delete_snapshot(&self.name, &snapshot.name)?;
        }
        let began = Instant::now();
        let before = self.before.get().copied().unwrap_or(2 * VOLUME_BYTES);
        let live = before + SPACE_SLACK;
        loop {
            let used = self.used_bytes()?;
            if used <= live {
                return Ok(());
            }
            let is_late = began.elapsed() > SPACE_LIMIT;
            anyhow::ensure!(
                !is_late,
                "{used} bytes are still in use after the snapshots"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl SnapshotTaker for ManagerSnapshots {
    fn take(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        let taken = self.create().context("cannot take a snapshot");
        taken.map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn drop_all(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        let dropped = self.delete_all().context("cannot drop snapshots");
        dropped.map_err(anyhow::Error::into_boxed_dyn_error)
    }
}
