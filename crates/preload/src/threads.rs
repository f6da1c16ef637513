//! Threads of the engine, and the end of a process that has none but these.
//!
//! A process ends when its last thread has: by `exit(0)` where the C library knows of it, and by
//! the kernel, with the main thread's code, where threads ended past it. Threads of the engine
//! count for neither. All of them begin here (`binding`).
//!
//! - The C library counts threads (`__nptl_nthreads`), and the one that ends last calls `exit`. A
//!   thread of the engine takes itself off that number as long as it runs.
//! - For threads that end by a bare system call one thread of the engine waits, until only the
//!   engine's are left. Then it ends the process as the kernel would have.

use crate::binding;
use crate::elf::Name;
use crate::{sys, withdraw};
use libc::{c_int, c_void, pthread_attr_t, pthread_t};
use pagemesh_base::aside::aside;
use pagemesh_base::wait::until_readable;
use pagemesh_direct::owned;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};
use std::time::{Duration, Instant};

/// More than 16 mounts with 16 slots of two legs each need. Further threads are refused.
const THREADS_MAX: usize = 1024;
const NONE: i32 = 0;
const STARTING: i32 = -1;

/// The kernel's numbers of them.
static THREADS: [AtomicI32; THREADS_MAX] = [const { AtomicI32::new(NONE) }; THREADS_MAX];

/// The C library's number of threads, or null where it does not show it.
static COUNTED: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Counts beginnings and ends of engine threads.
static CHANGES: AtomicU32 = AtomicU32::new(0);

static IS_WATCHING: AtomicBool = AtomicBool::new(false);
/// The word that the kernel clears, and wakes, when the main thread ends. Null: it did not tell.
static MAIN: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// In place of that.
static NO_MAIN: AtomicU32 = AtomicU32::new(0);

/// Between two looks, where the kernel does not tell that the main thread has ended.
const LOOK: Duration = Duration::from_millis(500);
/// The same for others, where the kernel cannot tell (before Linux 6.9).
const LOOK_OFTEN: Duration = Duration::from_millis(20);
const WATCH_STACK_BYTES: usize = 64 << 10;

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Create =
    unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, Start, *mut c_void) -> c_int;

/// The C library's.
static CREATE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Once, when the library is loaded, before there is a thread of the engine.
pub fn begin() {
    let create = binding::of_c_library(Name::of(c"pthread_create"));
    CREATE.store(create.unwrap_or(0) as *mut c_void, Release);
    let counted = binding::data_of_c_library(Name::of(c"__nptl_nthreads"));
    COUNTED.store(counted.unwrap_or(0) as *mut AtomicU32, Release);
}

fn counted() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a word of the C library, which stays.
    unsafe { COUNTED.load(Acquire).as_ref() }
}

/// How many there are.
pub fn count() -> usize {
    let threads = THREADS.iter().map(|thread| thread.load(SeqCst));
    threads.filter(|thread| *thread != NONE).count()
}

fn is_own(thread: c_int) -> bool {
    THREADS.iter().any(|own| own.load(SeqCst) == thread)
}

/// In a child, which has none.
pub fn forked() {
    for thread in &THREADS {
        thread.store(NONE, SeqCst);
    }
    IS_WATCHING.store(false, SeqCst);
    MAIN.store(ptr::null_mut(), SeqCst);
}

struct Begin {
    start: Start,
    argument: *mut c_void,
    place: usize,
}

/// What the engine calls in place of `pthread_create`.
///
/// # Safety
/// As the C library's.
pub unsafe extern "C" fn create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let create = CREATE.load(Acquire);
    if create.is_null() || withdraw::is_withdrawn() {
        return libc::EAGAIN;
    }
    if !IS_WATCHING.swap(true, AcqRel) {
        watch();
    }
    let take = |own: &AtomicI32| own.compare_exchange(NONE, STARTING, SeqCst, SeqCst).is_ok();
    let Some(place) = THREADS.iter().position(take) else {
        return libc::EAGAIN;
    };
    let begin = Box::into_raw(Box::new(Begin {
        start,
        argument,
        place,
    }));
    // SAFETY: the C library's function of this name.
    let create = unsafe { std::mem::transmute::<*mut c_void, Create>(create) };
    // SAFETY: the caller's; `run` takes what it is given.
    let result = unsafe { create(thread, attributes, run, begin.cast()) };
    if result != 0 {
        // SAFETY: no thread has it.
        drop(unsafe { Box::from_raw(begin) });
        THREADS[place].store(NONE, SeqCst);
    }
    result
}

extern "C" fn run(begin: *mut c_void) -> *mut c_void {
    // SAFETY: `create` made it for this thread.
    let begin = *unsafe { Box::from_raw(begin.cast::<Begin>()) };
    THREADS[begin.place].store(sys::gettid(), SeqCst);
    CHANGES.fetch_add(1, SeqCst);
    if let Some(counted) = counted()
        && counted.fetch_sub(1, SeqCst) == 1
    {
        // The program's last thread ended just now, and took this one for another of its.
        // SAFETY: as the C library does it then.
        unsafe { libc::exit(0) };
    }
    let result = (begin.start)(begin.argument);
    CHANGES.fetch_add(1, SeqCst);
    THREADS[begin.place].store(NONE, SeqCst);
    if let Some(counted) = counted()
        && counted.fetch_add(1, SeqCst) == 0
    {
        // The program's last thread is ending the process.
        counted.fetch_sub(1, SeqCst);
        sys::end_thread();
    }
    result
}

/// Starts the thread that waits for the end of the program's.
fn watch() {
    if sys::gettid() == sys::getpid() {
        MAIN.store(sys::cleared_at_end() as *mut AtomicU32, Release);
    }
    let before = sys::mask(libc::SIG_BLOCK, crate::signals::OF_PROGRAMS);
    let thread = std::thread::Builder::new().name("pagemesh-end".into());
    if thread
        .stack_size(WATCH_STACK_BYTES)
        .spawn(await_end)
        .is_err()
    {
        IS_WATCHING.store(false, SeqCst);
    }
    sys::mask(libc::SIG_SETMASK, before);
}

fn main_word() -> &'static AtomicU32 {
    // SAFETY: null, or a word of the main thread's memory, which stays when it has ended.
    unsafe { MAIN.load(Acquire).as_ref() }.unwrap_or(&NO_MAIN)
}

/// Wakes the thread that waits, after the process has withdrawn: it ends.
pub fn stop_watching() {
    sys::wake_shared(main_word());
}

/// A descriptor of the engine's, which the program does not close.
struct Own(OwnedFd);

impl Own {
    fn of(fd: isize) -> Option<Own> {
        let fd = c_int::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: it was just opened.
        let moved = aside(unsafe { OwnedFd::from_raw_fd(fd) });
        owned::add(moved.as_raw_fd());
        Some(Own(moved))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        owned::remove(self.0.as_raw_fd());
    }
}

fn await_end() {
    let main = sys::getpid();
    while !withdraw::is_withdrawn() && !has_ended(main) {
        let word = main_word();
        let seen = word.load(SeqCst);
        let is_told = !ptr::eq(word, &NO_MAIN);
        if !is_told || seen == main as u32 {
            sys::wait_shared(word, seen, (!is_told).then_some(LOOK));
        } else {
            // Between its end and its disappearance.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let mut is_last = true;
    let mut seen = CHANGES.load(SeqCst);
    while !withdraw::is_withdrawn() {
        let found = others(main);
        let now = CHANGES.load(SeqCst);
        let is_settled = now == seen && !is_own(STARTING);
        seen = now;
        match found {
            // An engine thread that starts or ends is listed without its mark.
            Some(_) if !is_settled => std::thread::sleep(LOOK_OFTEN),
            Some(thread) => is_last = await_thread(thread),
            None => end(main, is_last),
        }
    }
}

fn has_ended(thread: c_int) -> bool {
    stat_of(thread).is_none_or(|stat| stat.has_ended)
}

/// Waits a while for a thread to end. Whether the main thread's code counts though this one ends
/// later: so it was in Linux before 6.0; those that tell of the ends of threads are newer.
fn await_thread(thread: c_int) -> bool {
    let end = Own::of(sys::open_thread(thread));
    match &end {
        Some(end) => {
            let _ = until_readable(&[end.0.as_raw_fd()], Some(Instant::now() + LOOK));
        }
        None => std::thread::sleep(LOOK_OFTEN),
    }
    end.is_none()
}

/// One of the program's threads that has not ended. Called by a thread of the engine.
fn others(main: c_int) -> Option<c_int> {
    let listed = std::fs::read_dir("/proc/self/task").ok();
    // Without the list of threads nothing can be said.
    let Some(listed) = listed else {
        return Some(main);
    };
    let numbers = listed
        .flatten()
        .filter_map(|it| it.file_name().to_str()?.parse().ok());
    let mut others = numbers.filter(|thread| !is_own(*thread));
    others.find(|thread| stat_of(*thread).is_some_and(|stat| !stat.has_ended))
}

struct Stat {
    has_ended: bool,
    exit_code: c_int,
}

/// Of a thread of this process (proc_pid_stat(5)).
fn stat_of(thread: c_int) -> Option<Stat> {
    /// Words behind the name: the state is the first of them.
    const EXIT_CODE: usize = 49;
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let (_, words) = text.rsplit_once(") ")?;
    let words: Vec<&str> = words.split_ascii_whitespace().collect();
    Some(Stat {
        has_ended: matches!(words.first(), Some(&("Z" | "X"))),
        exit_code: words.get(EXIT_CODE)?.parse().ok()?,
    })
}

/// Nothing of the program runs any more. The code is the main thread's if that one was the last, and
/// else the one that the C library ends threads with.
fn end(main: c_int, is_main_code: bool) {
    // One that is starting is not known by its number, and the C library's `exit` is under way.
    let is_exiting = counted().is_some_and(|counted| counted.load(SeqCst) == 0);
    if is_exiting || is_own(STARTING) {
        return std::thread::sleep(Duration::from_millis(1));
    }
    let code = match is_main_code {
        true => stat_of(main).map_or(0, |stat| stat.exit_code >> 8 & 0xff),
        false => 0,
    };
    if code == 0 && counted().is_none() {
        // SAFETY: as the C library does when the last thread has ended.
        unsafe { libc::exit(0) };
    }
    sys::end_process(code);
}
