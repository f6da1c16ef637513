//! Processes that end thread by thread. No thread of the engine keeps such a process alive.

use super::compile_c;
use super::support::mounted::{self, TestMount, direct_command};
use super::support::program;

/// The ends of the main thread and of another one.
const HOW: [&str; 4] = ["main", "main worker", "main raw-worker", "raw-main"];

#[test]
fn process_exit_is_unaffected_by_engine_threads() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let (program, file) = (compile_c(&cluster, "ends"), mount.path("file"));
    let (program, file) = (program.to_str().unwrap(), file.to_str().unwrap());
    for how in HOW {
        let by_kernel = program::limited(program)
            .args([file, how])
            .output()
            .unwrap();
        let mut command = direct_command(&[program, file, how]);
        let direct = command.env("IS_DIRECT", "1").output().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let of = |ended: &std::process::Output| {
            (
                ended.status.code(),
                said(&ended.stdout),
                said(&ended.stderr),
            )
        };
        assert_eq!(
            of(&by_kernel),
            of(&direct),
            "{how}: by the kernel, and directly"
        );
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
