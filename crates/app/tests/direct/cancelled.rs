//! Threads of programs that are cancelled amid a call.

use super::built;
use super::support::mounted::{self, Mounted, directly};
use super::support::program;

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
