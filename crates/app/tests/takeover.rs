//! A file system that another process has mounted: the next mount waits for one that still stores data, is refused
//! by one that serves programs, and replaces a dead one. Also: the state after the kill or the unmount of a mount with a
//! commit interval. Needs root, /dev/fuse and python3.

use crate::by_both;
use crate::support;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::mounted::{self, CLASSIC, TestMount};
use support::scrape::{page, uncommitted_pages};
use support::{Cluster, FENCED, Pools, until};

const PAGE: usize = 4096;
/// Pages of a mapped file: more than one transaction holds.
const PAGES: usize = 300;
/// Tries to begin a mount while another one stores its pages.
const TRIES_MAX: usize = 5;

by_both! {
    killed_mount_keeps_a_prefix_since_last_fsync
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
    let waited = (0..TRIES_MAX).any(|_| second_mount_waits(&cluster, fuse));
    assert!(waited, "each first mount ended before the second one began");
}

/// Returns whether the second mount began while the first one stored its pages.
fn second_mount_waits(cluster: &Cluster, fuse: &'static str) -> bool {
    let mut first = TestMount::with_fuse(cluster, "files", "tcp", fuse);
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
    let mut daemon = first.daemon.take().unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| TestMount::try_new(cluster, "files", "mnt2", "tcp", fuse));
        let mut is_early = false;
        until("the second mount waits for the first", || {
            let is_waiting = log_of(cluster, "mnt2").contains("still stores its data");
            is_early = second.is_finished() && !is_waiting;
            is_waiting || is_early
        });
        let has_given_up = is_early && !daemon.is_running();
        signal_bricks("CONT");
        let second = second.join().unwrap();
        if has_given_up {
            // It was storing something else, as file times, when the bricks stopped, and the end of the program waited for that.
            return false;
        }
        assert!(!is_early, "it did not wait: {}", log_of(cluster, "mnt2"));
        let second = second.unwrap();
        assert!(daemon.await_end().success(), "{}", daemon.log());
        check_stores(&second.dir);
        second.stop(cluster);
        true
    })
}

fn mounted_file_system_is_refused_without_force(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mut first = TestMount::with_fuse(&cluster, "files", "auto", fuse);
    let open = File::create(first.path("file")).unwrap();
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
    let open = File::create(first.path("open")).unwrap();
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

/// The longest interval: a test stores changes only by full batches, by syncs and by unmounts.
const DEFERRED: [&str; 4] = ["--commit-interval", "300", "--metrics", "127.0.0.1:0"];
/// Files before an fsync, at least.
const SYNCED_MIN: usize = 10;
/// Files after an fsync that a writer has made when the mount is killed, and the most that it makes. They fill
/// no batch, a few batches, and many.
const LATER: [(usize, usize); 3] = [(0, 0), (40, 2000), (200, 2000)];

/// A cluster on disks: a mount on memory ignores the option.
fn disk_cluster() -> Option<Cluster> {
    mounted::cluster_with_medium(Pools::Disk, &[128, 128], "80M")
}

fn mount_deferred(cluster: &Cluster, fuse: &'static str) -> TestMount {
    TestMount::try_with_options(cluster, "files", "mnt", ("auto", fuse), &DEFERRED)
        .unwrap_or_else(|ended| panic!("no mount: {ended:?}"))
}

/// The contents of a file: up to two pages.
fn content(name: &str) -> Vec<u8> {
    name.repeat(1500).into_bytes()
}

/// Makes file number `n` of a series.
fn write_file(dir: &Path, series: &str, n: usize) -> io::Result<()> {
    let name = format!("{series}{n}");
    fs::write(dir.join(&name), content(&name))
}

/// Makes files of series `a` until a change waits to be stored. Returns their number.
fn write_until_uncommitted(mount: &TestMount, dir: &Path) -> usize {
    let metrics = mount.daemon.as_ref().unwrap().metrics_line();
    let mut count = 0;
    // The first changes may be stored at once, while the mount reserves pages.
    until("a change waits", || {
        write_file(dir, "a", count).unwrap();
        count += 1;
        count >= SYNCED_MIN && uncommitted_pages(&page(&metrics)) > 0
    });
    count
}

/// Asserts that a directory has the first files of a series, in the order of their creation, and all but the last one with
/// their contents. Returns their number.
fn check_prefix(dir: &Path, series: &str) -> usize {
    let names = fs::read_dir(dir).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: BTreeSet<String> = names.filter(|name| name.starts_with(series)).collect();
    let count = names.len();
    let first: BTreeSet<String> = (0..count).map(|n| format!("{series}{n}")).collect();
    assert_eq!(names, first, "no prefix");
    check_contents(dir, series, count.saturating_sub(1));
    if let Some(last) = count.checked_sub(1) {
        let last = format!("{series}{last}");
        let found = fs::read(dir.join(&last)).unwrap();
        assert!(content(&last).starts_with(&found), "{last}: {found:?}");
    }
    count
}

/// Asserts that the first files of a series have their contents.
fn check_contents(dir: &Path, series: &str, count: usize) {
    for n in 0..count {
        let name = format!("{series}{n}");
        let found = fs::read(dir.join(&name)).unwrap();
        assert!(found == content(&name), "{name}: {} bytes", found.len());
    }
}

/// The fsync of any file or directory stores all changes before it.
fn killed_mount_keeps_a_prefix_since_last_fsync(fuse: &'static str) {
    let Some(cluster) = disk_cluster() else {
        return;
    };
    for (round, (later_min, later_max)) in LATER.into_iter().enumerate() {
        let mount = mount_deferred(&cluster, fuse);
        let dir = mount.path(&format!("round{round}"));
        fs::create_dir(&dir).unwrap();
        let synced = write_until_uncommitted(&mount, &dir);
        let any = [dir.join("a0"), dir.clone(), mount.dir.clone()];
        File::open(&any[round]).unwrap().sync_all().unwrap();
        let later = AtomicUsize::new(0);
        let write_later = || {
            // It ends with an error of the killed mount. The directory beneath the mount has no such subdirectory.
            let mut writes = (0..later_max).map(|n| write_file(&dir, "b", n));
            writes.try_for_each(|written| {
                later.fetch_add(1, Ordering::Relaxed);
                written
            })
        };
        std::thread::scope(|scope| {
            scope.spawn(write_later);
            until("later files are there", || {
                later.load(Ordering::Relaxed) >= later_min
            });
            mount.kill();
        });
        let mount = mount_deferred(&cluster, fuse);
        assert!(check_prefix(&dir, "a") == synced, "a synced file is lost");
        check_contents(&dir, "a", synced);
        let made = later.into_inner();
        let kept = check_prefix(&dir, "b");
        assert!(kept <= made, "{kept} of {made}");
        mount.stop(&cluster);
    }
    cluster.check_identical("files");
}

#[test]
fn unmount_stores_uncommitted_changes() {
    let Some(cluster) = disk_cluster() else {
        return;
    };
    let mount = mount_deferred(&cluster, CLASSIC);
    let count = write_until_uncommitted(&mount, &mount.dir);
    mount.stop(&cluster);
    let mount = TestMount::new(&cluster, "files", "auto");
    assert_eq!(check_prefix(&mount.dir, "a"), count);
    check_contents(&mount.dir, "a", count);
    mount.stop(&cluster);
    cluster.check_identical("files");
}
