//! Programs as child processes, and the CPU time of any process.
//!
//! A [`ChildProcess`] is killed and reaped when it is dropped. The kernel kills it when the thread
//! that started it ends without a drop, by a signal, an abort or a panic of the process. No process
//! is killed by name. Output goes to a file, so that a program with much output never blocks.

use crate::error::BenchError;
use nix::time::clock_getcpuclockid;
use nix::unistd;
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Most bytes of a program's output in an error.
const STDERR_BYTES_MAX: usize = 2000;

/// A command for a program that the kernel kills when the calling thread ends for any reason
/// (prctl(2), `PR_SET_PDEATHSIG`). setpriv(1) sets the signal and then executes the program under
/// the same process id. Call [`require_program`] first: setpriv itself starts even if the program
/// is missing.
pub(crate) fn command_killed_with_thread(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]);
    command
}

/// The Debian package with setpriv, which [`command_killed_with_thread`] uses.
const SETPRIV_PACKAGE: &str = "util-linux";

/// A running program.
pub(crate) struct ChildProcess {
    program: String,
    child: std::process::Child,
    pidfd: OwnedFd,
    stderr: File,
}

impl ChildProcess {
    /// Starts a command from [`command_killed_with_thread`], and keeps its error output. `program`
    /// is its name in errors.
    pub(crate) fn start(program: &str, command: Command) -> Result<ChildProcess, BenchError> {
        ChildProcess::spawn(program, command, SETPRIV_PACKAGE)
    }

    /// `package` is the Debian package to name if the started program is not installed.
    fn spawn(
        program: &str,
        mut command: Command,
        package: &'static str,
    ) -> Result<ChildProcess, BenchError> {
        let program = program.to_owned();
        let cannot = || BenchError::system(format!("start {program}"));
        let words = tempfile::tempfile().map_err(cannot())?;
        let errors = words.try_clone().map_err(cannot())?;
        let child = command.stderr(errors).spawn();
        let mut child = child.map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => BenchError::Missing {
                program: command.get_program().to_string_lossy().into_owned(),
                package,
            },
            _ => cannot()(cause),
        })?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("it has no process id"));
        let ended = pid.and_then(|pid| Ok(pidfd_open(pid, PidfdFlags::empty())?));
        match ended {
            Ok(ended) => Ok(ChildProcess {
                program,
                child,
                pidfd: ended,
                stderr: words,
            }),
            Err(cause) => {
                kill_and_wait(&mut child);
                Err(cannot()(cause))
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the program ends, at most `limit`. Returns whether it has ended.
    pub(crate) fn wait_for_end(&self, limit: Duration) -> Result<bool, BenchError> {
        self.wait_for_input(&self.pidfd, Instant::now() + limit)
    }

    fn wait_for_input(&self, from: impl AsFd, until: Instant) -> Result<bool, BenchError> {
        let mut fds = [PollFd::new(&from, PollFlags::IN)];
        loop {
            match until_ready(&mut fds, Some(until)) {
                // A signal has ended the wait early.
                Ok(true) if fds[0].revents().is_empty() => {}
                Ok(is_ready) => return Ok(is_ready),
                Err(errno) => {
                    let cannot = BenchError::system(format!("wait for {}", self.program));
                    return Err(cannot(errno.into()));
                }
            }
        }
    }

    /// Waits for the first line of a program with piped output, at most `limit`.
    pub(crate) fn read_line(&mut self, limit: Duration) -> Result<String, BenchError> {
        let until = Instant::now() + limit;
        let Some(mut output) = self.child.stdout.take() else {
            return Err(self.program_error("its output is not piped"));
        };
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            if !self.wait_for_input(&output, until)? {
                return Err(self.program_error(&format!("not ready after {} s", limit.as_secs())));
            }
            let mut byte = [0];
            if output.read(&mut byte).unwrap_or(0) == 0 {
                return Err(self.program_error("it ended"));
            }
            line.extend(byte);
        }
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    /// Closes its input.
    pub(crate) fn close_stdin(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits for a successful end, at most `limit`.
    pub(crate) fn wait_for_success(self, limit: Duration) -> Result<(), BenchError> {
        self.wait_for_code(limit, 0)
    }

    /// Waits for an end with this exit code, at most `limit`.
    pub(crate) fn wait_for_code(mut self, limit: Duration, code: i32) -> Result<(), BenchError> {
        if !self.wait_for_end(limit)? {
            let what = format!("it did not end within {} s", limit.as_secs());
            let (program, cause) = (self.program.clone(), self.words_after(&what));
            return Err(BenchError::Unended { program, cause });
        }
        let status = self.child.wait();
        match status.as_ref().map(ExitStatus::code) {
            Ok(ended) if ended == Some(code) => Ok(()),
            Ok(_) => Err(self.program_error(&format!("{}", status.unwrap_or_default()))),
            Err(error) => Err(self.program_error(&error.to_string())),
        }
    }

    /// An error with its description and the program's last output.
    pub(crate) fn program_error(&mut self, what: &str) -> BenchError {
        BenchError::Program {
            program: self.program.clone(),
            cause: self.words_after(what),
        }
    }

    /// A description with the program's last output.
    fn words_after(&mut self, what: &str) -> String {
        let mut words = Vec::new();
        let read = self
            .stderr
            .rewind()
            .and_then(|()| self.stderr.read_to_end(&mut words));
        let from = words.len().saturating_sub(STDERR_BYTES_MAX);
        let said = match read {
            Ok(0) | Err(_) => "it said nothing".to_owned(),
            Ok(_) => format!(
                "it said: {}",
                String::from_utf8_lossy(&words[from..]).trim()
            ),
        };
        format!("{what}; {said}")
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        kill_and_wait(&mut self.child);
    }
}

/// Both calls fail only if the process has ended and was reaped.
fn kill_and_wait(child: &mut std::process::Child) {
    let _already_ended = child.kill();
    let _already_reaped = child.wait();
}

/// Longest time for a program to print its version: its first start may read from a slow disk.
const VERSION_MAX: Duration = Duration::from_secs(10);

/// Fails if a program is missing.
pub(crate) fn require_program(
    program: &'static str,
    package: &'static str,
) -> Result<(), BenchError> {
    let mut command = Command::new(program);
    command
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    ChildProcess::spawn(program, command, package)?.wait_for_success(VERSION_MAX)
}

/// CPU time of a process in nanoseconds, including all threads and those that have ended; `None` if
/// the process has ended.
pub fn process_cpu(pid: u32) -> Option<Duration> {
    let pid = unistd::Pid::from_raw(i32::try_from(pid).ok()?);
    let used = clock_getcpuclockid(pid).ok()?.now().ok()?;
    Some(used.into())
}

/// Bytes that a process has sent to disks: `write_bytes` of proc_pid_io(5).
pub(crate) fn written_bytes(pid: u32) -> Result<u64, BenchError> {
    let path = format!("/proc/{pid}/io");
    let text =
        std::fs::read_to_string(&path).map_err(BenchError::system(format!("read {path}")))?;
    let found = text
        .lines()
        .find_map(|line| line.strip_prefix("write_bytes: "));
    let bytes = found.and_then(|bytes| bytes.parse().ok());
    bytes.ok_or_else(|| {
        BenchError::Option(format!("{path} does not count the bytes written to disks"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_known_while_process_exists() {
        let used = process_cpu(std::process::id()).expect("it runs");
        assert!(used > Duration::ZERO);
        assert_eq!(process_cpu(u32::MAX), None);
    }

    #[test]
    fn missing_program_names_its_package() {
        let error =
            require_program("pagemesh-has-no-such-program", "the-package").expect_err("missing");
        let text = error.to_string();
        assert!(text.contains("apt-get install the-package"), "{text}");
    }

    #[test]
    fn failing_program_output_is_quoted() {
        let mut command = command_killed_with_thread("sh");
        command.args(["-c", "echo broken >&2; exit 3"]);
        let child = ChildProcess::start("sh", command).expect("started");
        let error = child
            .wait_for_success(Duration::from_secs(10))
            .expect_err("it failed");
        let text = error.to_string();
        assert!(text.contains("broken") && text.contains('3'), "{text}");
    }

    #[test]
    fn dropped_child_is_killed() {
        let child = start_blocked_child();
        let pid = child.pid();
        assert!(!child.wait_for_end(Duration::ZERO).expect("asked"));
        drop(child);
        assert_eq!(process_cpu(pid), None);
    }

    /// Starts a program that prints a byte and then waits for input.
    fn start_blocked_child() -> ChildProcess {
        let mut command = command_killed_with_thread("sh");
        command
            .args(["-c", "echo; read -r line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = ChildProcess::start("sh", command).expect("started");
        let said = child.child.stdout.as_mut().expect("piped");
        said.read_exact(&mut [0]).expect("it runs");
        child
    }

    #[test]
    fn child_dies_with_its_parent_thread() {
        let thread = std::thread::spawn(start_blocked_child);
        let child = thread.join().expect("the thread ended well");
        assert!(child.wait_for_end(Duration::from_secs(10)).expect("asked"));
    }
}
