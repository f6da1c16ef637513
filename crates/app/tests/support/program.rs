//! Common programs, with a limit on their time.

use super::LIMIT;
use super::net::{Host, Net};
use std::process::{Command, Output, Stdio};

/// The Debian packages of the programs.
const PACKAGES: [(&str, &str); 22] = [
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdinfo", "libnbd-bin"),
    ("mke2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("fio", "fio"),
    ("nbdkit", "nbdkit"),
    ("nfs-cat", "libnfs-utils"),
    ("nfs-cp", "libnfs-utils"),
    ("nfs-ls", "libnfs-utils"),
    ("cmp", "diffutils"),
    ("bash", "bash"),
    ("kill", "procps"),
    ("ip", "iproute2"),
    ("mount", "mount"),
    ("umount", "mount"),
    ("cp", "coreutils"),
    ("perl", "perl-base"),
    ("git", "git"),
    ("unshare", "util-linux"),
    ("sqlite3", "sqlite3"),
];

/// A command that is killed when it takes too long.
pub fn limited(program: &str) -> Command {
    // e2fsprogs is in directories that are not on the search path of users.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap());
    let mut command = Command::new("timeout");
    command
        .args(["-s", "KILL", &LIMIT.as_secs().to_string(), program])
        .env("PATH", path)
        .stdin(Stdio::null());
    command
}

/// The same on one of several machines; the program is the first argument.
pub fn limited_in(net: &Net, host: Host) -> Command {
    let words = net.enter(host);
    let mut command = limited(&words[0]);
    command.args(&words[1..]);
    command
}

/// Runs a program to its end.
pub fn run(program: &str, args: &[&str]) -> Output {
    let output = limited(program).args(args).output().unwrap();
    if output.status.code() == Some(127) {
        let package = PACKAGES.iter().find(|(name, _)| *name == program);
        let (_, package) = package.unwrap_or(&("", "of that name"));
        panic!("{program} is not installed: apt-get install {package}");
    }
    output
}

/// Runs a program that must succeed, and returns its standard output.
pub fn ok(program: &str, args: &[&str]) -> String {
    succeeded(&format!("{program} {}", args.join(" ")), run(program, args))
}

/// The standard output of a successful program.
pub fn succeeded(what: &str, output: Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{what}: {}\n{stdout}\n{stderr}",
        output.status
    );
    stdout
}

/// The standard error of a program that failed with code 1, without a panic and with these parts.
pub fn refused(what: &str, output: &Output, parts: &[&str]) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(1),
        "{what}: {}\n{stderr}",
        output.status
    );
    assert!(stderr.contains("error: "), "{what}: {stderr}");
    assert!(!stderr.contains("panicked"), "{what}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{what}: no '{part}' in: {stderr}");
    }
    stderr
}

/// Runs commands of qemu-io; each must succeed.
pub fn qemu_io(uri: &str, commands: &[&str]) -> String {
    run_qemu_io(uri, &["-f", "raw"], commands)
}

/// The same on a read-only export.
pub fn qemu_io_read_only(uri: &str, commands: &[&str]) -> String {
    run_qemu_io(uri, &["-r", "-f", "raw"], commands)
}

fn run_qemu_io(uri: &str, options: &[&str], commands: &[&str]) -> String {
    let mut args = options.to_vec();
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(uri);
    let text = ok("qemu-io", &args);
    // Before 8.0 qemu-io succeeds although patterns differ.
    let failed = ["Pattern verification failed", "failed:", "not supported"];
    let failed = failed.iter().any(|words| text.contains(words));
    assert!(!failed, "qemu-io {commands:?}: {text}");
    text
}

/// Sends a signal, as `INT`, to a process. It starts no program: a started program closes its
/// inherited descriptors, and that close waits for a stalled mount.
pub fn signal(pid: u32, signal: &str) {
    use rustix::process::{Pid, Signal, kill_process};
    let signal = match signal {
        "STOP" => Signal::STOP,
        "CONT" => Signal::CONT,
        "INT" => Signal::INT,
        "TERM" => Signal::TERM,
        "KILL" => Signal::KILL,
        "HUP" => Signal::HUP,
        "QUIT" => Signal::QUIT,
        "USR1" => Signal::USR1,
        "USR2" => Signal::USR2,
        "TSTP" => Signal::TSTP,
        other => panic!("signal {other}"),
    };
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    kill_process(pid, signal).unwrap();
}
