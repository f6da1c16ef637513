//! Programs that map a file tell its mount by the file itself: whoever they are, whatever else
//! they have or lack.

use super::support::mounted::{self, Mounted, directly};
use super::{direct, guest, opened};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::Stdio;

/// Maps the file so, tells, and shows what is there when it is asked.
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
fn whoever_maps_a_file_keeps_guests_away() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    for how in ["plain", "no-descriptors", "another-user", "handler"] {
        let file = opened(&mount, how);
        file.write_all_at(&[1; PAGE], 0).unwrap();
        let direct = direct(guest(), &file);
        super::until("it is a guest's", || direct.write(&[2; PAGE], 0).is_some());
        let mut command = directly(&["python3", "-c", MAPS]);
        command.arg(mount.path(how)).arg(how);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut maps = super::Child(command.spawn().unwrap());
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
