//! fio on a target: filling it, verifying it, and one cell of a row.

use super::DiskSample;
use super::rows::{DiskRow, RowDurability};
use super::targets::{DiskTarget, TargetAccess};
use crate::error::BenchError;
use crate::fio::{self, FIO_MARGIN, FioJob};
use crate::process::command_killed_with_thread;
use std::process::Command;
use std::time::Duration;

/// Bytes per second of the slowest fill or verification that is awaited.
const SLOWEST_BYTES_PER_S: u64 = 10 << 20;

/// Runs of fio before a cell fails.
const TRIES_MAX: u32 = 4;

/// Repeats a run that did not end: fio's nbd engine (3.33) sometimes waits for a reply that has
/// already arrived, with any server. An error of a request is never repeated.
fn run_again<T>(mut run: impl FnMut() -> Result<T, BenchError>) -> Result<T, BenchError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match run() {
            Err(BenchError::Unended { .. }) if tries < TRIES_MAX => {
                eprintln!("fio did not end; running it again");
            }
            other => return other,
        }
    }
}

fn limit_of(bytes: u64) -> Duration {
    FIO_MARGIN + Duration::from_secs(bytes / SLOWEST_BYTES_PER_S)
}

/// Writes the whole range once, so that no target answers from holes.
pub(super) fn fill(target: &DiskTarget, size_bytes: u64) -> Result<(), BenchError> {
    run_simple(
        target,
        size_bytes,
        &["--rw=write", "--bs=1m", "--iodepth=4"],
    )
}

/// Writes blocks in random order, reads all and compares their checksums: small blocks, then large
/// ones.
pub(super) fn verify(target: &DiskTarget, size_bytes: u64) -> Result<(), BenchError> {
    for block in ["--bs=4k", "--bs=1m"] {
        let write = ["--rw=randwrite", block, "--iodepth=16"];
        let check = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1"];
        // fio would leave a file in the current directory.
        let args = [&write[..], &check, &["--verify_state_save=0"]].concat();
        run_simple(target, size_bytes, &args)?;
    }
    Ok(())
}

fn run_simple(target: &DiskTarget, size_bytes: u64, args: &[&str]) -> Result<(), BenchError> {
    run_again(|| {
        let mut command = base_command(target, size_bytes, Engine::Queued);
        command.args(args);
        fio::run_fio(command, limit_of(2 * size_bytes))
            .and_then(|text| fio::single_job(&text).map(drop))
            .map_err(|error| fio::name_failed_place(&target.label(), error))
    })
}

/// Measures one cell.
pub(super) fn measure(
    target: &DiskTarget,
    row: &DiskRow,
    size_bytes: u64,
    runtime: Duration,
    seed: u64,
) -> Result<DiskSample, BenchError> {
    run_again(|| {
        let run = || {
            let command = row_command(target, row, size_bytes, runtime, seed);
            let text = fio::run_fio(command, runtime + FIO_MARGIN)?;
            sample_of(&fio::single_job(&text)?, row)
        };
        let (mut sample, cpu) =
            fio::measure_server_cpu(&target.pids, runtime, &target.label(), run)?;
        sample.server_cpu_percent = cpu;
        Ok(sample)
    })
}

/// How fio reaches a file.
#[derive(Clone, Copy)]
enum Engine {
    /// One request after the other.
    Synchronous,
    /// Requests in flight; a flush waits in the submitting thread.
    Queued,
    /// Requests and flushes in flight.
    QueuedFlushes,
}

fn base_command(target: &DiskTarget, size_bytes: u64, engine: Engine) -> Command {
    let mut command = command_killed_with_thread("fio");
    command.args([
        "--name=disk",
        // A thread, not a process, ends when fio is killed.
        "--thread",
        "--group_reporting",
        "--output-format=json",
        "--lat_percentiles=1",
        "--clat_percentiles=0",
        "--fallocate=none",
        &format!("--size={size_bytes}"),
    ]);
    match &target.access {
        TargetAccess::File(path) => {
            command.arg("--direct=1").arg(match engine {
                Engine::Synchronous => "--ioengine=psync",
                Engine::Queued => "--ioengine=libaio",
                Engine::QueuedFlushes => "--ioengine=io_uring",
            });
            command.arg(format!("--filename={}", escaped(&path.to_string_lossy())));
        }
        TargetAccess::Nbd(uri) => {
            command.args(["--ioengine=nbd", &format!("--uri={uri}")]);
        }
        TargetAccess::Rbd { pool, image } => {
            command.args([
                "--ioengine=rbd",
                "--clientname=admin",
                &format!("--pool={pool}"),
                &format!("--rbdname={image}"),
            ]);
        }
    }
    command
}

/// fio separates file names by colons.
fn escaped(path: &str) -> String {
    path.replace('\\', "\\\\").replace(':', "\\:")
}

fn row_command(
    target: &DiskTarget,
    row: &DiskRow,
    size_bytes: u64,
    runtime: Duration,
    seed: u64,
) -> Command {
    let is_file = matches!(target.access, TargetAccess::File(_));
    let engine = match row.durability {
        RowDurability::ForcedUnitAccess => Engine::Synchronous,
        RowDurability::Flushed if row.depth > 1 => Engine::QueuedFlushes,
        RowDurability::Flushed | RowDurability::Cached => Engine::Queued,
    };
    let mut command = base_command(target, size_bytes, engine);
    command.args([
        format!("--rw={}", row.pattern.fio_name()),
        "--rwmixread=70".to_owned(),
        format!("--bs={}", row.block_bytes),
        format!("--iodepth={}", row.depth),
        format!("--numjobs={}", row.jobs),
        "--time_based".to_owned(),
        format!("--runtime={}ms", runtime.as_millis()),
        "--norandommap".to_owned(),
        format!("--randseed={seed}"),
    ]);
    match (row.durability, is_file) {
        (RowDurability::Cached, _) => {}
        (RowDurability::ForcedUnitAccess, true) => drop(command.arg("--sync=dsync")),
        // An fsync of a file would write its times, too.
        (RowDurability::Flushed, true) => drop(command.arg("--fdatasync=1")),
        // fio's nbd engine sends no flush for an fdatasync.
        (RowDurability::Flushed | RowDurability::ForcedUnitAccess, false) => {
            command.arg("--fsync=1");
        }
    }
    command
}

/// The figures of a cell. Latencies are those of reads, if the row reads.
fn sample_of(job: &FioJob, row: &DiskRow) -> Result<DiskSample, BenchError> {
    let (reads, writes) = (row.pattern.reads(), row.pattern.writes());
    if (reads && job.read.total_ios == 0) || (writes && job.write.total_ios == 0) {
        return Err(fio::fio_error(
            "it did no operation in the time given".to_owned(),
        ));
    }
    let iops = job.read.iops + job.write.iops;
    let mut sample = DiskSample {
        iops,
        fio_cpu_percent: job.usr_cpu + job.sys_cpu,
        ..DiskSample::default()
    };
    if row.durability != RowDurability::Cached {
        // fio counts the write and its flush separately: this is the time of both.
        sample.mean_ns = f64::from(row.depth * row.jobs) * 1e9 / iops;
        return Ok(sample);
    }
    let latency = match reads {
        true => &job.read.lat_ns,
        false => &job.write.lat_ns,
    };
    let Some(latency) = latency else {
        return Err(fio::fio_error("its JSON has no lat_ns".to_owned()));
    };
    let at = |name: &str| latency.percentile.get(name).copied();
    sample.mean_ns = latency.mean;
    sample.p50_ns = at("50.000000");
    sample.p99_ns = at("99.000000");
    sample.p999_ns = at("99.900000");
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::rows::row_of;
    use crate::disk::targets::TargetKind;
    use std::path::Path;

    fn args(target: &DiskTarget, row: &str) -> Vec<String> {
        let row = row_of(row).expect("a row");
        let command = row_command(target, &row, 1 << 20, Duration::from_secs(1), 1);
        let args = command.get_args().map(|arg| arg.to_string_lossy());
        args.map(String::from).collect()
    }

    fn has(args: &[String], wanted: &str) -> bool {
        args.iter().any(|arg| arg == wanted)
    }

    #[test]
    fn raw_disk_is_flushed_by_fdatasync_and_dsync() {
        let raw = DiskTarget::raw(Path::new("/data/a:b"));
        let flushed = args(&raw, "write-flush-qd1");
        for wanted in ["--direct=1", "--ioengine=libaio", "--fdatasync=1"] {
            assert!(has(&flushed, wanted), "{flushed:?}");
        }
        assert!(has(&flushed, "--filename=/data/a\\:b"), "{flushed:?}");
        let forced = args(&raw, "fua-16-jobs");
        for wanted in ["--numjobs=16", "--sync=dsync", "--ioengine=psync"] {
            assert!(has(&forced, wanted), "{forced:?}");
        }
    }

    /// fio's JSON of reads and writes.
    fn output(reads: u32, writes: u32) -> String {
        let side = |ios: u32, mean: u32| {
            let latency = format!(
                r#"{{"mean": {mean}, "percentile": {{"50.000000": 1, "99.000000": {mean}, "99.900000": 3}}}}"#
            );
            format!(
                r#"{{"total_ios": {ios}, "iops": {ios}, "clat_ns": {latency}, "lat_ns": {latency}}}"#
            )
        };
        let (read, write) = (side(reads, 700), side(writes, 900));
        format!(
            r#"{{"jobs": [{{"error": 0, "usr_cpu": 1, "sys_cpu": 2, "read": {read}, "write": {write}}}]}}"#
        )
    }

    fn sample(row: &str, reads: u32, writes: u32) -> Result<DiskSample, BenchError> {
        let job = fio::single_job(&output(reads, writes)).expect("one job");
        sample_of(&job, &row_of(row).expect("a row"))
    }

    #[test]
    fn mixed_row_counts_both_and_times_reads() {
        let mixed = sample("mixed-qd32", 70, 30).expect("figures");
        assert_eq!((mixed.iops, mixed.mean_ns), (100.0, 700.0));
        assert_eq!(mixed.p99_ns, Some(700.0));
        assert!(sample("mixed-qd32", 70, 0).is_err(), "no writes");
    }

    #[test]
    fn flushed_row_times_write_and_flush_together() {
        let flushed = sample("fua-16-jobs", 0, 1000).expect("figures");
        assert_eq!((flushed.iops, flushed.mean_ns), (1000.0, 16e6));
        assert_eq!(flushed.p99_ns, None);
    }

    #[test]
    fn nbd_is_flushed_by_fsync_only() {
        let target = DiskTarget::pagemesh(TargetKind::OneLeg, "file-sync", "nbd://x", &[]);
        for row in ["write-flush-qd1", "write-flush-qd16", "fua-16-jobs"] {
            let args = args(&target, row);
            assert!(has(&args, "--fsync=1"), "{args:?}");
            assert!(!has(&args, "--fdatasync=1"), "{args:?}");
        }
        assert!(!has(&args(&target, "random-write-qd32"), "--fsync=1"));
    }
}
