//! Pools on machines where memory, or a limit, is short.

use crate::support;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::program::{self, limited};
use support::skip::skip;
use support::{PAGEMESH, Pools, until};

/// Runs a shell that sets a limit and then becomes `pagemesh` with these arguments.
fn run_with_limit(limit: &str, words: &[&str]) -> Output {
    let script = format!("{limit} && exec \"$@\"");
    let mut command = limited("sh");
    command.args(["-c", &script, "sh", PAGEMESH]).args(words);
    command.output().unwrap()
}

#[test]
fn pool_beyond_file_size_limit_is_refused_by_name() {
    let dir = Pools::Disk.dir();
    let pool = dir.path().join("pool");
    let words = ["pool", "create", pool.to_str().unwrap(), "--size", "64M"];
    let output = run_with_limit("ulimit -f 1000", &words);
    program::refused("create", &output, &["limit of file sizes", "ulimit -f"]);
    assert!(!pool.exists());
    assert!(
        run_with_limit("ulimit -f unlimited", &words)
            .status
            .success()
    );
}

#[test]
fn pool_larger_than_memory_is_refused_by_name() {
    let dir = Pools::Memory.dir();
    let pool = dir.path().join("pool");
    let words = ["pool", "create", pool.to_str().unwrap(), "--size", "16T"];
    let output = run_with_limit("true", &words);
    program::refused("create", &output, &["MiB are needed", "raise its size"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let data = dir.path().join("data");
    let memory = format!("--memory={}", dir.path().display());
    let words = [
        "up",
        "--dir",
        data.to_str().unwrap(),
        "--size",
        "8T",
        &memory,
    ];
    let output = run_with_limit("true", &words);
    program::refused("up", &output, &["no room for 3 pools", "fewer --bricks"]);
    let left = |name: &str| data.join(name).symlink_metadata().is_ok();
    assert!(!left("pools") && !left("brick-1.pool"));
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        1,
        "only the data"
    );
}

/// A control group with a memory limit; none where none can be made.
struct MemoryGroup {
    dir: PathBuf,
    limit: &'static str,
}

impl MemoryGroup {
    fn new(bytes: u64) -> Option<MemoryGroup> {
        let name = format!("pagemesh-test-{}", std::process::id());
        let tops = [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ];
        tops.into_iter().find_map(|(top, limit)| {
            let dir = Path::new(top).join(&name);
            // Where the controller is off for children, the file does not exist.
            fs::create_dir(&dir).ok()?;
            let group = MemoryGroup { dir, limit };
            let file = File::options().write(true).open(group.dir.join(limit));
            let written = file.and_then(|mut file| file.write_all(bytes.to_string().as_bytes()));
            written.is_ok().then_some(group)
        })
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The group is empty once its process has ended.
        let _ = fs::remove_dir(&self.dir);
    }
}

#[test]
fn pool_beyond_control_group_is_refused_and_not_killed() {
    let Some(group) = MemoryGroup::new(100 << 20) else {
        return skip("needs root and a hierarchy of control groups with memory");
    };
    let dir = Pools::Memory.dir();
    let pool = dir.path().join("pool");
    let enter = format!("echo $$ > {}/cgroup.procs", group.dir.display());
    let create = |size: &str| {
        let words = ["pool", "create", pool.to_str().unwrap(), "--size", size];
        run_with_limit(&enter, &words)
    };
    let refused = program::refused("create", &create("256M"), &["control group", "MemoryMax="]);
    assert!(refused.contains(group.limit), "{refused}");
    assert!(!pool.exists());
    assert!(create("32M").status.success());
}

#[test]
fn killed_pool_create_leaves_no_partial_file() {
    let dir = Pools::Memory.dir();
    let pool = dir.path().join("pool");
    let words = ["pool", "create", pool.to_str().unwrap(), "--size", "256M"];
    let mut child = Command::new(PAGEMESH).args(words).spawn().unwrap();
    until("the file has its name", || pool.exists());
    child.kill().unwrap();
    child.wait().unwrap();
    // Only a complete pool gets a name.
    program::ok(PAGEMESH, &["pool", "check", pool.to_str().unwrap()]);
}
