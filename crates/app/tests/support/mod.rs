//! A cluster of real processes, and the operations of tests on it.
//!
//! Invariants: a cluster has its own address, directories and key, so that tests run in parallel.
//! Every process ends with the test, also if the test panics or is killed, because it watches its
//! standard input. Every wait has a limit.

#![allow(dead_code, clippy::unwrap_used)] // Each test file uses a part of it.

pub mod daemon;
pub mod mounted;
pub mod net;
pub mod program;
pub mod random;
pub mod scrape;
#[path = "../../../brick/tests/support/skip.rs"]
pub mod skip;
#[path = "../../../front/fuse/tests/support/switch.rs"]
pub mod switch;

use daemon::Daemon;
use net::{Host, Net};
use serde_json::Value;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
/// The limit for any expected event on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The limit for the resync of returning legs.
pub const RESYNC_LIMIT: Duration = Duration::from_secs(300);
/// The program under test.
pub const PAGEMESH: &str = env!("CARGO_BIN_EXE_pagemesh");
/// The exit code of a process after another client took its volume over.
pub const FENCED: i32 = 4;
/// The cluster key, unless a test makes another.
const KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n";

/// The medium of the pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pools {
    /// On /dev/shm: class `process`.
    Memory,
    /// On a disk: class `file-sync`.
    Disk,
}

impl Pools {
    /// A directory for pools, deleted with the value.
    pub fn dir(self) -> TempDir {
        let parent = match self {
            Pools::Memory => "/dev/shm",
            // Not /tmp, which may be memory.
            Pools::Disk => env!("CARGO_TARGET_TMPDIR"),
        };
        tempfile::Builder::new()
            .prefix("pagemesh-test-")
            .tempdir_in(parent)
            .unwrap()
    }
}

/// A loopback address that no other test uses, so that a restarted daemon finds its port free.
pub fn own_ip() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let own = (std::process::id() << 6).wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
    let [_, high, middle, low] = own.to_be_bytes();
    format!("127.{}.{middle}.{}", high | 1, low.clamp(1, 254))
}

/// Waits until a condition holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !holds() {
        assert!(
            Instant::now() < end,
            "waited {LIMIT:?} in vain until {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Writes a key file in the format that the program expects.
pub fn write_key(path: &Path, digits: &str) {
    std::fs::write(path, digits).unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

/// The bytes copied to each returning leg, as the volume reports them.
fn resynced_bytes(told: &Value) -> Vec<Value> {
    let columns = told["columns"].as_array().into_iter().flatten();
    let legs = columns.flat_map(|column| column["legs"].as_array().into_iter().flatten());
    legs.map(|leg| leg["resync"]["bytes_done"].clone())
        .collect()
}

/// The last status of a volume, printed if the test fails.
struct LastStatus(Value);

impl Drop for LastStatus {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("last status: {:#}", self.0);
        }
    }
}

struct Brick {
    pool: PathBuf,
    /// Whether clients on this machine map its pool.
    is_local: bool,
    daemon: Option<Daemon>,
}

/// A manager and bricks, counted from 0.
pub struct Cluster {
    bricks: Vec<Brick>,
    manager: Option<Daemon>,
    listen: String,
    pools: TempDir,
    dir: TempDir,
    /// Seconds that the clocks of processes started from now on are ahead.
    clock_offset_s: u64,
    /// Dropped last: its processes end before.
    net: Option<Net>,
}

impl Cluster {
    /// Bricks with pools of 64 MiB.
    pub fn new(pools: Pools, bricks: usize) -> Cluster {
        Cluster::with_pools(pools, &vec![64; bricks])
    }

    /// Bricks with pools of these sizes in MiB.
    pub fn with_pools(pools: Pools, sizes_mib: &[u64]) -> Cluster {
        Cluster::build(pools.dir(), sizes_mib, None)
    }

    /// The same, and only the first `near` bricks count as on this machine.
    pub fn with_far_pools(pools: Pools, sizes_mib: &[u64], near: usize) -> Cluster {
        Cluster::build_with_local(pools.dir(), sizes_mib, near, None)
    }

    /// The same, each on a machine of its own.
    pub fn on_separate_hosts(pools: Pools, sizes_mib: &[u64], net: Net) -> Cluster {
        Cluster::build(pools.dir(), sizes_mib, Some(net))
    }

    /// The same with pools in this directory.
    pub fn build(pools: TempDir, sizes_mib: &[u64], net: Option<Net>) -> Cluster {
        Cluster::build_with_local(pools, sizes_mib, sizes_mib.len(), net)
    }

    fn build_with_local(
        pools: TempDir,
        sizes_mib: &[u64],
        near: usize,
        net: Option<Net>,
    ) -> Cluster {
        let listen = match net {
            Some(_) => format!("{}:7070", Host::Manager.ip()),
            None => format!("{}:0", own_ip()),
        };
        let mut cluster = Cluster {
            bricks: Vec::new(),
            manager: None,
            listen,
            pools,
            clock_offset_s: 0,
            net,
            dir: tempfile::Builder::new()
                .prefix("pm-")
                .tempdir_in("/tmp")
                .unwrap(),
        };
        write_key(&cluster.key(), KEY);
        cluster.start_manager();
        for (n, size_mib) in sizes_mib.iter().enumerate() {
            cluster.add_brick(&format!("{size_mib}M"), &[], n < near);
        }
        cluster.await_bricks(sizes_mib.len());
        cluster
    }

    /// Starts another brick. `args` are further arguments of `pool create`.
    pub fn add_brick(&mut self, size: &str, args: &[&str], is_local: bool) {
        let n = self.bricks.len();
        let pool = self.pools.path().join(format!("brick-{n}.pool"));
        let head = ["pool", "create", pool.to_str().unwrap(), "--size", size];
        self.ok(&[&head[..], args].concat());
        self.bricks.push(Brick {
            pool,
            is_local,
            daemon: None,
        });
        self.spawn_brick(n);
    }

    /// Where tests put their files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The file of the cluster key.
    pub fn key(&self) -> PathBuf {
        self.dir().join("key")
    }

    /// The manager's host and port.
    pub fn manager_address(&self) -> &str {
        &self.listen
    }

    /// The manager's process.
    pub fn manager(&self) -> &Daemon {
        self.manager.as_ref().unwrap()
    }

    /// A brick's process.
    pub fn brick(&self, n: usize) -> &Daemon {
        self.bricks[n].daemon.as_ref().unwrap()
    }

    /// The id of a running brick.
    pub fn brick_id(&self, n: usize) -> String {
        self.brick(n).ready[0].split(' ').nth(2).unwrap().to_owned()
    }

    /// The tcp address of a running brick.
    pub fn brick_address(&self, n: usize) -> String {
        self.brick(n).ready[0].split(' ').nth(3).unwrap().to_owned()
    }

    /// The map socket of a brick.
    pub fn brick_socket(&self, n: usize) -> PathBuf {
        self.dir().join(format!("brick-{n}.sock"))
    }

    /// The pool of a brick.
    pub fn pool(&self, n: usize) -> &Path {
        &self.bricks[n].pool
    }

    /// The network between its machines.
    pub fn net(&self) -> &Net {
        self.net.as_ref().expect("they are apart")
    }

    /// Daemons started from now on have a monotonic clock that is this far ahead. Needs root.
    pub fn set_clocks_ahead(&mut self, ahead_s: u64) {
        self.clock_offset_s = ahead_s;
    }

    /// A command with the environment of this cluster.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = match &self.net {
            Some(net) => {
                let mut command = program::limited_in(net, Host::Hub);
                command.arg(PAGEMESH);
                command
            }
            None => program::limited(PAGEMESH),
        };
        self.set_env(&mut command);
        command.args(args);
        command
    }

    /// A command that runs a daemon on one of the machines.
    fn command_on(&self, host: Host) -> Command {
        let mut words = match &self.net {
            Some(net) => net.enter(host),
            None => vec![],
        };
        if self.clock_offset_s > 0 {
            let ahead = self.clock_offset_s.to_string();
            let unshare = ["unshare", "--time", "--monotonic", &ahead, "--boottime"];
            words.extend(unshare.map(str::to_owned));
            // Only child processes are certain to have the new clocks.
            words.extend([ahead, "--fork".into(), "--kill-child".into()]);
        }
        words.push(PAGEMESH.into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    fn set_env(&self, command: &mut Command) {
        command
            .env("XDG_CONFIG_HOME", self.dir().join("config"))
            .env("PAGEMESH_MANAGER", format!("http://{}", self.listen))
            .env("PAGEMESH_KEY", self.key())
            .current_dir(self.dir());
    }

    /// Starts a command that prints `ready` this many times.
    pub fn try_daemon(&self, name: &str, args: &[&str], ready: usize) -> Result<Daemon, Output> {
        self.try_daemon_at(Host::Client(0), name, args, ready)
    }

    fn try_daemon_at(
        &self,
        host: Host,
        name: &str,
        args: &[&str],
        ready: usize,
    ) -> Result<Daemon, Output> {
        let mut command = self.command_on(host);
        self.set_env(&mut command);
        command.args(args).arg("--until-stdin-ends");
        Daemon::start(command, self.dir(), name, ready)
    }

    /// Starts a command on a machine that must print `ready` this many times.
    pub fn daemon_on(&self, host: Host, name: &str, args: &[&str], ready: usize) -> Daemon {
        self.daemon(host, name, args, ready)
    }

    fn daemon(&self, host: Host, name: &str, args: &[&str], ready: usize) -> Daemon {
        self.try_daemon_at(host, name, args, ready)
            .unwrap_or_else(|ended| panic!("{name} did not start: {ended:?}"))
    }

    /// Runs a command to its end.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs a command that must succeed, and returns its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        program::succeeded(&format!("pagemesh {}", args.join(" ")), self.run(args))
    }

    /// The JSON of a command that must succeed.
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.ok(&[args, &["--output", "json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|cause| panic!("{args:?}: {cause}: {text}"))
    }

    /// Runs a command that must fail with code 1 and an error with these parts, and returns the
    /// error.
    pub fn refused(&self, args: &[&str], parts: &[&str]) -> String {
        program::refused(
            &format!("pagemesh {}", args.join(" ")),
            &self.run(args),
            parts,
        )
    }

    /// Makes a volume; `args` are as in `--layout mirror`.
    pub fn create(&self, name: &str, size: &str, args: &[&str]) {
        self.ok(&[&["volume", "create", name, "--size", size], args].concat());
    }

    /// Panics unless the copies of a volume are identical.
    pub fn check_identical(&self, name: &str) {
        let report = self.json(&["volume", "check", name]);
        assert_eq!(report["pages_differing"], 0, "{report}");
        assert_eq!(report["pages_damaged"], 0, "{report}");
    }

    /// Kills a brick with SIGKILL and waits for its end.
    pub fn kill_brick(&mut self, n: usize) {
        self.bricks[n].daemon.take().unwrap().kill();
    }

    /// Stops a brick.
    pub fn stop_brick(&mut self, n: usize) {
        self.bricks[n].daemon.take().unwrap().stop();
    }

    /// Starts a brick that was killed or stopped. It listens when this returns, and the manager
    /// hears of it soon after.
    pub fn restart_brick(&mut self, n: usize) {
        assert!(self.bricks[n].daemon.is_none(), "brick {n} runs");
        self.spawn_brick(n);
    }

    fn spawn_brick(&mut self, n: usize) {
        let name = format!("brick-{n}");
        let pool = self.bricks[n].pool.to_str().unwrap();
        let socket = self.brick_socket(n);
        let socket = socket.to_str().unwrap();
        let mut args = vec!["brick", "--pool", pool, "--domain", &name, "--name", &name];
        args.extend(["--on-device-failure", "retire"]);
        if self.bricks[n].is_local {
            args.extend(["--map", socket]);
        }
        let host = Host::Brick(n);
        let listen = format!("{}:7071", host.ip());
        if self.net.is_some() {
            args.extend(["--listen", &listen]);
        }
        let daemon = self.daemon(host, &name, &args, 1);
        self.assert_clock_offset(&daemon);
        self.bricks[n].daemon = Some(daemon);
    }

    /// Asserts that a daemon's clock is as far ahead as requested.
    #[track_caller]
    fn assert_clock_offset(&self, daemon: &Daemon) {
        if self.clock_offset_s == 0 {
            return;
        }
        // The started program is the one that makes the namespace.
        let pid = daemon.pid();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let child = std::fs::read_to_string(children).unwrap();
        let offsets = format!("/proc/{}/timens_offsets", child.trim());
        let offsets = std::fs::read_to_string(offsets).unwrap();
        let words: Vec<&str> = offsets.split_whitespace().collect();
        let ahead = self.clock_offset_s.to_string();
        assert_eq!(words, ["monotonic", &ahead, "0", "boottime", &ahead, "0"]);
    }

    /// Waits until the manager counts this many bricks alive.
    pub fn await_bricks(&self, count: usize) {
        until(&format!("{count} bricks are alive"), || {
            self.json(&["status"])["status"]["bricks_alive"] == count
        });
    }

    /// Kills the manager with SIGKILL and waits for its end.
    pub fn kill_manager(&mut self) {
        self.manager.take().unwrap().kill();
    }

    /// Stops the manager.
    pub fn stop_manager(&mut self) {
        self.manager.take().unwrap().stop();
    }

    /// Starts the manager on its previous port.
    pub fn start_manager(&mut self) {
        assert!(self.manager.is_none(), "the manager runs");
        let key = self.key();
        let args = [
            "manager",
            "--listen",
            &self.listen,
            "--key",
            key.to_str().unwrap(),
        ];
        let daemon = self.daemon(Host::Manager, "manager", &args, 1);
        self.assert_clock_offset(&daemon);
        let address = daemon.ready[0].strip_prefix("ready http://").unwrap();
        self.listen = address.to_owned();
        self.manager = Some(daemon);
    }

    /// Exports volumes on one unix socket; `transport` is `auto`, `map` or `tcp`.
    pub fn export(&self, volumes: &[&str], transport: &str) -> Export {
        self.export_from(0, volumes, transport)
    }

    /// The same on this client's machine.
    pub fn export_from(&self, client: usize, volumes: &[&str], transport: &str) -> Export {
        self.try_export_from(client, volumes, transport)
            .unwrap_or_else(|ended| panic!("no export of {volumes:?}: {ended:?}"))
    }

    /// The same, where another client may win the race for the volume.
    pub fn try_export_from(
        &self,
        client: usize,
        volumes: &[&str],
        transport: &str,
    ) -> Result<Export, Output> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("nbd-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let socket = self.dir().join(format!("{name}.sock"));
        let place = ["--socket", socket.to_str().unwrap()];
        self.try_export(client, volumes, transport, &place)
    }

    /// Exports volumes at an address, as in `--listen 127.0.0.1:0`, and with options.
    pub fn export_at(&self, volumes: &[&str], transport: &str, place: &[&str]) -> Export {
        self.try_export(0, volumes, transport, place)
            .unwrap_or_else(|ended| panic!("no export of {volumes:?}: {ended:?}"))
    }

    fn try_export(
        &self,
        client: usize,
        volumes: &[&str],
        transport: &str,
        place: &[&str],
    ) -> Result<Export, Output> {
        let head = ["export", "nbd", "--transport", transport];
        let args = [&head, volumes, place].concat();
        let name = format!("export of {}", volumes.join(" "));
        let daemon = self.try_daemon_at(Host::Client(client), &name, &args, volumes.len())?;
        self.assert_clock_offset(&daemon);
        let uris: Vec<String> = daemon
            .ready
            .iter()
            .map(|line| line.strip_prefix("ready ").unwrap().to_owned())
            .collect();
        Ok(Export {
            uri: uris[0].clone(),
            uris,
            daemon,
        })
    }
}

/// Volumes exported over NBD; dropping it ends the server.
pub struct Export {
    /// The URI of the first volume.
    pub uri: String,
    /// The URIs of all volumes.
    pub uris: Vec<String>,
    pub daemon: Daemon,
}

impl Export {
    /// Kills the server with SIGKILL and waits for its end.
    pub fn kill(self) {
        self.daemon.kill();
    }

    /// Stops the server, which detaches the volumes.
    pub fn stop(self) {
        self.daemon.stop();
    }

    /// Waits until the server has ended because another client has its volumes.
    #[track_caller]
    pub fn await_fenced(&mut self) {
        let status = self.daemon.await_end();
        let log = self.daemon.log();
        assert_eq!(status.code(), Some(FENCED), "{log}");
        assert!(log.contains("another client took over"), "{log}");
    }

    /// The status of its volume, as the server reports it. For one volume only.
    pub fn status(&self) -> Value {
        assert_eq!(self.uris.len(), 1, "one volume");
        self.daemon.signal("USR1");
        let line = self.daemon.line();
        serde_json::from_str(&line).unwrap_or_else(|cause| panic!("{cause}: {line}"))
    }

    /// Waits until its volume is in this state, as `healthy`. The limit is longer while a resync
    /// copies pages to returning legs, since that depends on the disk.
    pub fn await_state(&self, state: &str) -> Value {
        let begun = Instant::now();
        let mut last = LastStatus(Value::Null);
        let mut moved = (Vec::new(), begun);
        loop {
            last.0 = self.status();
            if last.0["state"] == state {
                return std::mem::take(&mut last.0);
            }
            let copied = resynced_bytes(&last.0);
            if copied != moved.0 {
                moved = (copied, Instant::now());
            }
            let is_vain = moved.1.elapsed() > LIMIT || begun.elapsed() > RESYNC_LIMIT;
            assert!(!is_vain, "waited in vain until the volume is {state}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The unix socket on which it listens.
    pub fn socket(&self) -> PathBuf {
        let (_, path) = self.uri.split_once("?socket=").unwrap();
        path.into()
    }

    /// Runs commands of qemu-io on the first volume; each must succeed.
    pub fn io(&self, commands: &[&str]) -> String {
        program::qemu_io(&self.uri, commands)
    }
}
