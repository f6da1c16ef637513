//! Direct clients next to programs with calls that the library does not intercept, on files that
//! the library opened. One of the programs has no dynamic loader, one makes its own system calls,
//! and one uses io_uring. All write and read one file and share one model (`beside.c`). No program
//! reaches files by NBD: that serves other volumes.

use super::support::mounted::{self, TestMount};
use super::support::skip::skip;
use super::support::{Cluster, PAGEMESH, program, until};
use super::{ChildGuard, Random, rounds};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The same constants as in `beside.c`.
pub const PAGES: u64 = 60;
const STATS_OFFSET: u64 = PAGES * 8;
const STATS_BYTES: u64 = 24;
const MODEL_BYTES: u64 = STATS_OFFSET + 8 * STATS_BYTES;
const PAGE: usize = 4096;

/// How each writer reads and writes, by its number.
const WRITER_KINDS: [WriterKind; 5] = [
    WriterKind::new("libc", false),
    WriterKind::new("libc", false),
    WriterKind::new("libc", true),
    WriterKind::new("raw", false),
    WriterKind::new("io_uring", false),
];
/// The number of writers with intercepted calls.
const DIRECT_WRITERS: u64 = 2;

struct WriterKind {
    name: &'static str,
    is_static: bool,
}

impl WriterKind {
    const fn new(name: &'static str, is_static: bool) -> WriterKind {
        WriterKind { name, is_static }
    }
}

/// The model that all writers share in memory.
pub struct PageModel(File, PathBuf);

/// The counters of one writer.
#[derive(Clone, Copy, Debug)]
pub struct WriterStats {
    pub writes: u64,
    /// The longest time between two acknowledgements.
    pub longest_ns: u64,
}

impl PageModel {
    pub fn new(cluster: &Cluster, name: &str) -> PageModel {
        let path = cluster.dir().join(name);
        let file = File::create_new(&path).unwrap();
        file.set_len(MODEL_BYTES).unwrap();
        drop(file);
        let mut options = File::options();
        PageModel(options.read(true).write(true).open(&path).unwrap(), path)
    }

    fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, at).unwrap();
        u64::from_le_bytes(word)
    }

    pub fn acknowledged(&self, page: u64) -> u64 {
        self.word(page * 8)
    }

    pub fn stats(&self, own: u64) -> WriterStats {
        let at = STATS_OFFSET + own * STATS_BYTES;
        WriterStats {
            writes: self.word(at),
            longest_ns: self.word(at + 8),
        }
    }

    /// Resets the longest wait of a writer.
    pub fn reset_longest(&self, own: u64) {
        let at = STATS_OFFSET + own * STATS_BYTES + 8;
        self.0.write_all_at(&[0; 8], at).unwrap();
    }

    /// Asserts that each page holds one write, and none older than the last acknowledged one.
    pub fn check(&self, file: &File) {
        let mut bytes = vec![0; PAGE];
        for page in 0..PAGES {
            file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
            let (seq, told) = (super::seq_of(page, &bytes), self.acknowledged(page));
            assert!(
                (told..=told + 1).contains(&seq),
                "page {page}: {seq}, {told} was acknowledged"
            );
        }
    }
}

/// The programs: the normal build, and one without a dynamic loader.
pub struct WriterPrograms {
    dynamic: PathBuf,
    static_program: PathBuf,
}

impl WriterPrograms {
    pub fn build(cluster: &Cluster) -> WriterPrograms {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/direct/beside.c");
        let source = source.to_str().unwrap();
        let build = |name: &str, options: &[&str]| {
            let path = cluster.dir().join(name);
            let mut args = vec!["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"];
            args.extend(options);
            args.extend(["-o", path.to_str().unwrap(), source]);
            program::ok("cc", &args);
            path
        };
        WriterPrograms {
            dynamic: build("beside", &[]),
            static_program: build("beside-alone", &["-static"]),
        }
    }

    /// Starts a writer under `pagemesh exec`, which intercepts only calls through the C library.
    /// `numbers` are the writer's number, its first page, and the distance between its pages.
    fn start(
        &self,
        way: &WriterKind,
        file: &Path,
        model: &PageModel,
        numbers: [u64; 3],
    ) -> ChildGuard {
        let mut command = self.command(way, file, model, numbers);
        ChildGuard(command.spawn().unwrap())
    }

    fn command(
        &self,
        way: &WriterKind,
        file: &Path,
        model: &PageModel,
        numbers: [u64; 3],
    ) -> Command {
        let program = match way.is_static {
            true => &self.static_program,
            false => &self.dynamic,
        };
        let mut command = Command::new(PAGEMESH);
        command.args(mounted::exec_args()).arg(program);
        command.arg(way.name).arg(file).arg(&model.1);
        command.args(numbers.map(|number| number.to_string()));
        command.stdin(Stdio::null());
        // The kernel drops SIGTSTP to an orphaned process group: all parents are outside of its
        // session. So the child stays in the session of the tests.
        command.process_group(0);
        command
    }

    /// Starts a direct client that pauses between two writes.
    pub fn start_paced(
        &self,
        file: &Path,
        model: &PageModel,
        numbers: [u64; 3],
        rest: Duration,
    ) -> ChildGuard {
        let mut command = self.command(&WRITER_KINDS[0], file, model, numbers);
        command.env("PAUSE_US", rest.as_micros().to_string());
        ChildGuard(command.spawn().unwrap())
    }

    /// Starts a direct client.
    pub fn start_direct(&self, file: &Path, model: &PageModel, numbers: [u64; 3]) -> ChildGuard {
        self.start(&WRITER_KINDS[0], file, model, numbers)
    }
}

/// Makes a file for all writers.
pub fn prepare(mount: &TestMount, name: &str) -> File {
    let file = super::open_file(mount, name);
    file.write_all_at(&vec![0; PAGES as usize * PAGE], 0)
        .unwrap();
    file
}

/// The number of write system calls of a process; see proc(5).
fn write_calls(child: &ChildGuard) -> u64 {
    let told = std::fs::read_to_string(format!("/proc/{}/io", child.0.id())).unwrap();
    let line = told.lines().find_map(|line| line.strip_prefix("syscw: "));
    line.unwrap().parse().unwrap()
}

/// Whether io_uring works: a sysctl of this kernel, or a seccomp filter, may forbid it.
fn has_io_uring() -> bool {
    let told = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let is_there = told.is_ok_and(|told| told.trim() != "2");
    if !is_there {
        skip("needs a kernel that lets programs use io_uring");
    }
    is_there
}

#[test]
fn direct_clients_work_beside_uncaught_programs() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    if !has_io_uring() {
        return;
    }
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let (programs, model) = (
        WriterPrograms::build(&cluster),
        PageModel::new(&cluster, "model"),
    );
    let file = prepare(&mount, "file");
    let path = mount.path("file");
    let of = WRITER_KINDS.len() as u64;
    let start =
        |own: u64| programs.start(&WRITER_KINDS[own as usize], &path, &model, [own, own, of]);
    let mut writers: Vec<ChildGuard> = (0..of).map(start).collect();
    let mut random = Random::new(13);
    for round in 0..rounds(15) {
        let before: Vec<WriterStats> = (0..of).map(|own| model.stats(own)).collect();
        let more = 20 + random.below(100);
        until("all have written and read more", || {
            for (way, writer) in WRITER_KINDS.iter().zip(&mut writers) {
                let ended = writer.0.try_wait().unwrap();
                assert!(ended.is_none(), "{}: it found a fault", way.name);
            }
            (0..of).all(|own| model.stats(own).writes >= before[own as usize].writes + more)
        });
        let victim = u64::from(round) % of;
        writers[victim as usize].kill();
        writers[victim as usize] = start(victim);
    }
    // Direct clients stay on the direct path while others go through the kernel.
    for own in 0..DIRECT_WRITERS {
        let writer = &writers[own as usize];
        until("a direct client writes without the kernel", || {
            let (writes, before) = (model.stats(own).writes, write_calls(writer));
            until("it writes more", || model.stats(own).writes > writes + 500);
            let all = model.stats(own).writes - writes;
            write_calls(writer) - before < all * 9 / 10
        });
    }
    // The other writers go through the kernel.
    for own in [2, 3] {
        let writer = &writers[own as usize];
        let (writes, before) = (model.stats(own).writes, write_calls(writer));
        until("it writes more", || model.stats(own).writes > writes + 100);
        assert!(
            write_calls(writer) >= before + 100,
            "{}",
            WRITER_KINDS[own as usize].name
        );
    }
    writers.iter_mut().for_each(ChildGuard::kill);
    model.check(&file);
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}
