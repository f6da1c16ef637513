//! CPU time of an idle cluster.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::ScratchCluster;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::idle;
use pagemesh_bench::report::Report;
use std::time::Duration;

/// Wait for the background work of earlier phases.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// Runs the benchmark.
pub fn run(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 3, 1)?;
    let name: VolumeName = "idle".parse()?;
    let class = scratch.create_volume(&name)?;
    let (exporter, _) = scratch.export(&name, "map")?;
    std::thread::sleep(SETTLE_TIME);
    let mut cluster = scratch.cluster.pids();
    // This process supervises the others as `up` does.
    cluster.push(std::process::id());
    let group = |name: &str, pids| idle::ProcessGroup {
        name: name.into(),
        pids,
    };
    let groups = [
        group("3 bricks, manager, up", cluster),
        group("export", vec![exporter.0.id()]),
    ];
    let options = idle::IdleOptions {
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds),
        class,
    };
    Ok(idle::run_idle(&groups, &options)?)
}
