//! A program that maps a file tells the mount so by the file itself. This works for any user, with
//! any limits, and without other descriptors.

use super::support::mounted::{self, TestMount, direct_command};
use super::{direct_file, new_client, open_file};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::Stdio;

/// Maps the file, reports it, and prints its contents on request.
const MAPS: &str = r#"
import mmap, os, resource, signal, sys
how = sys.argv[2]
fd = os.open(sys.argv[1], os.O_RDWR)
found = []
def map(*_):
    found.append(mmap.mmap(os.dup(fd) if how == 'plain' else fd, 4096))
if how == 'no-descriptors':
    # One for python's own copy of the descriptor.
    last = max(int(name) for name in os.listdir('/proc/self/fd'))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, last + 1))
if how == 'another-user':
    os.setresuid(65534, 65534, 65534)
if how == 'handler':
    signal.signal(signal.SIGUSR1, map)
    os.kill(os.getpid(), signal.SIGUSR1)
else:
    map()
print(found[0][0], flush=True)
sys.stdin.readline()
print(found[0][0], flush=True)
"#;

const PAGE: usize = 4096;

#[test]
fn mapped_file_is_closed_to_direct_clients() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    for how in ["plain", "no-descriptors", "another-user", "handler"] {
        let file = open_file(&mount, how);
        file.write_all_at(&[1; PAGE], 0).unwrap();
        let direct = direct_file(new_client(), &file);
        super::until("the client writes directly", || {
            direct.write(&[2; PAGE], 0).is_some()
        });
        let mut command = direct_command(&["python3", "-c", MAPS]);
        command.arg(mount.path(how)).arg(how);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut maps = super::ChildGuard(command.spawn().unwrap());
        let mut lines = BufReader::new(maps.0.stdout.take().unwrap()).lines();
        let mut said = || lines.next().map(Result::unwrap).unwrap_or_default();
        assert_eq!(said(), "2", "{how}");
        for _ in 0..8 {
            let written = direct.write(&[3; PAGE], 0);
            assert!(written.is_none(), "{how}: past the mapping");
        }
        file.write_all_at(&[4; PAGE], 0).unwrap();
        maps.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert_eq!(said(), "4", "{how}");
        assert!(maps.0.wait().unwrap().success(), "{how}");
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}
