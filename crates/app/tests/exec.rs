//! `pagemesh exec`: exit codes, and children that cannot load the library.

use crate::support;
use std::fs;
use std::path::Path;
use std::process::Command;
use support::mounted::preload_library;
use support::program::{self, limited};
use support::{PAGEMESH, skip};

#[track_caller]
fn check(words: &[&str], code: i32, part: &str) {
    // The program does not run, so any file serves as its library.
    let head = ["exec", "--library", PAGEMESH, "--"];
    let output = limited(PAGEMESH).args(head).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
    assert!(said.contains(part), "no '{part}' in: {said}");
}

#[test]
fn exec_of_missing_program_exits_like_shell() {
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

/// Prints its last word and the libraries that were preloaded into it.
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

const EXEC_CALLS: [&str; 13] = [
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
struct TestPrograms(tempfile::TempDir);

impl TestPrograms {
    fn new() -> TestPrograms {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("child.c"), CHILD).unwrap();
        let children = TestPrograms(dir);
        children.build("child", &["cc"]);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exec/children.c");
        let source = source.to_str().unwrap();
        program::ok(
            "cc",
            &["-O2", "-Wall", "-o", &children.path("children"), source],
        );
        children
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn build(&self, name: &str, compiler: &[&str]) {
        let mut words = compiler[1..].to_vec();
        let (to, from) = (self.path(name), self.path("child.c"));
        words.extend(["-o", &to, &from]);
        program::ok(compiler[0], &words);
    }

    /// Starts a program by one function of the C library, and checks its output.
    #[track_caller]
    fn check(&self, way: &str, words: &[&str], said: &str) {
        let mut command = limited(PAGEMESH);
        let library = preload_library();
        let own = library.to_str().unwrap();
        command.args(["exec", "--library", own, "--"]);
        command.args([&self.path("children"), way]).args(words);
        let ended = command.output().unwrap();
        let told = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        let times = if way == "vfork" { 3 } else { 1 };
        assert_eq!(told, [said.repeat(times).as_str(), ""], "{way} {words:?}");
        assert_eq!(ended.status.code(), Some(0), "{way} {words:?}");
    }
}

fn expected_line() -> String {
    let library = preload_library().canonicalize().unwrap();
    format!("word, {}\n", library.display())
}

#[test]
fn children_that_cannot_preload_run_without_library() {
    let children = TestPrograms::new();
    // A loader of another C library, as its name says.
    let loader = children.path("ld-musl-x86_64.so.1");
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", &loader).unwrap();
    children.build("other", &["cc", &format!("-Wl,--dynamic-linker={loader}")]);
    let script = format!("#! {}\n", children.path("other"));
    fs::write(children.path("script"), script).unwrap();
    program::ok("chmod", &["+x", &children.path("script")]);
    for way in EXEC_CALLS {
        children.check(way, &[&children.path("child")], &expected_line());
        children.check(way, &[&children.path("other")], "word, nothing\n");
        if way != "fexecve" {
            // There the interpreter gets a descriptor that is already closed.
            children.check(way, &[&children.path("script")], "word, nothing\n");
        }
    }
}

/// Programs with real loaders of other C libraries, where their compilers are installed.
#[test]
fn children_with_other_loaders_print_no_error() {
    let children = TestPrograms::new();
    for (name, compiler) in [("musl", &["musl-gcc"][..]), ("32", &["cc", "-m32"])] {
        let tried = Command::new(compiler[0])
            .args(&compiler[1..])
            .args(["-o", &children.path(name), &children.path("child.c")])
            .output();
        match tried {
            Ok(built) if built.status.success() => {
                children.check("execve", &[&children.path(name)], "word, nothing\n");
            }
            _ => skip::skip(&format!("needs {}", compiler.join(" "))),
        }
    }
}

#[test]
fn children_in_chroot_without_library_print_no_error() {
    if !rustix::process::geteuid().is_root() {
        skip::skip("needs root");
        return;
    }
    let children = TestPrograms::new();
    let root = children.path("root");
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
    fs::copy(children.path("child"), format!("{root}/child")).unwrap();
    for way in EXEC_CALLS {
        children.check(way, &["/child", &root], "word, nothing\n");
    }
}

/// Other libraries and all variables remain, however many there are.
#[test]
fn children_without_library_keep_environment() {
    let children = TestPrograms::new();
    let loader = children.path("ld-musl-x86_64.so.1");
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", &loader).unwrap();
    children.build("other", &["cc", &format!("-Wl,--dynamic-linker={loader}")]);
    let mut command = limited(PAGEMESH);
    // The library of the direct path comes before this one.
    let others = children.path("other.so");
    fs::write(children.path("empty.c"), "").unwrap();
    let empty = children.path("empty.c");
    program::ok("cc", &["-shared", "-o", &others, &empty]);
    command.env("LD_PRELOAD", format!("{others}:{others}"));
    for number in 0..5000 {
        command.env(format!("VARIABLE_{number}"), "x".repeat(20));
    }
    command.args([
        "exec",
        "--library",
        preload_library().to_str().unwrap(),
        "--",
    ]);
    command.args([
        &children.path("children"),
        "execve",
        &children.path("other"),
    ]);
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    let expected = format!("word, {others}:{others}\n5000 variables\n");
    assert_eq!(said, expected, "{ended:?}");
}
