//! fio, one cell of a comparison at a time: its nbd engine, and its psync engine on files.

use crate::error::BenchError;
use crate::process::{ChildProcess, command_killed_with_thread, process_cpu};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time of fio beyond its run time, to connect and to sum up.
pub(crate) const FIO_MARGIN: Duration = Duration::from_secs(10);
/// The longest fill: 64 GiB at a slow 100 MB/s.
const FILL_MAX: Duration = Duration::from_secs(660);
/// The name of files that are filled before.
const FILLED_NAME: &str = "test";
/// Appended data is at most this part of the files, because pools have only a little more room.
const APPEND_DIVISOR: u64 = 8;
/// The Debian package of fio with its nbd engine.
pub(crate) const PACKAGE: &str = "fio";

/// The kind of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Random reads.
    Read,
    /// Random writes.
    Write,
    /// Writes to the end of a new file, one after the other.
    Append,
}

impl Direction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
            Direction::Append => "append",
        }
    }

    /// The name of the workload in fio.
    fn workload(self) -> &'static str {
        match self {
            Direction::Read => "randread",
            Direction::Write => "randwrite",
            Direction::Append => "write",
        }
    }
}

/// One case of the comparison: random requests of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCase {
    /// Reads or writes.
    pub direction: Direction,
    /// Requests in flight.
    pub queue_depth: u32,
}

impl std::fmt::Display for BlockCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} QD{}", self.direction.name(), self.queue_depth)
    }
}

/// The figures of one run of fio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FioSample {
    /// Operations per second.
    pub iops: f64,
    /// Mean of the completion latency.
    pub clat_mean_ns: f64,
    /// Its median.
    pub clat_p50_ns: f64,
    /// 99 %.
    pub clat_p99_ns: f64,
    /// 99.9 %.
    pub clat_p999_ns: f64,
    /// CPU of fio, user and system, % of one core.
    pub fio_cpu_percent: f64,
    /// CPU of the serving processes, % of one core.
    pub server_cpu_percent: f64,
}

/// One figure of each round.
pub(crate) fn figures(rounds: &[FioSample], of: fn(&FioSample) -> f64) -> Vec<f64> {
    rounds.iter().map(of).collect()
}

/// Runs a measurement, and adds the CPU time of the serving processes. `place` names the measured
/// place in errors.
pub(crate) fn with_server_cpu(
    pids: &[u32],
    runtime: Duration,
    place: &str,
    measure: impl FnOnce() -> Result<FioSample, BenchError>,
) -> Result<FioSample, BenchError> {
    let (mut sample, cpu) = measure_server_cpu(pids, runtime, place, measure)?;
    sample.server_cpu_percent = cpu;
    Ok(sample)
}

/// Runs a measurement. Returns its result, and the CPU time of the serving processes in % of one
/// core. `place` names the measured place in errors.
pub(crate) fn measure_server_cpu<T>(
    pids: &[u32],
    runtime: Duration,
    place: &str,
    measure: impl FnOnce() -> Result<T, BenchError>,
) -> Result<(T, f64), BenchError> {
    let used = || -> Duration { pids.iter().filter_map(|pid| process_cpu(*pid)).sum() };
    let (before, start) = (used(), Instant::now());
    let sample = measure().map_err(|error| name_failed_place(place, error))?;
    // Only the time of requests counts: the server is idle while fio starts and ends.
    let busy = runtime.min(start.elapsed());
    let cpu = used().saturating_sub(before);
    Ok((sample, cpu.as_secs_f64() / busy.as_secs_f64() * 100.0))
}

/// Adds the place to an error of a program.
pub(crate) fn name_failed_place(place: &str, error: BenchError) -> BenchError {
    match error {
        BenchError::Program { program, cause } => BenchError::Program {
            program: format!("{program} {place}"),
            cause,
        },
        BenchError::Unended { program, cause } => BenchError::Unended {
            program: format!("{program} {place}"),
            cause,
        },
        other => other,
    }
}

/// Runs a case against an endpoint.
pub(crate) fn measure(
    uri: &str,
    case: BlockCase,
    size_bytes: u64,
    runtime: Duration,
    seed: u64,
) -> Result<FioSample, BenchError> {
    let mut command = nbd_command(uri, size_bytes);
    command.args([
        format!("--rw={}", case.direction.workload()),
        "--bs=4k".to_owned(),
        format!("--iodepth={}", case.queue_depth),
        "--time_based".to_owned(),
        format!("--runtime={}ms", runtime.as_millis()),
        "--norandommap".to_owned(),
        format!("--randseed={seed}"),
    ]);
    parse_sample(&run_fio(command, runtime + FIO_MARGIN)?, case.direction)
}

/// Writes the whole range once, so that no endpoint answers from holes.
pub(crate) fn fill(uri: &str, size_bytes: u64) -> Result<(), BenchError> {
    let mut command = nbd_command(uri, size_bytes);
    command.args(["--rw=write", "--bs=256k", "--iodepth=4"]);
    run_fio(command, FILL_MAX).and_then(|text| single_job(&text).map(drop))
}

fn nbd_command(uri: &str, size_bytes: u64) -> Command {
    let mut command = command_killed_with_thread("fio");
    command.args([
        "--name=peers",
        // A thread, not a process, ends when fio is killed.
        "--thread",
        "--ioengine=nbd",
        "--output-format=json",
        &format!("--uri={uri}"),
        &format!("--size={size_bytes}"),
    ]);
    command
}

/// Synchronous random writes to files, as in the paper on mirrored persistent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCase {
    /// Reads or writes.
    pub direction: Direction,
    /// Bytes of one request.
    pub bytes: u32,
    /// Programs that write concurrently, each to its own file.
    pub jobs: u32,
    /// Busy time of each program between two writes.
    pub think_us: u32,
    /// Most requests per second.
    pub rate_iops: Option<u32>,
    /// Whether each write must be durable when it returns.
    pub sync: bool,
    /// Whether each job is a process.
    pub processes: bool,
}

impl std::fmt::Display for FileCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let FileCase {
            bytes,
            jobs,
            think_us,
            ..
        } = self;
        let what = self.direction.name();
        write!(f, "{what} of {bytes} B, {jobs} jobs, {think_us} µs")
    }
}

/// Runs a case on files of `size_bytes` altogether.
pub(crate) fn measure_files(
    prefix: &[String],
    dir: &Path,
    case: FileCase,
    size_bytes: u64,
    runtime: Duration,
) -> Result<FioSample, BenchError> {
    let mut command = match case.direction {
        Direction::Append => files_command(
            prefix,
            dir,
            "append",
            case.jobs,
            size_bytes / APPEND_DIVISOR,
        ),
        Direction::Read | Direction::Write => {
            files_command(prefix, dir, FILLED_NAME, case.jobs, size_bytes)
        }
    };
    // A thread ends when fio is killed.
    command.args((!case.processes).then_some("--thread"));
    command.args([
        "--invalidate=1",
        &format!("--sync={}", u8::from(case.sync)),
        &format!("--rw={}", case.direction.workload()),
        "--allrandrepeat=1",
        "--norandommap",
        &format!("--bs={}", case.bytes),
        &format!("--runtime={}ms", runtime.as_millis()),
    ]);
    match case.direction {
        Direction::Append => {
            command.args(["--create_on_open=1", "--fallocate=none", "--unlink=1"]);
        }
        // With it fio restarts at the end of a file; an append would then overwrite.
        Direction::Read | Direction::Write => drop(command.arg("--time_based")),
    }
    if let Some(rate) = case.rate_iops {
        command.arg(format!("--rate_iops={rate}"));
    }
    if case.think_us > 0 {
        let think = case.think_us;
        command.args([
            format!("--thinktime={think}"),
            format!("--thinktime_spin={think}"),
        ]);
    }
    parse_sample(&run_fio(command, runtime + FIO_MARGIN)?, case.direction)
}

/// Writes all files once, so that no case writes into holes.
pub(crate) fn fill_files(dir: &Path, jobs: u32, size_bytes: u64) -> Result<(), BenchError> {
    let mut command = files_command(&[], dir, FILLED_NAME, jobs, size_bytes);
    command.args(["--thread", "--rw=write", "--bs=1m"]);
    run_fio(command, FILL_MAX).and_then(|text| single_job(&text).map(drop))
}

fn files_command(prefix: &[String], dir: &Path, name: &str, jobs: u32, size_bytes: u64) -> Command {
    let mut command = match prefix {
        [] => command_killed_with_thread("fio"),
        [program, rest @ ..] => {
            let mut command = command_killed_with_thread(program);
            command.args(rest).arg("fio");
            command
        }
    };
    command.arg("--directory").arg(dir).args([
        &format!("--name={name}"),
        "--group_reporting",
        "--ioengine=psync",
        "--output-format=json",
        &format!("--numjobs={jobs}"),
        &format!("--size={}", size_bytes / u64::from(jobs)),
    ]);
    command
}

pub(crate) fn run_fio(mut command: Command, limit: Duration) -> Result<String, BenchError> {
    let cannot = || BenchError::system("keep fio's output");
    let mut output = tempfile::tempfile().map_err(cannot())?;
    let copy = output.try_clone().map_err(cannot())?;
    command.stdin(Stdio::null()).stdout(copy);
    ChildProcess::start("fio", command)?.wait_for_success(limit)?;
    let mut text = String::new();
    output.rewind().map_err(cannot())?;
    output.read_to_string(&mut text).map_err(cannot())?;
    Ok(text)
}

#[derive(Deserialize)]
struct FioOutput {
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
pub(crate) struct FioJob {
    error: i64,
    pub(crate) usr_cpu: f64,
    pub(crate) sys_cpu: f64,
    pub(crate) read: FioDirectionStats,
    pub(crate) write: FioDirectionStats,
}

#[derive(Deserialize)]
pub(crate) struct FioDirectionStats {
    pub(crate) total_ios: u64,
    pub(crate) iops: f64,
    clat_ns: FioLatency,
    /// From the submission on. Percentiles need `--lat_percentiles=1`.
    pub(crate) lat_ns: Option<FioLatency>,
}

#[derive(Deserialize)]
pub(crate) struct FioLatency {
    pub(crate) mean: f64,
    #[serde(default)]
    pub(crate) percentile: BTreeMap<String, f64>,
}

pub(crate) fn fio_error(cause: String) -> BenchError {
    BenchError::Program {
        program: "fio".to_owned(),
        cause,
    }
}

/// The only job. fio prints messages before its JSON.
pub(crate) fn single_job(text: &str) -> Result<FioJob, BenchError> {
    let json = text.find('{').map_or("", |at| &text[at..]);
    let output: FioOutput = serde_json::from_str(json)
        .map_err(|error| fio_error(format!("its JSON cannot be read ({error}): {text:.200}")))?;
    let mut jobs = output.jobs;
    match (jobs.pop(), jobs.is_empty()) {
        (Some(job), true) if job.error == 0 => Ok(job),
        (Some(job), true) => {
            let cause = std::io::Error::from_raw_os_error(job.error as i32);
            Err(fio_error(format!("an operation failed: {cause}")))
        }
        _ => Err(fio_error("it did not report one job".to_owned())),
    }
}

/// Reads fio's JSON; the server's CPU is not in it.
fn parse_sample(text: &str, direction: Direction) -> Result<FioSample, BenchError> {
    let job = single_job(text)?;
    let side = match direction {
        Direction::Read => job.read,
        Direction::Write | Direction::Append => job.write,
    };
    if side.total_ios == 0 {
        return Err(fio_error(
            "it did no operation in the time given".to_owned(),
        ));
    }
    let at = |name: &str| {
        let found = side.clat_ns.percentile.get(name).copied();
        found.ok_or_else(|| fio_error(format!("its JSON has no {name} percentile")))
    };
    Ok(FioSample {
        iops: side.iops,
        clat_mean_ns: side.clat_ns.mean,
        clat_p50_ns: at("50.000000")?,
        clat_p99_ns: at("99.000000")?,
        clat_p999_ns: at("99.900000")?,
        fio_cpu_percent: job.usr_cpu + job.sys_cpu,
        server_cpu_percent: 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPTURED: &str = include_str!("../tests/data/fio-randread.json");

    #[test]
    fn captured_fio_output_is_parsed() {
        let sample = parse_sample(CAPTURED, Direction::Read).expect("fio's own output");
        assert!(sample.iops > 1000.0, "{sample:?}");
        assert!(sample.clat_p50_ns <= sample.clat_p99_ns, "{sample:?}");
        assert!(sample.clat_p99_ns <= sample.clat_p999_ns, "{sample:?}");
        assert!(sample.fio_cpu_percent > 0.0, "{sample:?}");
    }

    #[test]
    fn output_without_a_result_is_an_error() {
        let error = |text: &str, direction| {
            let error = parse_sample(text, direction).expect_err("no result");
            error.to_string()
        };
        assert!(error(CAPTURED, Direction::Write).contains("no operation"));
        assert!(error("fio: nothing", Direction::Read).contains("cannot be read"));
        assert!(error("{\"jobs\":[]}", Direction::Read).contains("one job"));
        let failed = CAPTURED.replace("\"error\": 0", "\"error\": 5");
        assert!(error(&failed, Direction::Read).contains("Input/output error"));
    }
}
