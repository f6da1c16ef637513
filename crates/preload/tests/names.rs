//! Every function name that this library exports in front of the C library's.

use crate::support;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use support::{Counts, PACKAGE_FLAGS, TestDirs, check, check_built, library};

/// Operations of `descriptors.c` that the engine does.
const OPENS: u64 = 41;
const READS: u64 = 29;
const WRITES: u64 = 42;
/// One for each name of `lseek`.
const SIZES: u64 = 2;

/// All programs in `tests/programs`.
const PROGRAMS: [&str; 9] = [
    "cancel",
    "data",
    "descriptors",
    "names",
    "numbers",
    "preempt",
    "processes",
    "signals",
    "threads",
];

#[test]
fn every_name_behaves_as_in_the_kernel() {
    let counts = check("names", &[]);
    // If a name is not exported, its file is opened, read or written without the engine.
    let (opens, reads, writes) = (counts.opens, counts.reads, counts.writes);
    assert_eq!(
        (opens, reads, writes, counts.sizes),
        (OPENS, READS, WRITES, SIZES),
        "{counts:?}"
    );
}

#[test]
fn declined_calls_are_done_under_every_name() {
    for every in ["1", "2", "3"] {
        check("names", &[("DECLINE", every)]);
    }
}

#[test]
fn programs_with_package_flags_behave_the_same() {
    let reached = |counts: &Counts| (counts.opens, counts.reads, counts.writes, counts.sizes);
    for name in ["data", "names"] {
        let plain = check(name, &[]);
        let counts = check_built(name, PACKAGE_FLAGS, &[]);
        assert_eq!(reached(&counts), reached(&plain), "{name}: {counts:?}");
    }
    for name in ["descriptors", "numbers", "processes", "threads"] {
        let counts = check_built(name, PACKAGE_FLAGS, &[]);
        assert!(counts.writes > 20, "{name}: {counts:?}");
    }
    for (name, dwell_us) in [("signals", "200"), ("cancel", "20")] {
        let counts = check_built(name, PACKAGE_FLAGS, &[("DWELL_US", dwell_us)]);
        assert!(counts.writes > 200, "{name}: {counts:?}");
    }
}

/// Dynamic symbols of a program or library, without their versions.
fn symbols(file: &Path, which: &str) -> BTreeSet<String> {
    let listed = Command::new("nm").args(["-D", which]).arg(file).output();
    let listed = listed.expect("binutils come with a C compiler");
    assert!(listed.status.success(), "{listed:?}");
    let text = String::from_utf8(listed.stdout).expect("names are ASCII");
    let last = |line: &str| {
        let name = line.split_ascii_whitespace().last()?;
        name.split('@').next().map(str::to_owned)
    };
    text.lines().filter_map(last).collect()
}

#[test]
fn every_name_is_called_by_a_program() {
    let listed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let listed = listed.read_dir().expect("a directory");
    let listed = listed.map(|entry| entry.expect("an entry").path());
    let sources = listed.filter(|path| path.extension().is_some_and(|kind| kind == "c"));
    let stems = sources.map(|path| path.file_stem().map(|name| name.to_owned()));
    let mut found: BTreeSet<_> = stems.flatten().collect();
    // Another test generates its header.
    found.remove(OsStr::new("hijack"));
    assert_eq!(found, PROGRAMS.map(Into::into).into(), "all are built here");
    let stage = TestDirs::new();
    let builds = PROGRAMS.iter().flat_map(|name| {
        [&[], PACKAGE_FLAGS].map(|options| symbols(&stage.build(name, options), "--undefined-only"))
    });
    let called: BTreeSet<String> = builds.flatten().collect();
    let names = symbols(&library(), "--defined-only");
    assert!(names.len() > 60 && names.contains("pread64"), "{names:?}");
    // The functions of liburing need that library: crates/app/tests/direct/doors/rings.c.
    let is_of_liburing = |name: &&String| name.starts_with("io_uring_");
    let untested: Vec<_> = names
        .difference(&called)
        .filter(|name| !is_of_liburing(name))
        .collect();
    assert!(untested.is_empty(), "no program calls {untested:?}");
}
