//! Descriptor numbers: programs choose some numbers themselves, and close inherited ones.

use super::support::mounted::{self, TestMount, direct_command};

/// Shells move files to numbers of their own. Output of a program without a standard output must
/// not reach a brick's socket.
const SHELL: &str = r#"
set -e
cd "$1"
exec 3<>three 4>four 5>>five 9<>nine
for number in 3 4 5 9; do
    for line in 1 2 3 4 5 6 7 8; do echo "line $line" >&$number; done
done
exec 6>&3 3>six
echo six >&3
echo nine >&6
exec 1>&- 2>&-
exec 7>>five
for line in 1 2 3 4 5 6 7 8; do echo "more $line" >&7; done
echo lost || true
"#;

#[test]
fn shell_chosen_descriptor_numbers_work() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let mut command = direct_command(&["bash", "-c", SHELL, "bash"]);
    command.arg(&mount.dir);
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let lines = |word: &str| (1..=8).map(|n| format!("{word} {n}\n")).collect::<String>();
    let read = |name: &str| std::fs::read_to_string(mount.path(name)).unwrap();
    assert_eq!(read("three"), lines("line") + "nine\n");
    assert_eq!(read("four"), lines("line"));
    assert_eq!(read("five"), lines("line") + &lines("more"));
    assert_eq!(read("nine"), lines("line"));
    assert_eq!(read("six"), "six\n");
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Asserts that a forked child has no descriptor that the library opened in the parent. The fork
/// happens while threads of the parent reach the mount for the first time.
const FORKS: &str = r#"
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.pwrite(fd, bytes(4096 * 64), 0)
threads = 12
barrier = threading.Barrier(threads + 1)
def write(number):
    barrier.wait()
    for n in range(300):
        os.pwrite(fd, bytes([number]) * 4096, number * 4096)
all = [threading.Thread(target=write, args=(n,)) for n in range(threads)]
for each in all:
    each.start()
barrier.wait()
foreign = []
while any(each.is_alive() for each in all):
    child = os.fork()
    if child == 0:
        code = 0
        for fd in os.listdir('/proc/self/fd'):
            try:
                target = os.readlink('/proc/self/fd/' + fd)
            except OSError:
                continue
            if target.startswith(sys.argv[2]):
                code = 1
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        foreign.append(child)
assert not foreign, foreign
"#;

/// A pool stays locked as long as any process has it open with the brick's open file description.
#[test]
fn forked_child_has_no_pool_of_parent() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    for round in 0..4 {
        let mut command = direct_command(&["python3", "-c", FORKS]);
        command.arg(mount.path(&format!("file-{round}")));
        command.arg(cluster.pool(0).parent().unwrap());
        let ended = command.output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// One thread waits for a command while another one reaches the mount for the first time. The
/// command ends only after that.
const COMMANDS: &str = r#"
import os, sys, threading
os.mkfifo(sys.argv[2])
waits = threading.Thread(target=os.system, args=('read line < ' + sys.argv[2],))
waits.start()
# Opens once the command does.
tell = os.open(sys.argv[2], os.O_WRONLY)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for n in range(200):
    os.pwrite(fd, bytes([n]) * 4096, n * 4096)
os.write(tell, b'line\n')
waits.join()
"#;

#[test]
fn thread_waiting_for_command_blocks_no_other() {
    super::run_python(COMMANDS);
}

/// A child that shares its parent's descriptor table, and not its memory.
const SHARES: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE, CLONE_FILES, SIGCHLD = 56, 0x400, 17
def opened():
    found = {}
    for number in os.listdir('/proc/self/fd'):
        try:
            found[number] = os.readlink('/proc/self/fd/' + number)
        except FileNotFoundError:
            pass
    return found
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for page in range(50):
    os.pwrite(fd, b'x' * 4096, 4096 * page)
before = opened()
assert sum('socket' in name for name in before.values()) > 2, before
child = libc.syscall(CLONE, CLONE_FILES | SIGCHLD, 0, 0, 0, 0)
if child == 0:
    os.close(os.open(sys.argv[1], os.O_RDONLY))
    os.system('true')
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert opened() == before, (before, opened())
os.pwrite(fd, b'y' * 4096, 0)
assert os.pread(fd, 1, 0) == b'y'
"#;

#[test]
fn child_sharing_descriptors_closes_none_of_parent() {
    super::run_python(SHARES);
}
