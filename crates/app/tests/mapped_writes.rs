//! One program stores into a mapping while another one writes to other bytes of the same pages: neither
//! loses anything. Needs root, /dev/fuse and python3.

use crate::by_both;
use crate::support;
use rustix::fs::{FallocateFlags, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use support::Cluster;
use support::mounted::{self, TestMount, direct_command, open_as_library};

const PAGE: u64 = 4096;
/// Few pages: both programs are nearly always at the same one.
const PAGES: u64 = 8;
/// The part of each page that calls change.
const WRITTEN: u64 = 0x400;
/// Rounds over all pages.
const ROUNDS: u64 = 600;

by_both! {
    direct_writes_beside_stores_are_kept
    writes_on_direct_mount_beside_stores_are_kept
    holes_beside_stores_are_kept
}

/// Stores a number into each page again and again, checks that the one before is still there, and
/// prints the last one.
const STORE: &str = r#"
import mmap, os, struct, sys, threading
file = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2]) * 4096)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set())).start()
numbers = memoryview(file).cast('Q')
time = 0
print('stores', flush=True)
while not ended.is_set():
    for page in range(int(sys.argv[2])):
        if numbers[page * 512] != time:
            print('lost', page, time, numbers[page * 512], flush=True)
            os._exit(1)
        numbers[page * 512] = time + 1
    time += 1
print(time, flush=True)
os._exit(0)
"#;

/// A program that stores; dropping it kills it.
struct StoringProgram {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl StoringProgram {
    fn start(mut command: Command, path: &Path) -> StoringProgram {
        command.args(["-c", STORE]).arg(path).arg(PAGES.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut program = StoringProgram { child, lines };
        assert_eq!(program.line(), "stores");
        program
    }

    fn line(&mut self) -> String {
        let line = self.lines.next();
        line.unwrap_or_else(|| panic!("it ended: {:?}", self.child.wait()))
            .unwrap()
    }

    /// Ends it; returns the number that is stored in each page.
    fn end(mut self) -> u64 {
        self.child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let said = self.line();
        said.parse()
            .unwrap_or_else(|_| panic!("a store is lost: {said}"))
    }
}

impl Drop for StoringProgram {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn number_at(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_le_bytes(bytes)
}

/// Writes into the pages that a program stores into, and checks that each earlier write is still there.
fn check_writes(command: Command, path: &Path, writer: &File) {
    let storing = StoringProgram::start(command, path);
    for round in 1..=ROUNDS {
        for page in 0..PAGES {
            let at = page * PAGE + WRITTEN;
            assert_eq!(number_at(writer, at), round - 1, "page {page}");
            writer.write_all_at(&round.to_le_bytes(), at).unwrap();
        }
    }
    let stored = storing.end();
    writer.sync_all().unwrap();
    for page in 0..PAGES {
        let found = (
            number_at(writer, page * PAGE),
            number_at(writer, page * PAGE + WRITTEN),
        );
        assert_eq!(found, (stored, ROUNDS), "page {page}");
    }
}

fn python(is_direct: bool) -> Command {
    match is_direct {
        true => direct_command(&["python3"]),
        false => Command::new("python3"),
    }
}

/// A file of zeroes, or of a hole, or of preallocated pages.
fn make_file(path: &Path, kind: &str) {
    let file = File::create(path).unwrap();
    match kind {
        "hole" => file.set_len(PAGES * PAGE).unwrap(),
        "preallocated" => {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, PAGES * PAGE).unwrap();
        }
        _ => fs::write(path, vec![0; (PAGES * PAGE) as usize]).unwrap(),
    }
}

fn mount_with(fuse: &'static str, options: &[&str]) -> Option<(Cluster, TestMount)> {
    // Over TCP a write takes longer, and a page fault beside it is more probable.
    let cluster = mounted::cluster(&[64, 64], "24M")?;
    let how = ("tcp", fuse);
    let mount = TestMount::try_with_options(&cluster, "files", "mnt", how, options);
    Some((cluster, mount.unwrap()))
}

/// Writers that go past the cache of a mount with a cache: with `O_DIRECT`, and as the preload library opens files.
fn direct_writes_beside_stores_are_kept(fuse: &'static str) {
    let Some((cluster, mount)) = mount_with(fuse, &[]) else {
        return;
    };
    for kind in ["written", "hole", "preallocated"] {
        let path = mount.path(kind);
        make_file(&path, kind);
        let direct = OFlags::DIRECT.bits().cast_signed();
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true);
        let writer = options.clone().custom_flags(direct).open(&path).unwrap();
        check_writes(python(false), &path, &writer);
        drop(writer);
        make_file(&path, kind);
        let writer = open_as_library(&mut options.clone()).open(&path).unwrap();
        check_writes(python(true), &path, &writer);
    }
    mount.stop(&cluster);
}

fn writes_on_direct_mount_beside_stores_are_kept(fuse: &'static str) {
    let Some((cluster, mount)) = mount_with(fuse, &["--direct-io"]) else {
        return;
    };
    for kind in ["written", "hole", "preallocated"] {
        for is_direct in [false, true] {
            let path = mount.path(kind);
            make_file(&path, kind);
            let writer = OpenOptions::new().read(true).write(true).open(&path);
            check_writes(python(is_direct), &path, &writer.unwrap());
        }
    }
    mount.stop(&cluster);
}

/// Holes in a part of each page: later reads find zeroes there, and no store is lost.
fn holes_beside_stores_are_kept(fuse: &'static str) {
    let Some((cluster, mount)) = mount_with(fuse, &[]) else {
        return;
    };
    let path = mount.path("file");
    make_file(&path, "written");
    let writer = OpenOptions::new().read(true).write(true).open(&path);
    let writer = writer.unwrap();
    let storing = StoringProgram::start(python(false), &path);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for round in 1..=ROUNDS / 2 {
        for page in 0..PAGES {
            let at = page * PAGE + WRITTEN;
            assert_eq!(number_at(&writer, at), 0, "page {page}, round {round}");
            writer.write_all_at(&round.to_le_bytes(), at).unwrap();
            rustix::fs::fallocate(&writer, punch, at, 8).unwrap();
        }
    }
    let stored = storing.end();
    for page in 0..PAGES {
        let found = (
            number_at(&writer, page * PAGE),
            number_at(&writer, page * PAGE + WRITTEN),
        );
        assert_eq!(found, (stored, 0), "page {page}");
    }
    drop(writer);
    mount.stop(&cluster);
}
