//! A lock that does not use the C library: it works wherever a signal handler runs.
//!
//! A holder runs no handler of the program (it is *inside*, or has its signals blocked), so no
//! thread waits for itself. Waiters sleep in the kernel, so that no thread of higher priority spins
//! against the holder. The states come from Drepper, "Futexes Are Tricky". One is added: the
//! holder is in a single kernel call.

use crate::kernel::sys;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Flag: a thread may sleep.
const HAS_WAITERS: u32 = 2;
/// Flag: the holder only makes a kernel call.
const IN_KERNEL_CALL: u32 = 4;

/// Attempts before sleeping: about as long as two short system calls.
const SPINS_MAX: u32 = 100;

pub struct Lock(AtomicU32);

impl Lock {
    pub const fn new() -> Self {
        Lock(AtomicU32::new(FREE))
    }

    pub fn hold(&self) -> LockGuard<'_> {
        for _ in 0..SPINS_MAX {
            if self.take_as(HELD).is_ok() {
                return LockGuard(self);
            }
            spin_loop();
        }
        while let Err(seen) = self.take_as(HELD | HAS_WAITERS) {
            self.sleep(seen);
        }
        LockGuard(self)
    }

    fn take_as(&self, state: u32) -> Result<u32, u32> {
        self.0.compare_exchange(FREE, state, Acquire, Relaxed)
    }

    /// Sleeps until the state is no longer `seen`, or shorter.
    fn sleep(&self, seen: u32) {
        let awaited = seen | HAS_WAITERS;
        let mark = || self.0.compare_exchange(seen, awaited, Relaxed, Relaxed);
        if seen == awaited || mark().is_ok() {
            sys::futex_wait(&self.0, awaited);
        }
    }

    /// Returns when no thread holds the lock, except for a kernel call alone. Later holders see all
    /// writes that the caller made before.
    pub fn await_release(&self) {
        let mut has_slept = false;
        loop {
            // A write, so that a later holder is ordered behind it.
            let seen = self.0.fetch_or(0, AcqRel);
            if seen == FREE || seen & IN_KERNEL_CALL != 0 {
                break;
            }
            self.sleep(seen);
            has_slept = true;
        }
        if has_slept {
            // The wakeup may have been meant for a thread that wants to hold the lock.
            sys::futex_wake_one(&self.0);
        }
    }

    /// Resets the lock in a child, where the holding thread does not exist.
    pub fn reset(&self) {
        self.0.store(FREE, Release);
    }
}

pub struct LockGuard<'a>(&'a Lock);

impl LockGuard<'_> {
    /// Marks that the rest of the holder's work is one kernel call.
    pub fn mark_kernel_call(&self) {
        if self.0.0.fetch_or(IN_KERNEL_CALL, Release) & HAS_WAITERS != 0 {
            sys::futex_wake_all(&self.0.0);
        }
    }
}

impl Drop for LockGuard<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Release) & HAS_WAITERS != 0 {
            sys::futex_wake_one(&self.0.0);
        }
    }
}
