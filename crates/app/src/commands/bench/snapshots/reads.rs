//! Random reads of a volume, of a snapshot whose pages were all replaced since, and of a new clone.

use super::taker::step_error;
use super::{MeasuredVolume, SnapshotsArgs, fill};
use crate::client;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::Space;
use pagemesh_bench::BenchError;
use pagemesh_bench::load::{LoadWorker, RequestMix, RunLimit};
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, compare};
use pagemesh_manage::wire::CreateClone;

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let measured = MeasuredVolume::start(args, 0, args.size.0)?;
    let (taker, scratch) = (&measured.taker, &measured.scratch);
    let snapshot = taker.create().map_err(step_error)?;
    fill(&measured.volume)?;
    let name: VolumeName = "clone".parse()?;
    let request = CreateClone { name: name.clone() };
    taker
        .client
        .create_clone(&taker.name, &snapshot.parse()?, &request)?;
    let clone = scratch.attach(&name, args.transport)?;
    let path = format!("{}@{snapshot}", taker.name).parse()?;
    let of_snapshot = client::open_snapshot(&scratch.manager_args(), args.transport, &path)?;
    let mut cases = [
        reads("the volume", &*measured.volume, args)?,
        reads("a snapshot of it", &of_snapshot, args)?,
        reads("a clone of the snapshot", &clone, args)?,
    ];
    let title = "4 KiB random reads of a volume, a snapshot and a clone";
    let texts = measured.texts(title, "reads", "1/s");
    let report = compare(&texts, args.measure.rounds, &mut cases)?;
    Ok(report)
}

fn reads<'c>(
    name: &str,
    space: &'c dyn Space,
    args: &'c SnapshotsArgs,
) -> Result<ComparedCase<'c>, BenchError> {
    let mix = RequestMix {
        read_percent: 100,
        ..RequestMix::default()
    };
    let mut worker = LoadWorker::open(space, &mix, 0, 1)?;
    Ok(ComparedCase::new(name, move || {
        let result = worker.run(RunLimit::Time(args.measure.runtime()))?;
        Ok(CaseSample::of_load(&result))
    }))
}
