//! Processes that end thread by thread. None of the engine's threads keeps one.

use super::built;
use super::support::mounted::{self, Mounted, directly};
use super::support::program;

/// How the main thread ends, and another one.
const HOW: [&str; 4] = ["main", "main worker", "main raw-worker", "raw-main"];

#[test]
fn process_ends_as_without_the_engines_threads() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let (program, file) = (built(&cluster, "ends"), mount.path("file"));
    let (program, file) = (program.to_str().unwrap(), file.to_str().unwrap());
    for how in HOW {
        let by_kernel = program::limited(program)
            .args([file, how])
            .output()
            .unwrap();
        let mut command = directly(&[program, file, how]);
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
