//! Random writes to a volume, alone and while the same bricks free the versions of a snapshot of another one.

use super::taker::step_error;
use super::{MeasuredVolume, SnapshotsArgs, fill, write_percent};
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::Space;
use pagemesh_bench::load::{LoadWorker, RequestMix, RunLimit};
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, compare};
use std::cell::{Cell, RefCell};

/// Bytes of the volume that is written meanwhile.
const WRITTEN_BYTES: u64 = 256 << 20;

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let measured = MeasuredVolume::start(args, WRITTEN_BYTES, args.size.0 / 16)?;
    let name: VolumeName = "written".parse()?;
    let scratch = &measured.scratch;
    scratch.create_sized_volume(&name, WRITTEN_BYTES, args.copies)?;
    let written = scratch.attach(&name, args.transport)?;
    fill(&written)?;
    let mut worker = LoadWorker::open(&written, &RequestMix::default(), 0, 1)?;
    worker.run(RunLimit::Operations(written.size_bytes() / 4096))?;
    let worker = RefCell::new(worker);
    let seed = Cell::new(1);
    let snapshot = RefCell::new(String::new());
    let taker = &measured.taker;
    let write = || {
        let result = worker
            .borrow_mut()
            .run(RunLimit::Time(args.measure.runtime()))?;
        Ok(CaseSample::of_load(&result))
    };
    let mut cases = [
        ComparedCase::new("a snapshot with 1 % of changes", || {
            *snapshot.borrow_mut() = taker.create().map_err(step_error)?;
            seed.set(seed.get() + 1);
            write_percent(&measured.volume, seed.get())?;
            write()
        }),
        ComparedCase::new("while the snapshot is deleted", || {
            taker.delete(&snapshot.borrow()).map_err(step_error)?;
            let sample = write()?;
            taker.delete_all().map_err(step_error)?;
            Ok(sample)
        }),
    ];
    let title = "4 KiB random writes beside a volume whose snapshot is deleted";
    let texts = measured.texts(title, "writes", "1/s");
    let report = compare(&texts, args.measure.rounds, &mut cases)?;
    drop(cases);
    Ok(report)
}
