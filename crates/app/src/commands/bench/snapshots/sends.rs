//! An incremental stream of the changes between two snapshots, and a plain copy of as many bytes.

use super::taker::step_error;
use super::{MeasuredVolume, SnapshotsArgs, write_percent};
use crate::commands::snapshot::space_io::SpaceIo;
use anyhow::{Context, ensure};
use pagemesh_base::space::Space;
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, compare};
use serde::Deserialize;
use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Bytes of a read of the copy. Random pages cost a program a read each, too.
const COPY_BLOCK_BYTES: u32 = 4096;

/// The result of `snapshot send`, as far as this needs it.
#[derive(Deserialize)]
struct Sent {
    changed_bytes: u64,
    stream: SentStream,
}

#[derive(Deserialize)]
struct SentStream {
    data_bytes: u64,
    zero_bytes: u64,
    stream_bytes: u64,
}

pub(super) fn run(args: &SnapshotsArgs) -> anyhow::Result<Report> {
    let measured = MeasuredVolume::start(args, 0, args.size.0 / 4)?;
    let taker = &measured.taker;
    let from = taker.create().map_err(step_error)?;
    let written = write_percent(&measured.volume, 7)?;
    let to = taker.create().map_err(step_error)?;
    let files = tempfile::tempdir_in(&args.measure.pools)?;
    let (changed, sent_bytes) = (Cell::new(0), Cell::new(0));
    let send = || -> anyhow::Result<CaseSample> {
        let path = files.path().join("stream");
        let began = Instant::now();
        let sent = send(&measured, (&from, &to), &path)?;
        let took = began.elapsed();
        std::fs::remove_file(&path).context("cannot remove the stream")?;
        changed.set(sent.changed_bytes);
        sent_bytes.set(sent.stream.stream_bytes);
        let whole = sent.stream.data_bytes + sent.stream.zero_bytes;
        ensure!(whole == sent.changed_bytes, "the stream lacks changes");
        Ok(CaseSample::of_time(sent.changed_bytes >> 10, took))
    };
    let copy = || -> anyhow::Result<CaseSample> {
        let path = files.path().join("copy");
        let began = Instant::now();
        copy(&*measured.volume, written, &path)?;
        let took = began.elapsed();
        std::fs::remove_file(&path).context("cannot remove the copy")?;
        Ok(CaseSample::of_time(written >> 10, took))
    };
    let mut cases = [
        ComparedCase::new("a copy of as many pages", || copy().map_err(step_error)),
        ComparedCase::new("snapshot send", || send().map_err(step_error)),
    ];
    let title = "the changes of 1 % of a volume between two snapshots, into a file";
    let texts = measured.texts(title, "changes", "KiB/s");
    let mut report = compare(&texts, args.measure.rounds, &mut cases)?;
    drop(cases);
    report.add_note(format!(
        "{written} bytes were written between the snapshots, some pages twice; {} bytes were sent as changed, in a stream \
         of {}; the time of `snapshot send` has the start of its process",
        changed.get(),
        sent_bytes.get()
    ));
    Ok(report)
}

fn send(measured: &MeasuredVolume, (from, to): (&str, &str), path: &Path) -> anyhow::Result<Sent> {
    let (name, scratch) = (&measured.taker.name, &measured.scratch);
    let output = Command::new(std::env::current_exe()?)
        .args(["snapshot", "send", &format!("{name}@{to}")])
        .args(["--from", &format!("{name}@{from}"), "--to"])
        .arg(path)
        .args(["--output", "json", "--manager", &scratch.cluster.url])
        .arg("--key")
        .arg(scratch.dir.path().join("key"))
        .output()
        .context("cannot start `snapshot send`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`snapshot send` failed: {said}");
    serde_json::from_slice(&output.stdout).context("`snapshot send` printed no result")
}

/// Reads so many bytes, spread over the volume, and writes them to a file.
fn copy(volume: &dyn Space, bytes: u64, path: &Path) -> anyhow::Result<()> {
    let mut reader = SpaceIo::open(volume)?;
    let mut file = std::io::BufWriter::new(File::create_new(path)?);
    let block = u64::from(COPY_BLOCK_BYTES);
    let blocks = bytes / block;
    let stride = (volume.size_bytes() / block / blocks.max(1)).max(1) * block;
    for number in 0..blocks {
        file.write_all(&reader.read(number * stride, COPY_BLOCK_BYTES)?)?;
    }
    file.flush()?;
    Ok(())
}
