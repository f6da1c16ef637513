//! Page writes and reads of a mapped volume, compared with plain copies.

use crate::args::Transport;
use crate::commands::bench::scratch::{ScratchCluster, VOLUME_BYTES};
use crate::commands::bench::{MeasureArgs, SECONDS_MAX};
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::load;
use pagemesh_bench::report::Report;
use pagemesh_bench::session::{self, RawMemory};

/// Operations of one part of a `session` round, per second of the requested time.
const SESSION_OPERATIONS_PER_S: u64 = 400_000;
const _: () = assert!(
    SESSION_OPERATIONS_PER_S.checked_mul(SECONDS_MAX).is_some(),
    "the longest measurement can be counted"
);

/// Runs the benchmark.
pub fn run(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 2, 1)?;
    let name: VolumeName = "session".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, Transport::Map)?;
    load::fill(&volume, VOLUME_BYTES)?;
    let mut raw = RawMemory::create(&measure.pools, VOLUME_BYTES as usize)?;
    let options = session::SessionOptions {
        rounds: measure.rounds,
        operations: SESSION_OPERATIONS_PER_S * measure.seconds,
        class,
        space: "a volume mirrored over map".into(),
        ..session::SessionOptions::default()
    };
    let mut cpu = scratch.brick_cpu();
    Ok(session::run_session(&volume, &mut raw, &mut cpu, &options)?)
}
