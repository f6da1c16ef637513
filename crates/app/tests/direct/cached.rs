//! A file that a program has open without the library goes through the kernel's page cache. No
//! direct client accesses it meanwhile.

use super::support::mounted::{self, TestMount, open_as_library};
use super::support::{Cluster, until};
use super::{Direct, Random, direct_file, new_client, open_file};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PAGE: usize = 4096;
const MAPPED_BYTES: usize = 4 << 20;

/// A direct client, and its descriptor for operations through the kernel.
struct DirectTestFile {
    file: File,
    direct: Direct,
}

impl DirectTestFile {
    fn new(mount: &TestMount, name: &str) -> DirectTestFile {
        let file = open_file(mount, name);
        let direct = direct_file(new_client(), &file);
        DirectTestFile { file, direct }
    }

    /// Writes as a program under `pagemesh exec` does. Returns whether the write went directly.
    fn write(&self, bytes: &[u8], offset: u64) -> bool {
        let is_direct = self.direct.write(bytes, offset).is_some();
        if !is_direct {
            self.file.write_all_at(bytes, offset).unwrap();
        }
        is_direct
    }

    fn write_directly(&self, bytes: &[u8], offset: u64) {
        until("the file is on the direct path", || {
            self.write(bytes, offset)
        });
    }
}

fn start_mount() -> Option<(Cluster, TestMount)> {
    let cluster = mounted::cluster(&[64, 64], "24M")?;
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    Some((cluster, mount))
}

#[test]
fn cached_open_keeps_direct_clients_out_until_closed() {
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    let client = DirectTestFile::new(&mount, "file");
    client.write_directly(&[1; 2 * PAGE], 0);
    let read = |cached: &File| {
        let mut bytes = [0; 2 * PAGE];
        cached.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    for round in 2..30 {
        let cached = File::open(mount.path("file")).unwrap();
        assert_eq!(read(&cached), [round - 1; 2 * PAGE]);
        for _ in 0..8 {
            assert!(!client.write(&[round; PAGE], 0), "past the page cache");
        }
        assert_eq!(read(&cached)[..PAGE], [round; PAGE]);
        // A second open changes nothing, and neither does its close.
        drop(File::open(mount.path("file")).unwrap());
        assert!(!client.write(&[round; 2 * PAGE], 0), "past the page cache");
        assert_eq!(read(&cached), [round; 2 * PAGE]);
        drop(cached);
        client.write_directly(&[round; 2 * PAGE], 0);
    }
    drop(client);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A mapping of a file, also beyond its end.
struct Mapping(*mut u8);

impl Mapping {
    fn of(file: &File) -> Mapping {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        // SAFETY: new memory, which is read by system calls alone.
        let at = unsafe {
            mmap(
                ptr::null_mut(),
                MAPPED_BYTES,
                ProtFlags::READ,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        };
        Mapping(at.unwrap().cast())
    }

    /// The bytes that a load returns, or `None` for `SIGBUS`.
    fn load(&self, offset: usize, len: usize) -> Option<Vec<u8>> {
        assert!(offset + len <= MAPPED_BYTES, "within the mapping");
        let memory = File::open("/proc/self/mem").unwrap();
        let mut bytes = vec![0; len];
        let at = self.0 as u64 + offset as u64;
        memory.read_exact_at(&mut bytes, at).ok().map(|()| bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to it.
        unsafe { rustix::mm::munmap(self.0.cast(), MAPPED_BYTES) }.unwrap();
    }
}

#[test]
fn mapped_reader_sees_appends_of_direct_clients() {
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    let client = DirectTestFile::new(&mount, "file");
    let mut random = Random::new(3);
    let mut model = vec![0; 3 * PAGE];
    random.fill(&mut model);
    client.write_directly(&model, 0);
    let mut direct = 0;
    for round in 0..60 {
        // Direct appends make the file longer before the reader opens it; the kernel has not heard
        // of them.
        for _ in 0..6 {
            let len = match random.below(3) {
                0 => PAGE - model.len() % PAGE,
                _ => 1 + random.below(3000) as usize,
            };
            let mut more = vec![0; len];
            random.fill(&mut more);
            direct += u64::from(client.write(&more, model.len() as u64));
            model.extend(more);
        }
        let cached = File::open(mount.path("file")).unwrap();
        let mapping = Mapping::of(&cached);
        let tail = model.len() - 2 * PAGE;
        let check = |model: &[u8]| {
            let found = mapping.load(tail, model.len() - tail);
            assert!(found.as_deref() == Some(&model[tail..]), "round {round}");
        };
        // In every second round the pages are cached before the file grows.
        if round % 2 == 0 {
            check(&model);
        }
        for _ in 0..3 {
            let mut more = vec![0; 1 + random.below(5000) as usize];
            random.fill(&mut more);
            client.write(&more, model.len() as u64);
            model.extend(more);
            check(&model);
        }
    }
    assert!(direct > 50, "{direct} directly");
    drop(client);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn cached_appends_follow_direct_appends() {
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    let client = DirectTestFile::new(&mount, "file");
    let mut model = Vec::new();
    let mut direct = 0;
    for round in 0..200u64 {
        for part in 0..5 {
            let len = match (round + part) % 5 {
                0 => PAGE - model.len() % PAGE,
                other => 100 * other as usize + round as usize,
            };
            let bytes = vec![(round * 5 + part) as u8; len];
            direct += u64::from(client.write(&bytes, model.len() as u64));
            model.extend(bytes);
        }
        let mut options = OpenOptions::new();
        let mut cached = options
            .read(true)
            .append(true)
            .open(mount.path("file"))
            .unwrap();
        cached.write_all(&[0xaa; 50]).unwrap();
        model.extend([0xaa; 50]);
        assert_eq!(cached.stream_position().unwrap(), model.len() as u64);
        let mut found = Vec::new();
        cached.rewind().unwrap();
        cached.read_to_end(&mut found).unwrap();
        assert!(found == model, "by the page cache, round {round}");
        let mut found = vec![0; model.len() + 1];
        let read = client.file.read_at(&mut found, 0).unwrap();
        assert!(found[..read] == model, "past it, round {round}");
    }
    assert!(direct > 100, "{direct} directly");
    drop(client);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Stops the observing thread, also when an assertion fails.
struct StopOnDrop<'b>(&'b AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Direct appends race with the kernel's question for the size and the answer to its open.
#[test]
fn cached_appends_cross_appends_of_direct_clients() {
    const RECORD: usize = 64;
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    let path = mount.path("file");
    let file = open_file(&mount, "file");
    let is_over = AtomicBool::new(false);
    let (appended, wanted) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = open_as_library(OpenOptions::new().append(true)).open(&path);
            let mut file = file.unwrap();
            let direct = direct_file(new_client(), &file);
            while !is_over.load(Ordering::Acquire) {
                if appended.load(Ordering::Acquire) >= wanted.load(Ordering::Acquire) {
                    std::thread::yield_now();
                    continue;
                }
                match direct.append(&[1; RECORD]) {
                    Some(_) => drop(appended.fetch_add(1, Ordering::AcqRel)),
                    None => file.write_all(&[1; RECORD]).unwrap(),
                }
            }
        });
        let _ending = StopOnDrop(&is_over);
        for round in 0..300u64 {
            // After the append the kernel does not know the size.
            let before = appended.load(Ordering::Acquire);
            wanted.store(before + 300, Ordering::Release);
            while appended.load(Ordering::Acquire) < before + 20 {
                std::hint::spin_loop();
            }
            let mut options = OpenOptions::new();
            let mut cached = options.read(true).append(true).open(&path).unwrap();
            let own = [2 + round as u8 % 200; RECORD];
            cached.write_all(&own).unwrap();
            let end = cached.stream_position().unwrap();
            let mut found = [0; RECORD];
            let place = end - RECORD as u64;
            cached.read_exact_at(&mut found, place).unwrap();
            assert_eq!(found, own, "by the page cache, round {round}");
            file.read_exact_at(&mut found, place).unwrap();
            assert_eq!(found, own, "past it, round {round}");
        }
    });
    let (mut cached, mut past) = (Vec::new(), Vec::new());
    File::open(&path).unwrap().read_to_end(&mut cached).unwrap();
    let mut file = file;
    file.read_to_end(&mut past).unwrap();
    assert!(cached == past, "both are the same");
    let is_whole = |record: &[u8]| record.iter().all(|byte| *byte == record[0]);
    assert!(past.chunks(RECORD).all(is_whole), "records are whole");
    drop(file);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// A program may map a descriptor of the library by a system call of its own.
#[test]
fn page_fault_of_bypassing_open_leaves_no_old_page() {
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    check_page_faults(
        cluster,
        mount,
        open_as_library(OpenOptions::new().read(true)),
    );
}

/// On such a mount every open bypasses the cache.
#[test]
fn page_fault_on_direct_mount_leaves_no_old_page() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let how = ("map", "auto");
    let mount = TestMount::try_with_options(&cluster, "files", "mnt", how, &["--direct-io"]);
    check_page_faults(cluster, mount.unwrap(), OpenOptions::new().read(true));
}

/// A mapping shows each write of a direct client.
fn check_page_faults(cluster: Cluster, mount: TestMount, options: &OpenOptions) {
    let client = DirectTestFile::new(&mount, "file");
    client.write_directly(&[1; 2 * PAGE], 0);
    let other = options.open(mount.path("file"));
    let mapping = Mapping::of(&other.unwrap());
    for round in 2..60u8 {
        let found = mapping.load(0, 2 * PAGE).unwrap();
        assert_eq!(found, [round - 1; 2 * PAGE]);
        client.write_directly(&[round; 2 * PAGE], 0);
    }
    drop((client, mapping));
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// The kernel drops pages before such a write, and not after it.
#[test]
fn write_past_the_cache_leaves_no_old_page() {
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    let path = mount.path("file");
    std::fs::write(&path, [0; PAGE]).unwrap();
    let cached = File::open(&path).unwrap();
    for flags in [mounted::LIBRARY_FLAGS, OFlags::DIRECT.bits()] {
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(flags.cast_signed());
        let past = options.open(&path).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = [0; PAGE];
                while !is_over.load(Ordering::Acquire) {
                    cached.read_exact_at(&mut bytes, 0).unwrap();
                }
            });
            let _ending = StopOnDrop(&is_over);
            for round in 0..2000 {
                let new = [round as u8; PAGE];
                past.write_all_at(&new, 0).unwrap();
                let mut found = [0; PAGE];
                cached.read_exact_at(&mut found, 0).unwrap();
                assert_eq!(found, new, "round {round}");
            }
        });
    }
    drop(cached);
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// The kernel sends a long write in parts.
#[test]
fn long_appends_past_the_cache_stay_in_order() {
    let Some(cluster) = mounted::cluster(&[256, 256], "200M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let mut random = Random::new(5);
    for (name, flags) in [
        ("one", mounted::LIBRARY_FLAGS),
        ("other", OFlags::DIRECT.bits()),
    ] {
        let mut options = OpenOptions::new();
        let options = options.append(true).create(true);
        let options = options.custom_flags(flags.cast_signed());
        let mut file = options.open(mount.path(name)).unwrap();
        let mut model = Vec::new();
        for _ in 0..8 {
            let mut bytes = vec![0; 5 << 20];
            random.fill(&mut bytes);
            file.write_all(&bytes).unwrap();
            model.extend(bytes);
        }
        assert!(std::fs::read(mount.path(name)).unwrap() == model, "{name}");
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// After a failed write the kernel truncates a file to the size that it knows.
#[test]
fn failed_write_keeps_direct_appends() {
    let Some((cluster, mount)) = start_mount() else {
        return;
    };
    let script = "
import ctypes, os
fd = os.open('log', os.O_RDWR | os.O_CREAT | os.O_APPEND)
for i in range(2000):
    assert os.write(fd, b'x' * 100) == 100
libc = ctypes.CDLL(None, use_errno=True)
assert libc.write(fd, ctypes.c_void_p(16), 100) == -1
assert libc.syscall(1, fd, ctypes.c_void_p(16), 100) == -1
assert os.fstat(fd).st_size == 200000
assert os.pread(fd, 200000, 0) == b'x' * 200000
filled = 0
try:
    while True:
        filled += os.write(fd, b'y' * 1000)
except OSError as error:
    assert error.errno == 28, error
assert os.fstat(fd).st_size >= 200000 + filled
assert os.pread(fd, 1000, 200000 + filled - 1000) == b'y' * 1000
";
    let dir = mount.dir.display();
    super::run_script(&format!("cd {dir} && python3 -c \"{script}\""));
    mount.stop(&cluster);
    cluster.check_identical("files");
}
