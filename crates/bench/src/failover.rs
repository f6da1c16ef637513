//! A node fails under load, with its mounting process and its brick, and another node goes on with
//! the other copy. The benchmark measures the time from the command until a file can be written,
//! and checks the surviving data.
//!
//! Writers append records of a page to files of their own. Each record encodes its number, so that
//! none is taken for another. With synchronous writes all acknowledged records must survive.
//! Otherwise a *prefix* over all files must survive: if a record is missing, all records are
//! missing that began after it was acknowledged.
//!
//! The caller supplies the mounts and kills the node; every visit has new ones.

use crate::error::BenchError;
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::median;
use pagemesh_base::rng::SplitMix64;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::Serialize;
use serde_json::json;
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RECORD_BYTES: usize = 4096;
/// Records of one file; bounds the content of a file system.
pub const RECORDS_MAX: u64 = 1 << 15;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct FailoverOptions {
    /// Failures of each case, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Duration of the load before the failure.
    pub runtime: Duration,
    /// Files that are written concurrently.
    pub writers: usize,
}

/// One case of the comparison.
#[derive(Clone, Debug)]
pub struct FailoverCase {
    /// Its name.
    pub name: String,
    /// Whether each write must be durable when it returns.
    pub sync: bool,
}

type NodeResult<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The mounts of two nodes.
pub trait NodePair {
    /// Creates a file system with two copies, and mounts it on the first node.
    ///
    /// # Errors
    /// Any error ends the run.
    fn mount(&mut self, case: &FailoverCase) -> NodeResult<PathBuf>;
    /// Kills the first node.
    ///
    /// # Errors
    /// Any error ends the run.
    fn kill(&mut self) -> NodeResult<()>;
    /// Does the steps of an operator. Returns the directory of the new mount.
    ///
    /// # Errors
    /// Any error ends the run.
    fn fail_over(&mut self) -> NodeResult<PathBuf>;
}

/// One failure.
#[derive(Clone, Copy, Debug, Serialize)]
struct FailoverSample {
    /// From the command until the files were mounted.
    mounted_s: f64,
    /// From the command until a durable write had returned.
    writable_s: f64,
    acknowledged: u64,
    missing: u64,
}

/// Start of a record's write, and its acknowledgement.
type RecordTimes = (Instant, Option<Instant>);

/// Runs the benchmark; see the module.
///
/// # Errors
/// If an option is invalid, or data is missing.
pub fn run_failover(
    nodes: &mut dyn NodePair,
    cases: &[FailoverCase],
    class: &str,
    options: &FailoverOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if options.writers == 0 || cases.is_empty() {
        return Err(BenchError::Option(
            "there is nothing to write; give writers and cases".into(),
        ));
    }
    let mut found = vec![Vec::new(); cases.len()];
    for round in 0..options.rounds {
        for (case, samples) in cases.iter().zip(&mut found) {
            samples.push(measure_round(nodes, case, options)?);
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(cases, class, options, &found))
}

fn measure_round(
    nodes: &mut dyn NodePair,
    case: &FailoverCase,
    options: &FailoverOptions,
) -> Result<FailoverSample, BenchError> {
    let dir = nodes.mount(case).map_err(BenchError::Mount)?;
    let is_over = AtomicBool::new(false);
    let (killed, written) = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..options.writers)
            .map(|writer| {
                let (path, is_over) = (file_path(&dir, writer), &is_over);
                scope.spawn(move || write_records(&path, writer, case.sync, is_over))
            })
            .collect();
        std::thread::sleep(options.runtime);
        let killed = nodes.kill();
        is_over.store(true, Ordering::Relaxed);
        let written = writers.into_iter();
        let written = written.map(|writer| writer.join().expect("a writer does not panic"));
        (killed, written.collect::<Result<Vec<_>, _>>())
    });
    killed.map_err(BenchError::Mount)?;
    let written = written?;
    let start = Instant::now();
    let dir = nodes.fail_over().map_err(BenchError::Mount)?;
    let mounted_s = start.elapsed().as_secs_f64();
    let probe = dir.join("probe");
    open_append(&probe, true)
        .and_then(|file| file.write_all_at(&record_bytes(options.writers, 0), 0))
        .map_err(BenchError::system(format!("write {}", probe.display())))?;
    let writable_s = start.elapsed().as_secs_f64();
    let mut kept = vec![];
    for (writer, written) in written.iter().enumerate() {
        kept.push(count_records(
            &file_path(&dir, writer),
            writer,
            written.len() as u64,
        )?);
    }
    let missing = check_records(&written, &kept, case)?;
    let acknowledged = written.iter().flatten();
    Ok(FailoverSample {
        mounted_s,
        writable_s,
        acknowledged: acknowledged.filter(|(_, at)| at.is_some()).count() as u64,
        missing,
    })
}

fn file_path(dir: &Path, writer: usize) -> PathBuf {
    dir.join(format!("writer-{writer}"))
}

fn open_append(path: &Path, sync: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    if sync {
        options.custom_flags(OFlags::DSYNC.bits().cast_signed());
    }
    options.open(path)
}

/// Random bytes, by the writer's number and the record's.
fn record_bytes(writer: usize, number: u64) -> [u8; RECORD_BYTES] {
    let mut random = SplitMix64::new((writer as u64) << 48 | number);
    let mut bytes = [0; RECORD_BYTES];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes
}

/// Writes until the mount fails.
fn write_records(
    path: &Path,
    writer: usize,
    sync: bool,
    is_over: &AtomicBool,
) -> Result<Vec<RecordTimes>, BenchError> {
    let cannot = || BenchError::system(format!("write {}", path.display()));
    let file = open_append(path, sync).map_err(cannot())?;
    let mut written = Vec::new();
    for number in 0..RECORDS_MAX {
        let bytes = record_bytes(writer, number);
        let is_late = is_over.load(Ordering::Relaxed);
        let began = Instant::now();
        let result = file.write_all_at(&bytes, number * RECORD_BYTES as u64);
        written.push((began, result.is_ok().then(Instant::now)));
        if let Err(cause) = result {
            // The write may have failed just before the flag is set.
            let gone = [
                Errno::NOTCONN,
                Errno::CONNABORTED,
                Errno::CANCELED,
                Errno::IO,
            ];
            return match gone
                .iter()
                .any(|it| cause.raw_os_error() == Some(it.raw_os_error()))
            {
                true => Ok(written),
                false => Err(cannot()(cause)),
            };
        }
        if is_late {
            let late = "the file system goes on although its node was killed";
            return Err(BenchError::Option(late.into()));
        }
    }
    Err(BenchError::Option(format!(
        "a writer made all of its {RECORDS_MAX} records before the end; use less time"
    )))
}

/// Number of valid records at the start of a file; fails if any other bytes follow.
fn count_records(path: &Path, writer: usize, begun: u64) -> Result<u64, BenchError> {
    let cannot = || BenchError::system(format!("read {}", path.display()));
    let mut file = File::open(path).map_err(cannot())?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(cannot())?;
    let wrong = |what: String| BenchError::Mount(format!("{}: {what}", path.display()).into());
    if !bytes.len().is_multiple_of(RECORD_BYTES) {
        return Err(wrong(format!(
            "{} bytes are not a whole number of records",
            bytes.len()
        )));
    }
    let count = (bytes.len() / RECORD_BYTES) as u64;
    if count > begun {
        return Err(wrong(format!(
            "{count} records, of {begun} that were begun"
        )));
    }
    for (number, found) in (0..).zip(bytes.chunks_exact(RECORD_BYTES)) {
        if found != record_bytes(writer, number) {
            return Err(wrong(format!(
                "record {number} differs from the written one"
            )));
        }
    }
    Ok(count)
}

/// Checks that the first `kept` records of each file include all that must survive. Returns the
/// number of missing records that were acknowledged.
fn check_records(
    written: &[Vec<RecordTimes>],
    kept: &[u64],
    case: &FailoverCase,
) -> Result<u64, BenchError> {
    let wrong = |what: String| BenchError::Mount(format!("{}: {what}", case.name).into());
    let parts = || {
        let pairs = written.iter().zip(kept);
        pairs.map(|(all, &kept)| all.split_at(kept as usize))
    };
    let missing = || {
        parts()
            .flat_map(|(_, missing)| missing)
            .filter_map(|(_, at)| *at)
    };
    let count = missing().count() as u64;
    if case.sync && count > 0 {
        return Err(wrong(format!(
            "{count} records are missing that were acknowledged"
        )));
    }
    let newest = parts()
        .filter_map(|(there, _)| there.last())
        .map(|it| it.0)
        .max();
    match (missing().min(), newest) {
        (Some(first), Some(newest)) if newest > first => Err(wrong(
            "the surviving records are not a prefix of the acknowledged ones".into(),
        )),
        _ => Ok(count),
    }
}

fn report(
    cases: &[FailoverCase],
    class: &str,
    options: &FailoverOptions,
    found: &[Vec<FailoverSample>],
) -> Report {
    let title = "a node dies under load and the other goes on";
    let columns = [
        ("case", ""),
        ("mounted, median", "s"),
        ("mounted, max", "s"),
        ("writable, median", "s"),
        ("writable, max", "s"),
        ("acknowledged", ""),
        ("of these missing", ""),
    ];
    let mut report = Report::new("failover", title, class, &columns);
    let most = |all: &[f64]| ReportCell::from(all.iter().copied().reduce(f64::max));
    for (case, samples) in cases.iter().zip(found) {
        let pick =
            |of: fn(&FailoverSample) -> f64| -> Vec<f64> { samples.iter().map(of).collect() };
        let (mounted, writable) = (pick(|s| s.mounted_s), pick(|s| s.writable_s));
        report.add_row(vec![
            case.name.as_str().into(),
            median(&mounted).into(),
            most(&mounted),
            median(&writable).into(),
            most(&writable),
            samples.iter().map(|s| s.acknowledged).sum::<u64>().into(),
            samples.iter().map(|s| s.missing).sum::<u64>().into(),
        ]);
    }
    report.add_note(format!(
        "{} deaths each: brick and mounting process killed at once after {} ms of {} programs \
         that append pages; times are from the command on the other node; every record that \
         must be there is, and what is missing otherwise was acknowledged last",
        options.rounds,
        options.runtime.as_millis(),
        options.writers
    ));
    report.raw = json!({
        "cases": cases.iter().map(|case| &case.name).collect::<Vec<_>>(),
        "samples_by_case_round": found,
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_case(sync: bool) -> FailoverCase {
        FailoverCase {
            name: "it".into(),
            sync,
        }
    }

    /// Two files, written in turns, each record acknowledged before the next begins. The last
    /// record of the second file was not acknowledged.
    fn interleaved_records() -> Vec<Vec<RecordTimes>> {
        let start = Instant::now();
        let at = |n: u64| start + Duration::from_secs(n);
        let one = (0..3).map(|n| (at(4 * n), Some(at(4 * n + 1))));
        let other = (0..3).map(|n| (at(4 * n + 2), (n < 2).then(|| at(4 * n + 3))));
        vec![one.collect(), other.collect()]
    }

    #[test]
    fn only_last_records_may_be_missing() {
        let all = interleaved_records();
        assert_eq!(
            check_records(&all, &[3, 3], &test_case(true)).expect("all"),
            0
        );
        assert_eq!(
            check_records(&all, &[3, 2], &test_case(true)).expect("all acknowledged"),
            0
        );
        assert!(check_records(&all, &[2, 2], &test_case(true)).is_err());
        assert_eq!(
            check_records(&all, &[2, 2], &test_case(false)).expect("a prefix"),
            1
        );
        assert_eq!(
            check_records(&all, &[2, 1], &test_case(false)).expect("a prefix"),
            2
        );
        assert_eq!(
            check_records(&all, &[0, 0], &test_case(false)).expect("a prefix"),
            5
        );
        for no_prefix in [[3, 1], [1, 2], [0, 1]] {
            assert!(
                check_records(&all, &no_prefix, &test_case(false)).is_err(),
                "{no_prefix:?}"
            );
        }
    }

    #[test]
    fn file_with_foreign_bytes_is_rejected() {
        let dir = tempfile::tempdir().expect("made");
        let path = file_path(dir.path(), 1);
        let file = open_append(&path, true).expect("made");
        for number in 0..3 {
            let at = number * RECORD_BYTES as u64;
            file.write_all_at(&record_bytes(1, number), at)
                .expect("written");
        }
        assert_eq!(count_records(&path, 1, 3).expect("right"), 3);
        assert!(count_records(&path, 1, 2).is_err(), "more than was begun");
        assert!(count_records(&path, 0, 3).is_err(), "of another writer");
        file.write_all_at(b"x", 4096 + 7).expect("written");
        assert!(count_records(&path, 1, 3).is_err(), "a byte is wrong");
        file.set_len(5000).expect("cut");
        assert!(count_records(&path, 1, 3).is_err(), "half a record");
    }

    /// Nodes on a directory; killing the first has no effect.
    struct DirNodes(tempfile::TempDir);

    impl NodePair for DirNodes {
        fn mount(&mut self, case: &FailoverCase) -> NodeResult<PathBuf> {
            let dir = self.0.path().join(&case.name);
            std::fs::create_dir(&dir)?;
            Ok(dir)
        }

        fn kill(&mut self) -> NodeResult<()> {
            Ok(())
        }

        fn fail_over(&mut self) -> NodeResult<PathBuf> {
            Err("the run must fail before this".into())
        }
    }

    #[test]
    fn surviving_node_ends_the_run() {
        let mut nodes = DirNodes(tempfile::tempdir().expect("made"));
        let options = FailoverOptions {
            rounds: 5,
            runtime: Duration::from_millis(1),
            writers: 1,
        };
        let error = run_failover(&mut nodes, &[test_case(true)], "none", &options);
        let text = error.expect_err("it was not killed").to_string();
        assert!(text.contains("goes on"), "{text}");
    }
}
