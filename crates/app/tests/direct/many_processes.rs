//! Many processes on the direct path, far more than a pool has sessions.

use super::support::mounted::{self, TestMount};
use super::support::{Cluster, PAGEMESH, program, until};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Processes of a campaign, set by `make crowd PROCESSES=1000`.
const PROCESSES_ENV: &str = "PAGEMESH_TEST_PROCESSES";
/// The script of each process: it writes numbers into a page of its own, in turns at the file
/// offset, and checks the contents. It then reports, waits, and repeats this.
const WRITER_SCRIPT: &str = r#"
    use Fcntl ":flock";
    my ($path, $page, $ready, $gate) = @ARGV;
    sysopen(my $file, $path, 2) or die "open: $!";
    sub sip {
        for my $turn (@_) {
            my $wanted = pack("Q<", $page << 32 | $turn) x 512;
            sysseek($file, $page * 4096, 0);
            syswrite($file, $wanted) == 4096 or die "write: $!";
            sysseek($file, $page * 4096, 0);
            sysread($file, my $found, 4096) == 4096 or die "read: $!";
            $found eq $wanted or die "page $page differs in turn $turn";
        }
    }
    sip(1..20);
    open(my $said, ">>", $ready) or die; syswrite($said, "x");
    open(my $held, "<", $gate) or die; flock($held, LOCK_SH) or die;
    sip(21..40);
"#;
const LAST_TURN: u64 = 40;

fn processes(otherwise: u64) -> u64 {
    let given = std::env::var(PROCESSES_ENV);
    given.map_or(otherwise, |it| it.parse().unwrap())
}

/// Resources of a mount and its bricks: descriptors and threads of the mount, and sessions in use
/// of each pool.
#[derive(Debug)]
struct ResourceCounts {
    descriptors: usize,
    threads: usize,
    sessions: u64,
}

fn resource_counts(cluster: &Cluster, mount: &TestMount) -> ResourceCounts {
    let own = format!("/proc/{}", mount.daemon.as_ref().unwrap().pid());
    let count = |what: &str| std::fs::read_dir(format!("{own}/{what}")).unwrap().count();
    let told = cluster.json(&["status"]);
    let bricks = told["bricks"].as_array().unwrap().iter();
    let sessions = bricks.map(|brick| brick["sessions"].as_u64().unwrap());
    ResourceCounts {
        descriptors: count("fd"),
        threads: count("task"),
        sessions: sessions.max().unwrap(),
    }
}

/// Waits until all resources of direct clients are released.
fn check_resources_released(cluster: &Cluster, mount: &TestMount, before: &ResourceCounts) {
    until("all is given back", || {
        let now = resource_counts(cluster, mount);
        // The mount itself may have a few more I/O channels for a while.
        let (spare, more) = (before.descriptors + 40, before.threads + 8);
        now.descriptors <= spare && now.threads <= more && now.sessions <= before.sessions + 4
    });
}

fn exec(program: &[&str]) -> Command {
    let mut command = Command::new(PAGEMESH);
    command.args(mounted::exec_args()).args(program);
    command.stdin(Stdio::null());
    command
}

#[test]
fn many_short_processes_release_resources() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    mount.sh("head -c 100000 /dev/urandom > file");
    let before = resource_counts(&cluster, &mount);
    // dd(1) reads often enough to become a direct client, and writes in place.
    let script = format!(
        "set -euo pipefail; cd {}
        for i in $(seq {}); do
          dd if=file of=copy bs=4096 conv=notrunc status=none; cmp file copy
        done",
        mount.dir.display(),
        processes(100)
    );
    let output = exec(&["bash", "-c", &script]).output().unwrap();
    program::succeeded("dd", output);
    check_resources_released(&cluster, &mount, &before);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

struct ChildProcesses(Vec<Child>);

impl Drop for ChildProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // The process may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(count: u64, file: &Path, ready: &Path, gate: &Path) -> ChildProcesses {
    let [file, ready, gate] = [file, ready, gate].map(|path| path.to_str().unwrap());
    let children = (0..count).map(|page| {
        let page = page.to_string();
        let mut command = exec(&["perl", "-e", WRITER_SCRIPT, file, &page, ready, gate]);
        command.spawn().unwrap()
    });
    ChildProcesses(children.collect())
}

#[test]
fn more_processes_than_sessions_work() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let count = processes(100);
    let file = super::open_file(&mount, "file");
    file.write_all_at(&vec![0; count as usize * 4096], 0)
        .unwrap();
    let before = resource_counts(&cluster, &mount);
    let [ready, gate] = ["ready", "gate"].map(|name| cluster.dir().join(name));
    File::create_new(&ready).unwrap();
    let held = File::create_new(&gate).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut crowd = start(count, mount.path("file").as_path(), &ready, &gate);
    until("all are alive", || {
        for child in &mut crowd.0 {
            assert_eq!(child.try_wait().unwrap(), None, "one has failed");
        }
        std::fs::metadata(&ready).unwrap().len() == count
    });
    // Some processes are direct clients now.
    until("sessions are reported", || {
        resource_counts(&cluster, &mount).sessions > before.sessions
    });
    // The mount has more I/O channels than that while many processes wait for it.
    let all = sessions_max(&cluster);
    until("sessions are left", || {
        resource_counts(&cluster, &mount).sessions < all
    });
    mount.sh("for i in $(seq 20); do echo $i > f$i; done; cat f* | wc -l; rm f*");
    drop(held);
    for child in &mut crowd.0 {
        assert!(child.wait().unwrap().success());
    }
    let mut bytes = [0; 8];
    for page in 0..count {
        file.read_exact_at(&mut bytes, page * 4096 + 8).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), page << 32 | LAST_TURN);
    }
    check_resources_released(&cluster, &mount, &before);
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// The number of sessions that the pool of a brick has in total.
fn sessions_max(cluster: &Cluster) -> u64 {
    let pool = cluster.pool(0).to_str().unwrap().to_owned();
    let told = cluster.json(&["pool", "show", &pool]);
    told["sessions_max"]
        .as_u64()
        .unwrap_or_else(|| panic!("{told}"))
}

/// An idle direct client gives its session back if sessions are few, and gets one again.
#[test]
fn idle_process_releases_session() {
    let Some(cluster) = mounted::cluster(&[128, 128], "64M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = super::open_file(&mount, "file");
    file.write_all_at(&[1; 40960], 0).unwrap();
    let half = sessions_max(&cluster) / 2;
    // More clients than half of the sessions, all idle afterwards.
    let guests: Vec<_> = (0..half).map(|_| super::new_client()).collect();
    let files: Vec<_> = guests
        .iter()
        .map(|guest| super::direct_file(guest, &file))
        .collect();
    let mut bytes = [0; 4096];
    let mut read = |file: &super::Direct| file.read(&mut bytes, 0).is_some();
    until("sessions are few", || {
        let inside = files.iter().filter(|file| read(file)).count();
        inside as u64 == half && resource_counts(&cluster, &mount).sessions > half + 1
    });
    until("idle ones give theirs back", || {
        resource_counts(&cluster, &mount).sessions <= half + 1
    });
    until("and one of them has its again", || read(&files[0]));
    drop((files, file));
    mount.stop(&cluster);
}
