//! A connection of a client, and the process at its other end.
//!
//! Invariants: the process is known by a descriptor, so that no later process with the same number
//! is taken for it.

use super::status::ClientRecord;
use pagemesh_base::resume::{self, StopReason};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A process at the other end of a connection.
pub(super) struct ClientConnection {
    pub(super) process: OwnedFd,
    pub(super) pid: Pid,
    pub(super) socket: OwnedFd,
    pub(super) record: Arc<ClientRecord>,
}

impl ClientConnection {
    /// Whether its process ends within this time.
    pub(super) fn exits_within(&self, wait: Duration) -> bool {
        let until = Timespec::try_from(wait).unwrap_or_default();
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&until)), Ok(ended) if ended > 0)
    }

    /// Whether its process is gone. It then shuts the connection down, so that the connection's
    /// thread notices: a child that it forked may still have the connection.
    pub(super) fn has_ended(&self) -> bool {
        let is_gone = self.exits_within(Duration::ZERO);
        if is_gone {
            // It may be shut down already.
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
        is_gone
    }

    /// Whether the client waits for a reply, and has not begun to exit. That check comes before the
    /// exit closes or gives back anything that another process may notice.
    pub(super) fn awaits_reply(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let is_there = matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0));
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid.as_raw_pid()));
        let mut tasks = tasks.into_iter().flatten().flatten();
        is_there && tasks.any(|task| !is_exiting(&task.path().join("stat")))
    }

    pub(super) fn kill(&self, why: &str) {
        if !self.has_ended() {
            let (pid, name) = (self.pid.as_raw_pid(), self.record.name());
            let why = &match resume::stop_reason(pid.cast_unsigned()) {
                Some(StopReason::Tracer(tracer)) => {
                    let tracer_name = resume::process_name(tracer);
                    format!("{why}; process {tracer} ({tracer_name}) had stopped it, see ptrace(2)")
                }
                Some(StopReason::Signal) => {
                    format!("{why}; it was stopped, and did not leave it when it ran")
                }
                None => why.to_owned(),
            };
            tracing::warn!(pid, name, why, "a direct client is killed");
            self.record.record_kill(why);
            // It may have ended by itself meanwhile.
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
    }
}

/// Whether a thread belongs to one of these processes. The kernel gives 0 for a thread in a PID
/// namespace that this process does not see: such a thread may belong to any process.
pub(super) fn is_thread_of_any(processes: &[Pid], thread: u32) -> bool {
    let Some(pid) = Pid::from_raw(thread.cast_signed()) else {
        return !processes.is_empty();
    };
    if processes.is_empty() || processes.contains(&pid) {
        return !processes.is_empty();
    }
    // The kernel gives a descriptor only for the first thread of a process.
    if pidfd_open(pid, PidfdFlags::empty()).is_ok() {
        return false;
    }
    let is_of = |process: &Pid| {
        let process = process.as_raw_pid();
        Path::new(&format!("/proc/{process}/task/{thread}")).exists()
    };
    processes.iter().any(is_of)
}

/// A field of a process's or thread's status, counted from its state on, proc(5).
fn proc_stat_field(path: &Path, index: usize) -> Option<String> {
    let stat = std::fs::read_to_string(path).ok()?;
    // The name, in parentheses, may hold any characters.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(index).map(str::to_owned)
}

/// Whether a thread is exiting or has exited.
fn is_exiting(path: &Path) -> bool {
    /// `flags`, behind the state and five numbers.
    const FLAGS: usize = 6;
    /// `PF_EXITING` (Linux, `include/linux/sched.h`)
    const EXITING: u32 = 4;
    let flags = proc_stat_field(path, FLAGS).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_none_or(|flags| flags & EXITING != 0)
}
