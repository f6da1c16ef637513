//! Guests beside programs whose calls nobody catches, on files that the library opened: one without a
//! dynamic loader, one with system calls of its own, and one with io_uring. All write and read one file, by one model
//! (`beside.c`). No program reaches files by NBD: that serves other volumes.

use super::support::mounted::{self, Mounted};
use super::support::skip::skip;
use super::support::{Cluster, PAGEMESH, program, until};
use super::{Child, Random, rounds};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// As `beside.c` has them.
pub const PAGES: u64 = 60;
const OWN_AT: u64 = PAGES * 8;
const OWN_BYTES: u64 = 24;
const MODEL_BYTES: u64 = OWN_AT + 8 * OWN_BYTES;
const PAGE: usize = 4096;

/// How each writer reads and writes, by its number.
const WAYS: [Way; 5] = [
    Way::new("libc", false),
    Way::new("libc", false),
    Way::new("libc", true),
    Way::new("raw", false),
    Way::new("io_uring", false),
];
/// Those whose calls are caught.
const GUESTS: u64 = 2;

struct Way {
    name: &'static str,
    is_static: bool,
}

impl Way {
    const fn new(name: &'static str, is_static: bool) -> Way {
        Way { name, is_static }
    }
}

/// What all writers have in memory.
pub struct Model(File, PathBuf);

/// What one of them did.
#[derive(Clone, Copy, Debug)]
pub struct Did {
    pub writes: u64,
    /// From one acknowledgement to the next.
    pub longest_ns: u64,
}

impl Model {
    pub fn new(cluster: &Cluster, name: &str) -> Model {
        let path = cluster.dir().join(name);
        let file = File::create_new(&path).unwrap();
        file.set_len(MODEL_BYTES).unwrap();
        drop(file);
        let mut options = File::options();
        Model(options.read(true).write(true).open(&path).unwrap(), path)
    }

    fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, at).unwrap();
        u64::from_le_bytes(word)
    }

    pub fn acknowledged(&self, page: u64) -> u64 {
        self.word(page * 8)
    }

    pub fn did(&self, own: u64) -> Did {
        let at = OWN_AT + own * OWN_BYTES;
        Did {
            writes: self.word(at),
            longest_ns: self.word(at + 8),
        }
    }

    /// Nobody has waited for long from now on.
    pub fn forget_longest(&self, own: u64) {
        let at = OWN_AT + own * OWN_BYTES + 8;
        self.0.write_all_at(&[0; 8], at).unwrap();
    }

    /// Each page is of one write, and of none before the last that was acknowledged.
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

/// The programs: one as it is, one without a loader.
pub struct Programs {
    dynamic: PathBuf,
    alone: PathBuf,
}

impl Programs {
    pub fn build(cluster: &Cluster) -> Programs {
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
        Programs {
            dynamic: build("beside", &[]),
            alone: build("beside-alone", &["-static"]),
        }
    }

    /// Starts a writer under `exec`, where only those by the C library are caught. It has a
    /// number, and the first of its pages, and it is so far from one to the next.
    fn start(&self, way: &Way, file: &Path, model: &Model, numbers: [u64; 3]) -> Child {
        let mut command = self.command(way, file, model, numbers);
        Child(command.spawn().unwrap())
    }

    fn command(&self, way: &Way, file: &Path, model: &Model, numbers: [u64; 3]) -> Command {
        let program = match way.is_static {
            true => &self.alone,
            false => &self.dynamic,
        };
        let mut command = Command::new(PAGEMESH);
        command.args(mounted::exec()).arg(program);
        command.arg(way.name).arg(file).arg(&model.1);
        command.args(numbers.map(|number| number.to_string()));
        command.stdin(Stdio::null());
        // The kernel drops SIGTSTP to a group of processes whose parents are all outside of its
        // session: so it can be that of the tests.
        command.process_group(0);
        command
    }

    /// The same of a guest, which rests between two writes.
    pub fn start_resting(
        &self,
        file: &Path,
        model: &Model,
        numbers: [u64; 3],
        rest: Duration,
    ) -> Child {
        let mut command = self.command(&WAYS[0], file, model, numbers);
        command.env("PAUSE_US", rest.as_micros().to_string());
        Child(command.spawn().unwrap())
    }

    /// The same of a guest.
    pub fn start_guest(&self, file: &Path, model: &Model, numbers: [u64; 3]) -> Child {
        self.start(&WAYS[0], file, model, numbers)
    }
}

/// A file that all will write.
pub fn prepare(mount: &Mounted, name: &str) -> File {
    let file = super::opened(mount, name);
    file.write_all_at(&vec![0; PAGES as usize * PAGE], 0)
        .unwrap();
    file
}

/// Calls that a process has written with, proc(5).
fn calls(child: &Child) -> u64 {
    let told = std::fs::read_to_string(format!("/proc/{}/io", child.0.id())).unwrap();
    let line = told.lines().find_map(|line| line.strip_prefix("syscw: "));
    line.unwrap().parse().unwrap()
}

/// By a sysctl of this kernel, or a seccomp filter.
fn has_io_uring() -> bool {
    let told = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let is_there = told.is_ok_and(|told| told.trim() != "2");
    if !is_there {
        skip("needs a kernel that lets programs use io_uring");
    }
    is_there
}

#[test]
fn guests_work_beside_programs_that_are_not_caught() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    if !has_io_uring() {
        return;
    }
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let (programs, model) = (Programs::build(&cluster), Model::new(&cluster, "model"));
    let file = prepare(&mount, "file");
    let path = mount.path("file");
    let of = WAYS.len() as u64;
    let start = |own: u64| programs.start(&WAYS[own as usize], &path, &model, [own, own, of]);
    let mut writers: Vec<Child> = (0..of).map(start).collect();
    let mut random = Random::new(13);
    for round in 0..rounds(15) {
        let before: Vec<Did> = (0..of).map(|own| model.did(own)).collect();
        let more = 20 + random.below(100);
        until("all have written and read more", || {
            for (way, writer) in WAYS.iter().zip(&mut writers) {
                let ended = writer.0.try_wait().unwrap();
                assert!(ended.is_none(), "{}: it found a fault", way.name);
            }
            (0..of).all(|own| model.did(own).writes >= before[own as usize].writes + more)
        });
        let victim = u64::from(round) % of;
        writers[victim as usize].kill();
        writers[victim as usize] = start(victim);
    }
    // Guests are that while others go through the kernel.
    for own in 0..GUESTS {
        let writer = &writers[own as usize];
        until("a guest writes without the kernel", || {
            let (writes, before) = (model.did(own).writes, calls(writer));
            until("it writes more", || model.did(own).writes > writes + 500);
            let all = model.did(own).writes - writes;
            calls(writer) - before < all * 9 / 10
        });
    }
    // And the others are not.
    for own in [2, 3] {
        let writer = &writers[own as usize];
        let (writes, before) = (model.did(own).writes, calls(writer));
        until("it writes more", || model.did(own).writes > writes + 100);
        assert!(calls(writer) >= before + 100, "{}", WAYS[own as usize].name);
    }
    writers.iter_mut().for_each(Child::kill);
    model.check(&file);
    drop(file);
    mount.stop_once_free(&cluster);
    cluster.check_identical("files");
}
