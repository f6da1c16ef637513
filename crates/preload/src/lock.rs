//! A lock that asks the C library nothing: usable wherever a signal handler is.
//!
//! Whoever holds it runs no handler of the program (it is *inside*, or has its signals
//! blocked), so nobody waits for itself. It sleeps in the kernel, so that no thread of
//! higher priority spins against its holder. Three states, after Drepper, "Futexes Are
//! Tricky".

use crate::sys;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may sleep.
const AWAITED: u32 = 2;

/// Looks before sleeping: about as long as two short system calls.
const SPINS_MAX: u32 = 100;

pub struct Lock(AtomicU32);

impl Lock {
    pub const fn new() -> Self {
        Lock(AtomicU32::new(FREE))
    }

    pub fn hold(&self) -> Held<'_> {
        for _ in 0..SPINS_MAX {
            if self
                .0
                .compare_exchange(FREE, HELD, Acquire, Relaxed)
                .is_ok()
            {
                return Held(self);
            }
            spin_loop();
        }
        while self.0.swap(AWAITED, Acquire) != FREE {
            sys::futex_wait(&self.0, AWAITED);
        }
        Held(self)
    }

    /// In a child, where the thread that held it is not there.
    pub fn reset(&self) {
        self.0.store(FREE, Release);
    }
}

pub struct Held<'a>(&'a Lock);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Release) == AWAITED {
            sys::futex_wake_one(&self.0.0);
        }
    }
}
