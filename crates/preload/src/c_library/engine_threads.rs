//! Threads of the engine, and the end of a process that has only such threads left.
//!
//! A process ends when its last thread has ended. The C library ends it by `exit(0)` if it knows of
//! the end of the thread; the kernel ends it with the main thread's exit code if threads ended
//! without the C library. Threads of the engine must not delay either. All of them begin here:
//! `binding` gives this library [`create`] in place of `pthread_create`.
//!
//! - The C library counts threads (`__nptl_nthreads`), and the last one to end calls `exit`. A
//!   thread of the engine takes itself off that count as long as it runs.
//! - One thread of the engine waits for threads that end by a bare system call, until only threads
//!   of the engine are left. Then it ends the process as the kernel would.

use super::elf::SymbolName;
use super::symbols;
use crate::kernel::sys::{self, MASKABLE_SIGNALS};
use crate::state::withdrawal;
use libc::{c_int, c_void, pthread_attr_t, pthread_t};
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::wait::until_readable;
use pagemesh_direct::internal_fds;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};
use std::time::{Duration, Instant};

/// More than 16 mounts with 16 slots of two legs each need. Further threads are refused.
const THREADS_MAX: usize = 1024;
const NONE: i32 = 0;
const STARTING: i32 = -1;

/// The kernel's thread ids of the engine's threads. The id of a thread that has left this library
/// is negative: the thread still makes the system calls of the C library that end it.
static THREADS: [AtomicI32; THREADS_MAX] = [const { AtomicI32::new(NONE) }; THREADS_MAX];

/// The C library's count of threads, or null where it does not export it.
static C_LIBRARY_THREADS: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Counts starts and ends of engine threads.
static THREAD_CHANGES: AtomicU32 = AtomicU32::new(0);

static IS_WATCHING: AtomicBool = AtomicBool::new(false);
/// The word that the kernel clears, and wakes, when the main thread ends. Null: the kernel gave
/// none.
static MAIN_EXIT_WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// A stand-in for that word.
static NO_MAIN_EXIT_WORD: AtomicU32 = AtomicU32::new(0);

/// Delay between two checks, if the kernel does not report the end of the main thread.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Delay between two checks for other threads, if the kernel cannot report their end (before Linux
/// 6.9).
const FAST_POLL_INTERVAL: Duration = Duration::from_millis(20);
const WATCH_STACK_BYTES: usize = 64 << 10;

type StartRoutine = extern "C" fn(*mut c_void) -> *mut c_void;
type CreateFn =
    unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, StartRoutine, *mut c_void) -> c_int;

/// The C library's `pthread_create`.
static CREATE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Runs once, when the library is loaded, before the engine starts a thread.
pub fn begin() {
    let create = symbols::c_library_function(SymbolName::of(c"pthread_create"));
    CREATE.store(create.unwrap_or(0) as *mut c_void, Release);
    let counted = symbols::c_library_variable(SymbolName::of(c"__nptl_nthreads"));
    C_LIBRARY_THREADS.store(counted.unwrap_or(0) as *mut AtomicU32, Release);
}

fn c_library_threads() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a word of the C library, which stays.
    unsafe { C_LIBRARY_THREADS.load(Acquire).as_ref() }
}

/// Whether no thread of the engine is left in the kernel, so that none makes a system call.
pub fn are_gone() -> bool {
    forget_ended();
    THREADS.iter().all(|thread| thread.load(SeqCst) == NONE)
}

/// Frees the entries of threads that the kernel has ended.
fn forget_ended() {
    for own in &THREADS {
        let thread = own.load(SeqCst);
        if thread < STARTING && !sys::has_thread(-thread) {
            // A failure means that another thread has freed the entry.
            let _ = own.compare_exchange(thread, NONE, SeqCst, SeqCst);
        }
    }
}

fn is_engine_thread(thread: c_int) -> bool {
    THREADS.iter().any(|own| own.load(SeqCst) == thread)
}

/// Forgets all threads in a child, which has none of them.
pub fn reset_in_child() {
    for thread in &THREADS {
        thread.store(NONE, SeqCst);
    }
    IS_WATCHING.store(false, SeqCst);
    MAIN_EXIT_WORD.store(ptr::null_mut(), SeqCst);
}

struct ThreadStart {
    start: StartRoutine,
    argument: *mut c_void,
    place: usize,
}

/// Replaces `pthread_create` for the engine.
///
/// # Safety
/// As the C library's.
pub unsafe extern "C" fn create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: StartRoutine,
    argument: *mut c_void,
) -> c_int {
    let create = CREATE.load(Acquire);
    if create.is_null() || withdrawal::is_withdrawn() {
        return libc::EAGAIN;
    }
    if !IS_WATCHING.swap(true, AcqRel) {
        start_watcher();
    }
    let take = |own: &AtomicI32| own.compare_exchange(NONE, STARTING, SeqCst, SeqCst).is_ok();
    // The program may get the id of an ended thread again. An entry must not wait for that one.
    forget_ended();
    let Some(place) = THREADS.iter().position(take) else {
        return libc::EAGAIN;
    };
    let begin = Box::into_raw(Box::new(ThreadStart {
        start,
        argument,
        place,
    }));
    // SAFETY: the C library's function of this name.
    let create = unsafe { std::mem::transmute::<*mut c_void, CreateFn>(create) };
    // SAFETY: the caller's; `run` takes this argument.
    let result = unsafe { create(thread, attributes, run, begin.cast()) };
    if result != 0 {
        // SAFETY: no thread was started with it.
        drop(unsafe { Box::from_raw(begin) });
        THREADS[place].store(NONE, SeqCst);
    }
    result
}

extern "C" fn run(begin: *mut c_void) -> *mut c_void {
    // SAFETY: `create` made it for this thread.
    let begin = *unsafe { Box::from_raw(begin.cast::<ThreadStart>()) };
    THREADS[begin.place].store(sys::gettid(), SeqCst);
    THREAD_CHANGES.fetch_add(1, SeqCst);
    if let Some(counted) = c_library_threads()
        && counted.fetch_sub(1, SeqCst) == 1
    {
        // The program's last thread ended just now, and counted this one as a thread of the
        // program.
        // SAFETY: as the C library does it then.
        unsafe { libc::exit(0) };
    }
    let result = (begin.start)(begin.argument);
    THREAD_CHANGES.fetch_add(1, SeqCst);
    THREADS[begin.place].store(-sys::gettid(), SeqCst);
    if let Some(counted) = c_library_threads()
        && counted.fetch_add(1, SeqCst) == 0
    {
        // The program's last thread is ending the process.
        counted.fetch_sub(1, SeqCst);
        sys::end_thread();
    }
    result
}

/// Starts the thread that waits for the end of the program's threads.
fn start_watcher() {
    if sys::gettid() == sys::getpid() {
        MAIN_EXIT_WORD.store(sys::exit_clear_address() as *mut AtomicU32, Release);
    }
    let before = sys::mask(libc::SIG_BLOCK, MASKABLE_SIGNALS);
    let thread = std::thread::Builder::new().name("pagemesh-end".into());
    if thread
        .stack_size(WATCH_STACK_BYTES)
        .spawn(watch_program_end)
        .is_err()
    {
        IS_WATCHING.store(false, SeqCst);
    }
    sys::mask(libc::SIG_SETMASK, before);
}

fn main_exit_word() -> &'static AtomicU32 {
    // SAFETY: null, or a word of the main thread's memory, which stays when it has ended.
    unsafe { MAIN_EXIT_WORD.load(Acquire).as_ref() }.unwrap_or(&NO_MAIN_EXIT_WORD)
}

/// Wakes the watching thread after the process has withdrawn, so that it ends.
pub fn stop_watching() {
    sys::futex_wake_shared(main_exit_word());
}

/// A descriptor of the engine, which the program cannot close.
struct InternalFd(OwnedFd);

impl InternalFd {
    fn from_raw(fd: isize) -> Option<InternalFd> {
        let fd = c_int::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: it was just opened.
        let moved = move_fd_high(unsafe { OwnedFd::from_raw_fd(fd) });
        internal_fds::add(moved.as_raw_fd());
        Some(InternalFd(moved))
    }
}

impl Drop for InternalFd {
    fn drop(&mut self) {
        internal_fds::remove(self.0.as_raw_fd());
    }
}

fn watch_program_end() {
    let main = sys::getpid();
    while !withdrawal::is_withdrawn() && !has_ended(main) {
        let word = main_exit_word();
        let seen = word.load(SeqCst);
        let is_told = !ptr::eq(word, &NO_MAIN_EXIT_WORD);
        if !is_told || seen == main as u32 {
            sys::futex_wait_shared(word, seen, (!is_told).then_some(POLL_INTERVAL));
        } else {
            // The thread has ended, but the kernel still lists it.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let mut is_last = true;
    let mut seen = THREAD_CHANGES.load(SeqCst);
    while !withdrawal::is_withdrawn() {
        let found = live_program_thread(main);
        let now = THREAD_CHANGES.load(SeqCst);
        let is_settled = now == seen && !is_engine_thread(STARTING);
        seen = now;
        match found {
            // An engine thread that starts or ends is listed without its mark.
            Some(_) if !is_settled => std::thread::sleep(FAST_POLL_INTERVAL),
            Some(thread) => is_last = await_thread(thread),
            None => end_process(main, is_last),
        }
    }
}

fn has_ended(thread: c_int) -> bool {
    thread_stat(thread).is_none_or(|stat| stat.has_ended)
}

/// Waits a while for a thread to end. Returns whether the main thread's exit code counts though
/// this one ends later: so it was in Linux before 6.0, and kernels that report the ends of threads
/// are newer.
fn await_thread(thread: c_int) -> bool {
    let end = InternalFd::from_raw(sys::open_thread(thread));
    match &end {
        Some(end) => {
            let _ = until_readable(&[end.0.as_raw_fd()], Some(Instant::now() + POLL_INTERVAL));
        }
        None => std::thread::sleep(FAST_POLL_INTERVAL),
    }
    end.is_none()
}

/// One of the program's threads that has not ended. Only a thread of the engine calls this.
fn live_program_thread(main: c_int) -> Option<c_int> {
    let listed = std::fs::read_dir("/proc/self/task").ok();
    // Without the list of threads the answer is unknown.
    let Some(listed) = listed else {
        return Some(main);
    };
    let numbers = listed
        .flatten()
        .filter_map(|it| it.file_name().to_str()?.parse().ok());
    let mut others = numbers.filter(|thread| !is_engine_thread(*thread));
    others.find(|thread| thread_stat(*thread).is_some_and(|stat| !stat.has_ended))
}

struct ThreadStat {
    has_ended: bool,
    exit_code: c_int,
}

/// The status of a thread of this process (proc_pid_stat(5)).
fn thread_stat(thread: c_int) -> Option<ThreadStat> {
    /// Words behind the name: the state is the first of them.
    const EXIT_CODE: usize = 49;
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let (_, words) = text.rsplit_once(") ")?;
    let words: Vec<&str> = words.split_ascii_whitespace().collect();
    Some(ThreadStat {
        has_ended: matches!(words.first(), Some(&("Z" | "X"))),
        exit_code: words.get(EXIT_CODE)?.parse().ok()?,
    })
}

/// Ends the process when no thread of the program is left. The exit code is the main thread's if
/// that one was the last, and otherwise the code with which the C library ends threads.
fn end_process(main: c_int, is_main_code: bool) {
    // A starting thread has no known id, and the C library's `exit` is in progress.
    let is_exiting = c_library_threads().is_some_and(|counted| counted.load(SeqCst) == 0);
    if is_exiting || is_engine_thread(STARTING) {
        return std::thread::sleep(Duration::from_millis(1));
    }
    let code = if is_main_code {
        thread_stat(main).map_or(0, |stat| stat.exit_code >> 8 & 0xff)
    } else {
        0
    };
    if code == 0 && c_library_threads().is_none() {
        // SAFETY: as the C library does when the last thread has ended.
        unsafe { libc::exit(0) };
    }
    sys::end_process(code);
}
