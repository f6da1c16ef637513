//! Random writes to a volume, without snapshots and while they are taken.

use super::{KEPT_BYTES_PER_S, MeasuredVolume, SnapshotsArgs};
use pagemesh_base::space::Space;
use pagemesh_bench::BenchError;
use pagemesh_bench::load::{LoadWorker, RequestMix, RunLimit};
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, SnapshotTaker, compare, with_snapshots};
use pagemesh_bench::stats::median;
use std::cell::RefCell;
use std::time::Duration;

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let measured = MeasuredVolume::start(args, 0, KEPT_BYTES_PER_S * args.measure.seconds)?;
    let mut worker = LoadWorker::open(&*measured.volume, &RequestMix::default(), 0, 1)?;
    // Sessions hold as many free frames as they will.
    worker.run(RunLimit::Operations(measured.volume.size_bytes() / 4096))?;
    let worker = RefCell::new(worker);
    let took = RefCell::new(Vec::new());
    let write = || {
        worker
            .borrow_mut()
            .run(RunLimit::Time(args.measure.runtime()))
    };
    let taker: &dyn SnapshotTaker = &measured.taker;
    let mut cases = [
        ComparedCase::new("no snapshot", || Ok(CaseSample::of_load(&write()?))),
        ComparedCase::new(format!("one each {} ms", args.interval_ms), || {
            let (result, times) = with_snapshots(taker, args.interval(), write)?;
            took.borrow_mut().extend(times);
            taker.drop_all().map_err(BenchError::Mount)?;
            Ok(CaseSample::of_load(&result))
        }),
    ];
    let title = "4 KiB random writes to a volume, while snapshots are taken";
    let texts = measured.texts(title, "writes", "1/s");
    let mut report = compare(&texts, args.measure.rounds, &mut cases)?;
    drop(cases);
    report.add_note(durations(&took.into_inner()));
    Ok(report)
}

/// The durations of snapshots, for a report.
pub(super) fn durations(took: &[Duration]) -> String {
    let us: Vec<f64> = took.iter().map(|it| it.as_secs_f64() * 1e6).collect();
    let longest = us.iter().copied().fold(0.0, f64::max);
    format!(
        "a snapshot took {:.0} µs (median of {}; the longest: {longest:.0} µs)",
        median(&us).unwrap_or_default(),
        us.len()
    )
}
