//! Programs that do not know the library, and the files that they leave.

use crate::support;
use std::process::Command;
use support::{Counts, TestDirs};

/// A script has the same effects with and without the library.
fn check(script: &str) -> Counts {
    let stage = TestDirs::new();
    let make = || {
        let mut command = Command::new("bash");
        command.args(["-euc", script]);
        command
    };
    stage.compare_with_kernel(make, &[])
}

#[test]
fn shells_redirect() {
    let counts = check(
        "exec 5<>shell; echo one >&5; (echo two >&5); echo three >&5; cat shell
         { echo a; cat shell; echo b; } >both 2>&1; echo more >>both
         while read -r line; do echo \"read $line\"; done <both >lines
         exec 1>out; echo to the file; exec 2>&1; ls nothing || true; printf '%s' end",
    );
    assert!(counts.opens > 3 && counts.reads > 0, "{counts:?}");
}

#[test]
fn files_are_copied_and_changed() {
    let counts = check(
        "seq 100000 >numbers; cp numbers copy; cat numbers >cat; cmp numbers cat
         dd if=numbers of=blocks bs=1000 count=100 conv=fsync status=none
         dd if=numbers of=blocks bs=4096 seek=2 skip=1 count=9 conv=notrunc status=none
         dd if=/dev/zero of=blocks bs=7 count=3 oflag=append conv=notrunc status=none
         sort -rn numbers -o numbers; head -c 5000 numbers >head; tail -c 5000 numbers >tail
         sed -i s/9/nine/ head; tar cf archive.tar --mtime=@0 --owner=0 head tail
         mkdir there; tar xf archive.tar -C there; cmp head there/head; truncate -s 10 tail
         gzip -n copy; gunzip -c copy.gz | cmp - cat; split -b 100000 cat part; rm archive.tar",
    );
    assert!(counts.writes > 100 && counts.reads > 20, "{counts:?}");
}

#[test]
fn sqlite_results_are_the_same_as_by_kernel() {
    let counts = check(
        "sqlite3 base 'create table t(a integer primary key, b); begin;
           insert into t select value, hex(value * 7) from generate_series(1, 20000); commit;
           create index i on t(b); update t set b = b || a where a % 3 = 0;
           delete from t where a % 5 = 0; vacuum; pragma integrity_check;
           select count(*), sum(a), max(b) from t;'
         sqlite3 logged 'pragma journal_mode = wal; create table t(a);
           insert into t select value from generate_series(1, 5000);
           pragma wal_checkpoint; select sum(a) from t;'",
    );
    assert!(counts.writes > 100 && counts.syncs > 3, "{counts:?}");
}

#[test]
fn python_results_are_the_same_as_by_kernel() {
    let counts = check(
        "python3 - <<'END'
import mmap, os, subprocess, threading
with open('file', 'w+b', buffering=0) as f:
    f.write(b'hello ' * 1000)
    os.pwrite(f.fileno(), b'HELLO', 6)
    f.seek(3)
    print(f.read(20), os.pread(f.fileno(), 10, 5995), f.tell())
    subprocess.run(['sh', '-c', 'echo from a child'], stdout=f, check=True)
    f.write(b'and from the parent')
    print(f.tell(), os.preadv(f.fileno(), [bytearray(5), bytearray(9)], 3))
def work(name):
    with open(name, 'wb', buffering=0) as f:
        for i in range(1000):
            f.write(b'%d\\n' % i)
        os.fsync(f.fileno())
threads = [threading.Thread(target=work, args=('thread%d' % i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(sum(os.path.getsize('thread%d' % i) for i in range(4)))
child = os.fork()
if child == 0:
    with open('child', 'wb', buffering=0) as f:
        f.write(b'written in a child')
    os._exit(0)
os.waitpid(child, 0)
print(open('child').read())
END",
    );
    assert!(counts.writes > 4000 && counts.forks > 0, "{counts:?}");
}
