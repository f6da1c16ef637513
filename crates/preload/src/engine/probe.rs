//! An engine for tests: it does the operations by system calls, and counts them.
//!
//! It exists only in builds with debug assertions or the feature `probe`, and works only if the
//! environment names a directory. Every regular file below that directory is on the direct path.
//!
//! - `PAGEMESH_PROBE_DIR`: that directory.
//! - `PAGEMESH_PROBE_COUNTS`: a file of [`COUNTS`] words; all processes count in it.
//! - `PAGEMESH_PROBE_DECLINE=n`: it leaves one of every n calls to the kernel.
//! - `PAGEMESH_PROBE_DWELL_US`: the time that each call spends inside.
//! - `PAGEMESH_PROBE_NULL`: it reports success, and does nothing.

use crate::c_library::{environment, real};
use crate::kernel::sys;
use libc::{c_char, c_int, c_void};
use std::cell::Cell;
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};
use std::time::{Duration, Instant};

/// Number of counters: opens, reads, writes, syncs, ends, forks, wrong calls, begun calls, ended
/// calls, size queries. A call is wrong if it is inside another one of the same thread, if its file
/// has ended or was the parent's, or if it opens a file by a descriptor that leads elsewhere.
const COUNTS: usize = 10;

/// The order of the words, for the tests.
#[derive(Clone, Copy)]
enum Counter {
    Opens,
    Reads,
    Writes,
    Syncs,
    Ends,
    Forks,
    Wrong,
    Begun,
    Ended,
    Sizes,
}

static DIRECTORY: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());
static COUNTERS: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
static DECLINE: AtomicU64 = AtomicU64::new(0);
static DWELL_US: AtomicU64 = AtomicU64::new(0);
static IS_NULL: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

pub struct ProbeFile {
    fd: c_int,
    /// The process that opened it, counted along forks; 0 after its end.
    generation: AtomicU64,
}

static PROCESS_GENERATION: AtomicU64 = AtomicU64::new(1);

/// Runs once, when the library is loaded.
pub fn begin() {
    DIRECTORY.store(environment::string(c"PAGEMESH_PROBE_DIR"), SeqCst);
    DECLINE.store(
        environment::number(c"PAGEMESH_PROBE_DECLINE").unwrap_or(0),
        SeqCst,
    );
    DWELL_US.store(
        environment::number(c"PAGEMESH_PROBE_DWELL_US").unwrap_or(0),
        SeqCst,
    );
    IS_NULL.store(
        !environment::string(c"PAGEMESH_PROBE_NULL").is_null(),
        SeqCst,
    );
    let path = environment::string(c"PAGEMESH_PROBE_COUNTS");
    if !path.is_null() {
        COUNTERS.store(map(path), SeqCst);
    }
}

fn map(path: *const c_char) -> *mut AtomicU64 {
    const BYTES: usize = COUNTS * size_of::<AtomicU64>();
    // SAFETY: a path, and a mapping wherever there is room, which stays.
    unsafe {
        let fd = real::open(path, libc::O_RDWR | libc::O_CLOEXEC, 0);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let page = libc::mmap(ptr::null_mut(), BYTES, protection, libc::MAP_SHARED, fd, 0);
        real::close(fd);
        if page == libc::MAP_FAILED {
            ptr::null_mut()
        } else {
            page.cast()
        }
    }
}

fn count(what: Counter) {
    let counters = COUNTERS.load(Relaxed);
    if !counters.is_null() {
        // SAFETY: a mapped array of `COUNTS` words that stays.
        unsafe { &*counters.add(what as usize) }.fetch_add(1, Relaxed);
    }
}

/// Whether the test engine is on; then a file system of any kind may be a mount.
pub fn is_on_all() -> bool {
    !DIRECTORY.load(Relaxed).is_null()
}

pub fn open(fd: c_int, dev: u64, ino: u64, _reads: bool, _writes: bool) -> Option<ProbeFile> {
    // The engine on mounts does not check where a descriptor leads.
    if sys::fstat(fd).is_none_or(|stat| (stat.st_dev, stat.st_ino) != (dev, ino)) {
        count(Counter::Wrong);
    }
    if !is_on_all() || !is_below(fd) {
        return None;
    }
    count(Counter::Opens);
    // Its own descriptors have high numbers, as the real engine's have.
    // SAFETY: no memory is touched.
    let fd = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 1000) };
    // A duplicate with a number of its own.
    (fd >= 0).then(|| ProbeFile {
        fd,
        generation: AtomicU64::new(PROCESS_GENERATION.load(Relaxed)),
    })
}

fn is_below(fd: c_int) -> bool {
    let name = format!("/proc/self/fd/{fd}\0");
    let mut path = [0u8; 4096];
    // SAFETY: a string that ends with a zero, and a buffer with its length.
    let len = unsafe { libc::readlink(name.as_ptr().cast(), path.as_mut_ptr().cast(), path.len()) };
    // SAFETY: a string of the environment.
    let directory = unsafe { CStr::from_ptr(DIRECTORY.load(Relaxed)) };
    usize::try_from(len).is_ok_and(|len| path[..len].starts_with(directory.to_bytes()))
}

impl ProbeFile {
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        let _call = self.begin_call(Counter::Reads)?;
        if IS_NULL.load(Relaxed) {
            return Some(into.len());
        }
        // SAFETY: a buffer with its length.
        let read = unsafe { sys::pread(self.fd, into.as_mut_ptr().cast(), into.len(), offset) };
        usize::try_from(read).ok()
    }

    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        let _call = self.begin_call(Counter::Writes)?;
        if IS_NULL.load(Relaxed) {
            return Some(data.len());
        }
        let from = data.as_ptr().cast::<c_void>();
        // SAFETY: a buffer with its length.
        let written = unsafe { sys::pwrite(self.fd, from, data.len(), offset) };
        usize::try_from(written).ok()
    }

    /// The end is not atomic: another append in between may lie before these bytes.
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        let _call = self.begin_call(Counter::Writes)?;
        let end = sys::lseek(self.fd, 0, libc::SEEK_END);
        if IS_NULL.load(Relaxed) {
            return Some(end as u64 + data.len() as u64);
        }
        let from = data.as_ptr().cast::<c_void>();
        // SAFETY: a buffer with its length. The place does not matter, as it appends.
        let written = unsafe { sys::pwrite(self.fd, from, data.len(), end as u64) };
        let written = usize::try_from(written).ok()?;
        (written == data.len()).then(|| end as u64 + written as u64)
    }

    fn begin_call(&self, what: Counter) -> Option<ProbeCall> {
        let call = ProbeCall::begin(what);
        if self.generation.load(Relaxed) != PROCESS_GENERATION.load(Relaxed) {
            count(Counter::Wrong);
        }
        call
    }

    pub fn size(&self) -> Option<u64> {
        let _call = self.begin_call(Counter::Sizes)?;
        u64::try_from(sys::fstat(self.fd)?.st_size).ok()
    }

    pub fn sync(&self) -> bool {
        self.begin_call(Counter::Syncs).is_some()
    }
}

impl Drop for ProbeFile {
    fn drop(&mut self) {
        count(Counter::Ends);
        self.generation.store(0, Relaxed);
        // SAFETY: it is this file's own.
        unsafe { libc::close(self.fd) };
    }
}

/// A call in progress.
struct ProbeCall;

impl ProbeCall {
    fn begin(what: Counter) -> Option<ProbeCall> {
        let decline = DECLINE.load(Relaxed);
        if decline != 0 && CALLS.fetch_add(1, Relaxed).is_multiple_of(decline) {
            return None;
        }
        if COUNTERS.load(Relaxed).is_null() {
            return Some(ProbeCall);
        }
        count(what);
        count(Counter::Begun);
        if IS_INSIDE.replace(true) {
            count(Counter::Wrong);
        }
        dwell();
        Some(ProbeCall)
    }
}

impl Drop for ProbeCall {
    fn drop(&mut self) {
        if !COUNTERS.load(Relaxed).is_null() {
            IS_INSIDE.set(false);
            count(Counter::Ended);
        }
    }
}

fn dwell() {
    let dwell_us = DWELL_US.load(Relaxed);
    if dwell_us != 0 {
        let end = Instant::now() + Duration::from_micros(dwell_us);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    }
}

pub fn reset_in_child() {
    count(Counter::Forks);
    PROCESS_GENERATION.fetch_add(1, Relaxed);
    IS_INSIDE.set(false);
}
