//! `libpagemesh` on a mount, beside programs that go through the kernel. For root with
//! /dev/fuse.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use pagemesh::{Error, File, Part};
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use support::mounted::{self, Mounted, as_library};
use support::random::Random;
use support::{Cluster, Pools, program, until};

const PAGE: usize = 4096;
/// What a child of these tests does, and where.
const JOB: &str = "PAGEMESH_TEST_NATIVE";
/// Kills of a campaign, by `make natives ROUNDS=1000`.
const ROUNDS: &str = "PAGEMESH_TEST_ROUNDS";
/// Longer than a write takes, and shorter than a copy that stands still is waited for.
const LACKING: Duration = Duration::from_millis(300);

/// FNV-1a (Fowler, Noll, Vo).
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// A child of this test, killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn command(what: &str, dir: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture"]);
        command.env(JOB, format!("{what},{}", dir.display()));
        command
    }

    fn start(what: &str, dir: &Path) -> Running {
        Running(Running::command(what, dir).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn is_well(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // One that stood still inside of an operation may have been ended.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Not a test by itself: what the children run.
#[test]
fn child() {
    let Ok(job) = std::env::var(JOB) else { return };
    let [what, dir] = job.split(',').collect::<Vec<_>>()[..] else {
        panic!("{job}");
    };
    let dir = Path::new(dir);
    eprintln!("{what}: process {}", std::process::id());
    match what {
        "answer" => answer(&dir.join("file")),
        "native" => watch_native(dir),
        "guard" => watch_by_guard(dir),
        "kernel" => watch_by_kernel(dir),
        own => write_sets(dir, own.parse().unwrap()),
    }
}

/// Tells what the kernel reads where it is asked.
fn answer(path: &Path) {
    let file = as_library(OpenOptions::new().read(true)).open(path);
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
struct Other {
    child: Running,
    told: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn new(dir: &Path) -> Other {
        let mut command = Running::command("answer", dir);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let told = BufReader::new(child.stdout.take().unwrap());
        Other {
            child: Running(child),
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

/// What is at a place, by all ways of this process.
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

/// Random changes of every kind, each of which is seen at once.
fn change_and_check(mount: &Mounted, rounds: u64, is_direct: bool) {
    let path = mount.path("file");
    fs::write(&path, vec![0; 3 << 20]).unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(file.is_direct(), is_direct);
    let mut other = Other::new(&mount.dir);
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
            // Bytes of any place and length, and a page far from there.
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
    // Longer and shorter.
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

/// A log that gets longer, and its last page and its first one change as a whole.
fn grow_and_check(mount: &Mounted) {
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
            // Whole, and so maybe the page that has the end.
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

/// The first page is changed before the end is: no read shows it the other way round.
#[test]
fn a_read_shows_one_moment_of_a_file_that_grows() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    const ROUNDS: u64 = 10_000;
    let mount = Mounted::by(&cluster, "files", "map", "auto");
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
            assert!(first >= appended, "{first} beside an end of {appended}");
        }
    });
    drop((file, reader));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// What is persistent and what changed as a whole is so for a copy that follows, too.
#[test]
fn a_copy_follows_what_is_written_natively() {
    let Some((mut cluster, mount)) = mounted::followed() else {
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
    // Waits for the copy.
    file.persist().unwrap();
    drop(file);
    let mount = mounted::promote(&mut cluster, mount);
    let found = fs::read(mount.path("file")).unwrap();
    mounted::check_followed(&found, &model);
    mount.stop(&cluster);
}

/// Who opens a file so waits for such a copy with each write.
#[test]
fn a_write_with_o_dsync_waits_for_a_copy_that_follows() {
    let Some((cluster, mount)) = mounted::followed() else {
        return;
    };
    let path = mount.path("file");
    fs::write(&path, [0; 64 * PAGE]).unwrap();
    let mut options = OpenOptions::new();
    let flags = rustix::fs::OFlags::DSYNC.bits() as i32;
    let opened = options.read(true).write(true).custom_flags(flags);
    let file = File::new(opened.open(&path).unwrap()).unwrap();
    // The first ones go through the kernel.
    (0..50).for_each(|page| file.write_all_at(&[1; PAGE], page * PAGE as u64).unwrap());
    let check = |what: &str, write: &(dyn Fn() -> Result<(), Error> + Sync)| {
        cluster.brick(2).freeze();
        thread::scope(|scope| {
            let (told, ended) = mpsc::channel();
            scope.spawn(move || told.send(write()));
            let early = ended.recv_timeout(LACKING);
            cluster.brick(2).signal("CONT");
            assert!(
                early.is_err(),
                "{what}: {early:?} while the copy stood still"
            );
            ended.recv().unwrap().unwrap();
        });
        mounted::await_followed(&cluster);
    };
    let part = [Part::new(PAGE as u64, &[3; 100])];
    check("written", &|| file.write_all_at(&[2; PAGE], 0));
    check("written together", &|| file.write_atomic(&part));
    drop(file);
    mount.stop(&cluster);
}

/// Also who has only read before: nobody is asked, as the mount stands still.
#[test]
fn who_has_read_a_file_writes_it_past_the_kernel() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let path = mount.path("file");
    fs::write(&path, [7; 16 * PAGE]).unwrap();
    let file = File::open(&path).unwrap();
    let mut page = [0; PAGE];
    for _ in 0..50 {
        file.read_exact_at(&mut page, 0).unwrap();
    }
    let daemon = mount.daemon.as_ref().unwrap();
    daemon.freeze();
    thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let waits = scope.spawn(move || {
            let has_written = is_done.recv_timeout(Duration::from_secs(10)).is_ok();
            daemon.signal("CONT");
            has_written
        });
        // By the thread that has read: each has connections of its own.
        file.write_all_at(&[8; PAGE], 0).unwrap();
        let _ = done.send(());
        assert!(waits.join().unwrap(), "the mount was waited for");
    });
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn what_is_written_natively_is_seen_by_all_at_once() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    change_and_check(&mount, 1000, true);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn where_the_direct_path_is_closed_all_is_the_same() {
    let Some(cluster) = mounted::cluster_in(Pools::Disk, &[256, 256], "200M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "auto", "auto");
    change_and_check(&mount, 100, false);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

// Sets of pages that are always written as a whole.

const SETS: usize = 3;
/// Pages of a set that lie side by side, over the ends of spans.
const NEAR: usize = 8;
/// A file that says that the mount is taken away.
const GONE: &str = "gone";
/// The set that both writers write.
const SHARED: usize = 2;

fn near(set: usize) -> u64 {
    ((4 + set * 34) * PAGE) as u64
}

fn far(set: usize) -> u64 {
    ((600 + set * 3) * PAGE) as u64
}

/// Which write the pages are of: all of the same.
fn value_of(bytes: &[u8], what: &str) -> u64 {
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

/// What a call gave; ends this child where the mount has gone, which is no fault.
fn given<T, E: std::fmt::Display>(result: Result<T, E>, dir: &Path) -> T {
    result.unwrap_or_else(|cause| {
        if dir.join(GONE).exists() {
            std::process::exit(0);
        }
        panic!("{cause}");
    })
}

fn write_set(file: &File, set: usize, value: u64) -> Result<(), Error> {
    let bytes = value.to_le_bytes().repeat(NEAR * PAGE / 8);
    let place = near(set);
    let mut parts: Vec<Part<'_>> = match value % 64 {
        // Not of whole pages: by the mount.
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
    parts.push(Part::new(far(set), &bytes[..PAGE]));
    file.write_atomic(&parts)
}

/// The value of a set that nobody writes now, by the kernel.
fn whole_set(file: &fs::File, set: usize) -> u64 {
    let mut bytes = vec![0; (NEAR + 1) * PAGE];
    let (one, other) = bytes.split_at_mut(NEAR * PAGE);
    file.read_exact_at(one, near(set)).unwrap();
    file.read_exact_at(other, far(set)).unwrap();
    value_of(&bytes, "a set that nobody writes")
}

/// One of two that write a set of their own, and one together.
fn write_sets(dir: &Path, own: usize) {
    let path = dir.join("mnt/file");
    let acknowledged = OpenOptions::new()
        .write(true)
        .open(dir.join("acknowledged"))
        .unwrap();
    let kernel = as_library(OpenOptions::new().read(true)).open(&path);
    let kernel = kernel.unwrap();
    let file = File::open(&path).unwrap();
    let mut value = whole_set(&kernel, own);
    loop {
        value += 1;
        given(write_set(&file, own, value), dir);
        acknowledged
            .write_all_at(&value.to_le_bytes(), own as u64 * 8)
            .unwrap();
        if value.is_multiple_of(3) {
            given(write_set(&file, SHARED, value << 8 | own as u64), dir);
        }
    }
}

fn watch(what: &str, mut read: impl FnMut(usize, &mut [u8]) -> bool) {
    let mut bytes = vec![0; NEAR * PAGE];
    let mut seen = [0; SETS];
    for set in (0..SETS).cycle() {
        if read(set, &mut bytes) {
            let value = value_of(&bytes, what);
            assert!(
                set == SHARED || value >= seen[set],
                "{what}: {value} after {}",
                seen[set]
            );
            seen[set] = value;
        }
    }
}

fn watch_native(dir: &Path) {
    let file = File::open(dir.join("mnt/file")).unwrap();
    watch("read", |set, into| {
        given(file.read_exact_at(into, near(set)), dir);
        true
    });
}

fn watch_by_guard(dir: &Path) {
    let file = File::open(dir.join("mnt/file")).unwrap();
    let (mut valid, mut over) = (0u64, 0u64);
    watch("shown", |set, into| {
        let guard = given(file.guard(near(set), into.len()), dir);
        // Looked at late, its frames may hold something else by now.
        let mut page = [0; PAGE];
        for number in 0..(valid + over) % 3 * 200 {
            given(
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
    let file = as_library(OpenOptions::new().read(true)).open(dir.join("mnt/file"));
    let file = file.unwrap();
    watch("read by the kernel", |set, into| {
        given(file.read_exact_at(into, near(set)), dir);
        true
    });
}

/// A file with sets, and writers and readers of it.
struct Campaign {
    dir: PathBuf,
    acknowledged: fs::File,
    writers: Vec<Running>,
    readers: Vec<Running>,
}

impl Campaign {
    fn start(cluster: &Cluster, mount: &Mounted) -> Campaign {
        let dir = cluster.dir().to_owned();
        fs::write(mount.path("file"), vec![0; 700 * PAGE]).unwrap();
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true);
        let acknowledged = options.open(dir.join("acknowledged")).unwrap();
        acknowledged.write_all_at(&[0; SETS * 8], 0).unwrap();
        let mut campaign = Campaign {
            dir,
            acknowledged,
            writers: vec![],
            readers: vec![],
        };
        campaign.begin();
        campaign
    }

    fn begin(&mut self) {
        self.writers = ["0", "1"].map(|own| Running::start(own, &self.dir)).into();
        let ways = ["native", "guard", "kernel"];
        self.readers = ways.map(|way| Running::start(way, &self.dir)).into();
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
            all.into_iter().all(Running::is_well),
            "somebody found a fault"
        );
    }

    /// What nobody writes any more is whole, and nothing that was acknowledged is lost.
    fn check_set(&self, mount: &Mounted, own: usize) {
        let file = fs::File::open(mount.path("file")).unwrap();
        let value = whole_set(&file, own);
        let least = self.acknowledged(own);
        assert!(
            value >= least,
            "set {own} has {value}, and {least} was acknowledged"
        );
    }

    fn end(&mut self) {
        self.readers.clear();
        self.writers.clear();
    }
}

#[test]
fn atomic_writes_are_whole_though_writers_are_killed() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let rounds = std::env::var(ROUNDS).ok();
    let rounds: usize = rounds.map_or(25, |rounds| rounds.parse().unwrap());
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let mut campaign = Campaign::start(&cluster, &mount);
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
        campaign.writers[victim] = Running::start(&victim.to_string(), &campaign.dir);
        campaign.check();
    }
    campaign.end();
    mount.stop(&cluster);
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    (0..2).for_each(|own| campaign.check_set(&mount, own));
    whole_set(&fs::File::open(mount.path("file")).unwrap(), SHARED);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn atomic_writes_are_whole_though_everything_is_killed() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mut mount = Mounted::by(&cluster, "files", "map", "auto");
    let mut campaign = Campaign::start(&cluster, &mount);
    for round in 0..4 {
        if round > 0 {
            fs::remove_file(cluster.dir().join(GONE)).unwrap();
            campaign.begin();
        }
        campaign.await_more(0, 200);
        campaign.await_more(1, 200);
        campaign.check();
        fs::write(cluster.dir().join(GONE), "").unwrap();
        // In either order: the writers may outlive the mount, and one brick the other.
        if round % 2 == 0 {
            mount.daemon.take().unwrap().kill();
        }
        let first = round / 2;
        cluster.kill_brick(first);
        if round % 2 == 1 {
            mount.daemon.take().unwrap().kill();
        }
        cluster.kill_brick(1 - first);
        campaign.end();
        (0..2).for_each(|brick| cluster.restart_brick(brick));
        mount.come_back(&cluster, "files", "map");
        (0..2).for_each(|own| campaign.check_set(&mount, own));
        whole_set(&fs::File::open(mount.path("file")).unwrap(), SHARED);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// What a guard shows is used again when it is due, and then the guard is over.
#[test]
fn what_a_guard_shows_too_late_is_void() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
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
    // Nobody has kept the frames: all of the pool is written to, again and again.
    until("its frames hold something else", || {
        (0..2000).for_each(|number| write(20 + number % 20));
        !is_as_it_was(&void)
    });
    let ended = void.finish();
    assert!(matches!(ended, Err(Error::Changed)), "{ended:?}");
    // The other is the same, and nobody vouches for that after so many changes.
    assert!(is_as_it_was(&kept) && !kept.is_valid());
    drop((kept, guards));
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A guard keeps no pool: when its brick goes it is over, shows zeroes, and does not keep
/// the next brick from opening the pool.
#[test]
fn a_guard_is_over_when_its_brick_goes() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
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
    until("guests are let in again", || {
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

/// Compiles a program of `crates/native`, against the library beside this test.
fn compiled(source: &str, into: &Path) -> (PathBuf, PathBuf) {
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

/// Whom the mount does not let in it promises nothing.
fn refuse_others(mount: &Mounted, dir: &Path) {
    let (program, libraries) = compiled("examples/ledger.c", dir);
    // Another user sees neither directory.
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
    assert!(told.contains("move: nothing keeps several pages"), "{told}");
}

#[test]
fn c_programs_do_the_same() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let run = |source: &str, args: &[&str]| {
        let (compiled, libraries) = compiled(source, cluster.dir());
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

/// A pool stays locked as long as anybody has it open as its bricks do.
#[test]
fn a_child_of_fork_has_no_pool_of_a_program_with_the_library() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let (program, libraries) = compiled("tests/forks.c", cluster.dir());
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
