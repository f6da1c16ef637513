//! Programs whose threads are inside of operations when one of them executes another program.

use super::support::mounted::{self, CLASSIC, Mounted, directly};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

const PROCESSES: usize = 6;

/// Its thread is at it when it executes a shell.
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

/// Nothing of it can write any more, so nobody needs to end the new program.
#[test]
fn a_program_that_takes_the_place_of_another_is_not_ended_for_it() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", CLASSIC);
    let mut programs = Vec::new();
    for number in 0..PROCESSES {
        let mut command = directly(&["python3", "-c", WRITES_AND_EXECUTES]);
        command.arg(mount.path(&format!("file-{number}")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        programs.push(super::Child(command.spawn().unwrap()));
    }
    let mut said: Vec<_> = programs
        .iter_mut()
        .map(|program| BufReader::new(program.0.stdout.take().unwrap()).lines())
        .collect();
    for lines in &mut said {
        assert_eq!(lines.next().unwrap().unwrap(), "up");
    }
    // Waits until nobody is inside of an operation, and ends who stays there.
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
