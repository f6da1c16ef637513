//! Write amplification of a pool on a disk.

use crate::args::Transport;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::ScratchCluster;
use anyhow::bail;
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::units::Size;
use pagemesh_bench::amplification::{AmplificationOptions, FilledVolume, run_amplification};
use pagemesh_bench::report::Report;
use pagemesh_brick::resource_limits;
use pagemesh_manage::wire::{CreateVolume, VolumeContent};
use pagemesh_manage::{LayoutKind, TierPolicy};

/// Bytes that a pool on a disk writes for each byte of a user, random writes of 4 KiB, by the part of the pool that
/// is in use. Name a directory on a disk with --pools.
#[derive(Args)]
pub struct AmplificationArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Bytes of the pool of each case.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// Parts of the pool that the volume fills, in percent; each value is a case.
    #[arg(long, value_delimiter = ',', default_values_t = [50, 80], value_parser = clap::value_parser!(u64).range(1..=90))]
    pub fill: Vec<u64>,
    /// Queue depths.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32], value_parser = clap::value_parser!(u32).range(1..=256))]
    pub depths: Vec<u32>,
}

/// Runs the benchmark.
pub fn run(args: &AmplificationArgs) -> anyhow::Result<Report> {
    let pools = &args.measure.pools;
    if resource_limits::is_memory(pools) {
        bail!(
            "{} is in memory; name a directory on a disk with --pools",
            pools.display()
        );
    }
    let mut served = Vec::new();
    for &percent in &args.fill {
        let scratch = ScratchCluster::with_pools(&args.measure, 1, 0, args.size.0)?;
        let client = scratch.manager_client()?;
        let name: VolumeName = "filled".parse()?;
        let capacity: u64 = client.status()?.capacity_bytes;
        let created = client.create(&CreateVolume {
            name: name.clone(),
            size_bytes: (capacity * percent / 100) >> 20 << 20,
            layout: LayoutKind::Concat,
            columns: None,
            copies: None,
            durability: None,
            content: VolumeContent::Blocks,
            tier: TierPolicy::Auto,
            received: false,
        })?;
        let class = created.volume.info.durability.to_string();
        let volume = scratch.attach(&name, Transport::Tcp)?;
        served.push((percent, class, volume, scratch));
    }
    let volumes: Vec<FilledVolume<'_>> = served
        .iter()
        .map(|(fill_percent, _, volume, scratch)| FilledVolume {
            space: volume,
            fill_percent: *fill_percent,
            copies: 1,
            pids: scratch.cluster.brick_pids(),
        })
        .collect();
    let options = AmplificationOptions {
        rounds: args.measure.rounds,
        runtime: args.measure.runtime(),
        depths: args.depths.iter().map(|&depth| depth as usize).collect(),
        class: served
            .first()
            .map_or(String::new(), |(_, class, ..)| class.clone()),
    };
    Ok(run_amplification(&volumes, &options)?)
}
