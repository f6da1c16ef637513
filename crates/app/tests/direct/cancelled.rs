//! Threads of programs that are cancelled amid a call.

use super::support::mounted::{self, Mounted, directly};
use super::support::{Cluster, program};
use std::path::{Path, PathBuf};

/// A program in C that lies beside these tests.
pub fn built(cluster: &Cluster, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/direct/{name}.c"));
    let path = cluster.dir().join(name);
    let words = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"];
    let mut words = words.to_vec();
    words.extend(["-Wno-unused-result", "-o", path.to_str().unwrap()]);
    words.push(source.to_str().unwrap());
    program::ok("cc", &words);
    path
}

/// While it waits for what its file is, for a station, or for a command before it was a guest.
#[test]
fn a_thread_that_is_cancelled_leaves_nothing_locked() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    mount.sh("head -c 40000 /dev/zero > file");
    let (program, file) = (built(&cluster, "cancelled"), mount.path("file"));
    let pid = mount.daemon.as_ref().unwrap().pid().to_string();
    for wait in ["board", "station", "command"] {
        let words = [
            program.to_str().unwrap(),
            file.to_str().unwrap(),
            &pid,
            wait,
        ];
        let ended = directly(&words).output().unwrap();
        mount.daemon.as_ref().unwrap().signal("CONT");
        program::succeeded(wait, ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
