//! Other processes: identifying and killing them.
//!
//! Invariants: a process is identified by its number and its start time, so that a later process
//! with the same number is never killed.

use pagemesh_base::proc_maps::has_mapped;
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

/// A field of a process's `stat` file, by its number in proc(5), from 3 on; none if the process is
/// gone.
fn stat_field(pid: u32, number: usize) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; the third field follows it.
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_ascii_whitespace().nth(number - 3)?.to_owned())
}

/// The start time of a process, in clock ticks since boot; none if it is gone.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    stat_field(pid, 22)?.parse().ok()
}

/// Whether the process with this start time has a thread that may still run.
pub(crate) fn is_running(pid: u32, started: u64) -> bool {
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    // Only ESRCH proves that there is none; on any other error the process counts as running.
    let handle = match pidfd_open(target, PidfdFlags::empty()) {
        Ok(handle) => handle,
        Err(cause) => return cause != rustix::io::Errno::SRCH,
    };
    if start_time(pid) != Some(started) {
        return false;
    }
    // Readable once all threads of the process have ended, even before its parent reaps it.
    let mut fds = [PollFd::new(&handle, PollFlags::IN)];
    // A wait that the kernel refuses proves nothing.
    let _ = until_ready(&mut fds, Some(Instant::now()));
    fds[0].revents().is_empty()
}

/// Whether the process with this start time has certainly ended. A process that `/proc` hides counts as
/// running.
#[must_use]
pub fn has_ended(pid: u32, started: u64) -> bool {
    let is_absent = || {
        let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let opened = target.map(|target| pidfd_open(target, PidfdFlags::empty()));
        opened.is_none_or(|opened| opened.is_err_and(|it| it == rustix::io::Errno::SRCH))
    };
    !is_running(pid, started) && (start_time(pid).is_some() || is_absent())
}

/// Whether a process is stopped, by a signal or a debugger.
pub(crate) fn is_stopped(pid: u32) -> bool {
    matches!(stat_field(pid, 3).as_deref(), Some("T" | "t"))
}

/// Kills a process, if it still has this start time.
pub(crate) fn kill(pid: u32, started: u64) -> Result<(), String> {
    let told = |cause: rustix::io::Errno| {
        format!("process {pid} is stopped inside an operation and cannot be ended: {cause}; end it")
    };
    if pid == std::process::id() {
        return Err(
            "a thread of the brick is stopped inside an operation; restart the brick".into(),
        );
    }
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(());
    };
    let handle = match pidfd_open(target, PidfdFlags::empty()) {
        Ok(handle) => handle,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(cause) => return Err(told(cause)),
    };
    // The handle pins the process, so that it cannot refer to another one.
    if start_time(pid) != Some(started) {
        return Ok(());
    }
    match pidfd_send_signal(&handle, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(cause) => Err(told(cause)),
    }
}

/// Processes that hold the lock of a file, and their start times. They have the file mapped, or
/// were stopped between receiving its descriptor and mapping it, or between unmapping it and
/// closing the descriptor.
pub(crate) fn holders(file: &Path) -> Vec<(u32, u64)> {
    let Ok(wanted) = file.metadata() else {
        return Vec::new();
    };
    let Ok(listed) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = listed.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| pid != std::process::id())
        .filter_map(|pid| Some((pid, start_time(pid)?)))
        .filter(|&(pid, _)| {
            has_mapped(pid, wanted.dev(), wanted.ino()) == Some(true)
                || is_stopped(pid) && holds_lock(pid, wanted.dev(), wanted.ino())
        })
        .collect()
}

/// Whether a descriptor of a process shares a lock of this inode. A process that only opened the
/// file, for example to copy it, does not.
fn holds_lock(pid: u32, dev: u64, inode: u64) -> bool {
    let Ok(listed) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    listed.filter_map(Result::ok).any(|entry| {
        let is_it = std::fs::metadata(entry.path())
            .is_ok_and(|found| (found.dev(), found.ino()) == (dev, inode));
        let info = Path::new("/proc").join(pid.to_string()).join("fdinfo");
        is_it
            && std::fs::read_to_string(info.join(entry.file_name()))
                .is_ok_and(|info| info.lines().any(is_flock_line))
    })
}

/// Whether a line of `/proc/PID/fdinfo/FD` shows a lock of flock(2).
fn is_flock_line(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    words.next() == Some("lock:") && words.any(|word| word == "FLOCK")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_identified_by_pid_and_start_time() {
        let pid = std::process::id();
        assert!(start_time(pid).is_some());
        assert_eq!(start_time(u32::MAX), None);
        assert!(kill(pid, 0).is_err(), "never itself");
        assert!(is_running(pid, start_time(pid).expect("it runs")));
        assert!(!is_running(pid, 0), "that was another one");
        assert!(!is_running(u32::MAX, 0));
    }

    #[test]
    fn lines_of_locks_are_read() {
        assert!(is_flock_line(
            "lock:\t1: FLOCK  ADVISORY  WRITE 4711 fd:01:12 0 EOF"
        ));
        assert!(!is_flock_line(
            "lock:\t1: OFDLCK ADVISORY  WRITE -1 fd:01:12 0 EOF"
        ));
        assert!(!is_flock_line("flags:\t0100002"));
    }
}
