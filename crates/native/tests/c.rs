//! C programs against the header and the library, on a file that is on no mount. On a mount
//! they run in `crates/app/tests/native.rs`.

#![allow(clippy::unwrap_used)] // Tests.

use std::path::{Path, PathBuf};
use std::process::Command;

const WARNINGS: [&str; 6] = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-pedantic",
    "-Werror",
];

/// The directory of the libraries: the directory of this test.
fn library_dir() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().unwrap().to_owned()
}

fn crate_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{told}",
        output.status
    );
    String::from_utf8(output.stdout).unwrap()
}

fn compile(source: &str, into: &Path) -> PathBuf {
    let program = into.join("program");
    let mut compiler = Command::new("cc");
    compiler.args(WARNINGS).arg("-I").arg(crate_path("include"));
    compiler.arg(crate_path(source)).arg("-o").arg(&program);
    compiler
        .arg(library_dir().join("libpagemesh.so"))
        .arg("-lpthread");
    run(&mut compiler);
    program
}

fn command_with_library(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library_dir());
    command
}

#[test]
fn c_program_calls_behave_as_the_header_says() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile("tests/calls.c", dir.path());
    run(command_with_library(&program)
        .arg(dir.path().join("file"))
        .arg("plain"));
}

#[test]
fn example_fails_where_atomic_writes_are_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile("examples/ledger.c", dir.path());
    let output = command_with_library(&program)
        .arg(dir.path().join("file"))
        .arg("40")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("move: this file has no atomic"), "{told}");
}

#[test]
fn library_exports_only_the_header_functions() {
    let library = library_dir().join("libpagemesh.so");
    let told = run(Command::new("nm")
        .args(["-D", "--defined-only", "--format=just-symbols"])
        .arg(library));
    let mut names: Vec<&str> = told.lines().filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        declared_functions(include_str!("../include/pagemesh.h"))
    );
}

/// The functions of the header.
fn declared_functions(header: &'static str) -> Vec<&'static str> {
    let lines = header.lines().filter(|line| line.ends_with(");"));
    let name = |line: &'static str| line.split_once('(')?.0.rsplit([' ', '*']).next();
    let mut names: Vec<&str> = lines.filter_map(name).collect();
    names.sort_unstable();
    names
}
