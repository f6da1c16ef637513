//! A file system that another process has mounted: the next mount waits for one that still stores data, is refused
//! by one that serves programs, and replaces a dead one. Needs root, /dev/fuse and python3.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use support::mounted::{self, CLASSIC, TestMount};
use support::{Cluster, FENCED, until};

const PAGE: usize = 4096;
/// Pages of a mapped file: more than one transaction holds.
const PAGES: usize = 300;

by_both! {
    mount_waits_for_stores_of_ending_mount
    mounted_file_system_is_refused_without_force
}

/// Maps a file and stores into each page; unmaps and closes it at a word.
const STORE: &str = r#"
import mmap, os, sys
kept = os.open(sys.argv[1], os.O_RDWR)
file = mmap.mmap(kept, int(sys.argv[2]) * 4096)
def store(word):
    for page in range(int(sys.argv[2])):
        file[page * 4096:page * 4096 + 6] = word
store(b'before')
# From the first sync on the mount knows of the mapping, and takes pages without the volume.
file.flush()
store(b'stored')
print('stored', flush=True)
sys.stdin.readline()
file.close()
os.close(kept)
"#;

/// The log of a mount that is starting on this directory.
fn log_of(cluster: &Cluster, at: &str) -> String {
    let log = cluster.dir().join(format!("mount-{at}.log"));
    fs::read_to_string(log).unwrap_or_default()
}

fn check_stores(dir: &Path) {
    let bytes = fs::read(dir.join("file")).unwrap();
    assert_eq!(bytes.len(), PAGES * PAGE);
    let is_stored = |page: &[u8]| page.starts_with(b"stored");
    let stored = bytes.chunks(PAGE).filter(|page| is_stored(page)).count();
    assert_eq!(stored, PAGES);
}

/// umount(2) returns while the mounting process stores pages of a mapped file.
fn mount_waits_for_stores_of_ending_mount(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut first = TestMount::with_fuse(&cluster, "files", "tcp", fuse);
    fs::write(first.path("file"), vec![1; PAGES * PAGE]).unwrap();
    let mut program = Command::new("python3")
        .args(["-c", STORE])
        .arg(first.path("file"))
        .arg(PAGES.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(program.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "stored\n");
    // The mount gets the pages and cannot store them.
    let signal_bricks = |signal| (0..2).for_each(|brick| cluster.brick(brick).signal(signal));
    signal_bricks("STOP");
    program.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(program.wait().unwrap().success());
    rustix::mount::unmount(&first.dir, rustix::mount::UnmountFlags::empty()).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| TestMount::try_new(&cluster, "files", "mnt2", "tcp", fuse));
        until("the second mount waits for the first", || {
            let is_over = second.is_finished();
            assert!(!is_over, "it did not wait: {}", log_of(&cluster, "mnt2"));
            log_of(&cluster, "mnt2").contains("still stores its data")
        });
        signal_bricks("CONT");
        let second = second.join().unwrap().unwrap();
        let mut daemon = first.daemon.take().unwrap();
        assert!(daemon.await_end().success(), "{}", daemon.log());
        check_stores(&second.dir);
        second.stop(&cluster);
    });
}

fn mounted_file_system_is_refused_without_force(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut first = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    let open = fs::File::create(first.path("file")).unwrap();
    let shown = cluster.json(&["fs", "show", "files"]);
    let holder = shown["info"]["attached"]["client"].as_str().unwrap();
    let dir = cluster.dir().join("mnt2");
    fs::create_dir(&dir).unwrap();
    let refused = ["is mounted by", holder, "--force"];
    cluster.refused(&["mount", "files", dir.to_str().unwrap()], &refused);
    // The first mount goes on, and is fenced only by force.
    (&open).write_all(b"kept").unwrap();
    let second = TestMount::by_force(&cluster, "files", "mnt2", "auto", fuse);
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    let mut daemon = first.daemon.take().unwrap();
    assert_eq!(daemon.await_end().code(), Some(FENCED));
    second.stop(&cluster);
}

/// A lazily unmounted file system serves programs until they close their files.
#[test]
fn lazily_unmounted_file_system_counts_as_mounted() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let first = TestMount::new(&cluster, "files", "auto");
    let open = fs::File::create(first.path("open")).unwrap();
    let dir = first.dir.to_str().unwrap();
    cluster.ok(&["umount", "--lazy", dir]);
    cluster.refused(&["mount", "files", dir], &["is mounted by"]);
    (&open).write_all(b"kept").unwrap();
    drop(open);
    let second = TestMount::try_new(&cluster, "files", "mnt2", "auto", CLASSIC).unwrap();
    assert_eq!(fs::read(second.path("open")).unwrap(), b"kept");
    second.stop(&cluster);
}

/// A service restarts after SIGKILL without an option.
#[test]
fn killed_mount_is_replaced_at_once() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let first = TestMount::new(&cluster, "files", "auto");
    fs::write(first.path("file"), b"kept").unwrap();
    first.kill();
    let second = TestMount::new(&cluster, "files", "auto");
    let log = log_of(&cluster, "mnt");
    assert!(
        log.contains("and has ended; this mount takes over"),
        "{log}"
    );
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    second.stop(&cluster);
}

/// As a machine that died, or that the network has cut off.
#[test]
fn silent_mount_is_fenced_without_force() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut first = TestMount::new(&cluster, "files", "tcp");
    fs::write(first.path("file"), b"kept").unwrap();
    let mut daemon = first.daemon.take().unwrap();
    daemon.stop_all_threads();
    let second = TestMount::try_new(&cluster, "files", "mnt2", "tcp", CLASSIC).unwrap();
    let log = log_of(&cluster, "mnt2");
    assert!(log.contains("gives no sign of life"), "{log}");
    assert_eq!(fs::read(second.path("file")).unwrap(), b"kept");
    daemon.signal("CONT");
    assert_eq!(daemon.await_end().code(), Some(FENCED));
    second.stop(&cluster);
}
