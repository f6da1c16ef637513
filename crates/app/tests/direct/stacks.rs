//! Threads with small stacks.

use super::compile_c;
use super::support::mounted::{self, TestMount, direct_command};
use super::support::program;

/// The smallest stack that the C library allows, and larger ones.
#[test]
fn thread_with_small_stack_joins_reads_and_writes() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    mount.sh("head -c 40000 /dev/zero > file");
    let (program, file) = (compile_c(&cluster, "stacks"), mount.path("file"));
    // A consistent read of several pages takes most of the smallest stack by itself.
    for (kib, part) in [("64", "4096"), ("32", "4096"), ("16", "2048")] {
        let words = [program.to_str().unwrap(), file.to_str().unwrap(), kib, part];
        let ended = direct_command(&words).output().unwrap();
        program::succeeded(&format!("a stack of {kib} KiB"), ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Bytes of the program's stack for a call on the direct path, including the C library.
const STACK_BYTES: &str = "1024";

#[test]
fn direct_calls_use_little_coroutine_stack() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    mount.sh("head -c 400000 /dev/zero > file");
    let (program, file) = (compile_c(&cluster, "painted"), mount.path("file"));
    let words = [
        program.to_str().unwrap(),
        file.to_str().unwrap(),
        STACK_BYTES,
    ];
    // The loader takes a KiB or more when it binds a name at its first call.
    let ended = direct_command(&words)
        .env("LD_BIND_NOW", "1")
        .output()
        .unwrap();
    program::succeeded("what calls take of a stack", ended);
    mount.stop(&cluster);
    cluster.check_identical("files");
}
