//! Random synchronous writes to a file by a program on the direct path, without snapshots and while they are taken.

use super::taker::{ManagerSnapshots, step_error};
use super::writes::durations;
use super::{KEPT_BYTES_PER_S, SnapshotsArgs};
use crate::commands::bench::mounts::{DIRECT_THREADS, MountServing, MountSpec, exec_prefix};
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use anyhow::Context;
use pagemesh_bench::BenchError;
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{
    ComparedCase, ComparisonTexts, SnapshotTaker, compare, fill_file, measure_file_writes,
    with_snapshots,
};
use serde::Deserialize;
use std::cell::RefCell;
use std::path::Path;

/// The part of the file system that the file leaves free: inodes and tables.
const SPARE_DIVISOR: u64 = 8;
const NAME: &str = "files";

/// The report of one program under `exec`, as far as this needs it.
#[derive(Clone, Copy, Default, Deserialize)]
struct ProgramReport {
    direct: u64,
    kernel: u64,
}

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let (copies, size_bytes) = (args.copies, args.size.0);
    let kept_bytes = KEPT_BYTES_PER_S * args.measure.seconds;
    let pool_bytes = size_bytes + size_bytes / 64 + SPARE_BYTES + kept_bytes;
    let scratch = ScratchCluster::with_pools(&args.measure, copies, copies, pool_bytes)?;
    let spec = MountSpec {
        size_bytes,
        serving: MountServing::auto(DIRECT_THREADS),
    };
    let (_daemon, mut place) = scratch.mount(NAME, copies as usize, "map", &spec)?;
    let file_bytes = (size_bytes - size_bytes / SPARE_DIVISOR) >> 20 << 20;
    fill_file(&place, file_bytes)?;
    let reports = scratch.dir.path().join("programs.json");
    place.prefix = prefix_with_report(&reports)?;
    let taker = ManagerSnapshots::new(
        scratch.manager_client()?,
        NAME.parse()?,
        size_bytes * u64::from(copies),
    );
    let took = RefCell::new(Vec::new());
    // Those before a program joins the mount use the kernel in both cases.
    let counts = RefCell::new([ProgramReport::default(); 2]);
    let write = || measure_file_writes(&place, file_bytes, args.measure.runtime());
    let counted = |case: usize, before: ProgramReport| -> anyhow::Result<()> {
        let after = read_reports(&reports)?;
        let mut counts = counts.borrow_mut();
        counts[case].direct += after.direct - before.direct;
        counts[case].kernel += after.kernel - before.kernel;
        Ok(())
    };
    let read = || read_reports(&reports).map_err(step_error);
    let mut cases = [
        ComparedCase::new("no snapshot", || {
            let before = read()?;
            let sample = write()?;
            counted(0, before).map_err(step_error)?;
            Ok(sample)
        }),
        ComparedCase::new(format!("one each {} ms", args.interval_ms), || {
            let before = read()?;
            let (sample, times) = with_snapshots(&taker, args.interval(), write)?;
            counted(1, before).map_err(step_error)?;
            took.borrow_mut().extend(times);
            taker.drop_all().map_err(BenchError::Mount)?;
            Ok(sample)
        }),
    ];
    let texts = ComparisonTexts {
        title: "4 KiB random writes to a file on the direct path, while snapshots are taken",
        class: &place.class,
        operations: "writes",
        unit: "1/s",
    };
    let mut report = compare(&texts, args.measure.rounds, &mut cases)?;
    drop(cases);
    report.add_note(durations(&took.into_inner()));
    let [without, with] = counts.into_inner();
    report.add_note(format!(
        "of the operations, {} of {} used the kernel without snapshots, and {} of {} with them",
        without.kernel,
        without.kernel + without.direct,
        with.kernel,
        with.kernel + with.direct
    ));
    Ok(report)
}

/// The prefix of programs on the direct path that append to a file of reports.
fn prefix_with_report(reports: &Path) -> anyhow::Result<Vec<String>> {
    let mut prefix = exec_prefix()?;
    let path = reports.to_str().context("a scratch path is no text")?;
    let options = [format!("--report={path}"), "--output=json".to_owned()];
    prefix.splice(2..2, options);
    Ok(prefix)
}

/// The sum of all reports.
fn read_reports(path: &Path) -> anyhow::Result<ProgramReport> {
    let text = match std::fs::read_to_string(path) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let mut sum = ProgramReport::default();
    for line in text.lines() {
        let one: ProgramReport = serde_json::from_str(line)
            .with_context(|| format!("{} has no report: {line}", path.display()))?;
        sum.direct += one.direct;
        sum.kernel += one.kernel;
    }
    Ok(sum)
}
