//! Everyday work of programs on the files of a mount, compared with ext4: archives, trees, small files, dbench.
//!
//! The cases of a group share their files. In each round every group visits every place; the first place moves on by one.
//! A visit runs its cases in order, without a sync between them: later cases use the files of the earlier ones. It ends with
//! the untimed removal of all files and an untimed `syncfs`, so that no place writes in the time of another one.
//!
//! Programs run in the directory of the visit, so that the path of the place costs nothing. The time of `tar`, `cp`, `grep`
//! and `rm` covers the whole program. The steps of [`steps`] measure themselves, without the start of their program.

mod cases;
mod report;
pub mod steps;
mod tree;

pub use cases::EverydayCase;

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::process::{ChildProcess, command_killed_with_thread, process_cpu, require_program};
use crate::session::check_rounds;
use cases::{CASES, CaseGroup, CaseWork};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use steps::{FileStep, SMALL_READS_FILE, write_small_reads_file};
use tempfile::TempDir;

/// Longest time of a program, dbench's own run time excepted.
const PROGRAM_TIME_MAX: Duration = Duration::from_secs(300);
/// Concurrent clients of dbench.
const DBENCH_CLIENTS: u32 = 2;
/// Text that no file of the tree contains: their words are lower-case.
const ABSENT_TEXT: &str = "AbsentText";
/// Directory of a visit.
const VISIT_DIR: &str = "everyday";

/// The compared places.
#[derive(Clone, Debug)]
pub struct EverydayPlaces {
    /// A mount of pagemesh.
    pub mount: MountPlace,
    /// The same mount, for programs under `pagemesh exec`.
    pub exec: MountPlace,
    /// ext4.
    pub ext4: MountPlace,
}

/// Positions of the places in samples.
const MOUNT: usize = 0;
const EXEC: usize = 1;
const EXT4: usize = 2;
const PLACES: usize = 3;

impl EverydayPlaces {
    fn all(&self) -> [&MountPlace; PLACES] {
        [&self.mount, &self.exec, &self.ext4]
    }
}

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct EverydayOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// The cases; empty: all, without dbench if it is not installed.
    pub cases: Vec<EverydayCase>,
    /// Files that one program creates, reads, looks up and renames.
    pub files: u32,
    /// Files of the tree.
    pub tree_files: u32,
    /// Run time of dbench, in whole seconds.
    pub runtime: Duration,
    /// The command that runs a [`FileStep`]: its name and the number of files follow.
    pub step_command: Vec<String>,
    /// A directory in memory for the archive.
    pub memory_dir: PathBuf,
}

/// The result of a case in one visit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct EverydaySample {
    /// Seconds, or MB/s of dbench.
    figure: f64,
    /// Seconds of the whole program.
    program_s: f64,
    /// Processor time of the servers, in seconds.
    server_cpu_s: f64,
}

/// The samples of the cases.
struct EverydaySamples {
    cases: Vec<EverydayCase>,
    /// By case, place and round.
    samples: Vec<[Vec<EverydaySample>; PLACES]>,
    /// Load averages before and after.
    loads: [String; 2],
    /// Whether dbench was to be measured and is not installed.
    lacks_dbench: bool,
}

/// Runs the comparison; see the module.
///
/// # Errors
/// If an option is invalid, or a program is missing or fails.
pub fn run_everyday(
    places: &EverydayPlaces,
    options: &EverydayOptions,
) -> Result<crate::report::Report, BenchError> {
    check_rounds(options.rounds)?;
    if options.files == 0 || options.tree_files == 0 {
        let text = "there is nothing to measure; name at least one file";
        return Err(BenchError::Option(text.into()));
    }
    let (cases, lacks_dbench) = installed_cases(&options.cases)?;
    let cannot = BenchError::system("make a directory for the archive");
    let memory = TempDir::new_in(&options.memory_dir).map_err(cannot)?;
    let archive = tree::make_archive(memory.path(), options.tree_files)?;
    let before = load_average();
    let mut found = EverydaySamples {
        samples: cases.iter().map(|_| Default::default()).collect(),
        cases,
        loads: [before, String::new()],
        lacks_dbench,
    };
    for round in 0..options.rounds {
        for group in CaseGroup::ALL {
            for turn in 0..PLACES {
                let at = (turn + round) % PLACES;
                let place = places.all()[at];
                let visit = Visit {
                    place,
                    dir: place.dir.join(VISIT_DIR),
                    archive: &archive,
                    options,
                };
                visit.run(group, at, &mut found)?;
            }
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    found.loads[1] = load_average();
    Ok(report::report(places, options, &found))
}

/// The cases in the order of a round, and whether dbench is left out.
fn installed_cases(chosen: &[EverydayCase]) -> Result<(Vec<EverydayCase>, bool), BenchError> {
    for (program, package) in [
        ("tar", "tar"),
        ("cp", "coreutils"),
        ("rm", "coreutils"),
        ("grep", "grep"),
    ] {
        require_program(program, package)?;
    }
    let is_chosen = |case: &EverydayCase| chosen.is_empty() || chosen.contains(case);
    let mut cases: Vec<EverydayCase> = CASES.into_iter().filter(is_chosen).collect();
    if !cases.contains(&EverydayCase::Dbench) {
        return Ok((cases, false));
    }
    match require_program("dbench", "dbench") {
        // It knows no --version, but it exists.
        Ok(()) | Err(BenchError::Program { .. }) => Ok((cases, false)),
        Err(missing) if !chosen.is_empty() => Err(missing),
        Err(missing) => {
            eprintln!("dbench is left out: {missing}");
            cases.retain(|case| *case != EverydayCase::Dbench);
            Ok((cases, true))
        }
    }
}

/// The load averages of 1, 5 and 15 minutes.
fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// One group of cases at one place.
struct Visit<'a> {
    place: &'a MountPlace,
    dir: PathBuf,
    archive: &'a Path,
    options: &'a EverydayOptions,
}

impl Visit<'_> {
    /// Runs the chosen cases of the group, and the cases that make their files.
    fn run(
        &self,
        group: CaseGroup,
        at: usize,
        found: &mut EverydaySamples,
    ) -> Result<(), BenchError> {
        let is_chosen = |case: &EverydayCase| found.cases.contains(case);
        let of_group = CASES.into_iter().filter(|case| case.group() == group);
        let of_group: Vec<EverydayCase> = of_group.collect();
        if !of_group.iter().any(is_chosen) {
            return Ok(());
        }
        fs::create_dir(&self.dir).map_err(self.cannot("make a directory"))?;
        if group == CaseGroup::SmallReads {
            let path = self.dir.join(SMALL_READS_FILE);
            write_small_reads_file(&path).map_err(self.cannot("write a file"))?;
        }
        for case in of_group {
            let row = found.cases.iter().position(|chosen| *chosen == case);
            if row.is_none() && !case.makes_files() {
                continue;
            }
            let sample = self.measure(case)?;
            if let Some(row) = row {
                found.samples[row][at].push(sample);
            }
        }
        fs::remove_dir_all(&self.dir).map_err(self.cannot("remove the files"))?;
        let synced = File::open(&self.place.dir).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
        synced.map_err(self.cannot("sync the files"))
    }

    fn cannot(&self, action: &str) -> impl FnOnce(std::io::Error) -> BenchError + use<> {
        BenchError::system(format!("{action} on {}", self.place.name))
    }

    fn measure(&self, case: EverydayCase) -> Result<EverydaySample, BenchError> {
        let pids = &self.place.pids;
        let used = || -> Duration { pids.iter().filter_map(|&pid| process_cpu(pid)).sum() };
        let (cpu, start) = (used(), Instant::now());
        let own = match case.work() {
            CaseWork::Program(program, args) => {
                let mut command = self.command(&[], program);
                match program {
                    "tar" => command.arg("xf").arg(self.archive),
                    _ => command.args(args),
                };
                let code = i32::from(program == "grep");
                self.start(case, command)?
                    .wait_for_code(PROGRAM_TIME_MAX, code)?;
                None
            }
            CaseWork::Step(step) => Some(self.run_step(case, step)?),
            CaseWork::Dbench => Some(self.run_dbench(case)?),
        };
        let program_s = start.elapsed().as_secs_f64();
        Ok(EverydaySample {
            figure: own.unwrap_or(program_s),
            program_s,
            server_cpu_s: used().saturating_sub(cpu).as_secs_f64(),
        })
    }

    /// A program in the directory of the visit, started as the place demands it.
    fn command(&self, before: &[&str], program: &str) -> Command {
        let prefix = self.place.prefix.iter().map(String::as_str);
        let words: Vec<&str> = before.iter().copied().chain(prefix).collect();
        let mut command = match words.split_first() {
            None => command_killed_with_thread(program),
            Some((first, rest)) => {
                let mut command = command_killed_with_thread(first);
                command.args(rest).arg(program);
                command
            }
        };
        command.current_dir(&self.dir).env("LC_ALL", "C");
        command.stdin(Stdio::null());
        command
    }

    fn start(&self, case: EverydayCase, command: Command) -> Result<ChildProcess, BenchError> {
        ChildProcess::start(&format!("{} on {}", case.id(), self.place.name), command)
    }

    /// Returns the seconds that the step itself measured.
    fn run_step(&self, case: EverydayCase, step: FileStep) -> Result<f64, BenchError> {
        let Some((program, args)) = self.options.step_command.split_first() else {
            return Err(BenchError::Option("there is no command for steps".into()));
        };
        let mut command = self.command(&[], program);
        command.args(args).arg(step.id());
        command.arg(self.options.files.to_string());
        command.stdout(Stdio::piped());
        let mut child = self.start(case, command)?;
        let line = child.read_line(PROGRAM_TIME_MAX)?;
        let seconds = line
            .parse()
            .map_err(|_| child.program_error(&format!("it says {line}")))?;
        child.wait_for_success(PROGRAM_TIME_MAX)?;
        Ok(seconds)
    }

    /// Returns MB/s.
    fn run_dbench(&self, case: EverydayCase) -> Result<f64, BenchError> {
        // Its clients are processes. They end with the first process of their namespace.
        let namespace = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--"];
        let seconds = self.options.runtime.as_secs().max(1);
        let output = tempfile::tempfile().map_err(self.cannot("keep dbench's output"))?;
        let mut own = output
            .try_clone()
            .map_err(self.cannot("keep dbench's output"))?;
        let mut command = self.command(&namespace, "dbench");
        command.args(["-t", &seconds.to_string(), "-D", "."]);
        command.arg(DBENCH_CLIENTS.to_string()).stdout(output);
        let limit = PROGRAM_TIME_MAX + Duration::from_secs(seconds);
        self.start(case, command)?.wait_for_success(limit)?;
        let mut text = String::new();
        let read = own.rewind().and_then(|()| own.read_to_string(&mut text));
        read.map_err(self.cannot("read dbench's output"))?;
        dbench_rate(&text).ok_or_else(|| BenchError::Program {
            program: format!("dbench on {}", self.place.name),
            cause: format!("it reports no throughput: {}", text.trim()),
        })
    }
}

/// MB/s of the last line of dbench's output: `Throughput 307.511 MB/sec  2 clients …`.
fn dbench_rate(output: &str) -> Option<f64> {
    let mut words = output.lines().last()?.split_whitespace();
    match (words.next()?, words.next()?.parse(), words.next()?) {
        ("Throughput", Ok(rate), "MB/sec") => Some(rate),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_dbench_is_in_its_last_line() {
        let report = " Flush  1052  2.055  11.540\n\nThroughput 307.511 MB/sec  2 clients  2 procs  max_latency=11.543 ms\n";
        assert_eq!(dbench_rate(report), Some(307.511));
        let early = "Throughput 1 MB/sec\n(2) open client.txt failed\n";
        assert_eq!(dbench_rate(early), None);
        assert_eq!(dbench_rate(""), None);
    }

    #[test]
    fn chosen_cases_run_in_the_order_of_a_round() {
        let chosen = [EverydayCase::Remove, EverydayCase::Tar];
        let (cases, lacks_dbench) = installed_cases(&chosen).expect("installed");
        assert_eq!(cases, [EverydayCase::Tar, EverydayCase::Remove]);
        assert!(!lacks_dbench);
    }
}
