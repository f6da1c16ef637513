//! A process that keeps a pool from the next brick: it shares the lock of the pool's descriptor,
//! but maps nothing.

use pagemesh_brick::file::{self, FileError};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const MIB: u64 = 1 << 20;
const KILLED: i32 = 9;

/// A process that has the pool's file open, and its lock if `is_locked`.
fn spawn_holder(pool: &Path, is_locked: bool) -> Child {
    let file = File::options().read(true).write(true).open(pool);
    let file = file.expect("the pool");
    if is_locked {
        flock(&file, FlockOperation::NonBlockingLockExclusive).expect("the lock is free");
    }
    let mut command = Command::new("sleep");
    command.arg("1000").stdin(Stdio::from(file));
    command.spawn().expect("sleep runs")
}

fn stop(child: &Child) {
    let pid = child.id().to_string();
    let status = Command::new("kill").args(["-s", "STOP", &pid]).status();
    assert!(status.expect("kill runs").success());
    let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
    while !stat().contains(") T ") {
        std::thread::yield_now();
    }
}

/// Kills it; returns whether it still ran.
fn end(mut child: Child) -> bool {
    let ended = child.try_wait().expect("a child");
    child.kill().expect("a child");
    child.wait().expect("a child");
    ended.is_none()
}

#[test]
fn stopped_process_sharing_lock_is_ended() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let pool = dir.path().join("pool");
    file::create(&pool, 16 * MIB).expect("a pool");
    let mut child = spawn_holder(&pool, true);
    let reader = spawn_holder(&pool, false);
    stop(&child);
    stop(&reader);
    let opened = file::open(&pool);
    let ended = child.try_wait().expect("a child");
    assert!(end(reader), "a process without the lock was killed");
    if ended.is_none() {
        end(child);
    }
    opened.expect("the pool is free");
    assert_eq!(ended.and_then(|status| status.signal()), Some(KILLED));
}

#[test]
fn running_process_sharing_lock_is_left_alone() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let pool = dir.path().join("pool");
    file::create(&pool, 16 * MIB).expect("a pool");
    let child = spawn_holder(&pool, true);
    let opened = file::open(&pool).map(drop);
    assert!(end(child), "it was killed");
    assert!(matches!(opened, Err(FileError::InUse(_))), "{opened:?}");
}
