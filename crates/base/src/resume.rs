//! Runs a stopped process for a moment, so that it leaves what others wait for.
//!
//! A process that SIGSTOP or a terminal stopped in the middle of an operation holds locks in
//! shared memory. Nobody can finish the operation in its place: it may be continued at any instruction, and
//! its next store goes to the pool. So it finishes the operation itself. It is traced
//! (`PTRACE_SEIZE`), its threads run until it is outside, and then it is let go. The kernel remembers
//! that it was stopped (ptrace(2), "group-stop") and stops it again. Neither the process nor its
//! parent gets a signal; and a SIGCONT that comes meanwhile counts.
//!
//! Where tracing is not permitted, SIGCONT and SIGSTOP do the same. The parent sees both then.
//!
//! Invariants: a thread of its own does all of it; the end of the thread lets go of all that it traces.
//! A process that another one traces is left alone. Every wait is bounded.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::time::{Duration, Instant};

/// How long a process may run before it must be outside: operations take microseconds, and wait for
/// others that are stopped with it.
pub const RUN_MAX: Duration = Duration::from_millis(200);
/// How often it is stopped inside of the next operation before it stays there.
const ROUNDS_MAX: usize = 500;
/// How long a thread may take to stop: it may be in a call of the kernel that is not interrupted.
const STOP_MAX: Duration = Duration::from_millis(200);
/// Between two looks.
const POLL_PAUSE: Duration = Duration::from_micros(20);

/// How a process is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// By a signal: SIGSTOP, SIGTSTP, SIGTTIN or SIGTTOU.
    Signal,
    /// By the process that traces it: a debugger.
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

/// Lets a process that a signal stopped run until it is outside, and has it stopped again. False: it
/// did not come out, or cannot be run.
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

/// The same by signals.
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

/// Waits for something, but not for long.
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
        /// It is outside, and stopped.
        Outside,
        /// It stays inside.
        Inside,
        /// This process may not trace it.
        Refused,
    }

    /// A thread that is traced by this one.
    struct TracedThread {
        id: pid_t,
        is_stopped: bool,
        has_ended: bool,
        /// A signal that it is to get when it goes on.
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

        /// Takes in what it did since.
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

    /// All threads, of which new ones may come until all are traced.
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

    /// Waits until all are stopped.
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

    /// Lets all run until they are outside, for so long at most.
    fn run_threads(threads: &mut [TracedThread], is_outside: &dyn Fn() -> bool) {
        threads.iter_mut().for_each(TracedThread::continue_running);
        let began = Instant::now();
        while !is_outside() && began.elapsed() < RUN_MAX {
            for thread in &mut *threads {
                thread.poll();
                // A signal was on its way to it.
                thread.continue_running();
            }
            std::hint::spin_loop();
        }
    }

    pub(super) fn run_traced(pid: u32, is_outside: &dyn Fn() -> bool) -> RunOutcome {
        let mut threads = Vec::new();
        if !seize_all(pid, &mut threads) {
            // The end of this thread lets go of what is traced already.
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
    use std::process::{Child, Command};

    const WATCHDOG: Duration = Duration::from_secs(60);

    /// A program that writes all the time.
    fn busy() -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do echo > /dev/null; done"]);
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
