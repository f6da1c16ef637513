//! The exit codes of `pagemesh exec`.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use std::fs;
use support::PAGEMESH;
use support::program::limited;

#[track_caller]
fn check(words: &[&str], code: i32, part: &str) {
    // Any file will do for a library of what does not run.
    let head = ["exec", "--library", PAGEMESH, "--"];
    let output = limited(PAGEMESH).args(head).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
    assert!(said.contains(part), "no '{part}' in: {said}");
}

#[test]
fn exec_of_missing_program_exits_as_shells_do() {
    check(
        &["no-such-program-at-all"],
        127,
        "cannot run no-such-program-at-all",
    );
    check(&["/nowhere/program"], 127, "/nowhere/program");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "no program").unwrap();
    let path = file.to_str().unwrap();
    check(&[path], 126, "Permission denied");
    check(&[dir.path().to_str().unwrap()], 126, "cannot run");
}
