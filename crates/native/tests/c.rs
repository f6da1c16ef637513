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

/// Where the libraries are: beside this test.
fn libraries() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().unwrap().to_owned()
}

fn here(name: &str) -> PathBuf {
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

fn compiled(source: &str, into: &Path) -> PathBuf {
    let program = into.join("program");
    let mut compiler = Command::new("cc");
    compiler.args(WARNINGS).arg("-I").arg(here("include"));
    compiler.arg(here(source)).arg("-o").arg(&program);
    compiler
        .arg(libraries().join("libpagemesh.so"))
        .arg("-lpthread");
    run(&mut compiler);
    program
}

fn linked(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", libraries());
    command
}

#[test]
fn a_c_program_gets_what_the_header_says() {
    let dir = tempfile::tempdir().unwrap();
    let program = compiled("tests/calls.c", dir.path());
    run(linked(&program).arg(dir.path().join("file")).arg("plain"));
}

#[test]
fn the_example_tells_where_it_cannot_be_whole() {
    let dir = tempfile::tempdir().unwrap();
    let program = compiled("examples/ledger.c", dir.path());
    let output = linked(&program)
        .arg(dir.path().join("file"))
        .arg("40")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("move: nothing keeps several pages"), "{told}");
}

#[test]
fn the_library_exports_nothing_else() {
    let library = libraries().join("libpagemesh.so");
    let told = run(Command::new("nm")
        .args(["-D", "--defined-only", "--format=just-symbols"])
        .arg(library));
    let mut names: Vec<&str> = told.lines().filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    assert_eq!(names, declared(include_str!("../include/pagemesh.h")));
}

/// The functions of the header.
fn declared(header: &'static str) -> Vec<&'static str> {
    let lines = header.lines().filter(|line| line.ends_with(");"));
    let name = |line: &'static str| line.split_once('(')?.0.rsplit([' ', '*']).next();
    let mut names: Vec<&str> = lines.filter_map(name).collect();
    names.sort_unstable();
    names
}
