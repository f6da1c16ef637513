//! A stack for each thread that the engine runs on.
//!
//! Programs make calls on stacks of a few KiB: coroutines, threads with the least that the C
//! library allows. The kernel uses none of such a stack, and the engine takes up to 16 KiB. So a
//! thread that reaches the engine gets another stack for that, with a guard page below it. It is
//! mapped at the first such call and unmapped when the thread ends.
//!
//! A handler of the program runs on it only for a fault of the engine: other handlers wait until
//! the thread is outside (`signals`). So no two calls run on it at once.

use crate::kernel::sys;
use crate::state::thread;
use libc::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Release};

/// The engine takes 16 KiB at most (`app/tests/direct/stacks.rs`). A signal that is deferred on it takes
/// another 12 KiB, where the processor has registers of AMX.
const STACK_BYTES: usize = 64 << 10;
const GUARD_BYTES: usize = 4096;

/// The thread-specific key with the destructor that unmaps a thread's stack. -1: there is no such
/// key.
static KEY: AtomicI32 = AtomicI32::new(-1);

/// Runs once, when the library is loaded.
pub fn begin() {
    let mut key = 0;
    // SAFETY: room for a key, and a function that lives as long as the process.
    if unsafe { libc::pthread_key_create(&mut key, Some(unmap)) } == 0 {
        KEY.store(key as c_int, Release);
    }
}

unsafe extern "C" fn unmap(top: *mut c_void) {
    thread::this().set_engine_stack(0);
    sys::unmap(
        top as usize - STACK_BYTES - GUARD_BYTES,
        STACK_BYTES + GUARD_BYTES,
    );
}

/// The end of this thread's engine stack, or none: there is no memory for it.
#[inline]
fn stack_top() -> Option<usize> {
    match thread::this().engine_stack() {
        0 => map_stack(),
        top => Some(top),
    }
}

#[cold]
fn map_stack() -> Option<usize> {
    let key = c_uint::try_from(KEY.load(Acquire)).ok()?;
    let start = sys::map_stack(STACK_BYTES, GUARD_BYTES)?;
    let top = start + GUARD_BYTES + STACK_BYTES;
    // SAFETY: a key of ours.
    if unsafe { libc::pthread_setspecific(key, top as *const c_void) } != 0 {
        sys::unmap(start, STACK_BYTES + GUARD_BYTES);
        return None;
    }
    thread::this().set_engine_stack(top);
    Some(top)
}

struct StackJob<F, R> {
    run: MaybeUninit<F>,
    result: MaybeUninit<R>,
}

// A separate frame, so that it is not part of its caller's on the program's stack.
#[inline(never)]
extern "C" fn run_job<F: FnOnce() -> R, R>(job: *mut c_void) {
    // SAFETY: `on_engine_stack` passes a job with a closure to run, and reads the result only after
    // this.
    unsafe {
        let job = &mut *job.cast::<StackJob<F, R>>();
        job.result.write(job.run.assume_init_read()());
    }
}

/// Runs a closure on this thread's engine stack. The caller is inside. None: there is no memory for
/// a stack, and the closure did not run.
#[inline]
pub fn on_engine_stack<R>(run: impl FnOnce() -> R) -> Option<R> {
    fn with<F: FnOnce() -> R, R>(top: usize, run: F) -> R {
        let mut job = StackJob {
            run: MaybeUninit::new(run),
            result: MaybeUninit::<R>::uninit(),
        };
        let (work, argument) = (run_job::<F, R>, (&raw mut job).cast());
        if (top - STACK_BYTES..top).contains(&thread::stack_pointer()) {
            work(argument);
        } else {
            // SAFETY: a stack that nothing runs on, and a function that takes this job. It does
            // not unwind: it would end the process.
            unsafe { pagemesh_on_stack(top, work, argument) };
        }
        // SAFETY: the job is done.
        unsafe { job.result.assume_init() }
    }
    Some(with(stack_top()?, run))
}

unsafe extern "C" {
    fn pagemesh_on_stack(top: usize, run: extern "C" fn(*mut c_void), job: *mut c_void);
}

// Debuggers unwind by the frame pointer.
std::arch::global_asm!(
    ".text",
    ".p2align 4",
    ".globl pagemesh_on_stack",
    ".hidden pagemesh_on_stack",
    "pagemesh_on_stack:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "mov rsp, rdi",
    "mov rdi, rdx",
    "call rsi",
    "mov rsp, rbp",
    "pop rbp",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
);
