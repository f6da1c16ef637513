//! A file system in memory, mounted through the real kernel. The tests need root, or fusermount3.

use crate::memory;
use crate::skip;
use crate::support_mount;
use crate::switch;
use bytes::Bytes;
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Credentials, Fs, Ino, Wait};
use pagemesh_fuse::{Caching, MountFlags, MountOptions, Transport, mount_null, now};
use rustix::fs::{FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, XattrFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{
    FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink,
};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support_mount::{LIMIT, THREADS, TestMount, new_memory_fs, options};

/// Each of these tests runs with both transports.
macro_rules! by_both {
    ($($name:ident)*) => {
        mod classic {
            $(#[test]
            fn $name() {
                super::$name(pagemesh_fuse::Transport::Classic);
            })*
        }
        mod io_uring {
            $(#[test]
            fn $name() {
                super::$name(pagemesh_fuse::Transport::IoUring);
            })*
        }
    };
}

by_both! {
    names_files_and_links_outlive_the_mount
    renames_have_flags
    concurrent_appends_do_not_overlap
    holes_are_found_and_made
    attributes_are_as_they_were_set
    programs_run_and_are_replaced
    full_file_system_reports_enospc_until_space_is_freed
    files_without_a_name_get_one_or_go
    long_reads_and_writes_are_whole
    pending_calls_fail_when_the_mount_is_aborted
    writes_go_on_while_others_begin
    waiting_writer_thread_is_woken_by_next_request
    crash_leftovers_are_freed_in_the_background
}

/// A mount of another space; none, with a message, if it cannot be here.
fn mount_space(
    space: Arc<dyn Space>,
    wait: Wait,
    transport: Transport,
    caching: Caching,
) -> Option<TestMount> {
    let fs = Fs::mount(space, wait, now).unwrap();
    let options = MountOptions {
        caching,
        ..options(transport)
    };
    TestMount::of(Arc::new(fs), &options)
}

fn assert_refused<T: std::fmt::Debug>(result: std::io::Result<T>, errno: Errno) {
    let code = result.expect_err("refused").raw_os_error();
    assert_eq!(code, Some(errno.raw_os_error()));
}

fn inodes(mount: &TestMount) -> u64 {
    let told = rustix::fs::statvfs(mount.dir.path()).unwrap();
    told.f_files - told.f_ffree
}

/// Waits for an effect of another thread.
fn wait_until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "it never is so");
        std::thread::yield_now();
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn names_files_and_links_outlive_the_mount(transport: Transport) {
    let memory = new_memory_fs();
    let Some(mount) = TestMount::new(&memory, transport) else {
        return;
    };
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::create_dir_all(mount.path("a/b")).unwrap();
    fs::write(mount.path("a/b/file"), &content).unwrap();
    fs::hard_link(mount.path("a/b/file"), mount.path("a/other")).unwrap();
    symlink("../file", mount.path("a/b/link")).unwrap();
    fs::rename(mount.path("a/b/link"), mount.path("a/b/moved")).unwrap();
    let long = "n".repeat(255);
    fs::write(mount.path(&long), b"x").unwrap();
    assert_refused(
        fs::write(mount.path(&"n".repeat(256)), b""),
        Errno::NAMETOOLONG,
    );
    assert_refused(
        fs::rename(mount.path("a"), mount.path("a/b/a")),
        Errno::INVAL,
    );
    assert_refused(fs::remove_dir(mount.path("a")), Errno::NOTEMPTY);
    let told = fs::metadata(mount.path("a/other")).unwrap();
    assert_eq!((told.nlink(), told.size()), (2, 1_200_000));
    assert_eq!(told.blocks(), 1_200_000u64.div_ceil(4096) * 8);
    let ino = told.ino();
    for n in 0..2000 {
        File::create(mount.path(&format!("a/{n}"))).unwrap();
    }
    drop(mount);

    let mount = TestMount::new(&memory, transport).unwrap();
    assert_eq!(fs::read(mount.path("a/other")).unwrap(), content);
    assert_eq!(fs::metadata(mount.path("a/b/file")).unwrap().ino(), ino);
    let target = fs::read_link(mount.path("a/b/moved")).unwrap();
    assert_eq!(target, Path::new("../file"));
    assert_eq!(names(&mount.path("a")).len(), 2002);
    assert_eq!(names(&mount.path("a/b")), ["file", "moved"]);
    fs::remove_dir_all(mount.path("a")).unwrap();
    assert_eq!(names(mount.dir.path()), [long]);
}

fn renames_have_flags(transport: Transport) {
    let memory = new_memory_fs();
    let Some(mount) = TestMount::new(&memory, transport) else {
        return;
    };
    fs::write(mount.path("one"), b"1").unwrap();
    fs::write(mount.path("two"), b"2").unwrap();
    let cwd = File::open(mount.dir.path()).unwrap();
    let rename = |flags| rustix::fs::renameat_with(&cwd, "one", &cwd, "two", flags);
    assert_eq!(rename(RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename(RenameFlags::EXCHANGE).unwrap();
    // Otherwise the kernel would answer by itself.
    drop(cwd);
    drop(mount);
    let mount = TestMount::new(&memory, transport).unwrap();
    assert_eq!(fs::read(mount.path("one")).unwrap(), b"2");
    assert_eq!(fs::read(mount.path("two")).unwrap(), b"1");
    // A character device with number 0 is in the old place.
    let cwd = File::open(mount.dir.path()).unwrap();
    rustix::fs::renameat_with(&cwd, "one", &cwd, "two", RenameFlags::WHITEOUT).unwrap();
    drop(cwd);
    drop(mount);
    let mount = TestMount::new(&memory, transport).unwrap();
    assert_eq!(fs::read(mount.path("two")).unwrap(), b"2");
    let left = fs::symlink_metadata(mount.path("one")).unwrap();
    assert!(left.file_type().is_char_device() && left.rdev() == 0);
}

fn concurrent_appends_do_not_overlap(transport: Transport) {
    const EACH: usize = 200;
    let Some(mount) = TestMount::new(&new_memory_fs(), transport) else {
        return;
    };
    let path = mount.path("log");
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let path = &path;
            scope.spawn(move || {
                let mut options = OpenOptions::new();
                let mut file = options.create(true).append(true).open(path).unwrap();
                for _ in 0..EACH {
                    file.write_all(&[writer; 100]).unwrap();
                }
            });
        }
    });
    let log = fs::read(&path).unwrap();
    assert_eq!(log.len(), 4 * EACH * 100);
    let mut counts = [0; 4];
    for record in log.chunks(100) {
        assert!(record.iter().all(|&byte| byte == record[0]), "one record");
        counts[usize::from(record[0])] += 1;
    }
    assert_eq!(counts, [EACH; 4]);
}

fn holes_are_found_and_made(transport: Transport) {
    let Some(mount) = TestMount::new(&new_memory_fs(), transport) else {
        return;
    };
    let mut file = File::create_new(mount.path("holes")).unwrap();
    file.write_all_at(&[7; 8192], 1 << 20).unwrap();
    let at = |whence| rustix::fs::seek(&file, whence);
    assert_eq!(at(SeekFrom::Data(0)), Ok(1 << 20));
    assert_eq!(at(SeekFrom::Hole(1 << 20)), Ok((1 << 20) + 8192));
    assert_eq!(at(SeekFrom::Data((1 << 20) + 8192)), Err(Errno::NXIO));
    assert_eq!(file.metadata().unwrap().blocks(), 16);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 1 << 20, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 8);
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 16);
    let collapse = rustix::fs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(collapse, Err(Errno::OPNOTSUPP));
    file.set_len(10).unwrap();
    file.set_len(20).unwrap();
    file.rewind().unwrap();
    let mut back = Vec::new();
    File::open(mount.path("holes"))
        .unwrap()
        .read_to_end(&mut back)
        .unwrap();
    assert_eq!(back, [0; 20]);
}

fn attributes_are_as_they_were_set(transport: Transport) {
    let Some(mount) = TestMount::new(&new_memory_fs(), transport) else {
        return;
    };
    let path = mount.path("file");
    fs::write(&path, b"x").unwrap();
    let name = |name: &str| name.to_owned();
    let set = |key: &str, value: &[u8], how| rustix::fs::setxattr(&path, name(key), value, how);
    set("user.key", b"value", XattrFlags::CREATE).unwrap();
    assert_eq!(set("user.key", b"", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(set("user.no", b"", XattrFlags::REPLACE), Err(Errno::NODATA));
    let mut value = [0; 16];
    let acl = rustix::fs::getxattr(&path, "system.posix_acl_access", &mut value[..]);
    assert_eq!(acl, Err(Errno::NODATA));
    let other = rustix::fs::getxattr(&path, "system.other", &mut value[..]);
    assert_eq!(other, Err(Errno::OPNOTSUPP));
    let len = rustix::fs::getxattr(&path, "user.key", &mut value[..]).unwrap();
    assert_eq!(&value[..len], b"value");
    rustix::fs::removexattr(&path, "user.key").unwrap();
    assert_eq!(rustix::fs::listxattr(&path, &mut value[..]), Ok(0));

    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    std::os::unix::fs::chown(&path, Some(7), Some(8)).unwrap();
    let told = fs::metadata(&path).unwrap();
    assert_eq!(
        (told.uid(), told.gid(), told.mode() & 0o7777),
        (7, 8, 0o755)
    );
    let before_1970 = std::time::UNIX_EPOCH - std::time::Duration::from_millis(1500);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(before_1970).unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), before_1970);
}

fn programs_run_and_are_replaced(transport: Transport) {
    let Some(mount) = TestMount::new(&new_memory_fs(), transport) else {
        return;
    };
    // The kernel maps a program that it runs: this mapping needs no `unsafe`.
    let path = mount.path("script");
    fs::copy("/bin/true", &path).unwrap();
    let ran = std::process::Command::new(&path).status().unwrap();
    assert!(ran.success());
    fs::remove_file(&path).unwrap();
    fs::copy("/bin/false", &path).unwrap();
    let ran = std::process::Command::new(&path).status().unwrap();
    assert!(!ran.success());
}

fn full_file_system_reports_enospc_until_space_is_freed(transport: Transport) {
    let Some(mount) = TestMount::new(&new_memory_fs(), transport) else {
        return;
    };
    let path = mount.path("big");
    let mut file = OpenOptions::new()
        .create_new(true)
        .write(true)
        .custom_flags(OFlags::DSYNC.bits() as i32)
        .open(&path)
        .unwrap();
    let full = loop {
        if let Err(cause) = file.write_all(&[1; 1 << 20]) {
            break cause;
        }
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    let told = rustix::fs::statvfs(mount.dir.path()).unwrap();
    assert!(told.f_bavail < 300, "{} left", told.f_bavail);
    assert_eq!(told.f_blocks * told.f_frsize, LIMIT);
    fs::remove_file(&path).unwrap();
    drop(file);
    // The kernel reports the last close after `close` has returned.
    let free = || rustix::fs::statvfs(mount.dir.path()).unwrap().f_bavail;
    while free() < LIMIT / 4096 - 300 {
        std::thread::yield_now();
    }
}

#[test]
fn io_uring_is_used_where_available() {
    let Some(_on) = switch::turn_on() else {
        return skip::skip("needs FUSE over io_uring, and root to switch it on");
    };
    let dir = tempfile::tempdir().unwrap();
    let options = MountOptions {
        source: "nothing".into(),
        threads: 1,
        allow_other: false,
        flags: MountFlags::default(),
        transport: Transport::Auto,
        may_keep_cpus_awake: true,
        caching: Caching::PageCache,
        shows_snapshots: false,
        is_shared: false,
    };
    let mounted = mount_null(dir.path(), &options).unwrap();
    assert_eq!(mounted.transport(), Transport::IoUring);
    fs::write(dir.path().join("file"), b"forgotten").unwrap();
    // The mount is not served: dropping it unmounts.
    drop(mounted);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

fn files_without_a_name_get_one_or_go(transport: Transport) {
    let memory = new_memory_fs();
    let Some(mount) = TestMount::new(&memory, transport) else {
        return;
    };
    let unnamed = || {
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = OFlags::TMPFILE | OFlags::RDWR;
        File::from(rustix::fs::open(mount.dir.path(), flags, mode).unwrap())
    };
    let before = inodes(&mount);
    let (kept, gone) = (unnamed(), unnamed());
    assert_eq!(inodes(&mount), before + 2);
    for file in [&kept, &gone] {
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        file.write_all_at(&[5; 100_000], 0).unwrap();
    }
    let link = |file: &File, name: &str| {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let follow = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(
            rustix::fs::CWD,
            path,
            rustix::fs::CWD,
            mount.path(name),
            follow,
        )
    };
    assert_eq!(names(mount.dir.path()), [""; 0]);
    link(&kept, "named").unwrap();
    assert_eq!(link(&gone, "named"), Err(Errno::EXIST));
    assert_eq!(fs::metadata(mount.path("named")).unwrap().nlink(), 1);
    // A file that has lost its last name gets no other.
    let open = File::create(mount.path("unlinked")).unwrap();
    fs::remove_file(mount.path("unlinked")).unwrap();
    assert_eq!(link(&open, "again"), Err(Errno::NOENT));
    // After a crash here, the linked file exists and nothing is left of the others.
    let killed = memory.snapshot();
    drop((kept, gone, open));
    drop(mount);
    for memory in [killed, memory] {
        let mount = TestMount::new(&memory, transport).unwrap();
        assert_eq!(fs::read(mount.path("named")).unwrap(), [5; 100_000]);
        wait_until(|| inodes(&mount) == before + 1);
    }
}

fn long_reads_and_writes_are_whole(transport: Transport) {
    let Some(mount) = TestMount::new(&new_memory_fs(), transport) else {
        return;
    };
    let bytes: Vec<u8> = (0..5u32 << 18).flat_map(u32::to_le_bytes).collect();
    let file = File::create_new(mount.path("file")).unwrap();
    // Twice: into holes, and over existing data.
    for shift in [0, 1] {
        file.write_all_at(&bytes, shift).unwrap();
    }
    let mut back = vec![0; bytes.len() + 2];
    let file = File::open(mount.path("file")).unwrap();
    // Into the middle of pages, and beyond the end.
    file.read_exact_at(&mut back[..=bytes.len()], 0).unwrap();
    assert_eq!(file.read_at(&mut back, bytes.len() as u64 + 1).unwrap(), 0);
    assert!(back[0] == bytes[0] && back[1..=bytes.len()] == bytes);
}

fn pending_calls_fail_when_the_mount_is_aborted(transport: Transport) {
    let memory = new_memory_fs();
    let Some(mount) = TestMount::new(&memory, transport) else {
        return;
    };
    let file = File::create_new(mount.path("file")).unwrap();
    file.write_all_at(&[1; 8192], 0).unwrap();
    std::thread::scope(|scope| {
        // More calls than serving threads.
        let calls: Vec<_> = memory.while_stalled(|await_one| {
            let write = || file.write_all_at(&[2; 4096], 0);
            let calls = (0..8).map(|_| scope.spawn(write)).collect();
            await_one();
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(mount.dir.path(), flags).unwrap();
            calls
        });
        let cut_off = [Errno::CONNABORTED, Errno::NOTCONN].map(|errno| errno.raw_os_error());
        for call in calls {
            let code = call.join().unwrap().expect_err("cut off").raw_os_error();
            assert!(cut_off.map(Some).contains(&code), "{code:?}");
        }
    });
    assert_refused(file.write_all_at(&[2; 4096], 0), Errno::NOTCONN);
    drop(file);
    // It ends well: the callers that waited for answers are gone.
    drop(mount);
    let mount = TestMount::new(&memory, transport).unwrap();
    assert_eq!(fs::read(mount.path("file")).unwrap().len(), 8192);
}

/// A space that reports completions only at the fourth poll.
struct LateSpace {
    inner: Arc<dyn Space>,
    /// Most unreported requests of one channel.
    pending_max: Arc<AtomicUsize>,
}

struct LateChannel {
    inner: Box<dyn Channel>,
    delayed: Vec<(usize, Completion)>,
    pending_max: Arc<AtomicUsize>,
}

impl Space for LateSpace {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(LateChannel {
            inner: self.inner.open()?,
            delayed: Vec::new(),
            pending_max: Arc::clone(&self.pending_max),
        }))
    }
}

impl Channel for LateChannel {
    fn submit(&mut self, token: Token, request: Request) {
        self.inner.submit(token, request);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        const TIMES: usize = 4;
        let mut new = Vec::new();
        self.inner.reap(&mut new);
        self.delayed
            .extend(new.into_iter().map(|done| (TIMES, done)));
        self.pending_max
            .fetch_max(self.delayed.len(), Ordering::Relaxed);
        for (times, done) in std::mem::take(&mut self.delayed) {
            match times - 1 {
                0 => into.push(done),
                times => self.delayed.push((times, done)),
            }
        }
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}

fn poll_again(_: &[RawFd], _: Option<Instant>) {
    std::thread::yield_now();
}

/// Each program writes pages of its own, truncates and syncs a file of its own, and reads all back.
fn writes_go_on_while_others_begin(transport: Transport) {
    const PROGRAMS: u64 = 6;
    const PAGES: u64 = 40;
    let most = Arc::new(AtomicUsize::new(0));
    let space = Arc::new(LateSpace {
        inner: new_memory_fs().shared(),
        pending_max: Arc::clone(&most),
    });
    // The kernel sends one cached write of a file at a time.
    let Some(mount) = mount_space(space, poll_again, transport, Caching::Bypassed) else {
        return;
    };
    let shared = mount.path("shared");
    fs::write(&shared, vec![0; (PROGRAMS * PAGES * 4096) as usize]).unwrap();
    let mut round = 0u8;
    while round < 2 || most.load(Ordering::Relaxed) < 3 {
        round += 1;
        std::thread::scope(|scope| {
            for program in 0..PROGRAMS {
                let (shared, own) = (&shared, mount.path(&format!("own-{program}")));
                scope.spawn(move || {
                    let mut options = OpenOptions::new();
                    options.read(true).write(true);
                    let shared = options.open(shared).unwrap();
                    let own = options.create(true).truncate(false).open(own).unwrap();
                    let page = |n: u64| [round ^ (program * PAGES + n) as u8; 4096];
                    for n in 0..PAGES {
                        let place = (program * PAGES + n) * 4096;
                        shared.write_all_at(&page(n), place).unwrap();
                        match n % 8 {
                            3 => own.write_all_at(&page(n), n * 512).unwrap(),
                            5 => own.set_len(n * 100).unwrap(),
                            7 => own.sync_all().unwrap(),
                            _ => {}
                        }
                    }
                    for n in 0..PAGES {
                        let mut found = [0; 4096];
                        let place = (program * PAGES + n) * 4096;
                        shared.read_exact_at(&mut found, place).unwrap();
                        assert!(found == page(n), "page {n} of {program} in round {round}");
                    }
                });
            }
        });
    }
}

/// Most writes that complete together.
const BARRIER_WRITES: usize = 3;
/// Polls of waiting writes until the barrier times out. It counts polls, as this whole process may
/// be stalled for any time.
const POLLS_MAX: u32 = 200;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A space that completes a write only when others are in flight, too.
struct BarrierSpace {
    inner: Arc<dyn Space>,
    barrier: Arc<WriteBarrier>,
}

/// A barrier for a number of writes.
struct WriteBarrier {
    size: usize,
    /// Changed under the lock of `waiting`.
    is_active: AtomicBool,
    /// The descriptors that wake the channels of waiting writes.
    waiting: Mutex<Vec<Arc<EventFd>>>,
    /// How often enough writes met.
    meetings: AtomicUsize,
}

impl WriteBarrier {
    fn new(size: usize) -> WriteBarrier {
        WriteBarrier {
            size,
            is_active: AtomicBool::new(false),
            waiting: Mutex::default(),
            meetings: AtomicUsize::new(0),
        }
    }

    /// Waits for the end, and ends the barrier if no more writes arrive; returns whether it did.
    fn timed_out(&self) -> bool {
        let (mut before, mut looks) = (0, 0);
        while self.is_active.load(Ordering::SeqCst) && looks < POLLS_MAX {
            std::thread::sleep(POLL_INTERVAL);
            let met = self.meetings.load(Ordering::SeqCst);
            looks = if met == before { looks + 1 } else { 0 };
            before = met;
        }
        self.end();
        looks == POLLS_MAX
    }

    fn wake_all(waiting: &mut Vec<Arc<EventFd>>) {
        for wake in waiting.drain(..) {
            wake.signal();
        }
    }

    fn end(&self) {
        let mut waiting = self.waiting.lock().unwrap();
        self.is_active.store(false, Ordering::SeqCst);
        WriteBarrier::wake_all(&mut waiting);
    }
}

struct BarrierChannel {
    inner: Box<dyn Channel>,
    barrier: Arc<WriteBarrier>,
    wake: Arc<EventFd>,
    held: Vec<Completion>,
}

impl Space for BarrierSpace {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(BarrierChannel {
            inner: self.inner.open()?,
            barrier: Arc::clone(&self.barrier),
            wake: Arc::new(EventFd::new().unwrap()),
            held: Vec::new(),
        }))
    }
}

impl Channel for BarrierChannel {
    fn submit(&mut self, token: Token, request: Request) {
        let waits = matches!(request, Request::Write { .. });
        self.inner.submit(token, request);
        let mut waiting = self.barrier.waiting.lock().unwrap();
        if waits && self.barrier.is_active.load(Ordering::SeqCst) {
            self.inner.reap(&mut self.held);
            waiting.push(Arc::clone(&self.wake));
            if waiting.len() >= self.barrier.size {
                self.barrier.meetings.fetch_add(1, Ordering::SeqCst);
                WriteBarrier::wake_all(&mut waiting);
            }
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.inner.reap(into);
        if self.wake.drain() > 0 {
            into.append(&mut self.held);
        }
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        into.push(self.wake.as_raw_fd());
    }
}

/// Requests of one processor that are taken before the server knows that requests wait.
fn initial_entries_per_cpu(transport: Transport) -> usize {
    if transport == Transport::Classic {
        return THREADS;
    }
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let last = possible.trim().rsplit(['-', ',']).next().unwrap();
    THREADS.div_ceil(last.parse::<usize>().unwrap() + 1)
}

/// A thread that sleeps because its writes wait takes the next request when it comes, and not when
/// the writes end.
fn waiting_writer_thread_is_woken_by_next_request(transport: Transport) {
    const WRITES: u64 = 200;
    /// Long enough for the thread that waits for the last write to fall asleep.
    const THINKS: Duration = Duration::from_micros(300);
    // Programs on one processor would wait for its first entries.
    let all = sched_getaffinity(None).unwrap();
    let processors = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu));
    let first = initial_entries_per_cpu(transport) * processors.clone().count();
    let programs = first.min(BARRIER_WRITES) as u64;
    if programs < 2 {
        return skip::skip("needs two processors");
    }
    let meeting = Arc::new(WriteBarrier::new(programs as usize));
    let space = Arc::new(BarrierSpace {
        inner: new_memory_fs().shared(),
        barrier: Arc::clone(&meeting),
    });
    let caching = Caching::Bypassed;
    let Some(mount) = mount_space(space, pagemesh_fuse::wait, transport, caching) else {
        return;
    };
    let path = mount.path("file");
    fs::write(&path, vec![0; (programs * 4096) as usize]).unwrap();
    // A request other than a write may have to wait for writes in flight.
    let files: Vec<File> = (0..programs)
        .map(|_| OpenOptions::new().write(true).open(&path).unwrap())
        .collect();
    meeting.is_active.store(true, Ordering::SeqCst);
    let was_in_vain = std::thread::scope(|scope| {
        for ((program, file), processor) in (0..programs).zip(&files).zip(processors.cycle()) {
            let meeting = &meeting;
            scope.spawn(move || {
                let mut only = CpuSet::new();
                only.set(processor);
                sched_setaffinity(None, &only).unwrap();
                for write in 0..WRITES {
                    let began = Instant::now();
                    while program == programs - 1 && began.elapsed() < THINKS {
                        std::thread::yield_now();
                    }
                    let page = [write as u8; 4096];
                    file.write_all_at(&page, program * 4096).unwrap();
                }
                // The other programs may soon have no writes to wait for.
                meeting.end();
            });
        }
        meeting.timed_out()
    });
    assert!(!was_in_vain, "they waited in vain");
}

#[test]
fn uring_switch_stays_on_while_other_users_come_and_go() {
    if switch::turn_on().is_none() {
        return skip::skip("needs FUSE over io_uring, and root to switch it on");
    }
    std::thread::scope(|threads| {
        let users = threads.spawn(|| {
            for _ in 0..2000 {
                let _on = switch::turn_on().unwrap();
                assert!(switch::is_on());
            }
        });
        // Between fork and exec a child has all open files, and so their locks, too.
        while !users.is_finished() {
            let status = std::process::Command::new("true").status().unwrap();
            assert!(status.success());
        }
        users.join().unwrap();
    });
}

fn crash_leftovers_are_freed_in_the_background(transport: Transport) {
    let memory = new_memory_fs();
    let before = memory.mapped_pages();
    let fs = Fs::mount(memory.shared(), memory::wait, now).unwrap();
    let orphan = fs.create_unnamed(Ino::ROOT, 0o600, Credentials { uid: 0, gid: 0 });
    let bytes = Bytes::from(vec![7; 1 << 20]);
    let (ino, mut port) = (orphan.unwrap().ino, fs.open_channel().unwrap());
    fs.write(&mut port, ino, Some(0), &bytes, false).unwrap();
    assert!(memory.mapped_pages() >= before + 256);
    let left = memory.snapshot();
    let Some(mount) = TestMount::new(&left, transport) else {
        return;
    };
    wait_until(|| inodes(&mount) == 2);
    fs::write(mount.path("file"), b"new").unwrap();
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("stat")).ok());
    // The name may hold any characters, so fields count from behind it: nice is field 19 of stat,
    // proc(5).
    let priorities = stats.filter_map(|stat| {
        let (_, rest) = stat.split_once("(fs-free)")?;
        rest.split_whitespace().nth(16).map(str::to_owned)
    });
    // Threads of other mounts may be about to set their priority.
    assert!(priorities.into_iter().any(|nice| nice == "19"));
}
