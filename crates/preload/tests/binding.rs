//! Imports of the library never bind to the program's functions.

use crate::support;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::process::Command;
use support::{TestDirs, check, library};

/// Symbols that the start-up code of every program uses.
const STARTUP_SYMBOLS: [&str; 2] = ["__gmon_start__", "__cxa_finalize"];

/// The kinds of the library's relocations, and their symbols.
fn relocations() -> Vec<(String, String)> {
    let listed = Command::new("readelf").arg("-rW").arg(library()).output();
    let listed = listed.expect("binutils come with a C compiler");
    assert!(listed.status.success(), "{listed:?}");
    let text = String::from_utf8(listed.stdout).expect("names are ASCII");
    let one = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let name = words.get(4)?.split('@').next()?;
        Some((words.get(2)?.to_string(), name.to_owned()))
    };
    text.lines().filter_map(one).collect()
}

fn exported() -> BTreeSet<String> {
    let listed = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library())
        .output();
    let listed = listed.expect("binutils come with a C compiler");
    let text = String::from_utf8(listed.stdout).expect("names are ASCII");
    let names = text
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().last());
    names.map(str::to_owned).collect()
}

#[test]
fn library_calls_no_exported_name_through_the_plt() {
    let exported = exported();
    assert!(exported.contains("__sigaction"), "{exported:?}");
    let all = relocations();
    assert!(
        all.iter().any(|(kind, _)| kind == "R_X86_64_JUMP_SLOT"),
        "{all:?}"
    );
    let by_plt = all.iter().filter(|(kind, _)| kind == "R_X86_64_JUMP_SLOT");
    let own: Vec<_> = by_plt.filter(|(_, name)| exported.contains(name)).collect();
    assert!(own.is_empty(), "{own:?}");
}

#[test]
fn program_defined_sigaction_and_close_may_call_library() {
    let counts = check("preempt", &[]);
    assert!(counts.writes == 2 && counts.reads == 1, "{counts:?}");
}

#[test]
fn library_calls_no_function_that_the_program_defines() {
    let stage = TestDirs::new();
    let is_function =
        |kind: &str| ["R_X86_64_JUMP_SLOT", "R_X86_64_GLOB_DAT", "R_X86_64_64"].contains(&kind);
    let imported = relocations()
        .into_iter()
        .filter(|(kind, _)| is_function(kind));
    let names: BTreeSet<String> = imported.map(|(_, name)| name).collect();
    let is_left = |name: &str| {
        name.starts_with("_ITM") || name == "_r_debug" || STARTUP_SYMBOLS.contains(&name)
    };
    let names: Vec<_> = names.iter().filter(|name| !is_left(name)).collect();
    for name in ["malloc", "close", "open64", "pthread_create", "memcpy"] {
        assert!(names.iter().any(|it| *it == name), "{names:?}");
    }
    let mut header = String::new();
    for name in names {
        writeln!(header, "HIJACK({name})").expect("a string takes it");
    }
    fs::write(stage.path("hijack.h"), header).expect("a file");
    let here = format!("-I{}", stage.path("").display());
    let options = [
        here.as_str(),
        "-rdynamic",
        "-fno-builtin",
        "-fcf-protection=none",
    ];
    let program = stage.build("hijack", &options);
    let counts = stage.compare_with_kernel(|| Command::new(&program), &[]);
    assert!(counts.writes >= 6 && counts.reads >= 9, "{counts:?}");
}
