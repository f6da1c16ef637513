//! PostgreSQL on a mount: committed transactions are there after a kill of the mount process. On
//! the direct path they also survive a kill of the server, the mount and the bricks together. Needs
//! root and /dev/fuse.

use crate::support;
use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use support::mounted::{self, TestMount, preload_library};
use support::{Cluster, PAGEMESH, program, until};

/// PostgreSQL refuses to run as root.
const NOBODY_UID: u32 = 65534;
/// The number of times that all processes are killed, set by `make databases ROUNDS=50`.
const ROUNDS_ENV: &str = "PAGEMESH_TEST_ROUNDS";
/// Clients at once, with one server process each, set by `make databases CLIENTS=100`.
const CLIENTS_ENV: &str = "PAGEMESH_TEST_CLIENTS";
const CLIENTS_DEFAULT: u32 = 4;
/// Connections besides the clients'.
const SPARE_CONNECTIONS: u32 = 16;

fn clients() -> u32 {
    let wanted = std::env::var(CLIENTS_ENV).ok();
    wanted.map_or(CLIENTS_DEFAULT, |wanted| wanted.parse().unwrap())
}
/// The tables of pgbench, with the columns of their balances.
const TABLES: [(&str, &str); 3] = [
    ("pgbench_accounts", "abalance"),
    ("pgbench_tellers", "tbalance"),
    ("pgbench_branches", "bbalance"),
];

/// A database in a directory, which can be reached over its socket there only.
struct PostgresServer {
    bin: PathBuf,
    dir: PathBuf,
    sockets: tempfile::TempDir,
    server: Option<Child>,
    /// Whether the server is on the direct path.
    is_direct: bool,
}

/// Root appears as user 65534 in this namespace: a direct client needs the mount's user, and
/// PostgreSQL refuses root.
const USER_NAMESPACE_ARGS: [&str; 3] = ["--user", "--map-user=65534", "--map-group=65534"];

impl PostgresServer {
    fn new(dir: PathBuf, is_direct: bool) -> PostgresServer {
        let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
        let number = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.split('.').next().unwrap().parse::<u32>().unwrap_or(0)
        };
        let versions = versions.map(|entry| entry.unwrap().path());
        let newest = versions.max_by_key(number);
        let sockets = tempfile::tempdir().unwrap();
        if !is_direct {
            chown(sockets.path(), Some(NOBODY_UID), Some(NOBODY_UID)).unwrap();
        }
        PostgresServer {
            bin: newest.expect("a version").join("bin"),
            dir,
            sockets,
            server: None,
            is_direct,
        }
    }

    fn command(&self, name: &str) -> Command {
        let mut command;
        if self.is_direct {
            command = program::limited("unshare");
            command.args(USER_NAMESPACE_ARGS);
        } else {
            command = program::limited("setpriv");
            let nobody = NOBODY_UID.to_string();
            command.args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups"]);
        }
        self.add_program(command, name)
    }

    /// The server on the direct path, with all its processes in a PID namespace that ends with the
    /// started command.
    fn server(&self) -> Command {
        if !self.is_direct {
            return self.command("postgres");
        }
        let mut command = Command::new("unshare");
        command.args(USER_NAMESPACE_ARGS);
        command.args(["--pid", "--fork", "--kill-child"]);
        command.arg(PAGEMESH).args(["exec", "--library"]);
        command
            .arg(preload_library())
            .arg("--")
            .stdin(Stdio::null());
        self.add_program(command, "postgres")
    }

    fn add_program(&self, mut command: Command, name: &str) -> Command {
        command
            .arg(self.bin.join(name))
            .env("PGHOST", self.sockets.path())
            .env("PGUSER", "pagemesh")
            .env("PGDATABASE", "postgres")
            .current_dir("/");
        command
    }

    fn run(&self, name: &str, args: &[&str]) -> Output {
        self.command(name).args(args).output().unwrap()
    }

    fn ok(&self, name: &str, args: &[&str]) -> String {
        program::succeeded(name, self.run(name, args))
    }

    fn init_database(&self) {
        fs::create_dir(&self.dir).unwrap();
        if !self.is_direct {
            chown(&self.dir, Some(NOBODY_UID), Some(NOBODY_UID)).unwrap();
        }
        let dir = self.dir.to_str().unwrap();
        self.ok(
            "initdb",
            &["-D", dir, "-U", "pagemesh", "-A", "trust", "-k"],
        );
    }

    fn start(&mut self) {
        let dir = self.dir.to_str().unwrap();
        let sockets = self.sockets.path().to_str().unwrap();
        let log = fs::File::create(self.sockets.path().join("log")).unwrap();
        let server = self
            .server()
            .args(["-D", dir, "-k", sockets, "-h", ""])
            .args(["-c", "shared_buffers=16MB", "-c"])
            .arg(format!("max_connections={}", clients() + SPARE_CONNECTIONS))
            .args(match self.is_direct {
                // Writes of 8 KiB are atomic; pages are written all the time.
                true => &["-c", "full_page_writes=off", "-c", "bgwriter_delay=10ms"][..],
                false => &[],
            })
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn();
        self.server = Some(server.unwrap());
        until("PostgreSQL answers", || {
            let ended = self.server.as_mut().unwrap().try_wait().unwrap();
            assert_eq!(ended, None, "{}", self.log());
            self.run("pg_isready", &[]).status.success()
        });
    }

    fn log(&self) -> String {
        fs::read_to_string(self.sockets.path().join("log")).unwrap_or_default()
    }

    fn query(&self, sql: &str) -> String {
        let told = self.ok("psql", &["-Atqc", sql]);
        told.trim().to_owned()
    }

    /// The postmaster: the parent of all server processes.
    fn main_pid(&self) -> u32 {
        let pid = self.server.as_ref().unwrap().id();
        if !self.is_direct {
            return pid;
        }
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(children).unwrap();
        children.trim().parse().unwrap()
    }

    /// The number of server processes that access the pools directly.
    fn direct_clients(&self) -> usize {
        let main = self.main_pid();
        let children = format!("/proc/{main}/task/{main}/children");
        let children = fs::read_to_string(children).unwrap();
        let is_guest = |pid: &&str| {
            // A backend may end meanwhile.
            let threads = fs::read_dir(format!("/proc/{pid}/task"));
            threads.into_iter().flatten().flatten().any(|thread| {
                let name = fs::read_to_string(thread.path().join("comm"));
                name.is_ok_and(|name| name.trim() == "brick-watcher")
            })
        };
        children.split_whitespace().filter(is_guest).count()
    }

    /// Kills the server with all its processes at once, and returns when they are gone.
    fn kill_all(&mut self) {
        let mut server = self.server.take().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        // Each server process holds this descriptor.
        let mut said = server.stdout.take().unwrap();
        said.read_to_end(&mut Vec::new()).unwrap();
    }

    /// Stops the server as an operator would; a smart shutdown waits for clients.
    fn stop(&mut self) {
        let main = self.main_pid();
        let mut server = self.server.take().unwrap();
        program::signal(main, "INT");
        assert!(server.wait().unwrap().success(), "{}", self.log());
    }

    /// Ends the server, whether or not its files are readable. Its children end with it.
    fn kill(&mut self) {
        let mut server = self.server.take().unwrap();
        program::signal(server.id(), "QUIT");
        server.wait().unwrap();
    }

    /// Starts clients that never end; returns when more than `wanted` transactions are done.
    fn start_bench(&self, wanted: u64) -> Child {
        let bench = self
            .command("pgbench")
            .args(["-j", "2", "-n", "-t", "100000", "-c"])
            .arg(clients().to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let count = "select count(*) from pgbench_history";
        until("transactions are done", || {
            self.query(count).parse::<u64>().unwrap() > wanted
        });
        bench
    }

    /// Starts the server again after a kill. Asserts that at least `least` transactions are there,
    /// and returns their number.
    fn restart_and_check(&mut self, least: u64) -> u64 {
        self.start();
        let found = self.check();
        assert!(found >= least, "{found} of {least}");
        found
    }

    /// Asserts that every transaction moved the same sum in all tables, atomically, and that no
    /// index or page is damaged. Returns the number of transactions.
    fn check(&self) -> u64 {
        let moved = self.query("select coalesce(sum(delta), 0) from pgbench_history");
        for (table, column) in TABLES {
            let sum = self.query(&format!("select sum({column}) from {table}"));
            assert_eq!(sum, moved, "{table}");
        }
        self.ok(
            "pg_amcheck",
            &["--heapallindexed", "--install-missing", "-a"],
        );
        let count = self.query("select count(*) from pgbench_history");
        count.parse().unwrap()
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            // The server may have ended by itself.
            match self.is_direct {
                true => drop(server.kill()),
                false => program::signal(server.id(), "QUIT"),
            }
            let _ = server.wait();
        }
    }
}

/// The number of transactions that pgbench reports as done; all clients may have been cut off.
fn processed(output: &Output) -> u64 {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| {
        let rest = line.strip_prefix("number of transactions actually processed: ")?;
        rest.split('/').next()?.trim().parse().ok()
    });
    line.unwrap_or_else(|| panic!("{output:?}"))
}

fn make_traversable(dir: &Path) {
    fs::set_permissions(dir, Permissions::from_mode(0o711)).unwrap();
}

/// A running server, with the tables of pgbench.
fn start_filled_database(mount: &TestMount, is_direct: bool) -> PostgresServer {
    let mut database = PostgresServer::new(mount.path("data"), is_direct);
    database.init_database();
    database.start();
    database.ok("pgbench", &["-i", "-q", "-s", "2"]);
    database
}

fn end(mut database: PostgresServer, mount: TestMount, cluster: &Cluster) {
    database.stop();
    mount.stop(cluster);
    cluster.check_identical("files");
}

#[test]
fn postgresql_keeps_commits_if_mount_is_killed() {
    let Some(cluster) = mounted::cluster(&[384, 384], "300M") else {
        return;
    };
    make_traversable(cluster.dir());
    let mut mount = TestMount::new(&cluster, "files", "auto");
    let mut database = start_filled_database(&mount, false);
    let args = ["-c", "4", "-j", "2", "-n", "-t", "250"];
    let mut least = processed(&database.run("pgbench", &args));
    assert_eq!((least, database.check()), (1000, 1000));
    for _ in 0..2 {
        let bench = database.start_bench(least + 300);
        mount.daemon.take().unwrap().kill();
        least += processed(&bench.wait_with_output().unwrap());
        database.kill();
        mount.remount(&cluster, "files", "auto");
        least = database.restart_and_check(least);
    }
    end(database, mount, &cluster);
}

/// Kills the bricks and the mount, in either order, and starts them again.
fn kill_cluster(cluster: &mut Cluster, mount: &mut TestMount, bricks_first: bool) {
    if bricks_first {
        (0..2).for_each(|brick| cluster.kill_brick(brick));
    }
    mount.daemon.take().unwrap().kill();
    if !bricks_first {
        (0..2).for_each(|brick| cluster.kill_brick(brick));
    }
}

#[test]
fn direct_postgresql_keeps_commits_if_all_is_killed() {
    let Some(mut cluster) = mounted::cluster(&[384, 384], "300M") else {
        return;
    };
    let rounds = std::env::var(ROUNDS_ENV).ok();
    let rounds: u32 = rounds.map_or(2, |rounds| rounds.parse().unwrap());
    make_traversable(cluster.dir());
    let mut mount = TestMount::new(&cluster, "files", "map");
    let mut database = start_filled_database(&mount, true);
    let mut least = 0;
    for round in 0..rounds {
        let bench = database.start_bench(least + 300);
        until("clients are on the direct path", || {
            database.direct_clients() >= 4
        });
        // The server first, or the cluster below it.
        match round % 2 {
            0 => {
                kill_cluster(&mut cluster, &mut mount, round % 4 == 0);
                database.kill_all();
            }
            _ => {
                database.kill_all();
                kill_cluster(&mut cluster, &mut mount, round % 4 == 1);
            }
        }
        least += processed(&bench.wait_with_output().unwrap());
        (0..2).for_each(|brick| cluster.restart_brick(brick));
        cluster.await_bricks(2);
        mount.remount(&cluster, "files", "auto");
        least = database.restart_and_check(least);
    }
    end(database, mount, &cluster);
}
