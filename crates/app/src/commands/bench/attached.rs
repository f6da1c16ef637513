//! Many attached volumes on the same bricks.

use crate::args::Transport;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster, VOLUME_BYTES};
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::attached::{AttachedOptions, IdleVolumes, run_attached};
use pagemesh_bench::report::Report;
use pagemesh_manage::wire::{CreateVolume, VolumeContent};
use pagemesh_manage::{LayoutKind, TierPolicy};
use pagemesh_volume::Volume;
use std::error::Error;

/// Bytes of an idle volume.
const IDLE_BYTES: u64 = 1 << 20;

/// Latency of writes to one mirrored volume, alone and while both its bricks serve many idle volumes.
#[derive(Args)]
pub struct AttachedArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Number of idle volumes. Each uses a session of both pools.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=4000))]
    pub volumes: u32,
    /// Transport of all volumes.
    #[arg(long, value_enum, default_value = "tcp")]
    pub transport: Transport,
}

/// Runs the benchmark.
pub fn run(args: &AttachedArgs) -> anyhow::Result<Report> {
    let idle_bytes = u64::from(args.volumes) * IDLE_BYTES;
    let size_bytes = VOLUME_BYTES + SPARE_BYTES + idle_bytes;
    let sessions = args.volumes + SPARE_SESSIONS;
    let scratch = ScratchCluster::with_sessions(&args.measure, (2, 2), size_bytes, Some(sessions))?;
    let name: VolumeName = "measured".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, args.transport)?;
    let mut idle = AttachedVolumes {
        scratch: &scratch,
        transport: args.transport,
        names: (0..args.volumes)
            .map(|number| format!("idle-{number}").parse())
            .collect::<Result<_, _>>()?,
        attached: Vec::new(),
    };
    idle.create()?;
    let options = AttachedOptions {
        rounds: args.measure.rounds,
        runtime: args.measure.runtime(),
        idle_volumes: args.volumes as usize,
        class,
    };
    Ok(run_attached(&volume, &mut idle, &options)?)
}

/// Sessions for the measured volume, and for the control connections of the manager.
const SPARE_SESSIONS: u32 = 64;

struct AttachedVolumes<'s> {
    scratch: &'s ScratchCluster,
    transport: Transport,
    names: Vec<VolumeName>,
    attached: Vec<Volume>,
}

impl AttachedVolumes<'_> {
    fn create(&self) -> anyhow::Result<()> {
        let client = self.scratch.manager_client()?;
        for name in &self.names {
            client.create(&CreateVolume {
                name: name.clone(),
                size_bytes: IDLE_BYTES,
                layout: LayoutKind::Mirror,
                columns: None,
                copies: None,
                durability: None,
                content: VolumeContent::Blocks,
                tier: TierPolicy::Auto,
                received: false,
            })?;
        }
        Ok(())
    }
}

impl IdleVolumes for AttachedVolumes<'_> {
    fn attach(&mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        for name in &self.names {
            let volume = self.scratch.attach(name, self.transport);
            self.attached
                .push(volume.map_err(anyhow::Error::into_boxed_dyn_error)?);
        }
        Ok(())
    }

    fn detach(&mut self) {
        for volume in self.attached.drain(..) {
            volume.detach();
        }
    }
}
