//! Signals of programs on the direct path. The mapped pools need two signals.

/// Handles one signal and ignores the other, and the other way round, before and after the first
/// write past the kernel. A signal with its default action ends a child.
const SIGNALS: &str = r#"
import os, signal, sys
kinds = (signal.SIGSEGV, signal.SIGBUS)
heard = []
def write(fd):
    for page in range(50):
        os.pwrite(fd, b'x' * 4096, 4096 * page)
def send(handled):
    heard.clear()
    for kind in kinds:
        os.kill(os.getpid(), kind)
    assert heard == [handled], (heard, handled)
def handle(handled):
    for kind in kinds:
        signal.signal(kind, (lambda kind, _: heard.append(kind)) if kind == handled else signal.SIG_IGN)
for first in kinds:
    if os.fork() == 0:
        handle(first)
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        send(first)
        write(fd)
        maps = open('/proc/self/maps').read()
        assert '.pool' in maps
        send(first)
        for second in kinds:
            handle(second)
            write(fd)
            send(second)
        for kind in kinds:
            signal.signal(kind, signal.SIG_DFL)
            if os.fork() == 0:
                os.kill(os.getpid(), kind)
                os._exit(0)
            assert os.wait()[1] & 127 == kind
        write(fd)
        signal.signal(first, signal.SIG_DFL)
        os.kill(os.getpid(), first)
        os._exit(0)
    assert os.wait()[1] & 127 == first
"#;

#[test]
fn signals_to_direct_client_reach_program() {
    super::run_python(SIGNALS);
}

/// Maps an empty file over the pools, so that accesses raise SIGBUS as on a failing medium, and
/// reads.
const FAILS: &str = r#"
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for page in range(50):
    os.pwrite(fd, bytes([page]) * 4096, 4096 * page)
nothing = os.memfd_create('nothing')
cut = 0
for line in open('/proc/self/maps'):
    if '.pool' in line:
        first, last = (int(end, 16) for end in line.split()[0].split('-'))
        most = (last - first) // 65536 * 4096 * 15
        how = mmap.MAP_SHARED | 0x10
        found = libc.mmap(last - most, most, mmap.PROT_READ | mmap.PROT_WRITE, how, nothing, 0)
        assert found == last - most, ctypes.get_errno()
        cut += 1
assert cut == 2, cut
for page in range(50):
    assert os.pread(fd, 4096, 4096 * page) == bytes([page]) * 4096, page
print('went on')
"#;

/// After a pool error the client continues through the kernel.
#[test]
fn client_continues_through_kernel_on_pool_error() {
    if let Some(said) = super::run_python(FAILS) {
        assert_eq!(said, "went on\n");
    }
}
