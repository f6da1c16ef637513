//! `pagemesh exec`: exit codes, and children that cannot have the library.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use support::mounted::library;
use support::program::{self, limited};
use support::{PAGEMESH, skip};

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

/// Says its last word and which libraries it was started with.
const CHILD: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
extern char **environ;
int main(int argc, char **argv)
{
    const char *preloaded = getenv("LD_PRELOAD");
    int count = 0;
    for (char **entry = environ; *entry; entry++)
        count += !strncmp(*entry, "VARIABLE_", 9);
    printf("%s, %s\n", argv[argc - 1], preloaded ? preloaded : "nothing");
    if (count)
        printf("%d variables\n", count);
    return 0;
}
"#;

const WAYS: [&str; 13] = [
    "execve",
    "execv",
    "execvp",
    "execvpe",
    "execveat",
    "fexecve",
    "execl",
    "execlp",
    "execle",
    "posix_spawn",
    "posix_spawnp",
    "vfork",
    "alone",
];

/// Programs in a directory, one of which starts the others.
struct Children(tempfile::TempDir);

impl Children {
    fn new() -> Children {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("child.c"), CHILD).unwrap();
        let children = Children(dir);
        children.build("child", &["cc"]);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exec/children.c");
        let source = source.to_str().unwrap();
        program::ok(
            "cc",
            &["-O2", "-Wall", "-o", &children.at("children"), source],
        );
        children
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn build(&self, name: &str, compiler: &[&str]) {
        let mut words = compiler[1..].to_vec();
        let (to, from) = (self.at(name), self.at("child.c"));
        words.extend(["-o", &to, &from]);
        program::ok(compiler[0], &words);
    }

    /// Starts a program in this way.
    #[track_caller]
    fn check(&self, way: &str, words: &[&str], said: &str) {
        let mut command = limited(PAGEMESH);
        let library = library();
        let own = library.to_str().unwrap();
        command.args(["exec", "--library", own, "--"]);
        command.args([&self.at("children"), way]).args(words);
        let ended = command.output().unwrap();
        let told = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        let times = if way == "vfork" { 3 } else { 1 };
        assert_eq!(told, [said.repeat(times).as_str(), ""], "{way} {words:?}");
        assert_eq!(ended.status.code(), Some(0), "{way} {words:?}");
    }
}

fn own() -> String {
    let library = library().canonicalize().unwrap();
    format!("word, {}\n", library.display())
}

#[test]
fn children_that_cannot_have_the_library_run_without() {
    let children = Children::new();
    // A loader of another C library, as its name says.
    let loader = children.at("ld-musl-x86_64.so.1");
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", &loader).unwrap();
    children.build("other", &["cc", &format!("-Wl,--dynamic-linker={loader}")]);
    let script = format!("#! {}\n", children.at("other"));
    fs::write(children.at("script"), script).unwrap();
    program::ok("chmod", &["+x", &children.at("script")]);
    for way in WAYS {
        children.check(way, &[&children.at("child")], &own());
        children.check(way, &[&children.at("other")], "word, nothing\n");
        if way != "fexecve" {
            // There the interpreter is given a descriptor that is closed by then.
            children.check(way, &[&children.at("script")], "word, nothing\n");
        }
    }
}

/// Programs of real other loaders, where the compilers are.
#[test]
fn children_of_other_loaders_say_nothing() {
    let children = Children::new();
    for (name, compiler) in [("musl", &["musl-gcc"][..]), ("32", &["cc", "-m32"])] {
        let tried = Command::new(compiler[0])
            .args(&compiler[1..])
            .args(["-o", &children.at(name), &children.at("child.c")])
            .output();
        match tried {
            Ok(built) if built.status.success() => {
                children.check("execve", &[&children.at(name)], "word, nothing\n");
            }
            _ => skip::skip(&format!("needs {}", compiler.join(" "))),
        }
    }
}

#[test]
fn children_in_a_root_without_the_library_say_nothing() {
    if !rustix::process::geteuid().is_root() {
        skip::skip("needs root");
        return;
    }
    let children = Children::new();
    let root = children.at("root");
    let libraries = [
        "/lib64/ld-linux-x86-64.so.2",
        "/lib/x86_64-linux-gnu/libc.so.6",
    ];
    for file in libraries {
        let to = format!("{root}{file}");
        fs::create_dir_all(Path::new(&to).parent().unwrap()).unwrap();
        if fs::copy(file, &to).is_err() {
            skip::skip(&format!("needs {file}"));
            return;
        }
    }
    fs::copy(children.at("child"), format!("{root}/child")).unwrap();
    for way in WAYS {
        children.check(way, &["/child", &root], "word, nothing\n");
    }
}

/// Other libraries and all variables stay, however many there are.
#[test]
fn children_without_the_library_keep_all_else() {
    let children = Children::new();
    let loader = children.at("ld-musl-x86_64.so.1");
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", &loader).unwrap();
    children.build("other", &["cc", &format!("-Wl,--dynamic-linker={loader}")]);
    let mut command = limited(PAGEMESH);
    // In front of this one stands that of the direct path.
    let others = children.at("other.so");
    fs::write(children.at("empty.c"), "").unwrap();
    let empty = children.at("empty.c");
    program::ok("cc", &["-shared", "-o", &others, &empty]);
    command.env("LD_PRELOAD", format!("{others}:{others}"));
    for number in 0..5000 {
        command.env(format!("VARIABLE_{number}"), "x".repeat(20));
    }
    command.args(["exec", "--library", library().to_str().unwrap(), "--"]);
    command.args([&children.at("children"), "execve", &children.at("other")]);
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    let expected = format!("word, {others}:{others}\n5000 variables\n");
    assert_eq!(said, expected, "{ended:?}");
}
