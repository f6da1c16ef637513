//! Programs with threads in operations when one of the threads executes another program.

use super::support::mounted::{self, CLASSIC, TestMount, direct_command};
use super::support::{PAGEMESH, program};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

const PROCESSES: usize = 6;

/// A thread writes while the process executes a shell.
const WRITES_AND_EXECUTES: &str = r#"
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.pwrite(fd, bytes(4096 * 256), 0)
started = threading.Barrier(2)
def write():
    for n in range(2000):
        os.pwrite(fd, bytes([n % 256]) * 4096, n % 256 * 4096)
    started.wait()
    while True:
        for page in range(256):
            os.pwrite(fd, bytes([page]) * 4096, page * 4096)
threading.Thread(target=write, daemon=True).start()
started.wait()
os.execv('/bin/sh', ['sh', '-c', 'echo up; read line; echo went on'])
"#;

/// No thread of the old program can write any more, so the new program need not be killed.
#[test]
fn program_after_execve_in_operation_is_not_killed() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", CLASSIC);
    let mut programs = Vec::new();
    for number in 0..PROCESSES {
        let mut command = direct_command(&["python3", "-c", WRITES_AND_EXECUTES]);
        command.arg(mount.path(&format!("file-{number}")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        programs.push(super::ChildGuard(command.spawn().unwrap()));
    }
    let mut said: Vec<_> = programs
        .iter_mut()
        .map(|program| BufReader::new(program.0.stdout.take().unwrap()).lines())
        .collect();
    for lines in &mut said {
        assert_eq!(lines.next().unwrap().unwrap(), "up");
    }
    // Deletes a slice: this waits until no client is in an operation, and kills clients that stay
    // in one.
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    cluster.ok(&["fs", "delete", "other"]);
    for (program, lines) in programs.iter_mut().zip(&mut said) {
        let told = program.0.stdin.take().unwrap().write_all(b"\n");
        assert!(told.is_ok(), "it was ended");
        assert_eq!(lines.next().unwrap().unwrap(), "went on");
        assert!(program.0.wait().unwrap().success());
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Writes a file of a mount and prints a line.
const SANITIZED: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char page[4096] = {1};
    int fd = open(argv[argc - 1], O_RDWR | O_CREAT, 0644);
    for (int i = 0; i < 100; i++)
        if (pwrite(fd, page, sizeof page, 0) != sizeof page || pread(fd, page, sizeof page, 0) < 0)
            return 1;
    printf("done%s\n", getenv("LD_PRELOAD") && getenv("SAYS_PRELOAD") ? ", preloaded" : "");
    return 0;
}
"#;

#[test]
fn special_programs_run_as_without_exec() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let at = |name: &str| cluster.dir().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("program.c"), SANITIZED).unwrap();
    // A loader of another C library, as its name says.
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", at("ld-musl-x86_64.so.1")).unwrap();
    let loader = format!("-Wl,--dynamic-linker={}", at("ld-musl-x86_64.so.1"));
    let builds = [
        ("plain", "-O1"),
        ("sanitized", "-fsanitize=address"),
        ("static", "-static"),
        ("other", loader.as_str()),
    ];
    for (name, option) in builds {
        program::ok("cc", &[option, "-o", &at(name), &at("program.c")]);
    }
    std::fs::write(at("script"), format!("#!{}\n", at("other"))).unwrap();
    program::ok("chmod", &["+x", &at("script")]);
    let file = mount.path("file").to_str().unwrap().to_owned();
    let checked = |words: &[&str], said: &str| {
        let ended = direct_command(words)
            .env("SAYS_PRELOAD", "1")
            .output()
            .unwrap();
        let told = (&*ended.stdout, &*ended.stderr, ended.status.code());
        assert_eq!(
            told,
            (said.as_bytes(), &b""[..], Some(0)),
            "{words:?}: {ended:?}"
        );
    };
    checked(&[&at("plain"), &file], "done, preloaded\n");
    checked(&[&at("sanitized"), &file], "done, preloaded\n");
    checked(&[&at("static"), &file], "done, preloaded\n");
    checked(&[&at("other"), &file], "done\n");
    // The script is its interpreter's first argument, and the file its last.
    checked(&[&at("script"), &file], "done\n");
    checked(
        &[
            "valgrind",
            "-q",
            "--trace-children=yes",
            &at("plain"),
            &file,
        ],
        "done, preloaded\n",
    );
    for (name, why) in [("static", "statically"), ("other", "GNU C library")] {
        let mut command = program::limited(PAGEMESH);
        let words = ["exec", "--verbose", "--library"].map(String::from);
        command
            .args(words)
            .arg(mounted::preload_library())
            .args(["--", &at(name), &file]);
        let ended = command.output().unwrap();
        let told = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(told.contains(name) && told.contains(why), "{told}");
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
