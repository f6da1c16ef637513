//! Runs programs with and without the library, in directories of their own.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The counts of the test engine, in the order of `src/probe.rs`.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Counts {
    pub opens: u64,
    pub reads: u64,
    pub writes: u64,
    pub syncs: u64,
    pub ends: u64,
    pub forks: u64,
    pub wrong: u64,
    pub begun: u64,
    pub ended: u64,
    pub sizes: u64,
}

/// A run of a program: its output, its exit status, and the files that it left.
#[derive(Debug, PartialEq)]
pub struct ProgramRun {
    pub output: String,
    pub status: String,
    pub files: BTreeMap<PathBuf, Vec<u8>>,
}

pub struct TestDirs {
    root: TempDir,
}

/// The library that was built for this test, which lies in the same directory. The one above, where
/// `cargo build` puts it, may be older.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let library = test.with_file_name("libpagemesh_preload.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

impl TestDirs {
    pub fn new() -> TestDirs {
        let root = TempDir::new().expect("a temporary directory");
        for name in ["kernel", "direct"] {
            fs::create_dir(root.path().join(name)).expect("a directory");
        }
        TestDirs { root }
    }

    /// A path next to the directories of the runs.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// The program `name`, built from `tests/programs` with these options.
    pub fn build(&self, name: &str, options: &[&str]) -> PathBuf {
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
        let program = self.root.path().join(name);
        let output = Command::new("cc")
            .args([
                "-O2",
                "-g",
                "-Wall",
                "-Wextra",
                "-Wno-nonnull",
                "-Wno-stringop-overflow",
                "-Wno-deprecated-declarations",
            ])
            .args(options)
            .args(["-D_GNU_SOURCE", "-pthread", "-o"])
            .arg(&program)
            .arg(programs.join(format!("{name}.c")))
            .output()
            .expect("there is a C compiler");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{name}: {said}");
        program
    }

    fn run(&self, directory: &str, command: &mut Command) -> ProgramRun {
        let directory = self.root.path().join(directory);
        let Output {
            status,
            stdout,
            stderr,
        } = command
            .current_dir(&directory)
            .output()
            .expect("the program starts");
        let said = [stdout, stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        ProgramRun {
            output: said,
            status: status.to_string(),
            files: files_of(&directory),
        }
    }

    pub fn by_kernel(&self, command: &mut Command) -> ProgramRun {
        self.run("kernel", command)
    }

    /// Runs a command with the library, and these settings of its engine.
    pub fn direct(&self, command: &mut Command, settings: &[(&str, &str)]) -> (ProgramRun, Counts) {
        let counts = self.root.path().join("counts");
        fs::write(&counts, [0u8; 80]).expect("a file for counts");
        command
            .env("LD_PRELOAD", library())
            .env("PAGEMESH_PROBE_DIR", self.root.path().join("direct"))
            .env("PAGEMESH_PROBE_COUNTS", &counts);
        for (name, value) in settings {
            command.env(format!("PAGEMESH_PROBE_{name}"), value);
        }
        let run = self.run("direct", command);
        (run, counts_in(&counts))
    }

    /// Checks that a command has the same effects with and without the library, and succeeds.
    pub fn compare_with_kernel(
        &self,
        mut make: impl FnMut() -> Command,
        settings: &[(&str, &str)],
    ) -> Counts {
        let by_kernel = self.by_kernel(&mut make());
        let (direct, counts) = self.direct(&mut make(), settings);
        assert_eq!(
            by_kernel.output, direct.output,
            "left: by the kernel, right: direct"
        );
        assert_eq!(by_kernel, direct);
        assert_eq!(direct.status, "exit status: 0", "{}", direct.output);
        assert_eq!(counts.wrong, 0, "{counts:?}");
        assert_eq!(counts.begun, counts.ended, "{counts:?}");
        counts
    }
}

/// The usual build flags of packages: for long files, with checked calls.
pub const PACKAGE_FLAGS: &[&str] = &[
    "-D_FILE_OFFSET_BITS=64",
    "-D_FORTIFY_SOURCE=2",
    "-Wno-unused-result",
];

/// Builds a program and runs it with and without the library.
pub fn check(name: &str, settings: &[(&str, &str)]) -> Counts {
    check_built(name, &[], settings)
}

/// As [`check`], for a program that is built with these options.
pub fn check_built(name: &str, options: &[&str], settings: &[(&str, &str)]) -> Counts {
    let stage = TestDirs::new();
    let program = stage.build(name, options);
    stage.compare_with_kernel(|| Command::new(&program), settings)
}

fn files_of(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut left = vec![directory.to_path_buf()];
    while let Some(path) = left.pop() {
        for entry in fs::read_dir(&path).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                left.push(path);
            } else {
                let name = path
                    .strip_prefix(directory)
                    .expect("it lies below")
                    .to_path_buf();
                files.insert(name, fs::read(&path).expect("a file"));
            }
        }
    }
    files
}

fn counts_in(path: &Path) -> Counts {
    let bytes = fs::read(path).expect("a file of counts");
    let word = |at: usize| {
        let bytes = bytes[at * 8..][..8].try_into().expect("eight bytes");
        u64::from_ne_bytes(bytes)
    };
    Counts {
        opens: word(0),
        reads: word(1),
        writes: word(2),
        syncs: word(3),
        ends: word(4),
        forks: word(5),
        wrong: word(6),
        begun: word(7),
        ended: word(8),
        sizes: word(9),
    }
}
