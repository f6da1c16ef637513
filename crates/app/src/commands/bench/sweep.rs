//! Requests to a mirrored volume, over the number of readers and over the block size.

use crate::args::Transport;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::ScratchCluster;
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::report::Report;
use pagemesh_bench::{ramp, sweep, table};
use std::time::Duration;

/// A measurement over one transport.
#[derive(Args)]
pub struct SweepArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
}

fn sweep_options(
    measure: &MeasureArgs,
    class: String,
    transport: Transport,
) -> sweep::SweepOptions {
    // In the other classes a write is durable when it is acknowledged.
    let durable = class == "file-sync";
    let over = match (transport, durable) {
        (Transport::Auto, false) | (Transport::Map, _) => "map",
        _ => "tcp",
    };
    sweep::SweepOptions {
        durable,
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds),
        class,
        space: format!("a volume mirrored over {over}"),
        ..sweep::SweepOptions::default()
    }
}

/// Reads by a growing number of readers.
pub fn ramp(args: &SweepArgs) -> anyhow::Result<Report> {
    let (measure, transport) = (&args.measure, args.transport);
    let scratch = ScratchCluster::start(measure, 2, 1)?;
    let name: VolumeName = "ramp".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, transport)?;
    let options = ramp::RampOptions {
        sweep_options: sweep_options(measure, class, transport),
        ..ramp::RampOptions::default()
    };
    Ok(ramp::run_ramp(&volume, &mut scratch.brick_cpu(), &options)?)
}

/// Reads and writes of several block sizes.
pub fn table(args: &SweepArgs) -> anyhow::Result<Report> {
    let (measure, transport) = (&args.measure, args.transport);
    let scratch = ScratchCluster::start(measure, 2, 1)?;
    let name: VolumeName = "table".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, transport)?;
    let options = table::TableOptions {
        sweep_options: sweep_options(measure, class, transport),
        ..table::TableOptions::default()
    };
    Ok(table::run_table(
        &volume,
        &mut scratch.brick_cpu(),
        &options,
    )?)
}
