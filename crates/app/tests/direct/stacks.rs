//! Threads of programs with little stack.

use super::built;
use super::support::mounted::{self, Mounted, directly};
use super::support::program;

/// The least that the C library allows, and more.
#[test]
fn a_thread_with_little_stack_joins_reads_and_writes() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    mount.sh("head -c 40000 /dev/zero > file");
    let (program, file) = (built(&cluster, "stacks"), mount.path("file"));
    // Reading several pages as they are at one moment takes most of the least stack by itself.
    for (kib, part) in [("64", "4096"), ("32", "4096"), ("16", "2048")] {
        let words = [program.to_str().unwrap(), file.to_str().unwrap(), kib, part];
        let ended = directly(&words).output().unwrap();
        program::succeeded(&format!("a stack of {kib} KiB"), ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Calls on the direct path take so much of the program's stack, with all that the C library takes.
const STACK_BYTES: &str = "1024";

#[test]
fn calls_take_little_of_a_coroutines_stack() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    mount.sh("head -c 400000 /dev/zero > file");
    let (program, file) = (built(&cluster, "painted"), mount.path("file"));
    let words = [
        program.to_str().unwrap(),
        file.to_str().unwrap(),
        STACK_BYTES,
    ];
    // The loader takes a KiB or more when it binds a name at its first call.
    let ended = directly(&words).env("LD_BIND_NOW", "1").output().unwrap();
    program::succeeded("what calls take of a stack", ended);
    mount.stop(&cluster);
    cluster.check_identical("files");
}
