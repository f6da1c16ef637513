//! The state of a thread.
//!
//! A thread is *inside* while it may hold a resource that other threads wait for: a lock of the
//! engine or of this library, or a use of an entry. While it is inside, no handler of the program
//! runs on it (`signals`) and it is not cancelled, so that it always leaves again.
//!
//! The memory is in the thread's static TLS block: it is not allocated, and need not be freed when
//! the thread ends. Only the thread itself and handlers on it access it, so all accesses are
//! relaxed.

use crate::kernel::sys::{self, ALL_SIGNALS};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, compiler_fence};

pub struct ThreadState {
    is_inside: AtomicBool,
    /// A child of `vfork` runs in this thread's memory.
    is_vforked: AtomicBool,
    is_cancelled_anywhere: AtomicBool,
    /// Its number, or 0.
    number: AtomicU32,
    /// Signals that came while it was inside; they are blocked and pending.
    deferred: AtomicU64,
    /// A handler runs while the stack pointer is below this, or in the range of the alternate
    /// signal stack.
    handler_end: AtomicUsize,
    alternate_start: AtomicUsize,
    alternate_end: AtomicUsize,
    /// The end of its stack for the engine, or 0.
    engine_stack: AtomicUsize,
    /// Start and bytes of the mapping that holds the environment of an `exec` in progress, or 0.
    exec_mapping_start: AtomicUsize,
    exec_mapping_len: AtomicUsize,
    not_sync: PhantomData<*const ()>,
}

thread_local! {
    static THREAD: ThreadState = const { ThreadState {
        is_inside: AtomicBool::new(false),
        is_vforked: AtomicBool::new(false),
        is_cancelled_anywhere: AtomicBool::new(false),
        number: AtomicU32::new(0),
        deferred: AtomicU64::new(0),
        handler_end: AtomicUsize::new(0),
        alternate_start: AtomicUsize::new(0),
        alternate_end: AtomicUsize::new(0),
        engine_stack: AtomicUsize::new(0),
        exec_mapping_start: AtomicUsize::new(0),
        exec_mapping_len: AtomicUsize::new(0),
        not_sync: PhantomData,
    } };
}

static THREAD_COUNT: AtomicU32 = AtomicU32::new(0);

/// This thread. The reference cannot be sent to another.
#[inline]
pub fn this() -> &'static ThreadState {
    let thread = THREAD.with(|thread| &raw const *thread);
    // SAFETY: the memory is this thread's as long as it runs code, since nothing in it is
    // destroyed; and the reference stays here, since `ThreadState` is not `Sync`.
    unsafe { &*thread }
}

/// Whether this thread may be cancelled at any instruction; then it must not enter the engine. It
/// may be cancelled in this function.
#[inline(never)]
pub extern "C" fn is_cancelled_anywhere() -> bool {
    this().is_cancelled_anywhere.load(Relaxed)
}

impl ThreadState {
    /// Whether this thread may enter the engine now.
    #[inline]
    fn may_enter(&self) -> bool {
        !(self.is_inside.load(Relaxed)
            | self.is_vforked.load(Relaxed)
            | self.is_cancelled_anywhere.load(Relaxed))
    }

    /// None: the call goes to the kernel.
    #[inline]
    pub fn enter(&'static self) -> Option<EngineGuard> {
        if !self.may_enter() {
            return None;
        }
        self.is_inside.store(true, Relaxed);
        compiler_fence(SeqCst);
        Some(EngineGuard(self))
    }

    /// As [`ThreadState::enter`], also for a thread that may be cancelled at any instruction: all
    /// signals are blocked meanwhile, and so is cancellation.
    pub fn enter_to_change(&'static self) -> Option<ChangeGuard> {
        if !self.is_cancelled_anywhere.load(Relaxed) {
            return Some(ChangeGuard {
                inside: Some(self.enter()?),
                previous_mask: None,
            });
        }
        let before = sys::mask(libc::SIG_SETMASK, ALL_SIGNALS);
        self.is_cancelled_anywhere.store(false, Relaxed);
        let inside = self.enter();
        self.is_cancelled_anywhere.store(true, Relaxed);
        Some(ChangeGuard {
            inside,
            previous_mask: Some(before),
        })
        .filter(|it| it.inside.is_some())
    }

    #[inline]
    pub fn is_inside(&self) -> bool {
        self.is_inside.load(Relaxed)
    }

    pub fn is_vforked(&self) -> bool {
        self.is_vforked.load(Relaxed)
    }

    /// A mapping that a program is executed with: its start and its bytes.
    pub fn set_exec_mapping(&self, start: usize, len: usize) {
        self.exec_mapping_start.store(start, Relaxed);
        self.exec_mapping_len.store(len, Relaxed);
    }

    /// Runs in the parent, when a child of `vfork` has left its memory.
    pub fn unmap_exec_mapping(&self) {
        let start = self.exec_mapping_start.load(Relaxed);
        let len = self.exec_mapping_len.load(Relaxed);
        if len > 0 {
            sys::unmap(start, len);
            self.set_exec_mapping(0, 0);
        }
    }

    pub fn set_vforked(&self, is_vforked: bool) {
        self.is_vforked.store(is_vforked, Relaxed);
    }

    pub fn set_cancelled_anywhere(&self, is_so: bool) {
        self.is_cancelled_anywhere.store(is_so, Relaxed);
    }

    #[inline]
    pub fn engine_stack(&self) -> usize {
        self.engine_stack.load(Relaxed)
    }

    pub fn set_engine_stack(&self, top: usize) {
        self.engine_stack.store(top, Relaxed);
    }

    /// A number that spreads threads over counters.
    #[inline]
    pub fn number(&self) -> u32 {
        let number = self.number.load(Relaxed);
        if number != 0 {
            return number;
        }
        let number = THREAD_COUNT.fetch_add(1, Relaxed) | 1 << 31;
        self.number.store(number, Relaxed);
        number
    }

    pub fn defer(&self, signals: u64) {
        self.deferred.fetch_or(signals, Relaxed);
    }

    pub fn take_deferred(&self) -> u64 {
        self.deferred.swap(0, Relaxed)
    }

    /// Whether a handler of the program runs. It may have interrupted `malloc`, so the engine must
    /// not be called. The stack pointer detects a handler that was left by `longjmp`: a caller
    /// above it has left the handler, and is in no handler from then on.
    #[inline]
    pub fn is_in_handler(&self) -> bool {
        let is_any = self.handler_end.load(Relaxed) | self.alternate_end.load(Relaxed) != 0;
        is_any && self.check_in_handler()
    }

    #[cold]
    fn check_in_handler(&self) -> bool {
        let is_so = self.is_handler_stack(stack_pointer());
        if !is_so {
            self.handler_end.store(0, Relaxed);
            self.alternate_end.store(0, Relaxed);
        }
        is_so
    }

    fn is_handler_stack(&self, here: usize) -> bool {
        let other = self.alternate_start.load(Relaxed)..self.alternate_end.load(Relaxed);
        here < self.handler_end.load(Relaxed) || other.contains(&here)
    }

    /// Records that a handler begins below this address, perhaps on the alternate stack. Returns
    /// the word to reset to 0 at its end. None: it interrupts another handler, which stays recorded
    /// even if this one jumps back into it.
    pub fn begin_handler(&self, here: usize, other: Range<usize>) -> Option<&AtomicUsize> {
        if self.is_handler_stack(here) {
            return None;
        }
        let end = if other.contains(&here) {
            self.alternate_start.store(other.start, Relaxed);
            &self.alternate_end
        } else {
            &self.handler_end
        };
        end.store(here, Relaxed);
        Some(end)
    }
}

#[inline(always)]
pub fn stack_pointer() -> usize {
    let here: usize;
    // SAFETY: it reads a register.
    unsafe { std::arch::asm!("mov {}, rsp", out(reg) here, options(nomem, nostack)) };
    here
}

pub struct EngineGuard(&'static ThreadState);

impl EngineGuard {
    pub fn thread(&self) -> &'static ThreadState {
        self.0
    }
}

impl Drop for EngineGuard {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(SeqCst);
        self.0.is_inside.store(false, Relaxed);
        compiler_fence(SeqCst);
        if self.0.deferred.load(Relaxed) != 0 {
            // They were not blocked before, so they are delivered now.
            sys::mask(libc::SIG_UNBLOCK, self.0.take_deferred() & ALL_SIGNALS);
        }
    }
}

pub struct ChangeGuard {
    inside: Option<EngineGuard>,
    previous_mask: Option<u64>,
}

impl Drop for ChangeGuard {
    fn drop(&mut self) {
        drop(self.inside.take());
        if let Some(before) = self.previous_mask {
            sys::mask(libc::SIG_SETMASK, before);
        }
    }
}
