//! An incremental stream of the changes between two snapshots, and a plain copy of as many bytes.

use super::taker::step_error;
use super::{MeasuredVolume, SnapshotsArgs, write_percent};
use crate::args::{ManagerArgs, Output, Transport};
use crate::commands::snapshot::send::{SendArgs, send};
use crate::commands::snapshot::space_io::SpaceIo;
use anyhow::{Context, ensure};
use pagemesh_base::space::Space;
use pagemesh_bench::report::Report;
use pagemesh_bench::snapshots::{CaseSample, ComparedCase, compare};
use std::cell::Cell;
use std::fs::File;
use std::io::{IntoInnerError, Write};
use std::path::Path;
use std::time::Instant;

/// Bytes of a read of the copy. Random pages cost a program a read each, too.
const COPY_BLOCK_BYTES: u32 = 4096;

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
        let sent = send(&send_args(&measured, (&from, &to), &path)?)?;
        let took = began.elapsed();
        std::fs::remove_file(&path).context("cannot remove the stream")?;
        changed.set(sent.changed_bytes);
        let stream = sent.stream.context("nothing was sent")?;
        sent_bytes.set(stream.stream_bytes);
        let whole = stream.data_bytes + stream.zero_bytes;
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
         of {}; both files are synced",
        changed.get(),
        sent_bytes.get()
    ));
    Ok(report)
}

fn send_args(
    measured: &MeasuredVolume,
    (from, to): (&str, &str),
    path: &Path,
) -> anyhow::Result<SendArgs> {
    let (name, scratch) = (&measured.taker.name, &measured.scratch);
    Ok(SendArgs {
        snapshot: format!("{name}@{to}").parse()?,
        from: Some(format!("{name}@{from}").parse()?),
        to: path.to_owned(),
        compress: false,
        rate: None,
        resume: None,
        dry_run: false,
        transport: Transport::Auto,
        client: ManagerArgs {
            manager: scratch.cluster.url.clone(),
            key: Some(scratch.dir.path().join("key")),
            token_file: None,
            output: Output::Json,
        },
    })
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
    let file = file.into_inner().map_err(IntoInnerError::into_error)?;
    file.sync_all()?;
    Ok(())
}
