//! Files that programs map and store into: seen by everybody at once, and synced as a
//! whole. For root with /dev/fuse, and python3.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use rustix::process::{Pid, Signal};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use support::mounted::{self, Mounted, directly};
use support::random::Random;
use support::{Cluster, program, until};

const PAGE: u64 = 4096;
/// Pages that the program stores into: more than one transaction has room for.
const PAGES: u64 = 400;
/// How often the mount is killed, by `make mapped ROUNDS=100`.
const ROUNDS: &str = "PAGEMESH_TEST_ROUNDS";

/// Stores its number into some of the pages of a file, of each time others, syncs, and
/// says outside of the mount that it did. Of every second one few, else many.
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

/// Whether a time is one that stores into a page.
fn stores(time: u64, page: u64) -> bool {
    let some = if time % 2 == 1 { 40 } else { 2 };
    (page * 31 + time * 17) % 97 < some
}

/// Which time a page tells after so many.
fn last(times: u64, page: u64) -> u64 {
    (1..=times)
        .rev()
        .find(|&time| stores(time, page))
        .unwrap_or(0)
}

/// A program that is killed when it is dropped, with what limits its time: they are a group.
struct Storing(Child);

impl Drop for Storing {
    fn drop(&mut self) {
        // It may have ended, or be no group yet.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Case {
    cluster: Cluster,
    mount: Mounted,
    acknowledged: PathBuf,
}

impl Case {
    fn new(fuse: &'static str) -> Option<Case> {
        let cluster = mounted::cluster(&[128, 128], "100M")?;
        let mount = Mounted::by(&cluster, "files", "map", fuse);
        let acknowledged = cluster.dir().join("acknowledged");
        fs::write(&acknowledged, [0; 8]).unwrap();
        Some(Case {
            cluster,
            mount,
            acknowledged,
        })
    }

    /// What runs a program of python, directly or not.
    fn python(is_direct: bool) -> Command {
        match is_direct {
            true => directly(&["python3"]),
            false => program::limited("python3"),
        }
    }

    fn storing(&self, is_direct: bool) -> Storing {
        let mut command = Case::python(is_direct);
        command.args(["-c", STORE]).arg(self.mount.path("file"));
        let pages = PAGES.to_string();
        let time = self.time().to_string();
        command.arg(&self.acknowledged).args([pages, time]);
        Storing(command.spawn().unwrap())
    }

    /// Up to when it was said that all is synced.
    fn time(&self) -> u64 {
        let bytes = fs::read(&self.acknowledged).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    /// What is in the file is of one time, of the last that was told or the next.
    fn check(&self) -> u64 {
        let file = File::open(self.mount.path("file")).unwrap();
        let mut bytes = vec![0; (PAGES * PAGE) as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let told = |page: u64| {
            let at = (page * PAGE + 8 * (page % 500)) as usize;
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        let is_of = |times: u64| (0..PAGES).all(|page| told(page) == last(times, page));
        let acknowledged = self.time();
        let found = [acknowledged, acknowledged + 1];
        let found = found.into_iter().find(|&times| is_of(times));
        let wrong = || (0..PAGES).find(|&page| told(page) != last(acknowledged, page));
        found.unwrap_or_else(|| {
            let page = wrong().unwrap();
            panic!(
                "torn: page {page} is of time {}, and {acknowledged} was told",
                told(page)
            )
        })
    }
}

/// The mount dies while programs store and sync; what is found then is of one sync.
fn the_mount_is_killed_amid_syncs(fuse: &'static str) {
    let Some(mut case) = Case::new(fuse) else {
        return;
    };
    let path = case.mount.path("file");
    fs::write(&path, vec![0; (PAGES * PAGE) as usize]).unwrap();
    let rounds = std::env::var(ROUNDS).map_or(6, |rounds| rounds.parse().unwrap());
    let mut random = Random::new(11);
    for round in 0..rounds {
        let storing = case.storing(round % 2 == 1);
        let before = case.time();
        let more = 2 + random.below(30);
        until("more is synced", || case.time() >= before + more);
        case.mount.daemon.take().unwrap().kill();
        drop(storing);
        case.mount.come_back(&case.cluster, "files", "map");
        let found = case.check();
        // The next one begins there.
        fs::write(&case.acknowledged, found.to_le_bytes()).unwrap();
    }
    let Case { cluster, mount, .. } = case;
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Stores without a sync, and waits to be told what others wrote meanwhile.
const SHARE: &str = r#"
import mmap, os, sys
file = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 3 * 4096)
file[4090:4102] = b'stored by it'
print('stored', flush=True)
sys.stdin.readline()
print(file[8:24].decode(), file[8192 + 5:8192 + 21].decode(), flush=True)
sys.stdin.readline()
"#;

/// Nobody has to sync to be seen, by the kernel or on the direct path.
fn what_is_stored_is_seen_at_once(fuse: &'static str) {
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;
    let Some(case) = Case::new(fuse) else { return };
    let path = case.mount.path("file");
    for is_direct in [false, true] {
        fs::write(&path, [b'.'; 3 * PAGE as usize]).unwrap();
        let mut command = Case::python(is_direct);
        command.args(["-c", SHARE]).arg(&path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut sharing = Storing(command.spawn().unwrap());
        let mut tell = sharing.0.stdin.take().unwrap();
        let mut lines = BufReader::new(sharing.0.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "stored");
        let read = "import os,sys; f=os.open(sys.argv[1], os.O_RDONLY); \
                    [os.pread(f, 12, 4090) for _ in range(8)]; \
                    print(os.pread(f, 12, 4090).decode())";
        for reads_directly in [false, true] {
            let mut command = Case::python(reads_directly);
            command.args(["-c", read]).arg(&path);
            let told = program::succeeded("reading", command.output().unwrap());
            assert_eq!(told.trim(), "stored by it", "{is_direct} {reads_directly}");
        }
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(b"and written here", 8).unwrap();
        let mut command = Case::python(true);
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
        // It ended without a sync, and nobody has the file any more.
        let text = fs::read(&path).unwrap();
        assert_eq!(&text[4090..4102], b"stored by it");
    }
    // Nobody waits for what the mount does behind the last one who closes a file. Who syncs
    // does, also for what others stored.
    File::open(&path).unwrap().sync_all().unwrap();
    let Case {
        cluster, mut mount, ..
    } = case;
    mount.daemon.take().unwrap().kill();
    mount.come_back(&cluster, "files", "map");
    let text = fs::read(mount.path("file")).unwrap();
    assert_eq!(&text[4090..4102], b"stored by it");
    assert_eq!(&text[8..24], b"and written here");
    mount.stop(&cluster);
}

by_both! {
    the_mount_is_killed_amid_syncs
    what_is_stored_is_seen_at_once
}
