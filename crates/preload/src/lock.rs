//! A lock that asks the C library nothing: usable wherever a signal handler is.
//!
//! Whoever holds it runs no handler of the program (it is *inside*, or has its signals
//! blocked), so nobody waits for itself. It sleeps in the kernel, so that no thread of
//! higher priority spins against its holder. Its states are those of Drepper, "Futexes Are
//! Tricky", and that what it is held for is a call of the kernel's alone.

use crate::sys;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Besides: somebody may sleep.
const HAS_WAITERS: u32 = 2;
/// Besides: for a call of the kernel's alone.
const IN_KERNEL_CALL: u32 = 4;

/// Looks before sleeping: about as long as two short system calls.
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

    /// Until it is no longer as it was seen, or sooner.
    fn sleep(&self, seen: u32) {
        let awaited = seen | HAS_WAITERS;
        let mark = || self.0.compare_exchange(seen, awaited, Relaxed, Relaxed);
        if seen == awaited || mark().is_ok() {
            sys::futex_wait(&self.0, awaited);
        }
    }

    /// Returns when nobody holds it, unless for a call of the kernel's alone. Whoever holds it
    /// from then on sees what the caller did before.
    pub fn await_release(&self) {
        let mut has_slept = false;
        loop {
            // It writes, so that who takes the lock later has seen that.
            let seen = self.0.fetch_or(0, AcqRel);
            if seen == FREE || seen & IN_KERNEL_CALL != 0 {
                break;
            }
            self.sleep(seen);
            has_slept = true;
        }
        if has_slept {
            // One who would hold it may have been meant.
            sys::futex_wake_one(&self.0);
        }
    }

    /// In a child, where the thread that held it is not there.
    pub fn reset(&self) {
        self.0.store(FREE, Release);
    }
}

pub struct LockGuard<'a>(&'a Lock);

impl LockGuard<'_> {
    /// What is left to do is one call of the kernel's.
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
