//! `pagemesh exec`: runs a program whose threads reach files of mounts themselves.

mod obstacle;

use crate::args::{Exec, Output};
use anyhow::{Context, bail};
use obstacle::{Obstacle, obstacle};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library that catches the program's calls.
const LIBRARY: &str = "libpagemesh_preload.so";
/// Where it is, from the directory of this program.
const PLACES: [&str; 3] = [".", "../lib/pagemesh", "../lib"];
const PRELOAD: &str = "LD_PRELOAD";
const ASAN: &str = "ASAN_OPTIONS";
/// What the library looks at.
const PATIENCE: &str = "PAGEMESH_PATIENCE";
const REPORT: &str = "PAGEMESH_REPORT";
const REPORT_OUTPUT: &str = "PAGEMESH_REPORT_OUTPUT";
/// The same: filters of system calls that this process is under, and the library may take for granted.
const FILTERS: &str = "PAGEMESH_FILTERS";

/// Becomes the program.
pub fn run(args: &Exec) -> anyhow::Result<()> {
    let Some((program, rest)) = args.command.split_first() else {
        bail!("say which program is to run: pagemesh exec -- PROGRAM ARGUMENT…");
    };
    let library = match &args.library {
        Some(path) => checked(path)?,
        None => found()?,
    };
    let mut command = Command::new(program);
    command.args(rest);
    let obstacle = obstacle(program);
    if let Some(Obstacle::Refused(why) | Obstacle::LeftOut(why)) = obstacle
        && args.verbose
    {
        let program = Path::new(program).display();
        eprintln!("pagemesh exec: {program} is not on the direct path: {why}");
    }
    // The loader of such a program says that it cannot load the library, or ends it.
    if !matches!(obstacle, Some(Obstacle::Refused(_))) {
        preload(&mut command, library);
    }
    if let Some(filters) = filters() {
        command.env(FILTERS, filters);
    }
    if let Some(calls) = args.patience {
        command.env(PATIENCE, calls.to_string());
    }
    if let Some(place) = &args.report {
        // The program may change its directory.
        let place = match place.as_os_str() == "-" {
            true => place.clone(),
            false => std::path::absolute(place).context("--report: no such place")?,
        };
        command.env(REPORT, place);
        if args.output == Output::Json {
            command.env(REPORT_OUTPUT, "json");
        }
    }
    let cause = command.exec();
    Err(NotRun {
        program: program.into(),
        cause,
    }
    .into())
}

/// The program could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot run {}: {cause}", program.display())]
pub struct NotRun {
    program: PathBuf,
    cause: std::io::Error,
}

impl NotRun {
    /// The exit code that shells, env(1) and nohup(1) have for it (POSIX, 2.8.2).
    pub fn exit_code(&self) -> u8 {
        match self.cause.kind() {
            std::io::ErrorKind::NotFound => 127,
            _ => 126,
        }
    }
}

/// Has the library loaded into the program and its children.
fn preload(command: &mut Command, library: PathBuf) {
    let with = |name, value: OsString| {
        let mut with = value;
        if let Some(others) = std::env::var_os(name).filter(|others| !others.is_empty()) {
            with.push(":");
            with.push(others);
        }
        with
    };
    command.env(PRELOAD, with(PRELOAD, library.into()));
    // A sanitizer that is not first of all libraries refuses to run; so no check of that. The library leaves
    // such programs alone.
    command.env(ASAN, with(ASAN, "verify_asan_link_order=0".into()));
}

/// Filters of system calls (seccomp) that this process is under (proc_pid_status(5)).
fn filters() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut values = status
        .lines()
        .filter_map(|line| line.strip_prefix("Seccomp_filters:"));
    Some(values.next()?.trim().to_owned())
}

fn checked(path: &Path) -> anyhow::Result<PathBuf> {
    let path = path.canonicalize();
    let path = path.context("the library of the direct path is not where --library says")?;
    // The loader divides what it is told at these.
    match path.to_str() {
        Some(text) if !text.contains([':', ' ']) => Ok(path),
        _ => bail!(
            "{}: a path with colons or blanks cannot be loaded; move the library",
            path.display()
        ),
    }
}

fn found() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let mut places = PLACES.iter().map(|place| beside.join(place).join(LIBRARY));
    match places.find(|path| path.is_file()) {
        Some(path) => checked(&path),
        None => bail!(
            "{LIBRARY} is not beside {}, nor in ../lib; build it (cargo build --release -p \
             pagemesh-preload), or say where it is: pagemesh exec --library FILE -- PROGRAM",
            program.display()
        ),
    }
}
