//! Withdrawal: the process leaves everything to the kernel, for good.
//!
//! A process withdraws from the direct path before it gets a limit that the engine would violate,
//! or by which the engine would harm the program:
//! * a filter of system calls, which kills for calls that it does not list;
//! * a limit of its memory, which counts mapped pools;
//! * memory that is locked as a whole.
//!
//! It also withdraws when it creates an `io_uring`, which does not move the offsets of files that
//! bypass the page cache (RFD 023).
//!
//! Afterwards no thread of the engine is left, no pool is mapped, the kernel has the program's own
//! signal handlers again, and the library makes no system call of its own.

use super::{ownership, signals};
use crate::c_library::elf::{SymbolName, loaded_objects};
use crate::c_library::{engine_threads, environment};
use crate::descriptors::table;
use crate::engine;
use crate::kernel::{buffer, sys};
use crate::state::thread;
use crate::state::withdrawal::{is_withdrawn, set_filtered, set_withdrawn};
use libc::{c_int, c_long, c_ulong, c_void, pid_t};
use std::arch::asm;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The limits and filters that the process started with were checked.
static IS_CHECKED: AtomicBool = AtomicBool::new(false);
/// The number of system call filters that `pagemesh exec` was under itself.
static FILTERS_KNOWN: AtomicU64 = AtomicU64::new(0);

/// How often this library polls for other threads to leave the engine, and for the engine's own
/// threads to end.
const LEAVE_TRIES_MAX: u32 = 20_000;
const POLL_INTERVAL_NS: c_long = 100_000;

/// Runs once, when the library is loaded.
pub fn begin() {
    FILTERS_KNOWN.store(
        environment::number(c"PAGEMESH_FILTERS").unwrap_or(0),
        Relaxed,
    );
    if is_emulated() || is_sanitized() {
        set_withdrawn();
    }
}

/// Whether valgrind runs the program: it knows neither the instructions nor the memory of pools.
/// Its requests are instructions that do nothing elsewhere (`valgrind.h`).
fn is_emulated() -> bool {
    const RUNNING_ON_VALGRIND: u64 = 0x1001;
    let request = [RUNNING_ON_VALGRIND, 0, 0, 0, 0, 0];
    let mut result = 0u64;
    // SAFETY: the register is rotated by 128 bits in all.
    unsafe {
        asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") &raw const request,
            inout("rdx") result,
            inout("rdi") 0u64 => _,
        );
    }
    result != 0
}

/// Whether a sanitizer is loaded: it checks the arguments of C library calls, also the length of a
/// buffer that is read into.
fn is_sanitized() -> bool {
    let names = [
        c"__asan_init",
        c"__hwasan_init",
        c"__msan_init",
        c"__tsan_init",
        c"__lsan_init",
    ];
    let has =
        |name| loaded_objects().any(|object| object.function(SymbolName::of(name), None).is_some());
    names.into_iter().any(has)
}

/// Whether a first file may go on the direct path, by the limits and filters that the process
/// started with. The caller is inside.
pub fn may_use_direct_path() -> bool {
    if is_withdrawn() {
        return false;
    }
    if IS_CHECKED.swap(true, SeqCst) {
        return true;
    }
    let is_limited = [libc::RLIMIT_AS, libc::RLIMIT_DATA].map(sys::is_limited);
    let is_free = !is_limited.contains(&true) && filter_count() <= FILTERS_KNOWN.load(Relaxed);
    if !is_free {
        set_withdrawn();
    }
    is_free
}

/// How many filters of system calls this thread is under, as far as the kernel reports it.
fn filter_count() -> u64 {
    let mut text = [0u8; 4096];
    let len = sys::read_file(c"/proc/self/status", &mut text);
    let text = text.get(..len).unwrap_or_default();
    let value = |name: &[u8]| {
        let line = text
            .split(|byte| *byte == b'\n')
            .find(|line| line.starts_with(name))?;
        str::from_utf8(&line[name.len()..])
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    match value(b"Seccomp:") {
        Some(0) => 0,
        // Without that file a system call reads it, which a filter may forbid.
        None if sys::seccomp_mode() == 0 => 0,
        _ => value(b"Seccomp_filters:").unwrap_or(u64::MAX),
    }
}

/// Withdraws, before a limit applies. Returns when that is done, or other threads have not left the
/// engine in time.
#[cold]
#[inline(never)]
pub extern "C" fn withdraw() {
    let thread = thread::this();
    if thread.is_vforked() || is_withdrawn() || !ownership::may_change() {
        return;
    }
    set_withdrawn();
    {
        let Some(_inside) = thread.enter_to_change() else {
            return;
        };
        for fd in table::ours_in(0, u32::MAX) {
            // So that the kernel knows the size: an asynchronous read ends there.
            sys::fstat(fd);
            table::remove(fd);
        }
        table::free_deferred();
    }
    let is_quiet = wait_until(table::is_unused);
    {
        let Some(_inside) = thread.enter_to_change() else {
            return;
        };
        table::free_all_unused();
    }
    engine::leave_all_mounts();
    engine_threads::stop_watching();
    wait_until(engine_threads::are_gone);
    if is_quiet {
        signals::restore();
    }
}

fn wait_until(is_so: impl Fn() -> bool) -> bool {
    for _ in 0..LEAVE_TRIES_MAX {
        if is_so() {
            return true;
        }
        sys::sleep_ns(POLL_INTERVAL_NS);
    }
    false
}

/// Runs before a limit is set.
///
/// # Safety
/// `limit` is a limit, null, or any pointer that the kernel would refuse.
pub fn before_setrlimit(pid: pid_t, what: c_int, limit: *const c_void) {
    let is_of_memory = [libc::RLIMIT_AS, libc::RLIMIT_DATA].contains(&(what as u32));
    let is_own = pid == 0 || pid == sys::getpid();
    if is_of_memory
        && is_own
        && !limit.is_null()
        && buffer::read_checked(limit.cast::<u64>()) != Some(libc::RLIM64_INFINITY)
    {
        withdraw();
    }
}

/// Runs before a filter of system calls is installed.
fn before_filter() {
    withdraw();
    if is_withdrawn() && !thread::this().is_vforked() {
        set_filtered();
    }
}

/// Handles the result of creating an `io_uring`: its requests may read and write at the current
/// offset, which the kernel moves only for files that it caches, as all that are opened from now
/// on.
pub extern "C" fn io_uring_created(result: c_long) {
    if result >= 0 {
        withdraw();
    }
}

/// Runs before `prctl`.
pub extern "C" fn before_prctl(option: c_int) {
    if option == libc::PR_SET_SECCOMP {
        before_filter();
    }
}

/// Runs before a system call that may set limits.
#[inline]
pub fn before_syscall(number: c_long, a: c_long, c: c_long) {
    match number {
        libc::SYS_prctl => before_prctl(a as c_int),
        // A query for the available filters passes no filter.
        libc::SYS_seccomp if a as c_ulong <= 1 && (a == 0 || c != 0) => before_filter(),
        libc::SYS_mlockall => withdraw(),
        _ => {}
    }
}
