//! PostgreSQL on a mount: what it committed is there when the mounting process was
//! killed under it; on the direct path also when everything was, itself and the bricks.
//! For root with /dev/fuse.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use support::mounted::{self, Mounted, library};
use support::{Cluster, PAGEMESH, program, until};

/// It refuses to run as root.
const NOBODY: u32 = 65534;
/// How often everything dies, by `make databases ROUNDS=50`.
const ROUNDS: &str = "PAGEMESH_TEST_ROUNDS";
/// Clients at once, each of which has a process, by `make databases CLIENTS=100`.
const CLIENTS: &str = "PAGEMESH_TEST_CLIENTS";
const CLIENTS_USUAL: u32 = 4;
/// Connections beside theirs.
const OTHERS: u32 = 16;

fn clients() -> u32 {
    let wanted = std::env::var(CLIENTS).ok();
    wanted.map_or(CLIENTS_USUAL, |wanted| wanted.parse().unwrap())
}
/// What pgbench moves money between.
const TABLES: [(&str, &str); 3] = [
    ("pgbench_accounts", "abalance"),
    ("pgbench_tellers", "tbalance"),
    ("pgbench_branches", "bbalance"),
];

/// A database in a directory, which nobody reaches but over its socket there.
struct Database {
    bin: PathBuf,
    dir: PathBuf,
    sockets: tempfile::TempDir,
    server: Option<Child>,
    /// Whether its programs are on the direct path.
    is_direct: bool,
}

/// Root by another name: a guest is of the mount's user, and PostgreSQL refuses root.
const RENAMED: [&str; 3] = ["--user", "--map-user=65534", "--map-group=65534"];

impl Database {
    fn new(dir: PathBuf, is_direct: bool) -> Database {
        let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
        let number = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.split('.').next().unwrap().parse::<u32>().unwrap_or(0)
        };
        let versions = versions.map(|entry| entry.unwrap().path());
        let newest = versions.max_by_key(number);
        let sockets = tempfile::tempdir().unwrap();
        if !is_direct {
            chown(sockets.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        Database {
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
            command.args(RENAMED);
        } else {
            command = program::limited("setpriv");
            let nobody = NOBODY.to_string();
            command.args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups"]);
        }
        self.finish(command, name)
    }

    /// The server on the direct path, with all its processes in a world of their own that
    /// ends with what is started here.
    fn server(&self) -> Command {
        if !self.is_direct {
            return self.command("postgres");
        }
        let mut command = Command::new("unshare");
        command.args(RENAMED);
        command.args(["--pid", "--fork", "--kill-child"]);
        command.arg(PAGEMESH).args(["exec", "--library"]);
        command.arg(library()).arg("--").stdin(Stdio::null());
        self.finish(command, "postgres")
    }

    fn finish(&self, mut command: Command, name: &str) -> Command {
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

    fn make(&self) {
        fs::create_dir(&self.dir).unwrap();
        if !self.is_direct {
            chown(&self.dir, Some(NOBODY), Some(NOBODY)).unwrap();
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
            .arg(format!("max_connections={}", clients() + OTHERS))
            .args(match self.is_direct {
                // Writes of 8 KiB are whole or not at all; pages are written all the time.
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

    fn ask(&self, sql: &str) -> String {
        let told = self.ok("psql", &["-Atqc", sql]);
        told.trim().to_owned()
    }

    /// The process that has all others of the server.
    fn main_pid(&self) -> u32 {
        let pid = self.server.as_ref().unwrap().id();
        if !self.is_direct {
            return pid;
        }
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(children).unwrap();
        children.trim().parse().unwrap()
    }

    /// How many of the server's processes reach the pools themselves.
    fn guests(&self) -> usize {
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

    /// Ends it with all its processes at once, and returns when they are gone.
    fn kill_all(&mut self) {
        let mut server = self.server.take().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        // Each of them has this.
        let mut said = server.stdout.take().unwrap();
        said.read_to_end(&mut Vec::new()).unwrap();
    }

    /// As an operator would; a smart end waits for clients.
    fn stop(&mut self) {
        let main = self.main_pid();
        let mut server = self.server.take().unwrap();
        program::signal(main, "INT");
        assert!(server.wait().unwrap().success(), "{}", self.log());
    }

    /// Ends it, whatever has become of its files. Its children end with it.
    fn kill(&mut self) {
        let mut server = self.server.take().unwrap();
        program::signal(server.id(), "QUIT");
        server.wait().unwrap();
    }

    /// Starts clients that never end; returns when more than this is done.
    fn bench_beyond(&self, wanted: u64) -> Child {
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
            self.ask(count).parse::<u64>().unwrap() > wanted
        });
        bench
    }

    /// Starts again behind a kill. How many transactions there are, at least so many.
    fn come_back(&mut self, least: u64) -> u64 {
        self.start();
        let found = self.check();
        assert!(found >= least, "{found} of {least}");
        found
    }

    /// Every transaction moved the same sum in all tables, whole or not at all, and
    /// no index or page is damaged. How many there were.
    fn check(&self) -> u64 {
        let moved = self.ask("select coalesce(sum(delta), 0) from pgbench_history");
        for (table, column) in TABLES {
            let sum = self.ask(&format!("select sum({column}) from {table}"));
            assert_eq!(sum, moved, "{table}");
        }
        self.ok(
            "pg_amcheck",
            &["--heapallindexed", "--install-missing", "-a"],
        );
        let count = self.ask("select count(*) from pgbench_history");
        count.parse().unwrap()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            // It may have ended by itself.
            match self.is_direct {
                true => drop(server.kill()),
                false => program::signal(server.id(), "QUIT"),
            }
            let _ = server.wait();
        }
    }
}

/// The transactions that pgbench says were done; all clients may have been cut off.
fn processed(output: &Output) -> u64 {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| {
        let rest = line.strip_prefix("number of transactions actually processed: ")?;
        rest.split('/').next()?.trim().parse().ok()
    });
    line.unwrap_or_else(|| panic!("{output:?}"))
}

fn let_everybody_through(dir: &Path) {
    fs::set_permissions(dir, Permissions::from_mode(0o711)).unwrap();
}

/// One that runs, with what pgbench works on.
fn filled(mount: &Mounted, is_direct: bool) -> Database {
    let mut database = Database::new(mount.path("data"), is_direct);
    database.make();
    database.start();
    database.ok("pgbench", &["-i", "-q", "-s", "2"]);
    database
}

fn end(mut database: Database, mount: Mounted, cluster: &Cluster) {
    database.stop();
    mount.stop(cluster);
    cluster.check_identical("files");
}

#[test]
fn postgresql_keeps_what_it_committed_when_the_mount_is_killed() {
    let Some(cluster) = mounted::cluster(&[384, 384], "300M") else {
        return;
    };
    let_everybody_through(cluster.dir());
    let mut mount = Mounted::new(&cluster, "files", "auto");
    let mut database = filled(&mount, false);
    let args = ["-c", "4", "-j", "2", "-n", "-t", "250"];
    let mut least = processed(&database.run("pgbench", &args));
    assert_eq!((least, database.check()), (1000, 1000));
    for _ in 0..2 {
        let bench = database.bench_beyond(least + 300);
        mount.daemon.take().unwrap().kill();
        least += processed(&bench.wait_with_output().unwrap());
        database.kill();
        mount.come_back(&cluster, "files", "auto");
        least = database.come_back(least);
    }
    end(database, mount, &cluster);
}

/// Kills bricks and the mount, in one order or the other, and brings them back.
fn kill_cluster(cluster: &mut Cluster, mount: &mut Mounted, bricks_first: bool) {
    if bricks_first {
        (0..2).for_each(|brick| cluster.kill_brick(brick));
    }
    mount.daemon.take().unwrap().kill();
    if !bricks_first {
        (0..2).for_each(|brick| cluster.kill_brick(brick));
    }
}

#[test]
fn postgresql_on_the_direct_path_keeps_what_it_committed_when_all_is_killed() {
    let Some(mut cluster) = mounted::cluster(&[384, 384], "300M") else {
        return;
    };
    let rounds = std::env::var(ROUNDS).ok();
    let rounds: u32 = rounds.map_or(2, |rounds| rounds.parse().unwrap());
    let_everybody_through(cluster.dir());
    let mut mount = Mounted::new(&cluster, "files", "map");
    let mut database = filled(&mount, true);
    let mut least = 0;
    for round in 0..rounds {
        let bench = database.bench_beyond(least + 300);
        until("clients are on the direct path", || database.guests() >= 4);
        // The program first, or what is behind it.
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
        mount.come_back(&cluster, "files", "auto");
        least = database.come_back(least);
    }
    end(database, mount, &cluster);
}
