//! The manager's store fails to write: everyone sees it, reads go on, and the manager ends once its
//! disk takes writes again.

use crate::support;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use support::daemon::Daemon;
use support::{PAGEMESH, own_ip, program, write_key};

/// A manager on a disk that refuses writes without a signal.
fn start(dir: &Path) -> Daemon {
    let mut command = Command::new("sh");
    // A write beyond the limit of file sizes then fails with EFBIG, as one to a full disk with ENOSPC.
    let ignoring = "trap '' XFSZ; exec \"$0\" \"$@\"";
    command.args(["-c", ignoring, PAGEMESH, "manager", "--until-stdin-ends"]);
    command.args(["--listen", &format!("{}:0", own_ip())]);
    command.arg("--store").arg(dir.join("manager.redb"));
    command.arg("--key").arg(dir.join("key"));
    Daemon::start(command, dir, "manager", 1).unwrap()
}

/// Limits the size of the files that a process writes.
fn limit_files(daemon: &Daemon, bytes: Option<u64>) {
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    let limit = Rlimit {
        current: bytes,
        maximum: None,
    };
    prlimit(Some(pid), Resource::Fsize, limit).unwrap();
}

/// Status and body of `/healthz`.
fn health(url: &str) -> (String, String) {
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    (status.to_owned(), body.to_owned())
}

#[test]
fn failed_store_is_visible_until_manager_restarts() {
    let dir = tempfile::tempdir().unwrap();
    write_key(&dir.path().join("key"), &"a7c3e901".repeat(8));
    let mut manager = start(dir.path());
    let url = manager.ready[0].strip_prefix("ready ").unwrap().to_owned();
    let run = |url: &str, words: &[&str]| {
        let mut command = Command::new(PAGEMESH);
        command.args(words).args(["--manager", url, "--key"]);
        command.arg(dir.path().join("key")).output().unwrap()
    };
    let make = |url: &str, name: &str| {
        run(
            url,
            &["token", "create", "--name", name, "--role", "viewer"],
        )
    };
    program::succeeded("token", make(&url, "before"));
    assert_eq!(health(&url), ("200".into(), "ok\n".into()));
    limit_files(&manager, Some(1));
    let refused = make(&url, "refused");
    assert!(!refused.status.success(), "{refused:?}");
    let again = String::from_utf8(make(&url, "again").stderr).unwrap();
    assert!(again.contains("takes no changes"), "{again}");
    let (status, text) = health(&url);
    assert_eq!(status, "503");
    assert!(text.contains("takes no changes"), "{text}");
    let shown = program::succeeded("status", run(&url, &["status"]));
    assert!(shown.contains("THE MANAGER TAKES NO CHANGES"), "{shown}");
    let shown = program::succeeded("status", run(&url, &["status", "--output", "json"]));
    assert!(shown.contains("\"store_failed\": true"), "{shown}");
    // The space is free again.
    limit_files(&manager, None);
    let ended = manager.await_end();
    assert!(!ended.success(), "a service manager must restart it");
    let log = manager.log();
    assert!(
        log.contains("start the manager again to open the store anew"),
        "{log}"
    );
    let left = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|it| it.unwrap().file_name());
    assert!(
        !left
            .into_iter()
            .any(|it| it.to_string_lossy().contains("probe"))
    );
    let manager = start(dir.path());
    let url = manager.ready[0].strip_prefix("ready ").unwrap().to_owned();
    assert_eq!(health(&url).0, "200");
    program::succeeded("token", make(&url, "after"));
    drop(manager);
}
