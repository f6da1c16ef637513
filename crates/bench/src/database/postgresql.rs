//! A PostgreSQL server in a directory, and pgbench on it.

use crate::error::BenchError;
use crate::process::{ChildProcess, command_killed_with_thread};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

pub(super) const PACKAGE: &str = "postgresql";
/// User id of the server: PostgreSQL refuses to run as root.
const NOBODY_UID: u32 = 65534;
/// Maps root to this user id in a user namespace, as PostgreSQL refuses root. The mount still sees
/// its own user there, which the direct path requires.
const UNSHARE_USER_ARGS: [&str; 3] = ["--user", "--map-user=65534", "--map-group=65534"];
/// Connections in addition to the measured ones.
const EXTRA_CONNECTIONS: u32 = 20;
/// Longest time of a tool, including filling the tables.
const TOOL_TIME_MAX: Duration = Duration::from_secs(120);
/// Time of pgbench beyond its run time.
const PGBENCH_MARGIN: Duration = Duration::from_secs(30);
/// Longest time of the server to end.
const SHUTDOWN_MAX: Duration = Duration::from_secs(10);
/// Pause between two checks whether the server answers.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The figures of pgbench.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PgbenchSample {
    /// Transactions per second.
    pub tps: f64,
    /// Mean latency in ms; with a rate, from the scheduled start.
    pub latency_ms: f64,
}

/// The transactions of pgbench, and their rate.
#[derive(Clone, Copy)]
pub(super) struct PgbenchLoad<'a> {
    /// A script; `None`: pgbench's own, like TPC-B.
    pub script: Option<&'a Path>,
    pub clients: u32,
    /// Transactions per second; `None`: full speed.
    pub rate: Option<f64>,
    pub scale: u32,
    pub runtime: Duration,
}

/// A server; dropping it stops it.
pub(super) struct PostgresServer {
    name: String,
    bin: PathBuf,
    dir: PathBuf,
    /// Directory of its socket, its only address.
    sockets: tempfile::TempDir,
    prefix: Vec<String>,
    child: Option<ChildProcess>,
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn chown_if_root(path: &Path) -> Result<(), BenchError> {
    if is_root() {
        let cannot = BenchError::system(format!("give {} away", path.display()));
        chown(path, Some(NOBODY_UID), Some(NOBODY_UID)).map_err(cannot)?;
    }
    Ok(())
}

/// The directory of the newest version's programs.
fn find_programs() -> Result<PathBuf, BenchError> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let bins = versions.flatten().map(|entry| entry.path().join("bin"));
    let version = |bin: &PathBuf| -> Option<f64> {
        let version = bin.parent()?.file_name()?.to_str()?;
        version.parse().ok()
    };
    let there = bins.filter(|bin| bin.join("postgres").exists());
    let newest = there.max_by(|one, other| {
        version(one)
            .partial_cmp(&version(other))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    newest.ok_or(BenchError::Missing {
        program: "postgres".into(),
        package: PACKAGE,
    })
}

impl PostgresServer {
    /// A server without a database yet. `name` is its name in errors.
    pub(super) fn new(
        name: &str,
        dir: PathBuf,
        prefix: &[String],
    ) -> Result<PostgresServer, BenchError> {
        let sockets = tempfile::tempdir().map_err(BenchError::system("make a directory"))?;
        if prefix.is_empty() {
            chown_if_root(sockets.path())?;
        }
        Ok(PostgresServer {
            name: name.to_owned(),
            bin: find_programs()?,
            dir,
            sockets,
            prefix: prefix.to_vec(),
            child: None,
        })
    }

    fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program).display().to_string();
        let nobody = NOBODY_UID.to_string();
        let mut command = command_killed_with_thread("env");
        if is_root() && !self.prefix.is_empty() {
            command = Command::new("unshare");
            command
                .args(UNSHARE_USER_ARGS)
                .args(["--", "setpriv", "--pdeathsig", "KILL", "--"])
                .args(&self.prefix)
                .arg("env");
        } else if is_root() {
            // Changes the user before the parent-death signal is set, and before the program
            // starts.
            command = Command::new("setpriv");
            command
                .args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups"])
                .args(["--pdeathsig", "KILL", "--", "env"]);
        }
        command
            .arg(program)
            .env("PGHOST", self.sockets.path())
            .env("PGUSER", "bench")
            .env("PGDATABASE", "postgres")
            .current_dir("/")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, program: &str, args: &[&str], limit: Duration) -> Result<String, BenchError> {
        let cannot = || BenchError::system(format!("keep the output of {program}"));
        let mut said = tempfile::tempfile().map_err(cannot())?;
        let output = said.try_clone().map_err(cannot())?;
        let mut command = self.command(program);
        command.args(args).stdout(output);
        let label = format!("{program} on {}", self.name);
        ChildProcess::start(&label, command)?.wait_for_success(limit)?;
        let mut text = String::new();
        said.rewind()
            .and_then(|()| said.read_to_string(&mut text))
            .map_err(cannot())?;
        Ok(text)
    }

    /// Creates an empty database.
    pub(super) fn make(&self) -> Result<(), BenchError> {
        self.make_dir()?;
        let dir = self.dir.display().to_string();
        let args = ["-D", &dir, "-U", "bench", "-A", "trust", "--no-sync"];
        self.run("initdb", &args, TOOL_TIME_MAX).map(drop)
    }

    fn make_dir(&self) -> Result<(), BenchError> {
        let cannot = BenchError::system(format!("make {}", self.dir.display()));
        fs::create_dir(&self.dir).map_err(cannot)?;
        match self.prefix.is_empty() {
            true => chown_if_root(&self.dir),
            false => Ok(()),
        }
    }

    /// Creates a copy of a running server, which replicates it.
    pub(super) fn replicate_from(&self, primary: &PostgresServer) -> Result<(), BenchError> {
        self.make_dir()?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let cannot = BenchError::system(format!("close {}", self.dir.display()));
        fs::set_permissions(&self.dir, mode).map_err(cannot)?;
        let dir = self.dir.display().to_string();
        let args = ["-D", &dir, "-R", "-X", "stream", "-c", "fast", "--no-sync"];
        primary.run("pg_basebackup", &args, TOOL_TIME_MAX).map(drop)
    }

    /// Starts the server, and waits until it answers.
    pub(super) fn start(&mut self, clients: u32) -> Result<(), BenchError> {
        let connections = format!("max_connections={}", clients + EXTRA_CONNECTIONS);
        let mut command = self.command("postgres");
        command
            .arg("-D")
            .arg(&self.dir)
            .arg("-k")
            .arg(self.sockets.path())
            .args(["-h", "", "-c", "shared_buffers=64MB", "-c", &connections])
            .args(["-c", "max_wal_size=256MB", "-c", "min_wal_size=80MB"])
            .stdout(Stdio::null());
        let child = ChildProcess::start(&format!("postgres on {}", self.name), command)?;
        self.child = Some(child);
        let looks = TOOL_TIME_MAX.as_millis() / POLL_INTERVAL.as_millis();
        for _ in 0..looks {
            if let Some(child) = &mut self.child
                && child.wait_for_end(POLL_INTERVAL)?
            {
                return Err(child.program_error("it ended"));
            }
            if self.run("pg_isready", &[], TOOL_TIME_MAX).is_ok() {
                return Ok(());
            }
        }
        Err(BenchError::Program {
            program: format!("postgres on {}", self.name),
            cause: "it does not answer".into(),
        })
    }

    pub(super) fn query(&self, sql: &str) -> Result<String, BenchError> {
        let args = ["-Atq", "-v", "ON_ERROR_STOP=1", "-c", sql];
        Ok(self.run("psql", &args, TOOL_TIME_MAX)?.trim().to_owned())
    }

    pub(super) fn fill(&self, scale: u32) -> Result<(), BenchError> {
        let args = ["-i", "-q", "-s", &scale.to_string()];
        self.run("pgbench", &args, TOOL_TIME_MAX).map(drop)
    }

    pub(super) fn measure(&self, load: PgbenchLoad<'_>) -> Result<PgbenchSample, BenchError> {
        let mut args = vec![
            "-n".to_owned(),
            format!("--client={}", load.clients),
            "--jobs=2".into(),
            format!("--time={}", load.runtime.as_secs().max(1)),
            format!("--define=scale={}", load.scale),
        ];
        args.extend(load.rate.map(|rate| format!("--rate={rate:.1}")));
        args.extend(load.script.map(|path| format!("--file={}", path.display())));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said = self.run("pgbench", &args, load.runtime + PGBENCH_MARGIN)?;
        let sample = parse_pgbench(&said);
        sample.ok_or_else(|| BenchError::Program {
            program: format!("pgbench on {}", self.name),
            cause: format!("its output is not understood: {said}"),
        })
    }

    pub(super) fn socket_dir(&self) -> &Path {
        self.sockets.path()
    }

    /// Adds lines to its configuration.
    pub(super) fn configure(&self, lines: &str) -> Result<(), BenchError> {
        let path = self.dir.join("postgresql.auto.conf");
        let cannot = || BenchError::system(format!("change {}", path.display()));
        let mut file = File::options().append(true).open(&path).map_err(cannot())?;
        std::io::Write::write_all(&mut file, lines.as_bytes()).map_err(cannot())
    }
}

impl Drop for PostgresServer {
    /// Stops the server as an operator does: killed, it would leave shared memory behind.
    fn drop(&mut self) {
        let Some(child) = &self.child else { return };
        let pid = i32::try_from(child.pid()).ok();
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            // The server may have ended already; if it does not end in time, it is killed.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
            let _ = child.wait_for_end(SHUTDOWN_MAX);
        }
    }
}

/// Parses the final output of pgbench.
fn parse_pgbench(said: &str) -> Option<PgbenchSample> {
    let number = |before: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(before))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let failed: f64 = number("number of failed transactions: ").unwrap_or(0.0);
    Some(PgbenchSample {
        tps: number("tps = ").filter(|_| failed == 0.0)?,
        latency_ms: number("latency average = ")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pgbench_output_is_parsed() {
        let said = "transaction type: <builtin: TPC-B (sort of)>\nscaling factor: 10\n\
            number of transactions actually processed: 1000/1000\n\
            number of failed transactions: 0 (0.000%)\nlatency average = 1.250 ms\n\
            initial connection time = 4.2 ms\ntps = 3200.5 (without initial connection time)\n";
        let sample = parse_pgbench(said).expect("understood");
        assert_eq!((sample.tps, sample.latency_ms), (3200.5, 1.25));
        assert!(parse_pgbench(&said.replace("transactions: 0", "transactions: 3")).is_none());
        assert!(parse_pgbench("pgbench: error").is_none());
    }
}
