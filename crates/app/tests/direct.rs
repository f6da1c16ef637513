//! The direct path: processes that access the files of a mount without the kernel, next to
//! processes that go through the kernel. Needs root and /dev/fuse.

mod cached;
mod cancelled;
mod client_rows;
mod confinement;
mod descriptors;
mod device_reuse;
mod doors;
mod exec;
mod file_end;
mod inotify_watchers;
mod many_processes;
mod mmap_exclusion;
mod namespaces;
mod page_pairs;
mod partial_writes;
mod patience;
mod report;
mod signals;
mod stacks;
mod stall_bounds;
mod stopped;
mod thread_exit;
mod two_mounts;
mod uncaught_writers;

use crate::support;
use pagemesh_direct::client::{DirectClient, DirectFile as Direct};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use support::mounted::{self, TestMount, open_as_library, preload_library};
use support::random::Random;
use support::{Cluster, program, until};

fn open_file(mount: &TestMount, name: &str) -> File {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true);
    open_as_library(options).open(mount.dir.join(name)).unwrap()
}

fn direct_file(guest: &'static DirectClient, file: &File) -> Direct {
    let found = file.metadata().unwrap();
    guest.open(found.dev(), found.ino(), file.as_raw_fd())
}

/// A direct client that its mounts take for a process of its own. It joins at once.
fn new_client() -> &'static DirectClient {
    Box::leak(Box::new(DirectClient::new(|run| run(), 0)))
}

/// Compiles a C program from the directory of these tests.
fn compile_c(cluster: &Cluster, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/direct/{name}.c"));
    let path = cluster.dir().join(name);
    let words = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"];
    let mut words = words.to_vec();
    words.extend(["-Wno-unused-result", "-o", path.to_str().unwrap()]);
    words.push(source.to_str().unwrap());
    program::ok("cc", &words);
    path
}

/// Compares a range of a file by the direct path and by the kernel.
fn check(direct: &Direct, file: &File, offset: u64, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    until("direct access is allowed again", || {
        direct.read(&mut bytes, offset) == Some(expected.len())
    });
    assert!(bytes == expected, "directly, at {offset}");
    bytes.fill(0);
    file.read_exact_at(&mut bytes, offset).unwrap();
    assert!(bytes == expected, "by the kernel, at {offset}");
}

#[test]
fn direct_writes_are_read_by_kernel() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "file");
    let mut random = Random::new(1);
    let mut model = vec![0; 3 << 20];
    random.fill(&mut model);
    file.write_all_at(&model, 0).unwrap();
    let direct = direct_file(new_client(), &file);
    check(&direct, &file, 0, &model[..1 << 20]);
    for round in 0..2000 {
        let len = 1 + random.below(20_000) as usize;
        let offset = random.below((model.len() - len) as u64);
        let part = &mut model[offset as usize..][..len];
        random.fill(part);
        match round % 3 {
            0 => file.write_all_at(part, offset).unwrap(),
            _ => until("direct access is allowed", || {
                direct.write(part, offset) == Some(len)
            }),
        }
        check(&direct, &file, offset, part);
    }
    // Writes that lengthen the file, by the kernel and by the direct client, across the end and at
    // it.
    let mut longer = 0;
    for round in 0..200 {
        let len = 1 + random.below(9000) as usize;
        let over = random.below(5000) * (round % 2);
        let offset = model.len() as u64 - over;
        let mut part = vec![0; len];
        random.fill(&mut part);
        match round % 7 {
            0 => file.write_all_at(&part, offset).unwrap(),
            // At the end of the granted append space the kernel must write.
            _ => match direct.write(&part, offset) {
                Some(written) => {
                    assert_eq!(written, len);
                    longer += 1;
                }
                None => file.write_all_at(&part, offset).unwrap(),
            },
        }
        let kept = model.split_off(offset as usize);
        model.extend_from_slice(&part);
        model.extend_from_slice(kept.get(len..).unwrap_or(&[]));
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64);
        let last = model.len().saturating_sub(12_000);
        check(&direct, &file, last as u64, &model[last..]);
    }
    assert!(longer > 50, "{longer} by the direct client");
    assert_eq!(direct.write(&[1], model.len() as u64 + 1), None);
    let mut bytes = [0; 100];
    for (offset, expected) in [(model.len() - 40, 40), (model.len() + 40, 0)] {
        // At times the mount holds the file exclusively, and the direct read returns `None`.
        until("direct access is allowed", || {
            let read = direct.read(&mut bytes, offset as u64);
            read.inspect(|&read| assert_eq!(read, expected)).is_some()
        });
    }
    // Shorter: the truncated bytes are gone.
    file.set_len(10_000).unwrap();
    until("direct access is allowed again", || {
        direct.read(&mut bytes, 9_950) == Some(50)
    });
    until("direct access is allowed", || {
        direct.write(&[1; 10], 9_995) == Some(10)
    });
    assert_eq!(file.metadata().unwrap().len(), 10_005);
    assert_eq!(direct.write(&[1; 10], 10_006), None);
    // Holes are read by the kernel only.
    file.set_len(50_000).unwrap();
    for _ in 0..20 {
        assert_eq!(direct.read(&mut bytes, 9_950), None);
    }
    drop((direct, file));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A record of a log: its length, its writer, its number, and bytes that derive from these.
fn record(own: u64, seq: u64) -> Vec<u8> {
    let mut random = Random::new(own << 40 | seq);
    let len = match random.below(8) {
        0 => 3000 + random.below(9000),
        _ => 24 + random.below(300),
    };
    let mut bytes = vec![0; len as usize];
    random.fill(&mut bytes);
    for (at, word) in [len, own, seq].into_iter().enumerate() {
        bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Asserts that the log holds whole records only, each once and in the order of its writer. Returns
/// the number of records per writer.
fn records(bytes: &[u8]) -> std::collections::BTreeMap<u64, u64> {
    let mut counts = std::collections::BTreeMap::new();
    let mut at = 0;
    while at < bytes.len() {
        let word = |index: usize| {
            let word = bytes.get(at + index * 8..at + index * 8 + 8);
            u64::from_le_bytes(word.expect("a record").try_into().unwrap())
        };
        let (own, seq) = (word(1), word(2));
        let expected = record(own, seq);
        let found = bytes.get(at..at + expected.len());
        assert!(
            found == Some(&expected),
            "at {at} of {}: record {seq} of {own}",
            bytes.len()
        );
        let count = counts.entry(own).or_insert(0);
        assert_eq!(seq, *count, "record of {own} at {at}");
        *count += 1;
        at += expected.len();
    }
    counts
}

/// Two direct clients and one writer through the kernel append, while other threads read.
#[test]
fn concurrent_appends_are_whole_and_written_once() {
    const RECORDS: u64 = 3000;
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "log");
    let path = mount.path("log");
    let by_guests = std::sync::atomic::AtomicU64::new(0);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers = [0, 1, 2].map(|own| {
            let (path, by_guests) = (&path, &by_guests);
            scope.spawn(move || {
                let file = open_as_library(OpenOptions::new().append(true)).open(path);
                let file = file.unwrap();
                let direct = (own < 2).then(|| direct_file(new_client(), &file));
                // Each append through the kernel takes the file from the direct clients.
                let count = if own < 2 { RECORDS } else { RECORDS / 20 };
                for seq in 0..count {
                    let bytes = record(own, seq);
                    match direct.as_ref().and_then(|direct| direct.append(&bytes)) {
                        Some(end) => {
                            assert!(file.metadata().unwrap().len() >= end);
                            by_guests.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        }
                        None => {
                            let written = std::io::Write::write(&mut &file, &bytes);
                            assert_eq!(written.unwrap(), bytes.len());
                        }
                    }
                }
            })
        });
        let (path, is_over) = (&path, &is_over);
        let reader = scope.spawn(move || {
            let file = open_as_library(OpenOptions::new().read(true))
                .open(path)
                .unwrap();
            let mut seen = 0;
            while !is_over.load(std::sync::atomic::Ordering::Acquire) {
                let len = file.metadata().unwrap().len();
                assert!(len >= seen, "{len} bytes after {seen}");
                seen = len;
                let mut bytes = vec![0; len as usize];
                file.read_exact_at(&mut bytes, 0).unwrap();
                records(&bytes);
            }
        });
        writers
            .into_iter()
            .for_each(|writer| writer.join().unwrap());
        is_over.store(true, std::sync::atomic::Ordering::Release);
        reader.join().unwrap();
    });
    let by_guests = by_guests.into_inner();
    assert!(by_guests > RECORDS / 2, "{by_guests} by direct clients");
    let counts = records(&std::fs::read(&path).unwrap());
    let counts: Vec<u64> = counts.into_values().collect();
    assert_eq!(counts, [RECORDS, RECORDS, RECORDS / 20]);
    drop(file);
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    records(&std::fs::read(mount.path("log")).unwrap());
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// An appending program finds its offset after its own bytes, and sees the length of the file.
#[test]
fn file_offset_follows_appends() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let script = "
import os
fd = os.open('log', os.O_RDWR | os.O_CREAT | os.O_APPEND)
other = os.open('log', os.O_RDWR)
end = 0
for i in range(3000):
    data = bytes([i % 251]) * (1 + i * 37 % 500)
    if i % 9 == 8:
        assert os.pwrite(other, data, end) == len(data)
        assert os.lseek(other, 0, os.SEEK_END) == end + len(data)
    elif i % 9 == 7:
        assert os.writev(fd, [data[:10], data[10:]]) == len(data)
    else:
        assert os.write(fd, data) == len(data)
    end += len(data)
    if i % 9 != 8:
        assert os.lseek(fd, 0, os.SEEK_CUR) == end, (i, os.lseek(fd, 0, os.SEEK_CUR), end)
    assert os.fstat(fd).st_size == end
    assert os.pread(fd, 1000, end - len(data)) == data
    if i % 100 == 50:
        os.lseek(fd, 0, os.SEEK_SET)
        assert os.read(fd, 1) == b'\\0'
    if i % 700 == 650:
        end -= 1000
        os.ftruncate(fd, end)
";
    let dir = mount.dir.display();
    let script = format!("cd {dir} && python3 -c \"{script}\"");
    run_script(&script);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A growing log is truncated: no truncated byte returns, and no byte appears at a wrong offset.
#[test]
fn growing_file_is_truncated() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "log");
    let direct = direct_file(new_client(), &file);
    let mut random = Random::new(5);
    let mut model: Vec<u8> = Vec::new();
    let mut by_guest = 0;
    for round in 0..300 {
        for _ in 0..1 + random.below(8) {
            let mut part = vec![0; 1 + random.below(5000) as usize];
            random.fill(&mut part);
            model.extend_from_slice(&part);
            // At the end of the granted append space the kernel must write.
            match direct.append(&part) {
                Some(end) => {
                    assert_eq!(end, model.len() as u64);
                    by_guest += 1;
                }
                None => file
                    .write_all_at(&part, (model.len() - part.len()) as u64)
                    .unwrap(),
            }
        }
        match round % 4 {
            0 => model.truncate(random.below(model.len() as u64 + 1) as usize),
            1 => model.resize(model.len() + random.below(9000) as usize, 0),
            _ => {}
        }
        if round % 4 < 2 {
            file.set_len(model.len() as u64).unwrap();
            // Holes are read by the kernel only, until they are filled.
            file.write_all_at(&model, 0).unwrap();
        }
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64);
        let mut bytes = vec![0; model.len()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == model, "round {round}");
        assert_eq!(file.read_at(&mut [0; 9000], model.len() as u64).unwrap(), 0);
        if model.len() > 1 << 20 {
            model.clear();
            file.set_len(0).unwrap();
        }
    }
    assert!(by_guest > 100, "{by_guest} by the direct client");
    drop((direct, file));
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    assert!(std::fs::read(mount.path("log")).unwrap() == model);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn mtime_of_direct_write_is_visible() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "file");
    file.write_all_at(&[1; 8192], 0).unwrap();
    let old = file.metadata().unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    let direct = direct_file(new_client(), &file);
    until("direct access is allowed", || {
        direct.write(&[2; 4096], 0).is_some()
    });
    until("the time is reported", || {
        let now = file.metadata().unwrap();
        (now.mtime(), now.mtime_nsec()) > (old.mtime(), old.mtime_nsec())
    });
    drop((direct, file));
    mount.stop(&cluster);
}

#[test]
fn mtime_of_direct_write_survives_unmount() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "file");
    file.write_all_at(&[1; 8192], 0).unwrap();
    let old = file.metadata().unwrap();
    let guest = new_client();
    let direct = direct_file(guest, &file);
    until("direct access is allowed", || {
        direct.write(&[2; 4096], 0).is_some()
    });
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    direct.write(&[3; 4096], 0).expect("a direct write");
    drop((direct, file));
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let new = std::fs::metadata(mount.dir.join("file")).unwrap();
    assert!((new.mtime(), new.mtime_nsec()) >= (old.mtime(), old.mtime_nsec()));
    mount.stop(&cluster);
}

#[test]
fn brick_dies_and_returns_under_direct_client() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let file = open_file(&mount, "file");
    file.write_all_at(&[0; 1 << 20], 0).unwrap();
    let direct = direct_file(new_client(), &file);
    let mut random = Random::new(3);
    let mut model = vec![0; 1 << 20];
    let mut by_guest = 0;
    let mut write = |by_guest: &mut u32| {
        let offset = random.below(255) * 4096;
        let part = &mut model[offset as usize..][..4096];
        random.fill(part);
        match direct.write(part, offset) {
            Some(len) => {
                assert_eq!(len, 4096);
                *by_guest += 1;
            }
            None => file.write_all_at(part, offset).unwrap(),
        }
    };
    until("900 writes are direct", || {
        (0..100).for_each(|_| write(&mut by_guest));
        by_guest > 900
    });
    cluster.kill_brick(1);
    for _ in 0..1000 {
        write(&mut by_guest);
    }
    cluster.restart_brick(1);
    let alone = by_guest;
    until("direct access is allowed with both copies", || {
        write(&mut by_guest);
        let shown = cluster.json(&["volume", "show", "files"]).to_string();
        by_guest > alone && !shown.contains("stale") && !shown.contains("syncing")
    });
    let healthy = by_guest;
    until("direct access is allowed with both copies", || {
        write(&mut by_guest);
        by_guest > healthy
    });
    for _ in 0..1000 {
        write(&mut by_guest);
    }
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == model);
    drop((direct, file));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Runs a Python script on the direct path, with the paths of a file on a mount and of a file
/// outside it. Asserts that the copies are identical afterwards. Returns the output, or `None` if
/// this user cannot mount.
fn run_python(script: &str) -> Option<String> {
    let cluster = mounted::cluster(&[256, 256], "64M")?;
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let mut command = mounted::direct_command(&["python3", "-c", script]);
    let paths = [mount.path("file"), cluster.dir().join("beside")];
    let ended = command.args(paths).output().unwrap();
    let said = program::succeeded("a script of python on the direct path", ended);
    mount.stop(&cluster);
    cluster.check_identical("files");
    Some(said)
}

/// Runs a shell script on the direct path to its end.
fn run_script(script: &str) {
    let ended = mounted::direct_command(&["bash", "-c", script])
        .output()
        .unwrap();
    program::succeeded("a script on the direct path", ended);
}

/// Common programs do the same under `pagemesh exec` as without it.
#[test]
fn programs_read_back_direct_writes() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let script = "set -euo pipefail
        head -c 3000000 /dev/urandom > a; cp a b; cmp a b
        for i in $(seq 40); do
          head -c 12288 /dev/urandom > part
          for f in a b; do dd if=part of=$f bs=4096 seek=$((i * 13)) conv=notrunc status=none; done
          dd if=a bs=4096 skip=$((i * 13)) count=3 status=none | cmp - part
        done
        cmp a b
        perl -e 'sysopen(F, \"part\", 2) or die; for (1..50) { sysseek(F, 0, 0); sysread(F, $x, 4096); }
          $> = 65534; sysseek(F, 0, 0); die if sysread(F, $x, 4096) != 4096 or $> != 65534'
        sqlite3 db 'pragma journal_mode=wal; create table t(a integer primary key, b blob);'
        for i in 1 2 3; do sqlite3 -cmd '.timeout 20000' db \"pragma synchronous=full; \
          with recursive n(x) as (select 1 union all select x+1 from n where x<400) \
          insert into t(b) select randomblob(200) from n;\" & done; wait
        test $(sqlite3 db 'select count(*) from t') = 1200
        sqlite3 db 'update t set b=randomblob(300) where a % 3 = 0'
        test $(sqlite3 db 'pragma integrity_check') = ok
        export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
        git init -q repo; cd repo; git config user.email a@b; git config user.name a
        for i in $(seq 30); do seq $i $((i * 90)) > f$((i % 7)); git add -A; git commit -qm c$i; done
        git gc -q; git fsck --strict; test $(git log --oneline | wc -l) = 30
        test -z \"$(git status --porcelain)\"";
    let script = format!("cd {}\n{script}", mount.dir.display());
    let library = preload_library();
    let library = library.to_str().unwrap();
    run_script(&script);
    let told = cluster.ok(&["exec", "--library", library, "--", "bash", "-c", "exit 0"]);
    assert_eq!(told, "");
    // A shell that does not find a program has the same exit code and message.
    let missing = cluster.run(&["exec", "--library", library, "--", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no-such-program"));
    cluster.refused(
        &["exec", "--library", "/nowhere", "--", "true"],
        &["--library"],
    );
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    mount.sh(
        "cmp a b; test $(sqlite3 db 'pragma integrity_check') = ok; cd repo; git fsck --strict",
    );
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Pages of the file that all writers overwrite.
const PAGES: u64 = 64;
const PAGE: usize = 4096;
/// Number of kills of a campaign, set by `make direct-clients ROUNDS=1000`.
const ROUNDS_ENV: &str = "PAGEMESH_TEST_ROUNDS";
/// The job of a child of the test, and its paths.
const CHILD_JOB_ENV: &str = "PAGEMESH_TEST_GUEST";

/// A page in which each 8 bytes hold the same word: the page number and the write number.
fn filled(page: u64, seq: u64) -> Vec<u8> {
    let word = (page << 48 | seq).to_le_bytes();
    word.repeat(PAGE / 8)
}

/// The number of the write that a page holds. Panics if the page is torn.
fn seq_of(page: u64, bytes: &[u8]) -> u64 {
    let word = |at: usize| u64::from_le_bytes(bytes[at * 8..][..8].try_into().unwrap());
    let first = word(0);
    let torn = (1..PAGE / 8).find(|&at| word(at) != first);
    assert!(torn.is_none(), "page {page} is torn at word {torn:?}");
    assert!(
        first == 0 || first >> 48 == page,
        "page {page} is another's"
    );
    first & ((1 << 48) - 1)
}

/// The last acknowledged write of each page, in a file that all children share.
struct AcknowledgedWrites(File);

impl AcknowledgedWrites {
    fn get(&self, page: u64) -> u64 {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, page * 8).unwrap();
        u64::from_le_bytes(word)
    }

    fn set(&self, page: u64, seq: u64) {
        self.0.write_all_at(&seq.to_le_bytes(), page * 8).unwrap();
    }

    fn sum(&self) -> u64 {
        (0..PAGES).map(|page| self.get(page)).sum()
    }
}

/// One of several writers: each overwrites every third page as fast as it can.
fn write_pages(file: &File, acknowledged: &AcknowledgedWrites, own: u64) {
    let mut random = Random::new(own + std::process::id() as u64);
    let mut bytes = vec![0; PAGE];
    let mut seqs = [0; PAGES as usize];
    for page in (own..PAGES).step_by(3) {
        // A killed writer may have written a page without acknowledging it.
        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        seqs[page as usize] = seq_of(page, &bytes);
        assert!(
            seqs[page as usize] >= acknowledged.get(page),
            "page {page} is lost"
        );
    }
    loop {
        let page = own + random.below((PAGES - own).div_ceil(3)) * 3;
        let seq = seqs[page as usize] + 1;
        file.write_all_at(&filled(page, seq), page * PAGE as u64)
            .unwrap();
        acknowledged.set(page, seq);
        seqs[page as usize] = seq;
    }
}

/// Reads pages that other processes write: no acknowledged write is missing, and no page goes back
/// to an older write.
fn watch_pages(file: &File, acknowledged: &AcknowledgedWrites) {
    let mut random = Random::new(std::process::id().into());
    let mut bytes = vec![0; PAGE];
    let mut seen = [0; PAGES as usize];
    loop {
        let page = random.below(PAGES);
        let least = acknowledged.get(page).max(seen[page as usize]);
        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        let seq = seq_of(page, &bytes);
        assert!(seq >= least, "page {page}: {seq} after {least}");
        seen[page as usize] = seq;
    }
}

/// Writes between two syncs of the `count` child.
const SYNC_EVERY: u64 = 97;

/// Writes the pages in turn and syncs after every `SYNC_EVERY` writes. Acknowledges the last write,
/// and the last write before a sync.
fn write_and_sync(file: &File, acknowledged: &AcknowledgedWrites) {
    for seq in acknowledged.get(0) + 1.. {
        let page = seq % PAGES;
        file.write_all_at(&filled(page, seq), page * PAGE as u64)
            .unwrap();
        acknowledged.set(0, seq);
        if seq % SYNC_EVERY == 0 {
            file.sync_data().unwrap();
            acknowledged.set(1, seq);
        }
    }
}

/// One of several writers that append to a log.
fn append_records(path: &str, acknowledged: &AcknowledgedWrites, own: u64) {
    let file = open_as_library(OpenOptions::new().append(true)).open(path);
    let mut file = file.unwrap();
    for seq in 0.. {
        let bytes = record(own, seq);
        let written = std::io::Write::write(&mut file, &bytes).unwrap();
        assert_eq!(written, bytes.len());
        acknowledged.set(own, seq + 1);
    }
}

/// Not a test: the entry point of the children of the following tests.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD_JOB_ENV) else {
        return;
    };
    let [what, path, acknowledged] = job.split(',').collect::<Vec<_>>()[..] else {
        panic!("{job}");
    };
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let acknowledged = AcknowledgedWrites(options.open(acknowledged).unwrap());
    if let Some(own) = what.strip_prefix("append ") {
        return append_records(path, &acknowledged, own.parse().unwrap());
    }
    let file = open_as_library(&mut options).open(path).unwrap();
    let way = std::env::var_os("LD_PRELOAD").map_or("by the kernel", |_| "directly");
    eprintln!("{what}, {way}: process {}", std::process::id());
    if let Some(own) = what.strip_prefix("pairs") {
        return page_pairs::write_pairs(&file, &acknowledged, own.parse().unwrap());
    }
    match what.parse() {
        Ok(own) => write_pages(&file, &acknowledged, own),
        Err(_) if what == "count" => write_and_sync(&file, &acknowledged),
        Err(_) => watch_pages(&file, &acknowledged),
    }
}

struct ChildGuard(std::process::Child);

impl ChildGuard {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a child, either through the kernel only or on the direct path.
fn run_child(
    cluster: &support::Cluster,
    mount: &TestMount,
    what: &str,
    is_direct: bool,
) -> ChildGuard {
    let own = std::env::current_exe().unwrap();
    let own = own.to_str().unwrap();
    let run = ["--exact", "direct::child", "--nocapture"];
    let mut command = match is_direct {
        false => std::process::Command::new(own),
        true => {
            // `pagemesh exec` becomes the child, so a kill of the command kills the child.
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pagemesh"));
            command.args(mounted::exec_args()).arg(own);
            command
        }
    };
    let acknowledged = acknowledged_path(cluster);
    let job = format!(
        "{what},{},{}",
        mount.path("file").display(),
        acknowledged.display()
    );
    command.args(run).env(CHILD_JOB_ENV, job);
    ChildGuard(command.spawn().unwrap())
}

fn acknowledged_path(cluster: &support::Cluster) -> std::path::PathBuf {
    cluster.dir().join("acknowledged")
}

/// The number of kills of direct clients.
fn rounds(few: u32) -> u32 {
    let rounds = std::env::var(ROUNDS_ENV).ok();
    rounds.map_or(few, |rounds| rounds.parse().unwrap())
}

/// Makes the file that all writers overwrite, and the file of the acknowledged writes.
fn prepare_files(cluster: &support::Cluster, mount: &TestMount) -> (File, AcknowledgedWrites) {
    let file = open_file(mount, "file");
    file.write_all_at(&vec![0; PAGES as usize * PAGE], 0)
        .unwrap();
    let acknowledged = File::create_new(acknowledged_path(cluster)).unwrap();
    acknowledged.set_len(PAGES * 8).unwrap();
    drop(acknowledged);
    let open = OpenOptions::new()
        .read(true)
        .open(acknowledged_path(cluster));
    (file, AcknowledgedWrites(open.unwrap()))
}

/// Runs writers and readers, some through the kernel, and meanwhile kills and stops writers.
fn write_and_kill(
    cluster: &support::Cluster,
    mount: &TestMount,
    acknowledged: &AcknowledgedWrites,
    rounds: u32,
) {
    let start = |what: &str, is_direct| run_child(cluster, mount, what, is_direct);
    let mut readers = [start("watch", true), start("watch", false)];
    let kernel = start("2", false);
    let mut writers = [start("0", true), start("1", true), kernel];
    let mut random = Random::new(7);
    for round in 0..rounds {
        let before = acknowledged.sum();
        let more = 50 + random.below(500);
        until("more is written", || acknowledged.sum() >= before + more);
        // The writer through the kernel is killed at times, and these kills do not count.
        if round % 8 == 7 {
            writers[2].kill();
            writers[2] = start("2", false);
        }
        let victim = random.below(2) as usize;
        if round % 4 == 3 {
            let pid = rustix::process::Pid::from_child(&writers[victim].0);
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            let before = acknowledged.sum();
            until("the others go on", || acknowledged.sum() > before + 20);
            // The brick may have killed a writer that was stopped in an operation.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
        }
        writers[victim].kill();
        writers[victim] = start(&victim.to_string(), true);
        for reader in &mut readers {
            assert!(
                reader.0.try_wait().unwrap().is_none(),
                "a reader found a fault"
            );
        }
        // A writer that has ended by itself has found a lost write.
        for writer in &mut writers {
            assert!(
                writer.0.try_wait().unwrap().is_none(),
                "a writer found a fault"
            );
        }
    }
}

/// The number of the write that each page holds. Asserts that no acknowledged write is missing.
fn check_pages(file: &File, acknowledged: &AcknowledgedWrites) -> Vec<u64> {
    let mut bytes = vec![0; PAGE];
    let mut seqs = vec![];
    for page in 0..PAGES {
        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        let seq = seq_of(page, &bytes);
        assert!(seq >= acknowledged.get(page), "page {page}");
        seqs.push(seq);
    }
    seqs
}

#[test]
fn direct_clients_are_killed_while_others_write() {
    let Some(mut cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let (file, acknowledged) = prepare_files(&cluster, &mount);
    write_and_kill(&cluster, &mount, &acknowledged, rounds(25));
    check_pages(&file, &acknowledged);
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
    for brick in 0..2 {
        cluster.stop_brick(brick);
        let pool = cluster.pool(brick).to_str().unwrap().to_owned();
        cluster.ok(&["pool", "check", &pool]);
    }
}

/// Writes of a direct client stay on the direct path with an asynchronous replica, and reach it.
#[test]
fn async_replica_receives_direct_writes() {
    let Some((mut cluster, mount)) = mounted::mount_with_async_replica() else {
        return;
    };
    let file = open_file(&mount, "file");
    let mut random = Random::new(11);
    let mut model = vec![0; 1 << 20];
    random.fill(&mut model);
    file.write_all_at(&model, 0).unwrap();
    let direct = direct_file(new_client(), &file);
    check(&direct, &file, 0, &model);
    assert!(!direct.is_durable(), "the copy has to be waited for");
    let mut by_guest = 0;
    for round in 0..1500 {
        let len = match round % 4 {
            0 => 1 + random.below(40_000) as usize,
            1 => 1 + random.below(5000) as usize,
            _ => PAGE,
        };
        let offset = match round % 2 {
            0 => random.below((model.len() - len) as u64),
            _ => random.below(((model.len() - len) / PAGE) as u64) * PAGE as u64,
        };
        let part = &mut model[offset as usize..][..len];
        random.fill(part);
        let is_direct = round % 5 != 0 && direct.write(part, offset) == Some(len);
        if !is_direct {
            file.write_all_at(part, offset).unwrap();
        }
        by_guest += u32::from(is_direct);
        if round % 100 == 0 {
            check(&direct, &file, offset, part);
        }
    }
    assert!(by_guest > 800, "{by_guest}");
    // The sync waits for the asynchronous replica.
    file.sync_data().unwrap();
    drop((direct, file));
    let mount = mounted::promote_async_replica(&mut cluster, mount);
    let mut bytes = vec![0; model.len()];
    open_file(&mount, "file")
        .read_exact_at(&mut bytes, 0)
        .unwrap();
    mounted::check_async_replica(&bytes, &model);
    mount.stop(&cluster);
}

/// After the program and its machine have died, the asynchronous replica holds a prefix of the
/// program's writes. The prefix includes all writes before its last sync.
#[test]
fn async_replica_holds_prefix_of_direct_writes() {
    let Some((mut cluster, mount)) = mounted::mount_with_async_replica() else {
        return;
    };
    let (file, acknowledged) = prepare_files(&cluster, &mount);
    drop(file);
    let mut counter = run_child(&cluster, &mount, "count", true);
    until("much is written and synced", || {
        assert!(counter.0.try_wait().unwrap().is_none(), "it found a fault");
        acknowledged.get(1) > 3000
    });
    cluster.brick(2).stop_all_threads();
    until("all is written up to a sync", || {
        acknowledged.get(0) == acknowledged.get(1) + SYNC_EVERY
    });
    // A process that waits for the kernel ends only when the mount does, so the kill does not wait.
    counter.0.kill().unwrap();
    mount.daemon.as_ref().unwrap().signal("KILL");
    counter.0.wait().unwrap();
    let (last, synced) = (acknowledged.get(0), acknowledged.get(1));
    cluster.brick(2).signal("CONT");
    let mount = mounted::promote_async_replica(&mut cluster, mount);
    let file = open_file(&mount, "file");
    let mut bytes = vec![0; PAGE];
    let seqs: Vec<u64> = (0..PAGES)
        .map(|page| {
            file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
            seq_of(page, &bytes)
        })
        .collect();
    let newest = seqs.iter().copied().max().unwrap();
    println!("synced {synced}, there {newest}, acknowledged {last}");
    assert!((synced..=last + 1).contains(&newest), "{newest}");
    for (page, &seq) in seqs.iter().enumerate() {
        let expected = (0..=newest)
            .rev()
            .take(PAGES as usize)
            .find(|seq| seq % PAGES == page as u64);
        assert_eq!(Some(seq), expected, "page {page} of {newest}");
    }
    drop(file);
    mount.stop(&cluster);
}

/// Direct clients are killed, then their mount. A new mount resyncs the asynchronous replica, which
/// holds the same pages at the end.
#[test]
fn direct_clients_are_killed_with_async_replica() {
    let Some((mut cluster, mut mount)) = mounted::mount_with_async_replica() else {
        return;
    };
    let (file, acknowledged) = prepare_files(&cluster, &mount);
    write_and_kill(&cluster, &mount, &acknowledged, rounds(12));
    check_pages(&file, &acknowledged);
    drop(file);
    let mut writers = [
        run_child(&cluster, &mount, "0", true),
        run_child(&cluster, &mount, "1", true),
    ];
    let before = acknowledged.sum();
    until("more is written", || acknowledged.sum() > before + 2000);
    mount.daemon.take().unwrap().kill();
    for writer in &mut writers {
        let _ = writer.0.kill();
        writer.0.wait().unwrap();
    }
    mount.remount(&cluster, "files", "auto");
    mounted::await_async_replica(&cluster);
    let file = open_file(&mount, "file");
    check_pages(&file, &acknowledged);
    write_and_kill(&cluster, &mount, &acknowledged, rounds(4));
    let seqs = check_pages(&file, &acknowledged);
    file.sync_data().unwrap();
    drop(file);
    let shown = cluster.json(&["volume", "show", "files"]).to_string();
    assert!(shown.contains(r#""state":"following""#), "{shown}");
    let mount = mounted::promote_async_replica(&mut cluster, mount);
    let file = open_file(&mount, "file");
    assert_eq!(check_pages(&file, &acknowledged), seqs);
    drop(file);
    mount.stop(&cluster);
}

/// Appending direct clients are killed, some are stopped, and finally all are killed.
#[test]
fn appends_of_killed_direct_clients_are_kept() {
    const CHILDREN: u64 = 40;
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mut mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    File::create_new(mount.path("file")).unwrap();
    let acknowledged = File::create_new(acknowledged_path(&cluster)).unwrap();
    acknowledged.set_len(CHILDREN * 8).unwrap();
    drop(acknowledged);
    let open = OpenOptions::new()
        .read(true)
        .open(acknowledged_path(&cluster));
    let acknowledged = AcknowledgedWrites(open.unwrap());
    let sum = || (0..CHILDREN).map(|own| acknowledged.get(own)).sum::<u64>();
    let start_one = |mount: &TestMount, own: u64| {
        run_child(&cluster, mount, &format!("append {own}"), own % 4 < 3)
    };
    let check = |mount: &TestMount| {
        let counts = records(&std::fs::read(mount.path("file")).unwrap());
        for own in 0..CHILDREN {
            let (there, told) = (
                counts.get(&own).copied().unwrap_or(0),
                acknowledged.get(own),
            );
            assert!(
                (told..=told + 1).contains(&there),
                "{there} of {own}, {told} acknowledged"
            );
        }
    };
    let mut random = Random::new(11);
    let (mut own, mut own_seq) = (0, 0);
    for life in 0..4 {
        let mut writers: Vec<ChildGuard> = Vec::new();
        while writers.len() < 3 {
            writers.push(start_one(&mount, own));
            own += 1;
        }
        for round in 0..6 {
            let (before, more) = (sum(), 50 + random.below(500));
            until("more is written", || sum() >= before + more);
            let victim = random.below(3) as usize;
            if round == 4 {
                let pid = rustix::process::Pid::from_child(&writers[victim].0);
                rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
                let before = sum();
                until("the others go on", || sum() > before + 20);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
            }
            writers[victim].0.kill().unwrap();
            writers[victim].0.wait().unwrap();
            writers[victim] = start_one(&mount, own);
            own += 1;
            for writer in &mut writers {
                assert!(writer.0.try_wait().unwrap().is_none(), "a fault was found");
            }
        }
        let (before, more) = (sum(), 300);
        until("more is written", || sum() >= before + more);
        if life % 2 == 0 {
            // The mount dies first, while direct clients still run.
            mount.daemon.take().unwrap().kill();
        }
        drop(writers);
        if life % 2 == 0 {
            mount.remount(&cluster, "files", "map");
        }
        check(&mount);
        // A dead direct client does not block the direct path for others.
        let file = open_as_library(OpenOptions::new().append(true)).open(mount.path("file"));
        let (file, guest) = (file.unwrap(), new_client());
        let direct = direct_file(guest, &file);
        until("direct clients append again", || {
            let bytes = record(CHILDREN, own_seq);
            own_seq += 1;
            let appended = direct.append(&bytes).is_some();
            if !appended {
                let written = std::io::Write::write(&mut &file, &bytes).unwrap();
                assert_eq!(written, bytes.len());
            }
            appended
        });
    }
    mount.stop(&cluster);
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    check(&mount);
    mount.stop(&cluster);
    cluster.check_identical("files");
}
