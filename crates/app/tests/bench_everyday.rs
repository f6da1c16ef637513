//! `pagemesh bench everyday`: a tiny run judges each case, and nothing is left behind, also after a failure or a signal.

use crate::bench_disk::contents;
use crate::support;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use support::mounted::{may_mount, preload_library};
use support::program::{self, limited, succeeded};
use support::{PAGEMESH, Pools, until};
use tempfile::TempDir;

/// The directories of a run: of its pools, and of all else.
struct RunDirs {
    pools: TempDir,
    scratch: TempDir,
    /// Programs in place of the system's ones.
    programs: TempDir,
}

impl RunDirs {
    fn new() -> RunDirs {
        let [pools, scratch, programs] = [(); 3].map(|()| Pools::Memory.dir());
        RunDirs {
            pools,
            scratch,
            programs,
        }
    }

    /// The arguments of a run of few files.
    fn prepare<'a>(&self, command: &'a mut Command, cases: &str) -> &'a mut Command {
        let run = ["bench", "everyday", "--files", "30", "--tree-files", "40"];
        command
            .args(run)
            .args(["--case", cases, "--output", "json", "--pools"])
            .arg(self.pools.path())
            .env("TMPDIR", self.scratch.path())
            .env("PAGEMESH_PRELOAD", preload_library());
        let path = std::env::var("PATH").unwrap();
        let own = self.programs.path().to_str().unwrap();
        command.env("PATH", format!("{own}:{path}:/usr/sbin:/sbin"))
    }

    /// Replaces grep on ext4 by a program that stores the loop device below the current directory, and then ends so.
    fn replace_grep(&self, end: &str) {
        let record = self.record();
        let script = format!(
            "#!/bin/sh\n\
             [ \"$1\" != --version ] || exit 0\n\
             [ \"$(stat -f -c %T .)\" = ext2/ext3 ] || PATH=/usr/bin:/bin exec grep \"$@\"\n\
             device=$(stat -c %Hd:%Ld .)\n\
             echo $device $(cat /sys/dev/block/$device/diskseq) >{record}.part\n\
             mv {record}.part {record}\n\
             {end}\n"
        );
        let program = self.programs.path().join("grep");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn record(&self) -> String {
        let record = self.programs.path().join("loop-device");
        record.to_str().unwrap().to_owned()
    }

    /// No file, mount or loop device of the run is left.
    fn check_empty(&self) {
        let left = [contents(self.scratch.path()), contents(self.pools.path())].concat();
        assert!(left.is_empty(), "{left:?}");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let scratch = self.scratch.path().to_str().unwrap();
        assert!(!mounts.contains(scratch), "{mounts}");
        let record = std::fs::read_to_string(self.record()).unwrap();
        let (device, sequence) = record.trim().split_once(' ').unwrap();
        assert!(device.starts_with("7:"), "no loop device: {record}");
        let device = Path::new("/sys/dev/block").join(device);
        // Another program may have got the device since. Its sequence number rises with each use.
        let is_attached = device.join("loop/backing_file").exists();
        let now = std::fs::read_to_string(device.join("diskseq")).unwrap();
        assert!(!is_attached || now.trim() != sequence, "{record} is in use");
    }
}

#[test]
fn tiny_run_judges_each_case() {
    if !may_mount() {
        return;
    }
    let dirs = RunDirs::new();
    // It records the loop device, and finds nothing.
    dirs.replace_grep("exit 1");
    let cases = "rename,tar,cp,grep,rm,create,read,stat";
    let output = dirs.prepare(&mut limited(PAGEMESH), cases).output();
    let text = succeeded("bench everyday", output.unwrap());
    let report: Value = serde_json::from_str(&text).unwrap();
    let columns = report["columns"].as_array().unwrap();
    let cell = |row: &Value, name: &str| {
        let at = columns.iter().position(|column| column["name"] == name);
        row[at.unwrap()].clone()
    };
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<&str> = rows.iter().map(|row| row[0].as_str().unwrap()).collect();
    let titles = [
        "tar x",
        "cp -r",
        "grep -r",
        "rm -rf",
        "create 4 KiB files",
        "read 4 KiB files",
        "lstat files",
        "rename files",
    ];
    assert_eq!(found, titles);
    for row in rows {
        for figure in ["mount", "exec", "ext4", "mount to ext4", "exec to mount"] {
            assert!(cell(row, figure).as_f64().unwrap() > 0.0, "{row}");
        }
        let is_met = cell(row, "mount to ext4").as_f64() <= cell(row, "bar").as_f64();
        assert_eq!(cell(row, "met") == "met", is_met, "{row}");
        let has_exec_bar = row[0] == "read 4 KiB files";
        assert_eq!(cell(row, "exec met").is_string(), has_exec_bar, "{row}");
    }
    dirs.check_empty();
}

#[test]
fn failed_program_ends_the_run_and_leaves_nothing() {
    if !may_mount() {
        return;
    }
    let dirs = RunDirs::new();
    dirs.replace_grep("echo broken >&2; exit 2");
    let output = dirs.prepare(&mut limited(PAGEMESH), "grep").output();
    let parts = ["grep on ext4", "broken"];
    program::refused("bench everyday", &output.unwrap(), &parts);
    dirs.check_empty();
}

#[test]
fn signal_ends_the_run_and_leaves_nothing() {
    if !may_mount() {
        return;
    }
    let dirs = RunDirs::new();
    dirs.replace_grep("exec sleep 1000");
    let mut command = Command::new(PAGEMESH);
    dirs.prepare(&mut command, "grep");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let is_measuring = || Path::new(&dirs.record()).exists();
    until("grep runs on ext4", || {
        is_measuring() || child.try_wait().unwrap().is_some()
    });
    assert!(is_measuring(), "it ended early: {:?}", child.wait());
    let started = descendants(child.id());
    assert!(started.len() > 4, "{started:?}");
    let ends = started
        .iter()
        .map(|&pid| pidfd_open(pid, PidfdFlags::empty()).unwrap());
    let ends: Vec<_> = ends.collect();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    for end in &ends {
        poll(&mut [PollFd::new(end, PollFlags::IN)], None).unwrap();
    }
    // The namespace of ext4 does not hold the mount, so that it ends while its bricks serve it.
    let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert!(!said.contains("WARN"), "{said}");
    dirs.check_empty();
}

/// The processes below this one.
fn descendants(root: u32) -> Vec<Pid> {
    let all = std::fs::read_dir("/proc").unwrap();
    let all = all.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let parents: Vec<(u32, u32)> = all.filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut found = vec![root];
    let mut at = 0;
    while let Some(&above) = found.get(at) {
        let children = parents.iter().filter(|(_, parent)| *parent == above);
        found.extend(children.map(|(pid, _)| *pid));
        at += 1;
    }
    let below = found[1..].iter().map(|pid| pid.cast_signed());
    below.map(|pid| Pid::from_raw(pid).unwrap()).collect()
}

/// The parent of a process; none if it has ended.
fn parent(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may contain spaces.
    let (_, rest) = text.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}

#[test]
fn unknown_case_or_count_is_refused_before_start() {
    let check = |args: &[&str], parts: &[&str]| {
        let mut command = limited(PAGEMESH);
        let output = command.args(["bench", "everyday"]).args(args).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        for part in parts {
            assert!(said.contains(part), "no '{part}' in: {said}");
        }
    };
    check(&["--case", "tar,sort"], &["sort", "small-reads"]);
    check(&["--files", "0"], &["--files", "0"]);
    check(&["--tree-files", "20001"], &["--tree-files", "20001"]);
    check(&["--rounds", "4"], &["--rounds", "4"]);
}
