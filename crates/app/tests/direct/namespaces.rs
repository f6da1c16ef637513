//! Programs that see files of a mount but not the names of its sockets: in another network
//! namespace, and in containers.

use super::support::mounted::{self, CLASSIC, TestMount};
use super::support::{Cluster, PAGEMESH, program};
use std::path::Path;

/// Writes each page of a file, and prints whether the process has mapped pools.
const WRITES: &str = r#"
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
for page in range(64):
    assert os.pwrite(fd, bytes([page]) * 4096, page * 4096) == 4096
with open('/proc/self/maps') as maps:
    print('direct' if '.pool' in maps.read() else 'by the kernel')
"#;

/// Hides all that a container with the mount's directory does not see, except the programs.
const CONTAINER: &str = r#"
mount --bind "$1" "$2"
mount -t tmpfs none "$3"
mount -t tmpfs none /dev/shm
cd "$2"
shift 3
exec "$@"
"#;

/// The output of the writer, started by these words, on the file at this path.
fn run_writer(words: &[&str], path: &str) -> String {
    let mut command = program::limited(words[0]);
    command
        .args(&words[1..])
        .arg(PAGEMESH)
        .args(mounted::exec_args());
    command.args(["python3", "-c", WRITES, path]);
    program::succeeded("a writer", command.output().unwrap())
}

fn with_file() -> Option<(Cluster, TestMount)> {
    let cluster = mounted::cluster(&[64, 64], "24M")?;
    let mount = TestMount::with_fuse(&cluster, "files", "map", CLASSIC);
    mount.sh("head -c 262144 /dev/zero > file");
    Some((cluster, mount))
}

fn check(cluster: &Cluster, mount: TestMount) {
    let found = std::fs::read(mount.path("file")).unwrap();
    let expected = |(at, byte): (usize, &u8)| usize::from(*byte) == at / 4096;
    assert!(found.iter().enumerate().all(expected));
    mount.stop(cluster);
    cluster.check_identical("files");
}

#[test]
fn program_in_another_network_namespace_is_direct() {
    let Some((cluster, mount)) = with_file() else {
        return;
    };
    let path = mount.path("file");
    let path = path.to_str().unwrap();
    assert_eq!(run_writer(&["unshare", "--net"], path), "direct\n");
    check(&cluster, mount);
}

#[test]
fn program_in_container_with_only_mount_is_direct() {
    let Some((cluster, mount)) = with_file() else {
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (from, to, hidden) = (text(&mount.dir), text(place.path()), text(cluster.dir()));
    let spaces = ["--net", "--mount", "--pid", "--fork", "--mount-proc"];
    let container = ["sh", "-euc", CONTAINER, "sh", &from, &to, &hidden];
    let words = [&["unshare"][..], &spaces, &container].concat();
    assert_eq!(run_writer(&words, "file"), "direct\n");
    check(&cluster, mount);
}
