//! Many files: the time to mount a file system that has them, the memory of the mounting process,
//! and whether find(1) lists exactly the files that were made.
//!
//! The caller supplies the mounts; every mount but the first is of the file system that the
//! previous one left. Created and listed names are compared by number and by a checksum that
//! ignores their order.

use crate::error::BenchError;
use crate::process::{self, ChildProcess, command_killed_with_thread};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::median;
use serde::Serialize;
use serde_json::json;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Seek as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Longest time for creating the files of a tree.
const CREATE_TIME_MAX: Duration = Duration::from_secs(1200);
/// Longest time for finding them.
const FIND_TIME_MAX: Duration = Duration::from_secs(600);
/// Interval of progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Options of a run.
#[derive(Clone, Debug)]
pub struct ManyFilesOptions {
    /// Mounts of the created files, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Files of each kind of tree.
    pub files: u64,
    /// Files per directory; one tree for each value.
    pub per_directory: Vec<u64>,
    /// The pools' durability class.
    pub class: String,
}

/// A mount.
#[derive(Clone, Debug)]
pub struct MountInfo {
    /// Its directory.
    pub dir: PathBuf,
    /// From the start of the mounting process until it served.
    pub mount_time: Duration,
    /// The mounting process.
    pub pid: u32,
}

/// Makes mounts, one at a time.
pub trait Mounter {
    /// Unmounts the current mount cleanly, and mounts the file system of this name; a new name is a
    /// new file system.
    ///
    /// # Errors
    /// Any error ends the run.
    fn mount(&mut self, name: &str) -> Result<MountInfo, Box<dyn Error + Send + Sync>>;
    /// Private memory of a process in bytes, without pools.
    ///
    /// # Errors
    /// Any error ends the run.
    fn resident_bytes(&mut self, pid: u32) -> Result<u64, Box<dyn Error + Send + Sync>>;
}

#[derive(Debug, Serialize)]
struct TreeSample {
    per_directory: u64,
    made_s: f64,
    empty_mount_s: f64,
    mounts_s: Vec<f64>,
    resident_bytes: Vec<u64>,
    /// After all files were found.
    resident_after_bytes: u64,
    find_s: f64,
}

/// Runs the benchmark; see the module.
///
/// # Errors
/// If an option is invalid, a file cannot be created, or find lists other files than were created.
pub fn run_many_files(
    mount: &mut dyn Mounter,
    options: &ManyFilesOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if options.files == 0 || options.per_directory.contains(&0) {
        return Err(BenchError::Option("0 files are not many".into()));
    }
    process::require_program("find", "findutils")?;
    let trees = options.per_directory.iter();
    let trees: Result<Vec<TreeSample>, _> =
        trees.map(|&many| measure(mount, many, options)).collect();
    Ok(report(&trees?, options))
}

fn measure(
    mount: &mut dyn Mounter,
    per_directory: u64,
    options: &ManyFilesOptions,
) -> Result<TreeSample, BenchError> {
    let name = format!("by-{per_directory}");
    let again = |mount: &mut dyn Mounter| mount.mount(&name).map_err(BenchError::Mount);
    let mut mounted = again(mount)?;
    let empty_mount_s = mounted.mount_time.as_secs_f64();
    let start = Instant::now();
    let made = make_tree(&mounted.dir, options.files, per_directory)?;
    let made_s = start.elapsed().as_secs_f64();
    let (mut mounts_s, mut resident_bytes) = (vec![], vec![]);
    for _ in 0..options.rounds {
        mounted = again(mount)?;
        mounts_s.push(mounted.mount_time.as_secs_f64());
        resident_bytes.push(resident(mount, mounted.pid)?);
    }
    let start = Instant::now();
    let found = find_tree(&mounted.dir)?;
    let find_s = start.elapsed().as_secs_f64();
    if found != made {
        return Err(BenchError::Program {
            program: "find".into(),
            cause: format!("it finds {found:?} where {made:?} were made"),
        });
    }
    Ok(TreeSample {
        per_directory,
        made_s,
        empty_mount_s,
        mounts_s,
        resident_bytes,
        resident_after_bytes: resident(mount, mounted.pid)?,
        find_s,
    })
}

fn resident(mount: &mut dyn Mounter, pid: u32) -> Result<u64, BenchError> {
    mount.resident_bytes(pid).map_err(BenchError::Mount)
}

/// A number of names and the sum of their hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NameSet {
    count: u64,
    sum: u64,
}

impl NameSet {
    /// Adds a path below the tree's root. The hash is FNV-1a (Fowler, Noll, Vo).
    fn add(&mut self, path: &[u8]) {
        let hash = path.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        self.count += 1;
        self.sum = self.sum.wrapping_add(hash);
    }
}

fn make_tree(root: &Path, files: u64, per_directory: u64) -> Result<NameSet, BenchError> {
    let mut made = NameSet::default();
    let start = Instant::now();
    let mut tell = PROGRESS_INTERVAL;
    for at in 0..files {
        let dir = format!("dir-{}", at / per_directory);
        let name = format!("{dir}/file-{at}");
        let path = root.join(&name);
        let cannot = || BenchError::system(format!("make {}", path.display()));
        if at % per_directory == 0 {
            std::fs::create_dir(root.join(&dir)).map_err(cannot())?;
        }
        File::create_new(&path).map_err(cannot())?;
        made.add(name.as_bytes());
        let elapsed = start.elapsed();
        if elapsed > tell {
            eprintln!("{} of {files} files are made", at + 1);
            tell = elapsed + PROGRESS_INTERVAL;
        }
        if elapsed > CREATE_TIME_MAX {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            return Err(BenchError::system(format!("make more than {at} files"))(
                late,
            ));
        }
    }
    Ok(made)
}

fn find_tree(root: &Path) -> Result<NameSet, BenchError> {
    let cannot = || BenchError::system("keep what find says");
    let mut output = tempfile::tempfile().map_err(cannot())?;
    let mut command = command_killed_with_thread("find");
    command
        .arg(root)
        .args(["-type", "f", "-size", "0", "-printf", "%P\\n"])
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(cannot())?);
    ChildProcess::start("find", command)?.wait_for_success(FIND_TIME_MAX)?;
    output.rewind().map_err(cannot())?;
    let mut found = NameSet::default();
    for path in BufReader::new(output).split(b'\n') {
        found.add(&path.map_err(cannot())?);
    }
    Ok(found)
}

fn report(trees: &[TreeSample], options: &ManyFilesOptions) -> Report {
    const MIB: f64 = (1 << 20) as f64;
    let title = format!("{} files", options.files);
    let columns = [
        ("files of a directory", ""),
        ("made", "1/s"),
        ("mount when empty", "s"),
        ("mount, median", "s"),
        ("mount, max", "s"),
        ("memory then, median", "MiB"),
        ("memory then, max", "MiB"),
        ("find", "s"),
        ("memory after", "MiB"),
    ];
    let mut report = Report::new("many", &title, &options.class, &columns);
    let most = |all: &[f64]| ReportCell::from(all.iter().copied().reduce(f64::max));
    for tree in trees {
        let resident = tree.resident_bytes.iter();
        let resident: Vec<f64> = resident.map(|&bytes| bytes as f64 / MIB).collect();
        report.add_row(vec![
            tree.per_directory.into(),
            (options.files as f64 / tree.made_s).into(),
            tree.empty_mount_s.into(),
            median(&tree.mounts_s).into(),
            most(&tree.mounts_s),
            median(&resident).into(),
            most(&resident),
            tree.find_s.into(),
            (tree.resident_after_bytes as f64 / MIB).into(),
        ]);
    }
    report.add_note(format!(
        "made by one program, empty; {} mounts of each tree, from the start of the mounting \
         process until it serves; memory: resident, without what is mapped from pools; find \
         saw exactly the names that were made",
        options.rounds
    ));
    report.raw = json!({ "trees": trees });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that may lose files between two mounts.
    struct DirMounter {
        dir: tempfile::TempDir,
        lost_name: Option<&'static str>,
        mounts: usize,
    }

    impl Mounter for DirMounter {
        fn mount(&mut self, name: &str) -> Result<MountInfo, Box<dyn Error + Send + Sync>> {
            let dir = self.dir.path().join(name);
            self.mounts += 1;
            match self.mounts {
                1 => std::fs::create_dir(&dir)?,
                _ => {
                    if let Some(lost) = self.lost_name.take() {
                        std::fs::rename(dir.join(lost), dir.join("dir-0/other"))?;
                    }
                }
            }
            let took = Duration::from_millis(self.mounts as u64);
            Ok(MountInfo {
                dir,
                mount_time: took,
                pid: 1,
            })
        }

        fn resident_bytes(&mut self, _pid: u32) -> Result<u64, Box<dyn Error + Send + Sync>> {
            Ok(3 << 20)
        }
    }

    fn run(loses: Option<&'static str>) -> Result<Report, BenchError> {
        let dir = tempfile::tempdir().expect("made");
        let mut mount = DirMounter {
            dir,
            lost_name: loses,
            mounts: 0,
        };
        let options = ManyFilesOptions {
            rounds: 5,
            files: 25,
            per_directory: vec![10],
            class: "none".into(),
        };
        run_many_files(&mut mount, &options)
    }

    #[test]
    fn created_files_are_found() {
        let report = run(None).expect("measured");
        assert_eq!(report.rows[0][3], ReportCell::Number(0.004));
        assert_eq!(report.rows[0][5], ReportCell::Number(3.0));
    }

    #[test]
    fn changed_name_ends_the_run() {
        let error = run(Some("dir-1/file-12")).expect_err("another name");
        assert!(error.to_string().contains("find"), "{error}");
    }
}
