//! PostgreSQL on a mount: what it committed is there when the mounting process was
//! killed under it. For root with /dev/fuse.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use support::mounted::{self, Mounted};
use support::{program, until};

/// It refuses to run as root.
const NOBODY: u32 = 65534;
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
}

impl Database {
    fn new(dir: PathBuf) -> Database {
        let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
        let number = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.split('.').next().unwrap().parse::<u32>().unwrap_or(0)
        };
        let versions = versions.map(|entry| entry.unwrap().path());
        let newest = versions.max_by_key(number);
        let sockets = tempfile::tempdir().unwrap();
        chown(sockets.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        Database {
            bin: newest.expect("a version").join("bin"),
            dir,
            sockets,
            server: None,
        }
    }

    fn command(&self, name: &str) -> Command {
        let mut command = program::limited("setpriv");
        let nobody = NOBODY.to_string();
        command
            .args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups"])
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
        chown(&self.dir, Some(NOBODY), Some(NOBODY)).unwrap();
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
            .command("postgres")
            .args(["-D", dir, "-k", sockets, "-h", ""])
            .args(["-c", "shared_buffers=16MB", "-c", "max_connections=20"])
            .stdout(Stdio::null())
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

    /// As an operator would; a smart end waits for clients.
    fn stop(&mut self) {
        let mut server = self.server.take().unwrap();
        program::signal(server.id(), "INT");
        assert!(server.wait().unwrap().success(), "{}", self.log());
    }

    /// Ends it, whatever has become of its files. Its children end with it.
    fn kill(&mut self) {
        let mut server = self.server.take().unwrap();
        program::signal(server.id(), "QUIT");
        server.wait().unwrap();
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
            program::signal(server.id(), "QUIT");
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

#[test]
fn postgresql_keeps_what_it_committed_when_the_mount_is_killed() {
    let Some(cluster) = mounted::cluster(&[384, 384], "300M") else {
        return;
    };
    let_everybody_through(cluster.dir());
    let mut mount = Mounted::new(&cluster, "files", "auto");
    let mut database = Database::new(mount.path("data"));
    database.make();
    database.start();
    database.ok("pgbench", &["-i", "-q", "-s", "2"]);
    let args = ["-c", "4", "-j", "2", "-n", "-t", "250"];
    let mut least = processed(&database.run("pgbench", &args));
    assert_eq!((least, database.check()), (1000, 1000));
    for _ in 0..2 {
        let bench = database
            .command("pgbench")
            .args(["-c", "4", "-j", "2", "-n", "-t", "100000"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let wanted = (least + 300).to_string();
        let count = "select count(*) from pgbench_history";
        until("transactions are done", || {
            database.ask(count).parse::<u64>().unwrap() > wanted.parse::<u64>().unwrap()
        });
        mount.daemon.take().unwrap().kill();
        least += processed(&bench.wait_with_output().unwrap());
        database.kill();
        mount.come_back(&cluster, "files", "auto");
        database.start();
        let found = database.check();
        assert!(found >= least, "{found} of {least}");
        least = found;
    }
    database.stop();
    mount.stop(&cluster);
    cluster.check_identical("files");
}
