//! Direct I/O: the alignment that a mount reports, and writes of parts of pages. Needs root, /dev/fuse and python3.

use crate::by_both;
use crate::support;
use std::process::Command;
use support::mounted::{self, TestMount, direct_command};
use support::{Cluster, program};

by_both! {
    mount_reports_alignment_of_direct_io
    concurrent_parts_of_pages_are_all_written
}

/// Rounds of each kind of mount, of program and of alignment.
const ROUNDS: &str = "30";

/// Prints the answer to `XFS_IOC_DIOINFO` for each path: three numbers, or the error.
const LIMITS: &str = r#"
import errno, fcntl, os, struct, sys
for path in sys.argv[1:]:
    answer = bytearray(12)
    try:
        fcntl.ioctl(os.open(path, os.O_RDONLY), 0x800c581e, answer)
        print(*struct.unpack('III', answer))
    except OSError as error:
        print(errno.errorcode[error.errno])
"#;

/// Writes the parts of a file by requests of libaio that the kernel has at once, and compares the file with the bytes of all.
/// The arguments are a path, the unit of offsets and lengths, the number of rounds, and a seed.
const WRITE_PARTS: &str = r#"
import ctypes, mmap, os, random, struct, sys
path, unit, rounds, seed = sys.argv[1], *map(int, sys.argv[2:])
PAGES = 8
BYTES = PAGES * 4096
choices = random.Random(seed)
libc = ctypes.CDLL(None, use_errno=True)
memory = mmap.mmap(-1, 2 * BYTES)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
context = ctypes.c_ulong(0)

def call(number, *args):
    result = libc.syscall(number, *args)
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result

def write_at_once(parts, descriptors, expected):
    # A memory address of its own for each part, aligned to the unit.
    control, at = [], 0
    for start, end in parts:
        memory[at:at + end - start] = expected[start:end]
        descriptor = choices.choice(descriptors)
        control.append(ctypes.create_string_buffer(struct.pack('=QIIHhIQQqQII',
            0, 0, 0, 1, 0, descriptor, address + at, end - start, start, 0, 0, 0)))
        at += end - start
    pointers = (ctypes.c_void_p * len(control))(*map(ctypes.addressof, control))
    submitted = 0
    while submitted < len(control):
        rest = ctypes.byref(pointers, 8 * submitted)
        submitted += call(209, context, ctypes.c_long(len(control) - submitted), rest)
    events = ctypes.create_string_buffer(32 * len(control))
    call(208, context, ctypes.c_long(len(control)), ctypes.c_long(len(control)), events, None)
    written = sum(struct.unpack_from('=q', events, 32 * i + 16)[0] for i in range(len(control)))
    assert written == sum(end - start for start, end in parts), written

call(206, BYTES, ctypes.byref(context))
for round in range(rounds):
    kind = choices.choice(['hole', 'empty', 'written'])
    before = choices.randbytes(BYTES) if kind == 'written' else bytes(BYTES)
    with open(path, 'wb') as file:
        file.write(before if kind == 'written' else b'')
        file.truncate(0 if kind == 'empty' else BYTES)
    descriptors = [os.open(path, os.O_RDWR | os.O_DIRECT) for _ in range(2)]
    count = choices.randrange(1, 60)
    cuts = sorted({0, BYTES, *(choices.randrange(BYTES // unit) * unit for _ in range(count))})
    parts = [part for part in zip(cuts, cuts[1:]) if choices.random() < 0.9]
    choices.shuffle(parts)
    expected = bytearray(before)
    for start, end in parts:
        expected[start:end] = choices.randbytes(end - start)
    write_at_once(parts, descriptors, expected)
    expected = expected[:max([end for _, end in parts], default=0)] if kind == 'empty' else expected
    direct = os.preadv(descriptors[0], [into := mmap.mmap(-1, BYTES)], 0)
    with open(path, 'rb') as file:
        cached = file.read()
    for how, found in ('direct', into[:direct]), ('cached', cached):
        if found != expected:
            bad = [at for at in range(0, BYTES, 512) if found[at:at + 512] != expected[at:at + 512]]
            sys.exit(f'round {round}: a {how} read of {len(found)} bytes ({kind}) differs at {bad}; parts {parts}')
    for descriptor in descriptors:
        os.close(descriptor)
"#;

fn python(is_direct: bool, script: &str, args: &[&str]) -> String {
    let mut command = match is_direct {
        true => direct_command(&["python3"]),
        false => Command::new("python3"),
    };
    let output = command.args(["-c", script]).args(args).output().unwrap();
    program::succeeded("python3", output)
}

fn mount_with(fuse: &'static str, options: &[&str]) -> Option<(Cluster, TestMount)> {
    let cluster = mounted::cluster(&[128, 128], "64M")?;
    let mount = TestMount::try_with_options(&cluster, "files", "mnt", ("auto", fuse), options);
    Some((cluster, mount.unwrap()))
}

fn mount_reports_alignment_of_direct_io(fuse: &'static str) {
    let Some((cluster, mount)) = mount_with(fuse, &[]) else {
        return;
    };
    mount.sh("echo content > file; mkdir directory; sync .");
    cluster.ok(&["snapshot", "create", "files@one"]);
    let names = ["file", "directory", ".snapshot/one/file", ".snapshot"];
    let paths = names.map(|name| mount.path(name));
    let paths = paths.each_ref().map(|path| path.to_str().unwrap());
    let limits = "512 512 2147479552";
    for is_direct in [false, true] {
        let told = python(is_direct, LIMITS, &paths);
        let told: Vec<&str> = told.lines().collect();
        assert_eq!(told, [limits, "ENOTTY", limits, "ENOTTY"]);
    }
    mount.stop(&cluster);
}

/// The reported alignment holds, and so does a smaller one.
fn concurrent_parts_of_pages_are_all_written(fuse: &'static str) {
    for options in [&[][..], &["--direct-io"]] {
        let Some((cluster, mount)) = mount_with(fuse, options) else {
            return;
        };
        let path = mount.path("file");
        for (seed, unit) in [("1", "512"), ("2", "1")] {
            for is_direct in [false, true] {
                eprintln!("parts of {unit} bytes, {options:?}, exec {is_direct}");
                let args = [path.to_str().unwrap(), unit, ROUNDS, seed];
                python(is_direct, WRITE_PARTS, &args);
            }
        }
        mount.stop(&cluster);
    }
}
