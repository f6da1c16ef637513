//! Processes with system call filters and with limits, which the direct path would violate.

use super::compile_c;
use super::support::mounted::{self, TestMount, direct_command};
use super::support::program;

const HOW: [&str; 7] = [
    "strict",
    "prctl",
    "seccomp",
    "all threads",
    "limit",
    "limited",
    "locked",
];

#[test]
fn confined_process_makes_only_its_own_calls() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let (program, file) = (compile_c(&cluster, "withdrawn"), mount.path("file"));
    let (program, file) = (program.to_str().unwrap(), file.to_str().unwrap());
    for how in HOW {
        for is_direct in [false, true] {
            let mut command = match is_direct {
                false => program::limited(program),
                true => direct_command(&[program]),
            };
            if is_direct {
                command.env("IS_DIRECT", "1");
            }
            let ended = command.args([file, how]).output().unwrap();
            let said = String::from_utf8_lossy(&ended.stdout);
            let what = format!("{how}, direct_command: {is_direct}: {ended:?}");
            assert_eq!((ended.status.code(), &*said), (Some(3), "done\n"), "{what}");
        }
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Asserts that core files leave out every shared mapping of pools and segments.
const DUMPED: &str = r#"
import os, sys
def dumped(pid):
    name, found = None, []
    for line in open(f'/proc/{pid}/smaps'):
        words = line.split()
        if '-' in words[0]:
            name = line[73:].strip() if words[1].endswith('s') else None
        elif words[0] == 'VmFlags:' and name and ('.pool' in name or 'memfd:' in name):
            found.append((name, 'dd' in words))
    return found
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for page in range(50):
    os.pwrite(fd, b'x' * 4096, 4096 * page)
for pid in [os.getpid()] + [int(pid) for pid in os.listdir('/proc') if pid.isdigit()]:
    try:
        # The bricks and the mount of this test's build.
        build = os.environ['LD_PRELOAD'].split('/debug/')[0]
        if not os.readlink(f'/proc/{pid}/exe').startswith(build) and pid != os.getpid():
            continue
        found = dumped(pid)
    except OSError:
        continue
    assert all(is_left_out for _, is_left_out in found), (pid, found)
    if pid == os.getpid():
        assert sum('.pool' in name for name, _ in found) == 2, found
        assert sum('memfd:' in name for name, _ in found) >= 3, found
print('none')
"#;

#[test]
fn core_files_leave_shared_memory_out() {
    if let Some(said) = super::run_python(DUMPED) {
        assert_eq!(said, "none\n");
    }
}
