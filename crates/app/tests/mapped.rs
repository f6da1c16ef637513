//! Files that programs map and store into: every process sees a store at once, and a sync is
//! atomic. Needs root, /dev/fuse and python3.

use crate::by_both;
use crate::support;
use rustix::process::{Pid, Signal};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use support::mounted::{self, TestMount, direct_command};
use support::random::Random;
use support::{Cluster, program, until};

const PAGE: u64 = 4096;
/// Pages that the program stores into: more than one transaction holds.
const PAGES: u64 = 400;
/// The number of kills of the mount, set by `make mapped ROUNDS=100`.
const ROUNDS_ENV: &str = "PAGEMESH_TEST_ROUNDS";

/// In each turn: stores the number of the turn into some pages of a file, syncs, and records the
/// turn outside of the mount. Every second turn stores into few pages, the others into many.
const STORE: &str = r#"
import mmap, os, struct, sys
path, acknowledged, pages, time = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kept = os.open(path, os.O_RDWR)
for _ in range(9):
    os.pread(kept, 10, 0)
file = mmap.mmap(kept, pages * 4096)
told = os.open(acknowledged, os.O_RDWR)
while True:
    time += 1
    some = 40 if time % 2 else 2
    for page in range(pages):
        if (page * 31 + time * 17) % 97 < some:
            struct.pack_into('<Q', file, page * 4096 + 8 * (page % 500), time)
    if time % 3:
        file.flush()
    else:
        os.fsync(kept)
    os.pwrite(told, struct.pack('<Q', time), 0)
"#;

/// Whether a turn stores into a page.
fn stores(time: u64, page: u64) -> bool {
    let some = if time % 2 == 1 { 40 } else { 2 };
    (page * 31 + time * 17) % 97 < some
}

/// The turn that a page holds after this many turns.
fn last(times: u64, page: u64) -> u64 {
    (1..=times)
        .rev()
        .find(|&time| stores(time, page))
        .unwrap_or(0)
}

/// A program and the process that limits its time, in one process group; dropping it kills both.
struct StoringProcess(Child);

impl Drop for StoringProcess {
    fn drop(&mut self) {
        // The process may have ended, or may not lead its group yet.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct MmapCase {
    cluster: Cluster,
    mount: TestMount,
    acknowledged: PathBuf,
}

impl MmapCase {
    fn new(fuse: &'static str) -> Option<MmapCase> {
        let cluster = mounted::cluster(&[128, 128], "100M")?;
        let mount = TestMount::with_fuse(&cluster, "files", "map", fuse);
        let acknowledged = cluster.dir().join("acknowledged");
        fs::write(&acknowledged, [0; 8]).unwrap();
        Some(MmapCase {
            cluster,
            mount,
            acknowledged,
        })
    }

    /// A command that runs Python, on the direct path or through the kernel.
    fn python(is_direct: bool) -> Command {
        match is_direct {
            true => direct_command(&["python3"]),
            false => program::limited("python3"),
        }
    }

    fn start_storing(&self, is_direct: bool) -> StoringProcess {
        let mut command = MmapCase::python(is_direct);
        command.args(["-c", STORE]).arg(self.mount.path("file"));
        let pages = PAGES.to_string();
        let time = self.acknowledged_time().to_string();
        command.arg(&self.acknowledged).args([pages, time]);
        StoringProcess(command.spawn().unwrap())
    }

    /// The last turn with an acknowledged sync.
    fn acknowledged_time(&self) -> u64 {
        let bytes = fs::read(&self.acknowledged).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Asserts that all pages are of one turn: the last acknowledged one or the next. Returns the
    /// turn.
    fn check(&self) -> u64 {
        let file = File::open(self.mount.path("file")).unwrap();
        let mut bytes = vec![0; (PAGES * PAGE) as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let told = |page: u64| {
            let at = (page * PAGE + 8 * (page % 500)) as usize;
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        let is_of = |times: u64| (0..PAGES).all(|page| told(page) == last(times, page));
        let acknowledged = self.acknowledged_time();
        let found = [acknowledged, acknowledged + 1];
        let found = found.into_iter().find(|&times| is_of(times));
        let wrong = || (0..PAGES).find(|&page| told(page) != last(acknowledged, page));
        found.unwrap_or_else(|| {
            let page = wrong().unwrap();
            panic!(
                "torn: page {page} is of time {}, and {acknowledged} was acknowledged",
                told(page)
            )
        })
    }
}

/// The mount dies while programs store and sync; the file then holds the state of one sync.
fn mmap_sync_is_atomic_if_mount_is_killed(fuse: &'static str) {
    let Some(mut case) = MmapCase::new(fuse) else {
        return;
    };
    let path = case.mount.path("file");
    fs::write(&path, vec![0; (PAGES * PAGE) as usize]).unwrap();
    let rounds = std::env::var(ROUNDS_ENV).map_or(6, |rounds| rounds.parse().unwrap());
    let mut random = Random::new(11);
    for round in 0..rounds {
        let storing = case.start_storing(round % 2 == 1);
        let before = case.acknowledged_time();
        let more = 2 + random.below(30);
        until("more is synced", || {
            case.acknowledged_time() >= before + more
        });
        case.mount.daemon.take().unwrap().kill();
        drop(storing);
        case.mount.remount(&case.cluster, "files", "map");
        let found = case.check();
        // The next program begins there.
        fs::write(&case.acknowledged, found.to_le_bytes()).unwrap();
    }
    let MmapCase { cluster, mount, .. } = case;
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Stores without a sync, and prints the bytes that other processes wrote meanwhile.
const SHARE: &str = r#"
import mmap, os, sys
file = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 3 * 4096)
file[4090:4102] = b'stored by it'
print('stored', flush=True)
sys.stdin.readline()
print(file[8:24].decode(), file[8192 + 5:8192 + 21].decode(), flush=True)
sys.stdin.readline()
"#;

/// A store is visible without a sync, through the kernel and on the direct path.
fn mmap_stores_are_visible_at_once(fuse: &'static str) {
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;
    let Some(case) = MmapCase::new(fuse) else {
        return;
    };
    let path = case.mount.path("file");
    for is_direct in [false, true] {
        fs::write(&path, [b'.'; 3 * PAGE as usize]).unwrap();
        let mut command = MmapCase::python(is_direct);
        command.args(["-c", SHARE]).arg(&path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut sharing = StoringProcess(command.spawn().unwrap());
        let mut tell = sharing.0.stdin.take().unwrap();
        let mut lines = BufReader::new(sharing.0.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "stored");
        let read = "import os,sys; f=os.open(sys.argv[1], os.O_RDONLY); \
                    [os.pread(f, 12, 4090) for _ in range(8)]; \
                    print(os.pread(f, 12, 4090).decode())";
        for reads_directly in [false, true] {
            let mut command = MmapCase::python(reads_directly);
            command.args(["-c", read]).arg(&path);
            let told = program::succeeded("reading", command.output().unwrap());
            assert_eq!(told.trim(), "stored by it", "{is_direct} {reads_directly}");
        }
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(b"and written here", 8).unwrap();
        let mut command = MmapCase::python(true);
        let write = "import os,sys; f=os.open(sys.argv[1], os.O_WRONLY); \
                     [os.pwrite(f, b'or directly here', 8192 + 5) for _ in range(8)]";
        command.args(["-c", write]).arg(&path);
        program::succeeded("writing", command.output().unwrap());
        tell.write_all(b"\n").unwrap();
        let told = lines.next().unwrap().unwrap();
        assert_eq!(told, "and written here or directly here", "{is_direct}");
        drop(file);
        tell.write_all(b"\n").unwrap();
        assert!(sharing.0.wait().unwrap().success());
        // The program ended without a sync, and no process has the file open any more.
        let text = fs::read(&path).unwrap();
        assert_eq!(&text[4090..4102], b"stored by it");
    }
    // No process waits for the work that the mount does after the last close of a file. A sync
    // does, also for stores of other processes.
    File::open(&path).unwrap().sync_all().unwrap();
    let MmapCase {
        cluster, mut mount, ..
    } = case;
    mount.daemon.take().unwrap().kill();
    mount.remount(&cluster, "files", "map");
    let text = fs::read(mount.path("file")).unwrap();
    assert_eq!(&text[4090..4102], b"stored by it");
    assert_eq!(&text[8..24], b"and written here");
    mount.stop(&cluster);
}

by_both! {
    mmap_sync_is_atomic_if_mount_is_killed
    mmap_stores_are_visible_at_once
}
