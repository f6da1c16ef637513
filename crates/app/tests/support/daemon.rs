//! A child process that reports when it is ready and ends with the test.

use super::LIMIT;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// A daemon; dropping it ends the process.
pub struct Daemon {
    /// Its `ready` lines.
    pub ready: Vec<String>,
    /// Its output before the last of them.
    before_ready: Vec<String>,
    name: String,
    child: Child,
    log: PathBuf,
    /// Its output after it is ready.
    lines: Option<Mutex<Receiver<String>>>,
}

impl Daemon {
    /// Starts a process and waits for its `ready` lines. If it ends without them, the error is its
    /// output.
    pub fn start(
        mut command: Command,
        dir: &Path,
        name: &str,
        ready: usize,
    ) -> Result<Daemon, Output> {
        let log = dir.join(format!("{}.log", name.replace([' ', '/'], "-")));
        let errors = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        let said_before = errors.metadata().unwrap().len() as usize;
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .unwrap();
        let mut daemon = Daemon {
            ready: Vec::new(),
            before_ready: Vec::new(),
            name: name.to_owned(),
            child,
            log,
            lines: None,
        };
        let lines = daemon.read_lines();
        let end = Instant::now() + LIMIT;
        while daemon.ready.len() < ready {
            match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with("ready ") => daemon.ready.push(line),
                Ok(line) => daemon.before_ready.push(line),
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name} is not ready in time"),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Output {
                        status: daemon.await_end(),
                        stdout: Vec::new(),
                        stderr: daemon.log().split_off(said_before).into_bytes(),
                    });
                }
            }
        }
        daemon.lines = Some(Mutex::new(lines));
        Ok(daemon)
    }

    /// Reads its standard output to the end, so that the process never blocks on it.
    fn read_lines(&mut self) -> Receiver<String> {
        let (send, lines) = mpsc::channel();
        let stdout = BufReader::new(self.child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The receiver is gone after the end of the test.
                let _ = send.send(line);
            }
        });
        lines
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Standard error of this process and of its predecessors with this name.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Sends a signal, as `INT`.
    pub fn signal(&self, signal: &str) {
        super::program::signal(self.pid(), signal);
    }

    /// Stops the process, and waits until none of its threads is in a system call any more. `CONT`
    /// continues it.
    #[track_caller]
    pub fn stop_all_threads(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.pid());
        // The state is after the name, which is in parentheses (proc(5)).
        let is_stopped = |stat: String| {
            let rest = stat.rsplit_once(") ").map(|(_, rest)| rest.to_owned());
            rest.is_some_and(|rest| rest.starts_with('T'))
        };
        super::until(&format!("{} is stopped", self.name), || {
            let tasks = std::fs::read_dir(&tasks).expect("the threads of a process");
            let stats = tasks.map(|task| task.expect("a thread").path().join("stat"));
            stats
                .map(std::fs::read_to_string)
                .all(|stat| stat.is_ok_and(is_stopped))
        });
    }

    /// The line that names its metrics.
    #[track_caller]
    pub fn metrics_line(&self) -> String {
        let lines = &self.before_ready;
        let found = lines.iter().find(|line| line.starts_with("metrics "));
        found.expect("a process with --metrics").clone()
    }

    /// The next line of its standard output after `ready`.
    pub fn line(&self) -> String {
        let lines = self.lines.as_ref().unwrap().lock().unwrap();
        let line = lines.recv_timeout(LIMIT);
        line.unwrap_or_else(|cause| panic!("{} says nothing: {cause}", self.name))
    }

    /// Waits for its end.
    pub fn await_end(&mut self) -> ExitStatus {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "{} does not end", self.name);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills it with SIGKILL and waits for its end.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends its standard input and waits for its end, which must be a success.
    pub fn stop(mut self) {
        drop(self.child.stdin.take());
        let status = self.await_end();
        assert!(status.success(), "{}: {status}: {}", self.name, self.log());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of {}:\n{}", self.name, self.log());
        }
        drop(self.child.stdin.take());
        let end = Instant::now() + Duration::from_secs(15);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > end {
                eprintln!("{} had to be killed", self.name);
                // Fails only if it has ended.
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
