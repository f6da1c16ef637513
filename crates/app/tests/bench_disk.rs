//! `pagemesh bench disk`: a tiny run reports every cell, and nothing is left behind, also by a
//! signal.

use crate::support;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use support::program::{self, limited, succeeded};
use support::{PAGEMESH, Pools, mounted};

/// The smallest run: the raw disk and one leg.
fn tiny_args(dir: &Path, rows: &str) -> Vec<String> {
    let dir = dir.to_str().unwrap();
    let run = ["bench", "disk", "--dir", dir, "--size", "128M", "--cache"];
    let length = ["16M", "--rounds", "1", "--seconds", "1", "--targets"];
    let cells = ["one-leg", "--rows", rows, "--output", "json"];
    let args = [&run[..], &length, &cells].concat();
    args.into_iter().map(str::to_owned).collect()
}

fn is_empty(dir: &Path) -> bool {
    contents(dir).is_empty()
}

/// The names in a directory.
pub fn contents(dir: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn tiny_run_reports_raw_disk_and_one_leg() {
    let dir = Pools::Disk.dir();
    let args = tiny_args(dir.path(), "random-read-qd32,fua-16-jobs");
    let mut command = limited(PAGEMESH);
    // Programs leave nothing in the current directory either.
    command.args(&args).current_dir(dir.path());
    let text = succeeded("bench disk", command.output().unwrap());
    let report: Value = serde_json::from_str(&text).unwrap();
    let columns = report["columns"].as_array().unwrap();
    let cell = |row: &Value, name: &str| {
        let at = columns.iter().position(|column| column["name"] == name);
        row[at.unwrap()].clone()
    };
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "{text}");
    for row in rows {
        for figure in ["IOPS", "mean", "to raw disk"] {
            assert!(cell(row, figure).as_f64().unwrap() > 0.0, "{row}");
        }
        let is_judged = cell(row, "target") == "pagemesh, one leg";
        assert_eq!(cell(row, "bar").is_string(), is_judged, "{row}");
        assert_eq!(cell(row, "met").is_string(), is_judged, "{row}");
    }
    assert_eq!(report["raw"]["bars"].as_array().unwrap().len(), 2, "{text}");
    assert!(is_empty(dir.path()));
}

#[test]
fn signal_ends_run_and_removes_its_data() {
    let dir = Pools::Disk.dir();
    let mut args = tiny_args(dir.path(), "random-read-qd1");
    args.extend(["--rounds", "1000"].map(str::to_owned));
    let first = args.iter().position(|arg| arg == "--rounds").unwrap();
    args.drain(first..first + 2);
    let mut command = Command::new(PAGEMESH);
    command
        .args(&args)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let filled = lines.find(|line| {
        let line = line.as_ref().unwrap();
        line.contains("round 1 of 1000 is done")
    });
    assert!(filled.is_some(), "it ended early: {:?}", child.wait());
    assert!(!is_empty(dir.path()));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(is_empty(dir.path()));
    // Its children have the other end: the end of the lines shows that all have exited.
    assert!(lines.all(|line| line.is_ok()));
}

/// A terminal signals all processes of a group at once. The mounts end while their bricks serve them: otherwise they
/// wait for the bricks, and stay behind.
#[test]
fn signal_ends_mounts_before_their_bricks() {
    if !mounted::may_mount() {
        return;
    }
    let (dir, scratch) = (Pools::Disk.dir(), Pools::Memory.dir());
    let mut command = Command::new(PAGEMESH);
    let run = [
        "bench",
        "disk-files",
        "--workload",
        "sqlite",
        "--count",
        "50",
    ];
    let length = ["--size", "64M", "--rounds", "1000", "--pools"];
    command.args(run).args(length).arg(dir.path());
    command.env("TMPDIR", scratch.path()).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let is_measuring = lines.any(|line| line.unwrap().contains("round 1 of 1000 is done"));
    assert!(is_measuring, "it ended early: {:?}", child.wait());
    kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let said: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(!said.iter().any(|line| line.contains("WARN")), "{said:?}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(
        !mounts.contains(scratch.path().to_str().unwrap()),
        "{mounts}"
    );
    let left = [contents(scratch.path()), contents(dir.path())].concat();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn unsuitable_place_or_size_is_refused_before_start() {
    let (disk, memory) = (Pools::Disk.dir(), Pools::Memory.dir());
    let check = |dir: &Path, more: &[&str], parts: &[&str]| {
        let mut command = limited(PAGEMESH);
        command.args(["bench", "disk", "--dir"]).arg(dir).args(more);
        program::refused("bench disk", &command.output().unwrap(), parts);
        assert!(is_empty(dir));
    };
    check(memory.path(), &[], &["is in memory", "--dir"]);
    check(disk.path(), &["--size", "64T"], &["has room for", "--size"]);
    check(disk.path(), &["--size", "8M"], &["8M", "128M to 64T"]);
    let large = ["--size", "128M", "--cache", "32M"];
    check(disk.path(), &large, &["would not reach the disk", "16M"]);
    let file = disk.path().to_str().unwrap();
    let device = ["bench", "disk", "--dir", file, "--device", "/dev/null"];
    let output = limited(PAGEMESH).args(device).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let file = ["--size", "128M", "--overwrite", "--device", "/dev/null"];
    check(disk.path(), &file, &["/dev/null is no block device"]);
}
