//! `libpagemesh` on a mount, next to programs that go through the kernel. Needs root and /dev/fuse.

use crate::support;
use pagemesh::{Error, File, Part};
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use support::mounted::{self, TestMount, open_as_library};
use support::random::Random;
use support::{Cluster, Pools, program, until};

const PAGE: usize = 4096;
/// The job of a child of these tests, and its directory.
const CHILD_JOB_ENV: &str = "PAGEMESH_TEST_NATIVE";
/// Number of kills of a campaign, set by `make natives ROUNDS=1000`.
const ROUNDS_ENV: &str = "PAGEMESH_TEST_ROUNDS";
/// Longer than a write takes, and shorter than the time-out for a stalled replica.
const WAIT_MIN: Duration = Duration::from_millis(300);

/// FNV-1a (Fowler, Noll, Vo).
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// A child of this test, killed when it is dropped.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl ChildGuard {
    fn command(what: &str, dir: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "native::child", "--nocapture"]);
        command.env(CHILD_JOB_ENV, format!("{what},{}", dir.display()));
        command
    }

    fn start(what: &str, dir: &Path) -> ChildGuard {
        ChildGuard(ChildGuard::command(what, dir).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // The brick may have killed a child that was stopped in an operation.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Not a test: the entry point of the children.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD_JOB_ENV) else {
        return;
    };
    let [what, dir] = job.split(',').collect::<Vec<_>>()[..] else {
        panic!("{job}");
    };
    let dir = Path::new(dir);
    eprintln!("{what}: process {}", std::process::id());
    match what {
        "answer" => answer_reads(&dir.join("file")),
        "native" => watch_native(dir),
        "guard" => watch_by_guard(dir),
        "kernel" => watch_by_kernel(dir),
        own => write_sets(dir, own.parse().unwrap()),
    }
}

/// Reads the requested ranges through the kernel and answers with a hash of each.
fn answer_reads(path: &Path) {
    let file = open_as_library(OpenOptions::new().read(true)).open(path);
    let file = file.unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (offset, len) = line.split_once(' ').unwrap();
        let mut bytes = vec![0; len.parse().unwrap()];
        file.read_exact_at(&mut bytes, offset.parse().unwrap())
            .unwrap();
        println!("= {}", hash(&bytes));
    }
}

/// Another process that reads through the kernel.
struct KernelReader {
    child: ChildGuard,
    told: BufReader<std::process::ChildStdout>,
}

impl KernelReader {
    fn new(dir: &Path) -> KernelReader {
        let mut command = ChildGuard::command("answer", dir);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let told = BufReader::new(child.stdout.take().unwrap());
        KernelReader {
            child: ChildGuard(child),
            told,
        }
    }

    fn check(&mut self, offset: u64, expected: &[u8]) {
        let asked = self.child.0.stdin.as_mut().unwrap();
        writeln!(asked, "{offset} {}", expected.len()).unwrap();
        let mut line = String::new();
        while !line.starts_with("= ") {
            line.clear();
            assert!(self.told.read_line(&mut line).unwrap() > 0, "it has ended");
        }
        assert_eq!(line.trim(), format!("= {}", hash(expected)), "at {offset}");
    }
}

fn bytes_of(guard: &pagemesh::Guard<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for slice in guard.slices() {
        let from = bytes.len();
        bytes.resize(from + slice.len(), 0);
        slice.copy_to(&mut bytes[from..]);
    }
    bytes
}

/// Compares a range of a file by all read functions of this process.
fn check(file: &File, offset: u64, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    file.read_exact_at(&mut bytes, offset).unwrap();
    assert!(bytes == expected, "read at {offset}");
    if expected.len() <= 40 * PAGE {
        let guard = file.guard(offset, expected.len()).unwrap();
        let shown = bytes_of(&guard);
        guard.finish().unwrap();
        assert!(shown == expected, "shown at {offset}");
    }
}

/// Random changes of every kind, each of which is visible at once.
fn change_and_check(mount: &TestMount, rounds: u64, is_direct: bool) {
    let path = mount.path("file");
    fs::write(&path, vec![0; 3 << 20]).unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(file.is_direct(), is_direct);
    let mut other = KernelReader::new(&mount.dir);
    let mut random = Random::new(1);
    let mut model = vec![0; 3 << 20];
    let mut shown = 0;
    for round in 0..rounds {
        let len = 1 + random.below(30_000) as usize;
        let offset = random.below((model.len() - len) as u64);
        let part = &mut model[offset as usize..][..len];
        match round % 4 {
            0 | 1 => {
                random.fill(part);
                file.write_all_at(part, offset).unwrap();
            }
            // A range at any offset, and a page far from it.
            2 => {
                random.fill(part);
                let far = (offset as usize + (1 << 20)) % (2 << 20) / PAGE * PAGE;
                let far = if far.abs_diff(offset as usize) < 40_000 {
                    (5 << 19) + PAGE
                } else {
                    far
                };
                random.fill(&mut model[far..][..PAGE]);
                let parts = [
                    Part::new(offset, &model[offset as usize..][..len]),
                    Part::new(far as u64, &model[far..][..PAGE]),
                ];
                file.write_atomic(&parts).unwrap();
                other.check(far as u64, &model[far..][..PAGE]);
            }
            _ => {
                let pages: Vec<usize> = (0..8)
                    .map(|at| (random.below(90) * 8 + at) as usize)
                    .collect();
                for &page in &pages {
                    random.fill(&mut model[page * PAGE..][..PAGE]);
                }
                let part =
                    |&page: &usize| Part::new((page * PAGE) as u64, &model[page * PAGE..][..PAGE]);
                let parts: Vec<Part<'_>> = pages.iter().map(part).collect();
                file.write_atomic(&parts).unwrap();
                let last = pages[7] * PAGE;
                other.check(last as u64, &model[last..][..PAGE]);
            }
        }
        let expected = &model[offset as usize..][..len];
        other.check(offset, expected);
        check(&file, offset, expected);
        shown += u64::from(!file.guard(offset, len).unwrap().is_copy());
    }
    assert_eq!(shown > rounds / 2, is_direct, "{shown} of {rounds} guards");
    file.persist().unwrap();
    grow_and_check(mount);
    // Makes the file longer, and shorter.
    file.write_all_at(&[9; 5000], model.len() as u64 - 1000)
        .unwrap();
    model.truncate(model.len() - 1000);
    model.extend([9; 5000]);
    assert_eq!(file.size().unwrap(), model.len() as u64);
    let last = model.len() - 9000;
    check(&file, last as u64, &model[last..]);
    let beyond = [1; PAGE];
    let refused = file.write_atomic(&[Part::new(model.len() as u64 - 1, &beyond)]);
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    file.set_size(10_000).unwrap();
    let mut bytes = [0; 100];
    assert_eq!(file.read_at(&mut bytes, 9_950).unwrap(), 50);
    assert!(bytes[..50] == model[9_950..10_000]);
    file.persist().unwrap();
}

/// A log grows, and its last page and its first page change atomically together.
fn grow_and_check(mount: &TestMount) {
    let path = mount.path("log");
    fs::write(&path, [0; 3 * PAGE]).unwrap();
    let file = File::open(&path).unwrap();
    let mut random = Random::new(2);
    let mut model = vec![0; 3 * PAGE];
    for round in 0..400 {
        let end = model.len();
        model.resize(end + 1 + random.below(3000) as usize, 0);
        random.fill(&mut model[end..]);
        file.write_all_at(&model[end..], end as u64).unwrap();
        let last = match round % 10 {
            0 => model.len() - 20,
            // A whole page, maybe the page that has the end of the file.
            1 => (model.len() - PAGE) / PAGE * PAGE,
            _ => continue,
        };
        let len = PAGE.min(model.len() - last);
        random.fill(&mut model[last..][..len]);
        let mark = [round as u8; 8];
        model[..8].copy_from_slice(&mark);
        let parts = [
            Part::new(0, &mark),
            Part::new(last as u64, &model[last..][..len]),
        ];
        file.write_atomic(&parts).unwrap();
        assert_eq!(file.size().unwrap(), model.len() as u64);
        let from = model.len().saturating_sub(20_000);
        check(&file, from as u64, &model[from..]);
        assert!(fs::read(&path).unwrap() == model, "after {round}");
    }
}

/// The first page is changed before the end is: no read shows the new end with the old first page.
#[test]
fn read_of_growing_file_is_consistent() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    const ROUNDS: u64 = 10_000;
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let path = mount.path("file");
    fs::write(&path, [0; PAGE]).unwrap();
    let (file, reader) = (File::open(&path).unwrap(), File::open(&path).unwrap());
    let write = || {
        for round in 1..=ROUNDS {
            let end = PAGE as u64 + (round - 1) * 8;
            file.write_all_at(&round.to_le_bytes(), 0).unwrap();
            file.write_all_at(&round.to_le_bytes(), end).unwrap();
        }
    };
    thread::scope(|scope| {
        let writes = scope.spawn(write);
        let mut bytes = vec![0; 40 * PAGE];
        while !writes.is_finished() {
            let read = reader.read_at(&mut bytes, 0).unwrap();
            let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let appended = ((read - PAGE) / 8) as u64;
            assert!(first >= appended, "{first} with an end of {appended}");
        }
    });
    drop((file, reader));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Persisted writes and atomic writes reach an asynchronous replica, too.
#[test]
fn async_replica_receives_native_writes() {
    let Some((mut cluster, mount)) = mounted::mount_with_async_replica() else {
        return;
    };
    let mut model = vec![0; 1 << 20];
    let path = mount.path("file");
    fs::write(&path, &model).unwrap();
    let file = File::open(&path).unwrap();
    assert!(file.is_direct());
    let mut random = Random::new(3);
    for round in 0..600 {
        let mut change = || {
            let page = random.below(255) as usize * PAGE;
            random.fill(&mut model[page..][..PAGE]);
            page
        };
        let pages = [change(), change()];
        let part = |&page: &usize| Part::new(page as u64, &model[page..][..PAGE]);
        match pages[0] == pages[1] || round % 2 == 0 {
            true => {
                for page in pages {
                    file.write_all_at(&model[page..][..PAGE], page as u64)
                        .unwrap();
                }
            }
            false => file.write_atomic(&pages.map(|page| part(&page))).unwrap(),
        }
    }
    file.write_all_at(&[7; PAGE], 0).unwrap();
    model[..PAGE].fill(7);
    check(&file, 0, &model);
    // `persist` waits for the asynchronous replica.
    file.persist().unwrap();
    drop(file);
    let mount = mounted::promote_async_replica(&mut cluster, mount);
    let found = fs::read(mount.path("file")).unwrap();
    mounted::check_async_replica(&found, &model);
    mount.stop(&cluster);
}

/// Each write to a file that is open with `O_DSYNC` waits for the asynchronous replica.
#[test]
fn o_dsync_write_waits_for_async_replica() {
    let Some((cluster, mount)) = mounted::mount_with_async_replica() else {
        return;
    };
    let path = mount.path("file");
    fs::write(&path, [0; 64 * PAGE]).unwrap();
    let mut options = OpenOptions::new();
    let flags = rustix::fs::OFlags::DSYNC.bits() as i32;
    let opened = options.read(true).write(true).custom_flags(flags);
    let file = File::new(opened.open(&path).unwrap()).unwrap();
    // The first writes go through the kernel.
    (0..50).for_each(|page| file.write_all_at(&[1; PAGE], page * PAGE as u64).unwrap());
    let check = |what: &str, write: &(dyn Fn() -> Result<(), Error> + Sync)| {
        cluster.brick(2).stop_all_threads();
        thread::scope(|scope| {
            let (told, ended) = mpsc::channel();
            scope.spawn(move || told.send(write()));
            let early = ended.recv_timeout(WAIT_MIN);
            cluster.brick(2).signal("CONT");
            assert!(
                early.is_err(),
                "{what}: {early:?} while the replica was stalled"
            );
            ended.recv().unwrap().unwrap();
        });
        mounted::await_async_replica(&cluster);
    };
    let part = [Part::new(PAGE as u64, &[3; 100])];
    check("written", &|| file.write_all_at(&[2; PAGE], 0));
    check("written together", &|| file.write_atomic(&part));
    drop(file);
    mount.stop(&cluster);
}

/// A file that was only read so far can be written directly: the mount is stopped and gets no
/// request.
#[test]
fn reader_of_file_writes_it_directly() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let path = mount.path("file");
    fs::write(&path, [7; 16 * PAGE]).unwrap();
    let file = File::open(&path).unwrap();
    let mut page = [0; PAGE];
    for _ in 0..50 {
        file.read_exact_at(&mut page, 0).unwrap();
    }
    let daemon = mount.daemon.as_ref().unwrap();
    daemon.stop_all_threads();
    thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let waits = scope.spawn(move || {
            let has_written = is_done.recv_timeout(Duration::from_secs(10)).is_ok();
            daemon.signal("CONT");
            has_written
        });
        // The writing thread is the one that has read, since each thread has connections of its
        // own.
        file.write_all_at(&[8; PAGE], 0).unwrap();
        let _ = done.send(());
        assert!(waits.join().unwrap(), "the mount was waited for");
    });
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn native_writes_are_visible_at_once() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    change_and_check(&mount, 1000, true);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn native_calls_work_without_direct_path() {
    let Some(cluster) = mounted::cluster_with_medium(Pools::Disk, &[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "auto", "auto");
    change_and_check(&mount, 100, false);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

// Sets of pages that are always written atomically.

const SETS: usize = 3;
/// Adjacent pages of a set, which cross the ends of spans.
const ADJACENT_PAGES: usize = 8;
/// A file that tells the children, by its presence, that the mount is unmounted.
const UNMOUNTED_MARKER: &str = "gone";
/// The set that both writers write.
const SHARED_SET: usize = 2;

fn adjacent_offset(set: usize) -> u64 {
    ((4 + set * 34) * PAGE) as u64
}

fn distant_offset(set: usize) -> u64 {
    ((600 + set * 3) * PAGE) as u64
}

/// The number of the write that the pages hold. Panics unless all pages are of the same write.
fn set_value(bytes: &[u8], what: &str) -> u64 {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let first = word(0);
    let torn = (0..bytes.len()).step_by(8).find(|&at| word(at) != first);
    if let Some(at) = torn {
        panic!(
            "{what}: {first:x} in the first page, {:x} in {}",
            word(at),
            at / PAGE
        );
    }
    first
}

/// The value of a result. Ends this child without a fault if the mount is gone.
fn unwrap_or_exit<T, E: std::fmt::Display>(result: Result<T, E>, dir: &Path) -> T {
    result.unwrap_or_else(|cause| {
        if dir.join(UNMOUNTED_MARKER).exists() {
            std::process::exit(0);
        }
        panic!("{cause}");
    })
}

fn write_set(file: &File, set: usize, value: u64) -> Result<(), Error> {
    let bytes = value.to_le_bytes().repeat(ADJACENT_PAGES * PAGE / 8);
    let place = adjacent_offset(set);
    let mut parts: Vec<Part<'_>> = match value % 64 {
        // Parts of pages, which the mount writes.
        7 => vec![
            Part::new(place, &bytes[..104]),
            Part::new(place + 104, &bytes[104..]),
        ],
        at if at % 2 == 0 => vec![Part::new(place, &bytes)],
        _ => {
            let pages = bytes.chunks(PAGE).enumerate();
            pages
                .map(|(at, page)| Part::new(place + (at * PAGE) as u64, page))
                .collect()
        }
    };
    parts.push(Part::new(distant_offset(set), &bytes[..PAGE]));
    file.write_atomic(&parts)
}

/// The value of a set without a running writer, read through the kernel.
fn read_set(file: &fs::File, set: usize) -> u64 {
    let mut bytes = vec![0; (ADJACENT_PAGES + 1) * PAGE];
    let (one, other) = bytes.split_at_mut(ADJACENT_PAGES * PAGE);
    file.read_exact_at(one, adjacent_offset(set)).unwrap();
    file.read_exact_at(other, distant_offset(set)).unwrap();
    set_value(&bytes, "a set without a writer")
}

/// One of two writers: each writes a set of its own, and both write the shared set.
fn write_sets(dir: &Path, own: usize) {
    let path = dir.join("mnt/file");
    let acknowledged = OpenOptions::new()
        .write(true)
        .open(dir.join("acknowledged"))
        .unwrap();
    let kernel = open_as_library(OpenOptions::new().read(true)).open(&path);
    let kernel = kernel.unwrap();
    let file = File::open(&path).unwrap();
    let mut value = read_set(&kernel, own);
    loop {
        value += 1;
        unwrap_or_exit(write_set(&file, own, value), dir);
        acknowledged
            .write_all_at(&value.to_le_bytes(), own as u64 * 8)
            .unwrap();
        if value.is_multiple_of(3) {
            unwrap_or_exit(write_set(&file, SHARED_SET, value << 8 | own as u64), dir);
        }
    }
}

fn watch_sets(what: &str, mut read: impl FnMut(usize, &mut [u8]) -> bool) {
    let mut bytes = vec![0; ADJACENT_PAGES * PAGE];
    let mut seen = [0; SETS];
    for set in (0..SETS).cycle() {
        if read(set, &mut bytes) {
            let value = set_value(&bytes, what);
            assert!(
                set == SHARED_SET || value >= seen[set],
                "{what}: {value} after {}",
                seen[set]
            );
            seen[set] = value;
        }
    }
}

fn watch_native(dir: &Path) {
    let file = File::open(dir.join("mnt/file")).unwrap();
    watch_sets("read", |set, into| {
        unwrap_or_exit(file.read_exact_at(into, adjacent_offset(set)), dir);
        true
    });
}

fn watch_by_guard(dir: &Path) {
    let file = File::open(dir.join("mnt/file")).unwrap();
    let (mut valid, mut over) = (0u64, 0u64);
    watch_sets("shown", |set, into| {
        let guard = unwrap_or_exit(file.guard(adjacent_offset(set), into.len()), dir);
        // The guard is read late: its frames may hold other data by then.
        let mut page = [0; PAGE];
        for number in 0..(valid + over) % 3 * 200 {
            unwrap_or_exit(
                file.read_exact_at(&mut page, number % 600 * PAGE as u64),
                dir,
            );
        }
        into.copy_from_slice(&bytes_of(&guard));
        let is_valid = guard.finish().is_ok();
        valid += u64::from(is_valid);
        over += u64::from(!is_valid);
        if (valid + over).is_power_of_two() {
            eprintln!("guards: {valid} valid, {over} over");
        }
        is_valid
    });
}

fn watch_by_kernel(dir: &Path) {
    let file = open_as_library(OpenOptions::new().read(true)).open(dir.join("mnt/file"));
    let file = file.unwrap();
    watch_sets("read by the kernel", |set, into| {
        unwrap_or_exit(file.read_exact_at(into, adjacent_offset(set)), dir);
        true
    });
}

/// A file with sets, and its writers and readers.
struct KillCampaign {
    dir: PathBuf,
    acknowledged: fs::File,
    writers: Vec<ChildGuard>,
    readers: Vec<ChildGuard>,
}

impl KillCampaign {
    fn start(cluster: &Cluster, mount: &TestMount) -> KillCampaign {
        let dir = cluster.dir().to_owned();
        fs::write(mount.path("file"), vec![0; 700 * PAGE]).unwrap();
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true);
        let acknowledged = options.open(dir.join("acknowledged")).unwrap();
        acknowledged.write_all_at(&[0; SETS * 8], 0).unwrap();
        let mut campaign = KillCampaign {
            dir,
            acknowledged,
            writers: vec![],
            readers: vec![],
        };
        campaign.start_children();
        campaign
    }

    fn start_children(&mut self) {
        self.writers = ["0", "1"]
            .map(|own| ChildGuard::start(own, &self.dir))
            .into();
        let ways = ["native", "guard", "kernel"];
        self.readers = ways.map(|way| ChildGuard::start(way, &self.dir)).into();
    }

    fn acknowledged(&self, own: usize) -> u64 {
        let mut word = [0; 8];
        self.acknowledged
            .read_exact_at(&mut word, own as u64 * 8)
            .unwrap();
        u64::from_le_bytes(word)
    }

    fn await_more(&self, own: usize, more: u64) {
        let before = self.acknowledged(own);
        until("more is written", || {
            self.acknowledged(own) >= before + more
        });
    }

    fn check(&mut self) {
        let all = self.readers.iter_mut().chain(&mut self.writers);
        assert!(
            all.into_iter().all(ChildGuard::is_running),
            "a child found a fault"
        );
    }

    /// Asserts that a set without a running writer is whole, and that no acknowledged write is
    /// lost.
    fn check_set(&self, mount: &TestMount, own: usize) {
        let file = fs::File::open(mount.path("file")).unwrap();
        let value = read_set(&file, own);
        let least = self.acknowledged(own);
        assert!(
            value >= least,
            "set {own} has {value}, and {least} was acknowledged"
        );
    }

    fn stop_children(&mut self) {
        self.readers.clear();
        self.writers.clear();
    }
}

#[test]
fn atomic_writes_are_whole_if_writers_are_killed() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let rounds = std::env::var(ROUNDS_ENV).ok();
    let rounds: usize = rounds.map_or(25, |rounds| rounds.parse().unwrap());
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let mut campaign = KillCampaign::start(&cluster, &mount);
    let mut random = Random::new(7);
    for round in 0..rounds {
        let victim = random.below(2) as usize;
        campaign.await_more(victim, 50 + random.below(300));
        if round % 4 == 3 {
            campaign.writers[victim].signal(rustix::process::Signal::STOP);
            campaign.await_more(1 - victim, 20);
            campaign.writers[victim].signal(rustix::process::Signal::CONT);
        }
        campaign.writers[victim].kill();
        campaign.check_set(&mount, victim);
        campaign.writers[victim] = ChildGuard::start(&victim.to_string(), &campaign.dir);
        campaign.check();
    }
    campaign.stop_children();
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    (0..2).for_each(|own| campaign.check_set(&mount, own));
    read_set(&fs::File::open(mount.path("file")).unwrap(), SHARED_SET);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn atomic_writes_are_whole_if_everything_is_killed() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mut mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let mut campaign = KillCampaign::start(&cluster, &mount);
    for round in 0..4 {
        if round > 0 {
            fs::remove_file(cluster.dir().join(UNMOUNTED_MARKER)).unwrap();
            campaign.start_children();
        }
        campaign.await_more(0, 200);
        campaign.await_more(1, 200);
        campaign.check();
        fs::write(cluster.dir().join(UNMOUNTED_MARKER), "").unwrap();
        // In either order: the writers may outlive the mount, and one brick may outlive the other.
        if round % 2 == 0 {
            mount.daemon.take().unwrap().kill();
        }
        let first = round / 2;
        cluster.kill_brick(first);
        if round % 2 == 1 {
            mount.daemon.take().unwrap().kill();
        }
        cluster.kill_brick(1 - first);
        campaign.stop_children();
        (0..2).for_each(|brick| cluster.restart_brick(brick));
        mount.remount(&cluster, "files", "map");
        (0..2).for_each(|own| campaign.check_set(&mount, own));
        read_set(&fs::File::open(mount.path("file")).unwrap(), SHARED_SET);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// The frames of a guard are reused after enough writes, and then the guard is invalid.
#[test]
fn guard_becomes_invalid_when_frames_are_reused() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    fs::write(mount.path("file"), vec![7; 100 * PAGE]).unwrap();
    let file = File::open(mount.path("file")).unwrap();
    let mut guards = Vec::new();
    until("it is shown in the pool", || {
        guards = [0, 50]
            .map(|page| file.guard(page * PAGE as u64, 8 * PAGE).unwrap())
            .into();
        guards.iter().all(|guard| !guard.is_copy())
    });
    let (kept, void) = (guards.remove(1), guards.remove(0));
    let is_as_it_was = |guard: &pagemesh::Guard<'_>| bytes_of(guard) == [7; 8 * PAGE];
    let write = |page: usize| file.write_all_at(&[9; PAGE], (page * PAGE) as u64).unwrap();
    write(20);
    assert!(kept.is_valid() && void.is_valid());
    (0..8).for_each(write);
    assert!(kept.is_valid() && !void.is_valid());
    // The guard does not pin the frames: the loop overwrites all of the pool, again and again.
    until("its frames hold something else", || {
        (0..2000).for_each(|number| write(20 + number % 20));
        !is_as_it_was(&void)
    });
    let ended = void.finish();
    assert!(matches!(ended, Err(Error::Changed)), "{ended:?}");
    // The other guard shows the same bytes, but after so many changes it is not valid any more.
    assert!(is_as_it_was(&kept) && !kept.is_valid());
    drop((kept, guards));
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A guard does not hold its pool. When its brick dies, the guard is invalid and shows zeroes, and
/// the next brick can open the pool.
#[test]
fn guard_becomes_invalid_when_brick_dies() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    fs::write(mount.path("file"), vec![7; 1 << 20]).unwrap();
    let file = File::open(mount.path("file")).unwrap();
    let mut guards = Vec::new();
    until("it is shown in the pool", || {
        guards = vec![file.guard(0, 40 * PAGE).unwrap()];
        !guards[0].is_copy()
    });
    assert!(guards[0].is_valid() && bytes_of(&guards[0]).iter().all(|&byte| byte == 7));
    (0..2).for_each(|brick| cluster.kill_brick(brick));
    until("it is over", || !guards[0].is_valid());
    until("it shows nothing", || {
        bytes_of(&guards[0]).iter().all(|&byte| byte == 0)
    });
    (0..2).for_each(|brick| cluster.restart_brick(brick));
    until("direct access is allowed again", || {
        let guard = file.guard(0, PAGE).unwrap();
        !guard.is_copy() && bytes_of(&guard) == [7; PAGE] && guard.finish().is_ok()
    });
    let ended = guards.remove(0).finish();
    assert!(matches!(ended, Err(Error::Changed)), "{ended:?}");
    drop(guards);
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Compiles a program of `crates/native` against the library in the directory of this test.
fn compile_c(source: &str, into: &Path) -> (PathBuf, PathBuf) {
    let own = std::env::current_exe().unwrap();
    let libraries = own.parent().unwrap().to_owned();
    let native = Path::new(env!("CARGO_MANIFEST_DIR")).join("../native");
    let compiled = into.join(Path::new(source).file_stem().unwrap());
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let include = text(native.join("include"));
    let (source, library) = (
        text(native.join(source)),
        text(libraries.join("libpagemesh.so")),
    );
    let output = text(compiled.clone());
    let warnings = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"];
    let rest = [
        "-I",
        &include,
        &source,
        "-o",
        &output,
        &library,
        "-lpthread",
    ];
    program::ok("cc", &[&warnings[..], &rest[..]].concat());
    (compiled, libraries)
}

/// A process of another user gets no direct access, so an atomic write fails.
fn refuse_others(mount: &TestMount, dir: &Path) {
    let (program, libraries) = compile_c("examples/ledger.c", dir);
    // Another user can enter neither directory.
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let all = |mode| fs::Permissions::from_mode(mode);
    fs::set_permissions(place.path(), all(0o755)).unwrap();
    for dir in [dir, &mount.dir] {
        fs::set_permissions(dir, all(0o755)).unwrap();
    }
    fs::set_permissions(mount.path("ledger"), all(0o666)).unwrap();
    let library = place.path().join("libpagemesh.so");
    fs::copy(libraries.join("libpagemesh.so"), library).unwrap();
    let mut command = program::limited("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.arg(program).arg(mount.path("ledger")).arg("1");
    let output = command.env("LD_LIBRARY_PATH", place.path()).output();
    let told = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(told.contains("move: this file has no atomic"), "{told}");
}

#[test]
fn c_programs_use_native_library() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let run = |source: &str, args: &[&str]| {
        let (compiled, libraries) = compile_c(source, cluster.dir());
        let mut command = program::limited(compiled.to_str().unwrap());
        let output = command
            .args(args)
            .env("LD_LIBRARY_PATH", libraries)
            .output();
        program::succeeded(source, output.unwrap())
    };
    let file = |name: &str| mount.path(name).to_str().unwrap().to_owned();
    run("tests/calls.c", &[&file("calls"), "mount"]);
    let ledger = |amount| run("examples/ledger.c", &[&file("ledger"), amount]);
    assert_eq!(ledger("40"), "960 and 40\n");
    assert_eq!(ledger("-15"), "975 and 25\n");
    refuse_others(&mount, cluster.dir());
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A pool stays locked as long as any process has it open with the brick's open file description.
#[test]
fn forked_child_has_no_pool_of_native_program() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let (program, libraries) = compile_c("tests/forks.c", cluster.dir());
    for round in 0..4 {
        let file = mount.path(&format!("file-{round}"));
        fs::write(&file, vec![0; 64 * PAGE]).unwrap();
        let mut command = program::limited(program.to_str().unwrap());
        command.arg(file).arg(cluster.pool(0).parent().unwrap());
        let ended = command.env("LD_LIBRARY_PATH", &libraries).output();
        program::succeeded("a program that forks", ended.unwrap());
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
