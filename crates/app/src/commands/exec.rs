//! `pagemesh exec`: runs a program with direct access to the files of mounts.

mod obstacle;

use crate::args::Output;
use anyhow::{Context, bail};
use clap::Args;
use obstacle::{PreloadObstacle, find_obstacle};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Run a program with direct access to the files of mounts.
///
/// The program's threads read, overwrite and append to these files themselves. All other calls, and
/// statically linked programs, use the kernel as usual and see the same data. Direct access needs
/// mapped pools that need no flush, and a mount of the same user or of root.
#[derive(Args)]
pub struct ExecArgs {
    /// Library that intercepts the program's calls; by default the one installed with this program.
    #[arg(long, env = "PAGEMESH_PRELOAD", value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// Calls of a process on files of mounts that use the kernel before the process switches to
    /// direct access. The switch costs more than a hundred calls. 32 by default.
    #[arg(long, env = "PAGEMESH_PATIENCE", value_name = "CALLS")]
    pub patience: Option<u32>,
    /// Let each process report at its exit how many operations were direct, how many used the
    /// kernel, and why. The report goes to standard error, or is appended to a file.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub report: Option<PathBuf>,
    /// Format of the report; JSON is one line per process.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
    /// Write to standard error why the program gets no direct access, if that is known before it
    /// runs. For a running program use `PAGEMESH_LOG=info` or --report.
    #[arg(long)]
    pub verbose: bool,
    /// Program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<std::ffi::OsString>,
}

/// The library that intercepts the program's calls.
const LIBRARY: &str = "libpagemesh_preload.so";
/// Directories of the library, relative to the directory of this program.
const LIBRARY_DIRS: [&str; 3] = [".", "../lib/pagemesh", "../lib"];
const PRELOAD_ENV: &str = "LD_PRELOAD";
const ASAN_ENV: &str = "ASAN_OPTIONS";
/// Environment variables that the library reads.
const PATIENCE_ENV: &str = "PAGEMESH_PATIENCE";
const REPORT_ENV: &str = "PAGEMESH_REPORT";
const REPORT_OUTPUT_ENV: &str = "PAGEMESH_REPORT_OUTPUT";
/// The library also reads the number of seccomp filters on this process. It uses direct access only
/// if the program has no further filters.
const FILTERS_ENV: &str = "PAGEMESH_FILTERS";

/// Replaces this process by the program.
pub fn run(args: &ExecArgs) -> anyhow::Result<()> {
    let Some((program, rest)) = args.command.split_first() else {
        bail!("name the program: pagemesh exec -- PROGRAM ARGUMENT…");
    };
    let library = match &args.library {
        Some(path) => check_library_path(path)?,
        None => find_library()?,
    };
    let mut command = Command::new(program);
    command.args(rest);
    let obstacle = find_obstacle(program);
    if let Some(PreloadObstacle::Refused(why) | PreloadObstacle::LeftOut(why)) = obstacle
        && args.verbose
    {
        let program = Path::new(program).display();
        eprintln!("pagemesh exec: {program} is not on the direct path: {why}");
    }
    // The loader of such a program would print an error, or end the program.
    if !matches!(obstacle, Some(PreloadObstacle::Refused(_))) {
        preload(&mut command, library);
    }
    if let Some(filters) = seccomp_filters() {
        command.env(FILTERS_ENV, filters);
    }
    if let Some(calls) = args.patience {
        command.env(PATIENCE_ENV, calls.to_string());
    }
    if let Some(place) = &args.report {
        // The program may change its working directory.
        let place = match place.as_os_str() == "-" {
            true => place.clone(),
            false => std::path::absolute(place).context("--report: no such place")?,
        };
        command.env(REPORT_ENV, place);
        if args.output == Output::Json {
            command.env(REPORT_OUTPUT_ENV, "json");
        }
    }
    let cause = command.exec();
    Err(ExecError {
        program: program.into(),
        cause,
    }
    .into())
}

/// The program did not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot run {}: {cause}", program.display())]
pub struct ExecError {
    program: PathBuf,
    cause: std::io::Error,
}

impl ExecError {
    /// The exit code that shells, env(1) and nohup(1) use for this error (POSIX, 2.8.2).
    pub fn exit_code(&self) -> u8 {
        match self.cause.kind() {
            std::io::ErrorKind::NotFound => 127,
            _ => 126,
        }
    }
}

/// Makes the loader load the library into the program and its children.
fn preload(command: &mut Command, library: PathBuf) {
    let with = |name, value: OsString| {
        let mut with = value;
        if let Some(others) = std::env::var_os(name).filter(|others| !others.is_empty()) {
            with.push(":");
            with.push(others);
        }
        with
    };
    command.env(PRELOAD_ENV, with(PRELOAD_ENV, library.into()));
    // A sanitizer refuses to run unless it is the first library, so disable that check. The library
    // does not intercept calls of such programs.
    command.env(ASAN_ENV, with(ASAN_ENV, "verify_asan_link_order=0".into()));
}

/// The number of system call filters (seccomp) on this process (proc_pid_status(5)).
fn seccomp_filters() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut values = status
        .lines()
        .filter_map(|line| line.strip_prefix("Seccomp_filters:"));
    Some(values.next()?.trim().to_owned())
}

fn check_library_path(path: &Path) -> anyhow::Result<PathBuf> {
    let path = path.canonicalize();
    let path = path.context("the library of the direct path is not where --library says")?;
    // The loader splits `LD_PRELOAD` at these characters.
    match path.to_str() {
        Some(text) if !text.contains([':', ' ']) => Ok(path),
        _ => bail!(
            "{}: a path with colons or blanks cannot be loaded; move the library",
            path.display()
        ),
    }
}

fn find_library() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let mut places = LIBRARY_DIRS
        .iter()
        .map(|place| beside.join(place).join(LIBRARY));
    match places.find(|path| path.is_file()) {
        Some(path) => check_library_path(&path),
        None => bail!(
            "{LIBRARY} is not next to {}, nor in ../lib; build it (cargo build --release -p \
             pagemesh-preload), or say where it is: pagemesh exec --library FILE -- PROGRAM",
            program.display()
        ),
    }
}
