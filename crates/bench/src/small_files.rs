//! Time of one program to create, read and remove small files, and of `rm -rf` to remove a tree.
//!
//! In each round the program visits every place; the first place moves on by one. A visit creates
//! files of several sizes in directories of [`FILES_PER_DIRECTORY`], reads each whole, and unlinks
//! all. Then it creates a tree of empty files, untimed, and times `rm -rf` of that. The timed parts
//! do not sync. Each visit ends with an untimed `syncfs`, so that no place writes in another one's
//! time.

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::process::{process_cpu, require_program};
use crate::report::Report;
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde::Serialize;
use serde_json::json;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Files of a directory.
const FILES_PER_DIRECTORY: u64 = 1000;
/// Sizes of the files, in bytes, in turn.
const FILE_SIZES: [usize; 5] = [300, 700, 1500, 2600, 4096];

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct SmallFilesOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Files that are created, read and unlinked.
    pub files: u64,
    /// Entries of the tree that `rm -rf` removes; 0: no tree.
    pub entries: u64,
}

impl Default for SmallFilesOptions {
    fn default() -> SmallFilesOptions {
        SmallFilesOptions {
            rounds: 5,
            files: 50_000,
            entries: 70_000,
        }
    }
}

/// The times of one visit, in seconds.
#[derive(Clone, Debug, Serialize)]
struct SmallFilesSample {
    made: f64,
    read: f64,
    unlinked: f64,
    /// The sum of these three.
    all: f64,
    /// Removal of the tree by `rm -rf`.
    tree_removed: f64,
    /// Processor time of the servers during the first three.
    server_cpu: f64,
}

/// Runs the comparison; see the module. The report gives the ratio of each place's times to the
/// times of each of the `peers`, which are measured like the places.
///
/// # Errors
/// If an option is invalid, or a call fails.
pub fn run_small_files(
    places: &[MountPlace],
    peers: &[MountPlace],
    options: &SmallFilesOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if places.is_empty() || options.files == 0 {
        let text = "there is nothing to measure; name at least one place and one file";
        return Err(BenchError::Option(text.into()));
    }
    require_program("rm", "coreutils")?;
    let all: Vec<&MountPlace> = places.iter().chain(peers).collect();
    let mut found = vec![Vec::new(); all.len()];
    for round in 0..options.rounds {
        for turn in 0..all.len() {
            let at = (turn + round) % all.len();
            let place = all[at];
            let cannot =
                BenchError::system(format!("make, read and remove files on {}", place.name));
            found[at].push(measure_place(place, options).map_err(cannot)?);
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(&all, peers, options, &found))
}

fn measure_place(place: &MountPlace, options: &SmallFilesOptions) -> io::Result<SmallFilesSample> {
    let used = || -> Duration { place.pids.iter().filter_map(|&pid| process_cpu(pid)).sum() };
    let root = place.dir.join("small-files");
    let paths = TreePaths::new(&root, options.files);
    let cpu = used();
    let made = time_call(|| paths.make(|at| FILE_SIZES[at as usize % FILE_SIZES.len()]))?;
    let read = time_call(|| paths.read())?;
    let unlinked = time_call(|| paths.unlink())?;
    let server_cpu = used().saturating_sub(cpu).as_secs_f64();
    let tree_removed = match options.entries {
        0 => 0.0,
        entries => remove_tree(&root, entries)?,
    };
    rustix::fs::syncfs(File::open(&place.dir)?)?;
    Ok(SmallFilesSample {
        made,
        read,
        unlinked,
        all: made + read + unlinked,
        tree_removed,
        server_cpu,
    })
}

fn time_call(run: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

fn remove_tree(root: &Path, entries: u64) -> io::Result<f64> {
    TreePaths::new(root, entries).make(|_| 0)?;
    time_call(|| {
        let status = Command::new("rm").arg("-rf").arg(root).status()?;
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("rm -rf ended with {status}"))),
        }
    })
}

/// The directories and files of one visit, in the order of creation.
struct TreePaths {
    root: PathBuf,
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl TreePaths {
    fn new(root: &Path, files: u64) -> TreePaths {
        let directory = |at: u64| root.join(format!("directory-{at}"));
        let file = |at: u64| directory(at / FILES_PER_DIRECTORY).join(format!("file-{at}"));
        TreePaths {
            root: root.into(),
            directories: (0..files.div_ceil(FILES_PER_DIRECTORY))
                .map(directory)
                .collect(),
            files: (0..files).map(file).collect(),
        }
    }

    fn make(&self, size_of: impl Fn(u64) -> usize) -> io::Result<()> {
        let bytes = [b'x'; 4096];
        for directory in [&self.root].into_iter().chain(&self.directories) {
            std::fs::create_dir(directory)?;
        }
        for (at, path) in (0..).zip(&self.files) {
            let mut file = File::create_new(path)?;
            match size_of(at) {
                0 => {}
                size => file.write_all(&bytes[..size])?,
            }
        }
        Ok(())
    }

    fn read(&self) -> io::Result<()> {
        for (at, path) in self.files.iter().enumerate() {
            let (read, size) = (
                std::fs::read(path)?.len(),
                FILE_SIZES[at % FILE_SIZES.len()],
            );
            if read != size {
                let what = format!("{} has {read} bytes and not {size}", path.display());
                return Err(io::Error::other(what));
            }
        }
        Ok(())
    }

    fn unlink(&self) -> io::Result<()> {
        for path in &self.files {
            std::fs::remove_file(path)?;
        }
        for directory in self.directories.iter().chain([&self.root]) {
            std::fs::remove_dir(directory)?;
        }
        Ok(())
    }
}

fn report(
    places: &[&MountPlace],
    peers: &[MountPlace],
    options: &SmallFilesOptions,
    found: &[Vec<SmallFilesSample>],
) -> Report {
    let title = "small files made, read and removed by one program, all in one alternating run";
    let ratios = |what: &str| -> Vec<String> {
        let names = peers.iter().map(|peer| format!("{what} to {}", peer.name));
        names.collect()
    };
    let (of_files, of_tree) = (ratios("files"), ratios("rm -rf"));
    let mut columns = vec![
        ("place", ""),
        ("made", "s"),
        ("read", "s"),
        ("unlinked", "s"),
        ("all three", "s"),
        ("server CPU", "s"),
        ("rm -rf", "s"),
    ];
    let names = of_files.iter().chain(&of_tree);
    columns.extend(names.map(|name| (name.as_str(), "×")));
    let mut report = Report::new("small-files", title, &places[0].class, &columns);
    let peers_found = &found[places.len() - peers.len()..];
    for (place, rounds) in places.iter().zip(found) {
        let pick = |rounds: &[SmallFilesSample], of: fn(&SmallFilesSample) -> f64| -> Vec<f64> {
            rounds.iter().map(of).collect()
        };
        let times: [fn(&SmallFilesSample) -> f64; 6] = [
            |s| s.made,
            |s| s.read,
            |s| s.unlinked,
            |s| s.all,
            |s| s.server_cpu,
            |s| s.tree_removed,
        ];
        let mut row = vec![place.name.as_str().into()];
        row.extend(times.map(|of| median(&pick(rounds, of)).into()));
        for of in [times[3], times[5]] {
            let ratios = peers_found.iter().map(|peer| {
                let (own, peer) = (pick(rounds, of), pick(peer, of));
                median_ratio(&own, &peer).into()
            });
            row.extend(ratios);
        }
        report.add_row(row);
    }
    report.add_note(format!(
        "medians of {} alternating rounds; in each, one program makes {} files of {} to {} B \
         in directories of {FILES_PER_DIRECTORY}, reads each whole and unlinks all; rm -rf removes \
         {} empty files; ratios are of times, medians of the rounds' own",
        options.rounds,
        options.files,
        FILE_SIZES[0],
        FILE_SIZES[FILE_SIZES.len() - 1],
        options.entries,
    ));
    report.raw = json!({
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "samples_by_place_round": found,
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_leave_no_files_behind() {
        let [one, other] = [(); 2].map(|()| tempfile::tempdir().expect("made"));
        let options = SmallFilesOptions {
            files: 1001,
            entries: 3,
            ..SmallFilesOptions::default()
        };
        let places = [MountPlace::unserved("one", one.path())];
        let report = run_small_files(
            &places,
            &[MountPlace::unserved("other", other.path())],
            &options,
        );
        let text = report.expect("measured").text();
        assert!(text.contains("files to other"), "{text}");
        for dir in [&one, &other] {
            assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 0);
        }
    }

    #[test]
    fn existing_file_ends_the_run() {
        let dir = tempfile::tempdir().expect("made");
        std::fs::create_dir(dir.path().join("small-files")).expect("made");
        let sample = measure_place(
            &MountPlace::unserved("full", dir.path()),
            &SmallFilesOptions::default(),
        );
        let error = sample.expect_err("it is there already");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}
