//! Threads that are cancelled in a call.

use super::compile_c;
use super::support::mounted::{self, TestMount, direct_command};
use super::support::program;

/// The thread waits for the shared file map, for an I/O slot, or for a command before the process
/// joins the mount.
#[test]
fn cancelled_thread_leaves_nothing_locked() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    mount.sh("head -c 40000 /dev/zero > file");
    let (program, file) = (compile_c(&cluster, "cancelled"), mount.path("file"));
    let pid = mount.daemon.as_ref().unwrap().pid().to_string();
    for wait in ["board", "station", "command"] {
        let words = [
            program.to_str().unwrap(),
            file.to_str().unwrap(),
            &pid,
            wait,
        ];
        let ended = direct_command(&words).output().unwrap();
        mount.daemon.as_ref().unwrap().signal("CONT");
        program::succeeded(wait, ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
