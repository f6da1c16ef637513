//! Mirrored files: latency of small synchronous writes as a function of throughput.
//!
//! The experiment of the paper on persistent memory mirrored over a fabric, with its flags: `fio
//! --invalidate=1 --sync=1 --rw=randwrite --allrandrepeat=1 --ioengine=psync --thinktime=T
//! --thinktime_spin=T`. The time between two writes of a job is the variable. Additional flags are
//! `--thread`, `--norandommap` and a run time; each job has a file of its own that was filled
//! before.
//!
//! In each round every case visits every place; the first place moves on by one. Round trips over
//! TCP are measured in each round, too. GlusterFS with two copies may be one of the places.

use crate::error::BenchError;
pub use crate::fio::Direction;
use crate::fio::{self, FileCase, FioSample, figures};
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::process;
use crate::report::{Report, ReportCell};
use crate::round_trip;
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Round trips of one measurement.
const ROUND_TRIPS: u32 = 10_000;

/// A place for files.
#[derive(Clone, Debug)]
pub struct MountPlace {
    /// Its name in reports.
    pub name: String,
    /// A pool's durability class, or `none`.
    pub class: String,
    /// A directory there.
    pub dir: PathBuf,
    /// The processes that serve it, for the CPU column.
    pub pids: Vec<u32>,
    /// The command that runs fio there; empty: fio runs directly.
    pub prefix: Vec<String>,
}

impl MountPlace {
    /// A directory of a file system that no process serves.
    #[must_use]
    pub fn unserved(name: &str, dir: &Path) -> MountPlace {
        MountPlace {
            name: name.into(),
            class: "none".into(),
            dir: dir.into(),
            pids: vec![],
            prefix: vec![],
        }
    }
}

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct MirrorOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Time of one case at one place in one round.
    pub runtime: Duration,
    /// Bytes of all files of one number of jobs.
    pub size_bytes: u64,
    /// Bytes of a write.
    pub sizes: Vec<u32>,
    /// Concurrent programs of each case.
    pub jobs: Vec<u32>,
    /// Times between two writes, in µs.
    pub think_us: Vec<u32>,
    /// Most requests per second of each program.
    pub rate_iops: Option<u32>,
    /// Whether files are opened with `O_SYNC`.
    pub sync: bool,
    /// Whether files are written, or read.
    pub directions: Vec<Direction>,
    /// Sizes in bytes of appends to new files.
    pub appends: Vec<u32>,
    /// Whether each job is a process, as without `--thread`.
    pub processes: bool,
}

impl Default for MirrorOptions {
    fn default() -> MirrorOptions {
        MirrorOptions {
            rounds: 5,
            runtime: Duration::from_secs(1),
            size_bytes: 512 << 20,
            sizes: vec![512, 4096, 65_536],
            jobs: vec![1, 16],
            think_us: vec![0, 50, 200],
            rate_iops: None,
            sync: true,
            directions: vec![Direction::Write],
            appends: Vec::new(),
            processes: false,
        }
    }
}

impl MirrorOptions {
    fn cases(&self) -> Vec<FileCase> {
        let sizes = self.directions.iter().flat_map(|&direction| {
            let sizes = self.sizes.iter();
            sizes.map(move |&bytes| (direction, bytes))
        });
        let appends = self.appends.iter().map(|&bytes| (Direction::Append, bytes));
        let mut cases = vec![];
        for (direction, bytes) in sizes.chain(appends) {
            for &jobs in &self.jobs {
                cases.extend(self.think_us.iter().map(|&think_us| FileCase {
                    direction,
                    bytes,
                    jobs,
                    think_us,
                    rate_iops: self.rate_iops,
                    sync: self.sync,
                    processes: self.processes,
                }));
            }
        }
        cases
    }
}

/// The samples of all cases.
struct MirrorSamples {
    cases: Vec<FileCase>,
    /// By case, place and round.
    samples: Vec<Vec<Vec<FioSample>>>,
    /// By round.
    round_trips_ns: Vec<f64>,
}

/// Runs the comparison; see the module. Other places are compared with the first, with the second,
/// which has one copy, and with `peer`, which is measured like them. The first is a server that
/// does nothing.
///
/// # Errors
/// If an option is invalid, fio is missing or fails, or a write fails.
pub fn run_mirror(
    places: &[MountPlace],
    peer: Option<&MountPlace>,
    options: &MirrorOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let cases = options.cases();
    if places.len() < 2 || cases.is_empty() {
        let text = "there is nothing to compare; name at least two places and one case";
        return Err(BenchError::Option(text.into()));
    }
    process::require_program("fio", fio::PACKAGE)?;
    let places: Vec<&MountPlace> = places.iter().chain(peer).collect();
    for &place in &places {
        for &jobs in &options.jobs {
            fill_place(place, jobs, options)?;
        }
    }
    let mut found = MirrorSamples {
        samples: vec![vec![Vec::new(); places.len()]; cases.len()],
        cases,
        round_trips_ns: vec![],
    };
    for round in 0..options.rounds {
        let trip = round_trip::mean_round_trip(ROUND_TRIPS)?;
        found.round_trips_ns.push(trip.as_nanos() as f64);
        for (case, of_case) in found.cases.iter().zip(&mut found.samples) {
            for turn in 0..places.len() {
                let at = (turn + round) % places.len();
                of_case[at].push(measure(places[at], *case, options)?);
            }
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(&places, peer, options, &found))
}

/// Writes per second of one program without pauses at a place, in the first case.
///
/// # Errors
/// As [`run_mirror`].
pub fn saturating_iops(place: &MountPlace, options: &MirrorOptions) -> Result<f64, BenchError> {
    let cases = options.cases();
    let Some(&first) = cases.first() else {
        return Err(BenchError::Option("there is no case to measure".into()));
    };
    process::require_program("fio", fio::PACKAGE)?;
    let case = FileCase {
        think_us: 0,
        ..first
    };
    fill_place(place, case.jobs, options)?;
    let rounds = (0..options.rounds).map(|_| measure(place, case, options));
    let rounds = rounds.collect::<Result<Vec<_>, _>>()?;
    Ok(median(&figures(&rounds, |s| s.iops)).unwrap_or_default())
}

/// Fills the files of a number of jobs.
fn fill_place(place: &MountPlace, jobs: u32, options: &MirrorOptions) -> Result<(), BenchError> {
    let dir = jobs_dir(place, jobs);
    let cannot = BenchError::system(format!("make the directory {}", dir.display()));
    // Two places may be one directory with two kinds of access.
    std::fs::create_dir_all(&dir).map_err(cannot)?;
    fio::fill_files(&dir, jobs, options.size_bytes)
        .map_err(|error| fio::name_failed_place(&place_label(place), error))
}

fn jobs_dir(place: &MountPlace, jobs: u32) -> PathBuf {
    place.dir.join(format!("jobs-{jobs}"))
}

fn place_label(place: &MountPlace) -> String {
    format!("on {} in {}", place.name, place.dir.display())
}

fn measure(
    place: &MountPlace,
    case: FileCase,
    options: &MirrorOptions,
) -> Result<FioSample, BenchError> {
    let dir = jobs_dir(place, case.jobs);
    fio::with_server_cpu(&place.pids, options.runtime, &place_label(place), || {
        fio::measure_files(
            &place.prefix,
            &dir,
            case,
            options.size_bytes,
            options.runtime,
        )
    })
}

/// The additional latency of the rounds over the rounds of another place, in µs.
fn extra_latency_us(rounds: &[FioSample], than: &[FioSample]) -> Vec<f64> {
    let pairs = rounds.iter().zip(than);
    let longer = pairs.map(|(one, other)| (one.clat_mean_ns - other.clat_mean_ns) / 1e3);
    longer.collect()
}

fn report(
    places: &[&MountPlace],
    peer: Option<&MountPlace>,
    options: &MirrorOptions,
    found: &MirrorSamples,
) -> Report {
    let title = match options.sync {
        _ if options.directions.contains(&Direction::Read) => {
            "random synchronous writes to files, and reads, by fio, all in one alternating run"
        }
        true => "synchronous random writes to files by fio, all in one alternating run",
        false => "random writes to files by fio, without O_SYNC, all in one alternating run",
    };
    let to_first = format!("to {}", places[0].name);
    let beyond = format!("beyond {}", places[1].name);
    let to_peer = format!("to {}", peer.map_or("another", |peer| &peer.name));
    let columns = [
        ("fio", ""),
        ("request", "B"),
        ("jobs", ""),
        ("think", "µs"),
        ("place", ""),
        ("IOPS", "1/s"),
        ("mean", "µs"),
        ("p50", "µs"),
        ("p99", "µs"),
        ("p99.9", "µs"),
        ("server CPU", "% of a core"),
        (to_first.as_str(), "× mean"),
        (beyond.as_str(), "µs"),
        ("that, of a round trip", "×"),
        (to_peer.as_str(), "× IOPS"),
    ];
    let mut report = Report::new("mirror", title, &places[1].class, &columns);
    for (case, of_case) in found.cases.iter().zip(&found.samples) {
        for (place, rounds) in places.iter().zip(of_case) {
            let middle = |of| median(&figures(rounds, of));
            let us = |of| ReportCell::from(middle(of).map(|ns| ns / 1e3));
            let mean = |rounds: &[FioSample]| figures(rounds, |s| s.clat_mean_ns);
            let longer = extra_latency_us(rounds, &of_case[1]);
            let trips: Vec<f64> = found.round_trips_ns.iter().map(|ns| ns / 1e3).collect();
            let iops = |rounds: &[FioSample]| figures(rounds, |s| s.iops);
            // The peer is the last place.
            let of_peer = peer.and(of_case.last()).map(|rounds| iops(rounds));
            let to_peer = of_peer.and_then(|of_peer| median_ratio(&iops(rounds), &of_peer));
            report.add_row(vec![
                case.direction.name().into(),
                u64::from(case.bytes).into(),
                u64::from(case.jobs).into(),
                u64::from(case.think_us).into(),
                place.name.as_str().into(),
                middle(|s| s.iops).into(),
                us(|s| s.clat_mean_ns),
                us(|s| s.clat_p50_ns),
                us(|s| s.clat_p99_ns),
                us(|s| s.clat_p999_ns),
                middle(|s| s.server_cpu_percent).into(),
                median_ratio(&mean(rounds), &mean(&of_case[0])).into(),
                median(&longer).into(),
                median_ratio(&longer, &trips).into(),
                to_peer.into(),
            ]);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds of {} ms per cell; {} MiB of files per number of \
         jobs, written once before; ratios and differences are medians of the rounds' own",
        options.rounds,
        options.runtime.as_millis(),
        options.size_bytes >> 20
    ));
    let trip = median(&found.round_trips_ns).unwrap_or_default() / 1e3;
    report.add_note(format!(
        "a blocking round trip over TCP on loopback, 4 KiB out and 16 B back, across cores, \
         took {trip:.1} µs"
    ));
    report.plots = plots(places, options, found);
    report.raw = json!({
        "cases": found.cases,
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "round_trips_ns": found.round_trips_ns,
        "samples_by_case_place_round": found.samples,
    });
    report
}

/// One plot for each size and number of jobs.
fn plots(places: &[&MountPlace], options: &MirrorOptions, found: &MirrorSamples) -> Vec<Plot> {
    let mut plots = vec![];
    let kinds = options.directions.iter().flat_map(|&direction| {
        let sizes = options.sizes.iter();
        sizes.map(move |&bytes| (direction, bytes))
    });
    for (direction, bytes) in kinds {
        for &jobs in &options.jobs {
            let line = |(at, place): (usize, &&MountPlace)| PlotSeries {
                name: place.name.clone(),
                points: (found.cases.iter().zip(&found.samples))
                    .filter(|(case, _)| {
                        (case.direction, case.bytes, case.jobs) == (direction, bytes, jobs)
                    })
                    .filter_map(|(_, of)| {
                        let iops = median(&figures(&of[at], |s| s.iops))?;
                        Some((iops, median(&figures(&of[at], |s| s.clat_mean_ns / 1e3))?))
                    })
                    .collect(),
            };
            plots.push(Plot {
                title: format!("Random {}s of {bytes} B, {jobs} jobs", direction.name()),
                kind: PlotKind::Lines,
                x: PlotAxis::log("operations per second"),
                y: PlotAxis::log("mean latency in µs"),
                categories: Vec::new(),
                series: places.iter().enumerate().map(line).collect(),
            });
        }
    }
    plots
}
