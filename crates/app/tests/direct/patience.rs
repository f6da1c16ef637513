//! A process with few operations does not become a direct client.

use super::support::mounted::{self, TestMount, preload_library};
use super::support::{PAGEMESH, program};

/// Reads this many times. Prints whether the process then has mappings or descriptors of a mount or
/// a pool.
const READS: &str = r#"
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(int(sys.argv[2])):
    assert os.pread(fd, 100, 4096 * 5) == b'x' * 100
with open('/proc/self/maps') as maps:
    mapped = any('/memfd:pagemesh' in line or '.pool' in line for line in maps)
owned = any(int(name) >= 700 for name in os.listdir('/proc/self/fd'))
assert mapped == owned, (mapped, owned)
print('a guest' if mapped else 'nobody')
"#;

#[test]
fn process_with_few_calls_stays_on_kernel_path() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    mount.sh("head -c 100000 /dev/zero | tr '\\0' x > file");
    let path = mount.path("file");
    let says = |patience: Option<&str>, calls: &str| {
        let mut command = program::limited(PAGEMESH);
        command.args(["exec", "--library"]).arg(preload_library());
        command.args(patience.iter().flat_map(|calls| ["--patience", calls]));
        command.args(["--", "python3", "-c", READS]).arg(&path);
        let ended = command.arg(calls).output().unwrap();
        program::succeeded("a reader", ended)
    };
    assert_eq!(says(None, "32"), "nobody\n");
    assert_eq!(says(None, "33"), "a guest\n");
    assert_eq!(says(Some("0"), "0"), "a guest\n");
    assert_eq!(says(Some("70"), "70"), "nobody\n");
    assert_eq!(says(Some("70"), "71"), "a guest\n");
    mount.stop(&cluster);
}
