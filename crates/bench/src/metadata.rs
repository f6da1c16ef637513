//! Creations and removals of small files per second.
//!
//! Each job creates files in a directory of its own, writes a few bytes to each and closes it,
//! until the time is over. Then it removes them all. It does not sync: a place makes every change
//! durable before its call returns, or never. In each round every case visits every place; the
//! first place moves on by one.

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::process::process_cpu;
use crate::report::Report;
use crate::session::check_rounds;
use crate::stats::{Latencies, LatencySummary, median, median_ratio};
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use serde::Serialize;
use serde_json::json;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Most files of one job in one round: more would be another experiment.
const FILES_MAX: u64 = 200_000;

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct MetadataOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Time for creating files at one place in one round. Removing them has no limit.
    pub runtime: Duration,
    /// Concurrent programs of each case.
    pub jobs: Vec<u32>,
    /// Bytes of a file.
    pub bytes: usize,
}

impl Default for MetadataOptions {
    fn default() -> MetadataOptions {
        MetadataOptions {
            rounds: 5,
            runtime: Duration::from_secs(1),
            jobs: vec![1, 2],
            bytes: 100,
        }
    }
}

/// The result of one visit.
#[derive(Clone, Debug, Serialize)]
struct MetadataSample {
    files: u64,
    /// Files created per second.
    made: f64,
    removed: f64,
    /// Files created and removed again, per second of both.
    pairs: f64,
    making: LatencySummary,
    removing: LatencySummary,
    server_cpu_percent: f64,
}

/// Runs the comparison; see the module. Ratios are to each of the `peers`, which are measured like
/// the places.
///
/// # Errors
/// If an option is invalid, or a file cannot be created or removed.
pub fn run_metadata(
    places: &[MountPlace],
    peers: &[MountPlace],
    options: &MetadataOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let all: Vec<&MountPlace> = places.iter().chain(peers).collect();
    if places.is_empty() || options.jobs.is_empty() {
        let text = "there is nothing to measure; name at least one place and a number of jobs";
        return Err(BenchError::Option(text.into()));
    }
    let most = options.jobs.iter().copied().max().unwrap_or(1);
    for place in &all {
        for job in 0..most {
            let dir = job_dir(place, job);
            let cannot = BenchError::system(format!("make the directory {}", dir.display()));
            std::fs::create_dir(&dir).map_err(cannot)?;
        }
    }
    let mut found = vec![vec![Vec::new(); all.len()]; options.jobs.len()];
    for round in 0..options.rounds {
        for (&jobs, of_jobs) in options.jobs.iter().zip(&mut found) {
            for turn in 0..all.len() {
                let at = (turn + round) % all.len();
                let sample = measure_place(all[at], jobs, options);
                let place = &all[at].name;
                let cannot = BenchError::system(format!("make and remove files on {place}"));
                of_jobs[at].push(sample.map_err(cannot)?);
            }
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(&all, peers, options, &found))
}

fn job_dir(place: &MountPlace, job: u32) -> std::path::PathBuf {
    place.dir.join(format!("job-{job}"))
}

/// The result of one job.
struct JobResult {
    files: u64,
    making: Latencies,
    removing: Latencies,
}

fn measure_place(
    place: &MountPlace,
    jobs: u32,
    options: &MetadataOptions,
) -> io::Result<MetadataSample> {
    let used = || -> Duration { place.pids.iter().filter_map(|&pid| process_cpu(pid)).sum() };
    let (cpu, start) = (used(), Instant::now());
    // The jobs, and this thread, which takes the time.
    let barrier = Barrier::new(jobs as usize + 1);
    let (done, made, removed) = std::thread::scope(|scope| {
        let barrier = &barrier;
        let jobs: Vec<_> = (0..jobs)
            .map(|job| scope.spawn(move || run_job(&job_dir(place, job), options, barrier)))
            .collect();
        barrier.wait();
        let made = start.elapsed();
        let done: Vec<io::Result<JobResult>> = jobs
            .into_iter()
            .map(|job| job.join().expect("a job does not panic"))
            .collect();
        (done, made, start.elapsed() - made)
    });
    let done = done.into_iter().collect::<io::Result<Vec<JobResult>>>()?;
    let [mut making, mut removing] = [(); 2].map(|()| Latencies::new());
    for job in &done {
        making.merge(&job.making);
        removing.merge(&job.removing);
    }
    let files: u64 = done.iter().map(|job| job.files).sum();
    let all = made + removed;
    Ok(MetadataSample {
        files,
        made: files as f64 / made.as_secs_f64(),
        removed: files as f64 / removed.as_secs_f64(),
        pairs: files as f64 / all.as_secs_f64(),
        making: making.summary(),
        removing: removing.summary(),
        server_cpu_percent: used().saturating_sub(cpu).as_secs_f64() / all.as_secs_f64() * 100.0,
    })
}

/// Creates files until the time is over, waits for the other jobs, and removes the files.
fn run_job(dir: &Path, options: &MetadataOptions, barrier: &Barrier) -> io::Result<JobResult> {
    let mut done = JobResult {
        files: 0,
        making: Latencies::new(),
        removing: Latencies::new(),
    };
    let dir = File::open(dir);
    let made = dir.as_ref().map(|dir| make_files(dir, options, &mut done));
    // A job that failed must still reach the barrier.
    barrier.wait();
    match made {
        Ok(made) => made?,
        Err(_) => return dir.map(|_| done),
    }
    let dir = dir?;
    for at in 0..done.files {
        let start = Instant::now();
        unlinkat(&dir, file_name(at), AtFlags::empty())?;
        done.removing.record(start.elapsed());
    }
    Ok(done)
}

fn make_files(dir: &File, options: &MetadataOptions, done: &mut JobResult) -> io::Result<()> {
    let bytes = vec![b'x'; options.bytes];
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    let until = Instant::now() + options.runtime;
    while done.files < FILES_MAX {
        let start = Instant::now();
        if start >= until {
            break;
        }
        let file = openat(dir, file_name(done.files), flags, mode)?;
        let mut file = File::from(file);
        if !bytes.is_empty() {
            file.write_all(&bytes)?;
        }
        drop(file);
        done.making.record(start.elapsed());
        done.files += 1;
    }
    Ok(())
}

fn file_name(at: u64) -> String {
    format!("file-{at}")
}

fn report(
    places: &[&MountPlace],
    peers: &[MountPlace],
    options: &MetadataOptions,
    found: &[Vec<Vec<MetadataSample>>],
) -> Report {
    let title = "small files made and removed, all in one alternating run";
    let to_peers: Vec<String> = peers
        .iter()
        .map(|peer| format!("to {}", peer.name))
        .collect();
    let mut columns = vec![
        ("jobs", ""),
        ("place", ""),
        ("made", "1/s"),
        ("p50", "µs"),
        ("p99", "µs"),
        ("removed", "1/s"),
        ("p50", "µs"),
        ("p99", "µs"),
        ("made and removed", "1/s"),
        ("server CPU", "% of a core"),
    ];
    columns.extend(to_peers.iter().map(|name| (name.as_str(), "×")));
    let mut report = Report::new("metadata", title, &places[0].class, &columns);
    for (jobs, of_jobs) in options.jobs.iter().zip(found) {
        for (place, rounds) in places.iter().zip(of_jobs) {
            let pick =
                |of: fn(&MetadataSample) -> f64| -> Vec<f64> { rounds.iter().map(of).collect() };
            let middle = |of| median(&pick(of));
            let mut row = vec![
                u64::from(*jobs).into(),
                place.name.as_str().into(),
                middle(|s| s.made).into(),
                middle(|s| s.making.p50_ns as f64 / 1e3).into(),
                middle(|s| s.making.p99_ns as f64 / 1e3).into(),
                middle(|s| s.removed).into(),
                middle(|s| s.removing.p50_ns as f64 / 1e3).into(),
                middle(|s| s.removing.p99_ns as f64 / 1e3).into(),
                middle(|s| s.pairs).into(),
                middle(|s| s.server_cpu_percent).into(),
            ];
            // The peers are the last places.
            for of_peer in &of_jobs[places.len() - peers.len()..] {
                let of_peer: Vec<f64> = of_peer.iter().map(|s| s.pairs).collect();
                row.push(median_ratio(&pick(|s| s.pairs), &of_peer).into());
            }
            report.add_row(row);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds; in each, files of {} B are made for {} ms (opened, \
         written, closed) and then removed; ratios are of files made and removed, medians of \
         the rounds' own",
        options.rounds,
        options.bytes,
        options.runtime.as_millis()
    ));
    report.raw = json!({
        "jobs": options.jobs,
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "samples_by_jobs_place_round": found,
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_made_and_removed_again() {
        let [one, other] = [(); 2].map(|()| tempfile::tempdir().expect("made"));
        let options = MetadataOptions {
            runtime: Duration::from_millis(5),
            ..MetadataOptions::default()
        };
        let places = [MountPlace::unserved("one", one.path())];
        let report = run_metadata(
            &places,
            &[MountPlace::unserved("other", other.path())],
            &options,
        );
        let text = report.expect("measured").text();
        assert!(text.contains("to other"), "{text}");
        for job in ["job-0", "job-1"] {
            let left = std::fs::read_dir(one.path().join(job)).expect("there");
            assert_eq!(left.count(), 0);
        }
    }

    #[test]
    fn failed_file_creation_ends_the_run() {
        let dir = tempfile::tempdir().expect("made");
        let place = MountPlace::unserved("full", dir.path());
        let job = job_dir(&place, 1);
        for job in 0..2 {
            std::fs::create_dir(job_dir(&place, job)).expect("made");
        }
        std::fs::write(job.join(file_name(0)), b"in the way").expect("written");
        let sample = measure_place(&place, 2, &MetadataOptions::default());
        let error = sample.expect_err("it is there already");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}
