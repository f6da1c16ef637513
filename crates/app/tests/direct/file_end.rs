//! The end of a file as appending processes see it: the kernel knows only the size that it last
//! heard of.

use super::support::mounted::{self, TestMount, direct_command};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

/// Appends until all appends go directly, and waits. Then it appends, seeks to the end, and checks
/// the contents.
const SEEK: &str = r#"
import os, sys

def writes():
    for line in open('/proc/self/io'):
        if line.startswith('syscw:'):
            return int(line.split()[1])

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
other = os.dup(fd)
end = 200 << 10
os.pwrite(fd, b'.' * end, 0)

def append(data):
    global end
    assert os.pwrite(fd, data, end) == len(data)
    end += len(data)

def look():
    for back in [0, 7, -1000]:
        assert os.lseek(fd, -back, os.SEEK_END) == end - back
        assert os.lseek(other, 0, os.SEEK_CUR) == end - back
    assert os.lseek(other, -4, os.SEEK_END) == end - 4
    assert os.pread(fd, 9, os.lseek(fd, 0, os.SEEK_CUR)) == b'last'
    try:
        os.lseek(fd, -end - 1, os.SEEK_END)
        raise AssertionError('it is before the file')
    except OSError as error:
        assert error.errno == 22
    assert os.lseek(fd, 0, os.SEEK_CUR) == end - 4

for round in range(2):
    before = None
    while before != writes():
        before = writes()
        for _ in range(5):
            append(b'a few: last')
    print('ready', flush=True)
    sys.stdin.readline()
    for number in range(100):
        append(b'.' * number + b'last')
        look()
    print('done', flush=True)
    sys.stdin.readline()
    # What the kernel does goes up to there, too.
    target = os.open(sys.argv[1] + ' copied', os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    sent = os.sendfile(target, fd, end - 200, 200)
    append(b'the last')
    copied = os.copy_file_range(fd, target, 200, end - 200, 0)
    append(b'the last')
    pipe = os.pipe()
    spliced = os.splice(fd, pipe[1], 200, end - 200)
    assert (sent, copied, spliced) == (200, 200, 200), (sent, copied, spliced)
    for each in [target, *pipe]:
        os.close(each)
    # Others may move the offset from now on.
    child = os.fork()
    if child == 0:
        look()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.ftruncate(fd, end - 300)
    end -= 300
    assert os.lseek(fd, 0, os.SEEK_END) == end
"#;

/// The mount is stopped, so it answers no request.
#[test]
fn direct_clients_find_file_end_without_mount() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let mut command = direct_command(&["python3", "-c", SEEK]);
    command.arg(mount.path("log"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut seeks = super::ChildGuard(command.spawn().unwrap());
    let mut tell = seeks.0.stdin.take().unwrap();
    let mut lines = BufReader::new(seeks.0.stdout.take().unwrap()).lines();
    let mut said = || lines.next().map(Result::unwrap).unwrap_or_default();
    let daemon = mount.daemon.as_ref().unwrap();
    for _ in 0..2 {
        assert_eq!(said(), "ready");
        daemon.stop_all_threads();
        tell.write_all(b"\n").unwrap();
        let done = said();
        daemon.signal("CONT");
        assert_eq!(done, "done");
        tell.write_all(b"\n").unwrap();
    }
    assert!(seeks.0.wait().unwrap().success());
    mount.stop(&cluster);
    cluster.check_identical("files");
}
