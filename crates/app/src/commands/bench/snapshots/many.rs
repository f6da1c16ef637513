//! Writes, recovery and the memory of the manager, with one snapshot of a volume and with many.

use super::taker::step_error;
use super::{MeasuredVolume, SnapshotsArgs};
use crate::cluster::pool_path;
use crate::commands::bench::recovery;
use anyhow::Context;
use pagemesh_bench::load::{LoadWorker, RequestMix, RunLimit};
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, compare};
use pagemesh_bench::stats::{median, median_ratio};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;

/// Writes between two snapshots.
const WRITES_BETWEEN: u64 = 16;
/// Snapshots between two lines of progress.
const PROGRESS_SNAPSHOTS: u32 = 1000;

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let kept_bytes = args.size.0 + u64::from(args.snapshots) * WRITES_BETWEEN * 2 * 4096;
    let one = MeasuredVolume::start(args, 0, kept_bytes)?;
    take(&one, 1)?;
    let many = MeasuredVolume::start(args, 0, kept_bytes)?;
    take(&many, args.snapshots)?;
    let mut cases = [
        writes("1 snapshot", &one, args)?,
        writes(&format!("{} snapshots", args.snapshots), &many, args)?,
    ];
    let title = "4 KiB random writes to a volume with many snapshots";
    let texts = one.texts(title, "writes", "1/s");
    let mut report = compare(&texts, args.measure.rounds, &mut cases)?;
    drop(cases);
    let memory = [&one, &many].map(manager_memory);
    let [of_one, of_many] = memory;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    report.add_note(format!(
        "memory of the manager: {:.1} MiB with one snapshot, {:.1} MiB with many",
        mib(of_one?),
        mib(of_many?)
    ));
    kill_bricks(&one)?;
    kill_bricks(&many)?;
    let mut recoveries = [Vec::new(), Vec::new()];
    let mut records = [0, 0];
    for _ in 0..args.measure.rounds {
        for (number, measured) in [&one, &many].into_iter().enumerate() {
            let (took_ms, replayed) = recover_copy(&pool_path(measured.scratch.pools.path(), 1))?;
            recoveries[number].push(took_ms);
            records[number] = replayed;
        }
    }
    let [of_one, of_many] = records;
    let ratio = median_ratio(&recoveries[1], &recoveries[0]).unwrap_or_default();
    report.add_note(format!(
        "recovery after the bricks were killed: {:.1} ms and {of_one} records with one snapshot, {ratio:.2} × as long and {of_many} \
         records with many: {:.2} × for each record",
        median(&recoveries[0]).unwrap_or_default(),
        ratio * of_one as f64 / of_many.max(1) as f64
    ));
    Ok(report)
}

/// Takes snapshots, with a few writes before each.
fn take(measured: &MeasuredVolume, count: u32) -> anyhow::Result<()> {
    let mix = RequestMix {
        seed: 11,
        ..RequestMix::default()
    };
    let mut worker = LoadWorker::open(&*measured.volume, &mix, 0, 1)?;
    for number in 1..=count {
        worker.run(RunLimit::Operations(WRITES_BETWEEN))?;
        measured.taker.create().map_err(step_error)?;
        if number % PROGRESS_SNAPSHOTS == 0 {
            eprintln!("{number} of {count} snapshots are taken");
        }
    }
    Ok(())
}

fn writes<'c>(
    name: &str,
    measured: &'c MeasuredVolume,
    args: &'c SnapshotsArgs,
) -> anyhow::Result<ComparedCase<'c>> {
    let mut worker = LoadWorker::open(&*measured.volume, &RequestMix::default(), 0, 1)?;
    // Most pages are replaced once after the last snapshot.
    worker.run(RunLimit::Operations(args.size.0 / 4096 * 2))?;
    Ok(ComparedCase::new(name, move || {
        let result = worker.run(RunLimit::Time(args.measure.runtime()))?;
        Ok(CaseSample::of_load(&result))
    }))
}

fn manager_memory(measured: &MeasuredVolume) -> anyhow::Result<u64> {
    let pids = measured.scratch.cluster.pids();
    let manager = pids.first().context("the cluster has no manager")?;
    recovery::anonymous_bytes(*manager)
}

fn kill_bricks(measured: &MeasuredVolume) -> anyhow::Result<()> {
    for pid in measured.scratch.cluster.brick_pids() {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("a brick has no process id")?;
        kill_process(pid, Signal::KILL).context("cannot kill a brick")?;
    }
    Ok(())
}

/// Recovers a copy of a pool, so that each round finds the same. Returns the milliseconds, and the records that it replayed.
fn recover_copy(pool: &Path) -> anyhow::Result<(f64, u64)> {
    let copy = pool.with_extension("copy");
    std::fs::copy(pool, &copy).with_context(|| format!("cannot copy {}", pool.display()))?;
    let (took, (_, summary)) = recovery::recover(&copy)?;
    std::fs::remove_file(&copy).context("cannot remove the copy of a pool")?;
    Ok((took.as_secs_f64() * 1e3, summary.records))
}
