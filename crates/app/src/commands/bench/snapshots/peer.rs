//! Random writes after a snapshot, to a volume and to a qcow2 image of QEMU, each by way of its own library.

use super::taker::step_error;
use super::{MeasuredVolume, SnapshotsArgs};
use anyhow::{Context, ensure};
use pagemesh_bench::load::{LoadWorker, RequestMix, RunLimit};
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, compare};
use std::cell::Cell;
use std::path::Path;
use std::process::Command;

/// Writes of one measurement: one for each so many pages, so most of them are the first to their cluster of 64 KiB.
const PAGES_PER_WRITE: u64 = 16;
/// From one write of `qemu-img bench` to the next: an odd number of pages, so that writes are spread over the image.
const STEP_PAGES: u64 = 40_503;
const TOOL: &str = "qemu-img";

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let measured = MeasuredVolume::start(args, 0, args.size.0)?;
    let images = tempfile::tempdir_in(&args.measure.pools)?;
    let image = images.path().join("image");
    let size = args.size.0.to_string();
    qemu_img(&["create", "-q", "-f", "qcow2"], &image, &[&size])?;
    let blocks = (args.size.0 >> 20).to_string();
    bench_writes(&image, &["-s", "1M", "-c", &blocks])?;
    let writes = args.size.0 / 4096 / PAGES_PER_WRITE;
    let mut worker = LoadWorker::open(&*measured.volume, &RequestMix::default(), 0, 1)?;
    let taken = Cell::new(0);
    let mut cases = [
        ComparedCase::new("qcow2", || {
            taken.set(taken.get() + 1);
            write_image(&image, taken.get(), writes).map_err(step_error)
        }),
        ComparedCase::new("pagemesh", || {
            measured.taker.create().map_err(step_error)?;
            let result = worker.run(RunLimit::Operations(writes))?;
            measured.taker.delete_all().map_err(step_error)?;
            Ok(CaseSample::of_load(&result))
        }),
    ];
    let title = "4 KiB random writes after a snapshot";
    let texts = measured.texts(title, "writes", "1/s");
    let mut report = compare(&texts, args.measure.rounds, &mut cases)?;
    drop(cases);
    report.add_note(
        "qcow2: qemu-img bench, one request at a time, cached by the host and not flushed, one copy; pagemesh: durable as \
         the class of its pools says",
    );
    Ok(report)
}

/// Takes a snapshot of the image, writes, and deletes the snapshot.
fn write_image(image: &Path, number: u64, writes: u64) -> anyhow::Result<CaseSample> {
    let name = format!("s{number}");
    qemu_img(&["snapshot", "-q", "-c", &name], image, &[])?;
    let (count, step) = (writes.to_string(), (STEP_PAGES * 4096).to_string());
    let text = bench_writes(image, &["-s", "4096", "-S", &step, "-c", &count])?;
    qemu_img(&["snapshot", "-q", "-d", &name], image, &[])?;
    let seconds = text
        .split("completed in ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok())
        .with_context(|| format!("{TOOL} bench printed no time: {text}"))?;
    Ok(CaseSample {
        per_s: writes as f64 / seconds,
        ..CaseSample::default()
    })
}

/// Writes to an image by `qemu-img bench`, one request at a time, and returns its text.
fn bench_writes(image: &Path, requests: &[&str]) -> anyhow::Result<String> {
    let options = ["bench", "-w", "-f", "qcow2", "-t", "writeback", "-d", "1"];
    qemu_img(&[&options, requests].concat(), image, &[])
}

fn qemu_img(before: &[&str], image: &Path, after: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(TOOL)
        .args(before)
        .arg(image)
        .args(after)
        .output()
        .with_context(|| format!("cannot start {TOOL}; install qemu-utils"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{TOOL} {before:?} failed: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
