//! Runs a stopped process briefly, so that it leaves an operation that others wait for.
//!
//! A process that SIGSTOP or a terminal stopped in an operation holds locks in shared memory. No
//! other process can finish the operation for it: it may be continued at any instruction, and its
//! next store goes to the pool. So it must finish the operation itself. This module traces it
//! (`PTRACE_SEIZE`), runs its threads until it has left the operation, and detaches. The kernel
//! remembers that it was stopped (ptrace(2), "group-stop") and stops it again. Neither the process
//! nor its parent gets a signal, and a SIGCONT that arrives meanwhile takes effect.
//!
//! Where tracing is not permitted, SIGCONT and SIGSTOP do the same. The parent then sees both.
//!
//! Invariants: one dedicated thread does all of it, and its end detaches all traced threads. A
//! process with another tracer is left alone. Every wait is bounded.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::time::{Duration, Instant};

/// How long a process may run before it must have left the operation. Operations take microseconds,
/// and wait for others that are stopped with it.
pub const RUN_MAX: Duration = Duration::from_millis(200);
/// How often a process may be stopped inside of a following operation before the attempt ends.
const ROUNDS_MAX: usize = 500;
/// How long a thread may take to stop: it may be in an uninterruptible system call.
const STOP_MAX: Duration = Duration::from_millis(200);
/// The interval of the checks.
const POLL_PAUSE: Duration = Duration::from_micros(20);

/// The cause of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A signal: SIGSTOP, SIGTSTP, SIGTTIN or SIGTTOU.
    Signal,
    /// The process that traces it: a debugger.
    Tracer(u32),
}

/// Whether and how a process is stopped, proc(5).
#[must_use]
pub fn stop_reason(pid: u32) -> Option<StopReason> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let mut lines = status.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.trim()))
    };
    let tracer = field("TracerPid:").and_then(|tracer| tracer.parse().ok());
    match (field("State:")?.chars().next()?, tracer) {
        ('T' | 't', Some(tracer)) if tracer != 0 => Some(StopReason::Tracer(tracer)),
        ('T' | 't', _) => Some(StopReason::Signal),
        _ => None,
    }
}

/// The name of a process, for messages.
#[must_use]
pub fn process_name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// Runs a process that a signal stopped until it has left the operation, and stops it again. False:
/// it did not leave, or cannot be run.
pub fn run_until_outside(pid: u32, is_outside: &(dyn Fn() -> bool + Sync)) -> bool {
    if is_outside() {
        return true;
    }
    let traced = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("resume".into());
        let run = thread.spawn_scoped(scope, || traced::run_traced(pid, is_outside));
        run.ok()?.join().ok()
    });
    match traced {
        Some(traced::RunOutcome::Refused) => run_by_signals(pid, is_outside),
        Some(traced::RunOutcome::Outside) => true,
        Some(traced::RunOutcome::Inside) | None => is_outside(),
    }
}

/// The same with SIGCONT and SIGSTOP.
fn run_by_signals(pid: u32, is_outside: &(dyn Fn() -> bool + Sync)) -> bool {
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let handle = target.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let Some(handle) = handle else {
        return is_outside();
    };
    let began = Instant::now();
    while stop_reason(pid) == Some(StopReason::Signal) && began.elapsed() < RUN_MAX {
        if pidfd_send_signal(&handle, Signal::CONT).is_err() {
            break;
        }
        let _ = wait_for(is_outside, RUN_MAX);
        if pidfd_send_signal(&handle, Signal::STOP).is_err() {
            break;
        }
        let is_stopped = || stop_reason(pid).is_some();
        if wait_for(&is_stopped, STOP_MAX) && is_outside() {
            return true;
        }
    }
    is_outside()
}

/// Waits until a condition holds, at most for the limit.
fn wait_for(holds: &dyn Fn() -> bool, limit: Duration) -> bool {
    let began = Instant::now();
    while !holds() {
        if began.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(POLL_PAUSE);
    }
    true
}

/// The part that calls ptrace(2).
#[allow(unsafe_code)]
mod traced {
    use super::{POLL_PAUSE, ROUNDS_MAX, RUN_MAX, STOP_MAX};
    use libc::{c_int, c_uint, c_void, pid_t};
    use std::ptr::null_mut;
    use std::time::Instant;

    pub(super) enum RunOutcome {
        /// The process has left the operation, and is stopped.
        Outside,
        /// The process stays in the operation.
        Inside,
        /// This process may not trace it.
        Refused,
    }

    /// A thread that this thread traces.
    struct TracedThread {
        id: pid_t,
        is_stopped: bool,
        has_ended: bool,
        /// A signal to deliver when it continues.
        signal: c_int,
    }

    fn ptrace(request: c_uint, id: pid_t, data: c_int) -> bool {
        let (none, data) = (null_mut::<c_void>(), data as usize as *mut c_void);
        // SAFETY: none of the requests here reads or writes memory of this process.
        unsafe { libc::ptrace(request, id, none, data) == 0 }
    }

    impl TracedThread {
        fn seize(id: pid_t) -> Option<TracedThread> {
            ptrace(libc::PTRACE_SEIZE, id, 0).then_some(TracedThread {
                id,
                is_stopped: false,
                has_ended: false,
                signal: 0,
            })
        }

        /// Collects the thread's state changes.
        fn poll(&mut self) {
            if self.is_stopped || self.has_ended {
                return;
            }
            let mut status = 0;
            // SAFETY: the kernel writes the status.
            let changed =
                unsafe { libc::waitpid(self.id, &raw mut status, libc::__WALL | libc::WNOHANG) };
            if changed < 0 || changed > 0 && !libc::WIFSTOPPED(status) {
                self.has_ended = true;
            } else if changed > 0 {
                self.is_stopped = true;
                let is_event = status >> 16 != 0;
                self.signal = match is_event {
                    true => 0,
                    false => libc::WSTOPSIG(status),
                };
            }
        }

        fn continue_running(&mut self) {
            if self.is_stopped && !self.has_ended {
                self.is_stopped = !ptrace(libc::PTRACE_CONT, self.id, self.signal);
                self.signal = 0;
            }
        }

        fn interrupt(&self) {
            if !self.is_stopped && !self.has_ended {
                ptrace(libc::PTRACE_INTERRUPT, self.id, 0);
            }
        }
    }

    /// Attaches to all threads that the kernel lists. A thread that starts after this pass is not
    /// traced.
    fn seize_all(pid: u32, threads: &mut Vec<TracedThread>) -> bool {
        let listed = std::fs::read_dir(format!("/proc/{pid}/task"));
        let names = listed.into_iter().flatten().flatten();
        let ids = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for id in ids {
            if threads.iter().any(|thread| thread.id == id) {
                continue;
            }
            match TracedThread::seize(id) {
                Some(thread) => threads.push(thread),
                None if std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) => {}
                None => return false,
            }
        }
        !threads.is_empty()
    }

    /// Waits until all threads are stopped or ended.
    fn stop(threads: &mut [TracedThread]) -> bool {
        threads.iter().for_each(TracedThread::interrupt);
        let began = Instant::now();
        loop {
            threads.iter_mut().for_each(TracedThread::poll);
            if threads
                .iter()
                .all(|thread| thread.is_stopped || thread.has_ended)
            {
                return true;
            }
            if began.elapsed() >= STOP_MAX {
                return false;
            }
            std::thread::sleep(POLL_PAUSE);
        }
    }

    /// Runs all threads until the process has left the operation, at most for the limit.
    fn run_threads(threads: &mut [TracedThread], is_outside: &dyn Fn() -> bool) {
        threads.iter_mut().for_each(TracedThread::continue_running);
        let began = Instant::now();
        while !is_outside() && began.elapsed() < RUN_MAX {
            for thread in &mut *threads {
                thread.poll();
                // It may have stopped again for a pending signal.
                thread.continue_running();
            }
            std::hint::spin_loop();
        }
    }

    pub(super) fn run_traced(pid: u32, is_outside: &dyn Fn() -> bool) -> RunOutcome {
        let mut threads = Vec::new();
        if !seize_all(pid, &mut threads) {
            // The end of this thread detaches the threads traced so far.
            return RunOutcome::Refused;
        }
        let began = Instant::now();
        let mut ran = RunOutcome::Inside;
        for _ in 0..ROUNDS_MAX {
            if !stop(&mut threads) {
                break;
            }
            if is_outside() {
                ran = RunOutcome::Outside;
                break;
            }
            if began.elapsed() >= RUN_MAX {
                break;
            }
            run_threads(&mut threads, is_outside);
        }
        for thread in threads.iter().filter(|thread| thread.is_stopped) {
            ptrace(libc::PTRACE_DETACH, thread.id, thread.signal);
        }
        ran
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    const WATCHDOG: Duration = Duration::from_secs(60);

    /// A program that writes all the time.
    /// In a process group of its own: the kernel ignores SIGTSTP in an orphaned group, as tests in the
    /// background may have.
    fn busy() -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do echo > /dev/null; done"]);
        command.process_group(0);
        command.spawn().expect("a shell")
    }

    /// Bytes that it has written, proc(5).
    fn written(pid: u32) -> u64 {
        let told = std::fs::read_to_string(format!("/proc/{pid}/io")).expect("it is there");
        let mut lines = told.lines();
        let found = lines.find_map(|line| line.strip_prefix("wchar: "));
        found.expect("a field").parse().expect("a number")
    }

    fn signal(pid: u32, signal: Signal) {
        let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    fn end(mut child: Child) {
        child.kill().expect("it is there");
        child.wait().expect("its end");
    }

    #[test]
    fn stopped_process_runs_until_outside_and_stops_again() {
        for stop in [Signal::STOP, Signal::TSTP] {
            for resume in [run_until_outside, run_by_signals] {
                let child = busy();
                let pid = child.id();
                assert!(wait_for(&|| written(pid) > 10, WATCHDOG));
                assert_eq!(stop_reason(pid), None);
                signal(pid, stop);
                let is_stopped = || stop_reason(pid) == Some(StopReason::Signal);
                assert!(wait_for(&is_stopped, WATCHDOG));
                let before = written(pid);
                assert!(resume(pid, &|| written(pid) != before), "it runs");
                assert!(wait_for(&is_stopped, WATCHDOG), "it is stopped again");
                let after = written(pid);
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(written(pid), after);
                signal(pid, Signal::CONT);
                assert!(wait_for(&|| written(pid) > after, WATCHDOG));
                end(child);
            }
        }
    }

    #[test]
    fn process_inside_for_too_long_is_given_up() {
        let child = busy();
        let pid = child.id();
        signal(pid, Signal::STOP);
        assert!(wait_for(&|| stop_reason(pid).is_some(), WATCHDOG));
        assert!(!run_until_outside(pid, &|| false));
        assert!(wait_for(
            &|| stop_reason(pid) == Some(StopReason::Signal),
            WATCHDOG
        ));
        end(child);
    }
}
