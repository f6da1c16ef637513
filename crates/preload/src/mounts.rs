//! The engine: files on mounts, as a guest of theirs.

use crate::engine::number;
use crate::{real, sys, threads};
use libc::c_int;
use pagemesh_direct::account::{Told, Why};
use pagemesh_direct::guest::{self, Guest};
use pagemesh_direct::owned;
use pagemesh_pmem::unreadable;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32};

pub struct File(guest::File);

/// Calls that the kernel serves before a process joins its first mount. Most processes of a
/// shell script, or compilers, never get there.
const PATIENCE: u32 = 32;

/// What the environment says instead, when the library was loaded.
static PATIENCE_SET: AtomicU32 = AtomicU32::new(PATIENCE);

/// Once, when the library is loaded.
pub fn begin() {
    unreadable::leave_to_caller();
    let calls = number(c"PAGEMESH_PATIENCE").and_then(|calls| u32::try_from(calls).ok());
    if let Some(calls) = calls {
        PATIENCE_SET.store(calls, Release);
    }
}

/// Made for the first file on a FUSE mount, and never freed.
static GUEST: AtomicPtr<Guest> = AtomicPtr::new(ptr::null_mut());

fn guest() -> &'static Guest {
    let found = GUEST.load(Acquire);
    let found = match found.is_null() {
        false => found,
        true => {
            let made = Box::into_raw(Box::new(Guest::new(masked, PATIENCE_SET.load(Acquire))));
            match GUEST.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
                Ok(_) => made,
                Err(other) => {
                    // SAFETY: nobody else has seen it.
                    drop(unsafe { Box::from_raw(made) });
                    other
                }
            }
        }
    };
    // SAFETY: it came from a box that is never freed.
    unsafe { &*found }
}

/// What this process did on the direct path, and by the kernel.
pub fn told() -> Vec<Told> {
    guest().told()
}

/// `PTHREAD_CANCEL_DISABLE`
const CANCEL_DISABLE: c_int = 1;

/// Threads that are started meanwhile get none of the program's signals. This one is not
/// cancelled where it waits for them.
fn masked(run: &mut dyn FnMut()) {
    let before = sys::mask(libc::SIG_BLOCK, crate::signals::OF_PROGRAMS);
    let (mut may_be, mut disabled) = (0, 0);
    // SAFETY: both are of this thread's stack.
    unsafe { real::pthread_setcancelstate(CANCEL_DISABLE, &mut may_be) };
    run();
    // SAFETY: as above.
    unsafe { real::pthread_setcancelstate(may_be, &mut disabled) };
    sys::mask(libc::SIG_SETMASK, before);
}

pub fn open(device: u64, ino: u64, fd: RawFd) -> File {
    File(guest().open(device, ino, fd))
}

impl File {
    #[inline]
    pub fn changes(&self) -> Option<u64> {
        self.0.changes()
    }

    #[inline]
    pub fn ready(&self) -> Option<u64> {
        self.0.ready()
    }

    #[cold]
    pub fn prepare(&self) -> Option<u64> {
        self.0.prepare()
    }

    #[inline]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        self.0.read(into, offset)
    }

    #[inline]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        self.0.write(data, offset)
    }

    #[inline]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        self.0.append(data)
    }

    #[inline]
    pub fn size(&self) -> Option<u64> {
        self.0.size()
    }

    /// The kernel gets an operation, for this reason.
    pub fn note(&self, why: Why) {
        self.0.note(why);
    }

    #[inline]
    pub fn sync(&self) -> bool {
        self.0.is_durable()
    }
}

/// Leaves all mounts, and joins none any more.
pub fn leave() {
    // SAFETY: null, or from a box that is never freed.
    if let Some(guest) = unsafe { GUEST.load(Acquire).as_ref() } {
        guest.leave();
    }
}

/// What the parent's threads may be changing is left as it is, for ever.
pub fn forked(closes: bool) {
    GUEST.store(ptr::null_mut(), Release);
    threads::forked();
    owned::forked(|fd| {
        if closes {
            sys::close(fd);
        }
    });
}

/// Before the process is copied: the child must know of all that is the engine's.
pub fn before_copy() {
    owned::before_copy();
}

/// In the parent, behind it.
pub fn after_copy() {
    owned::after_copy();
}

/// All that the engine has.
pub fn owned() -> impl Iterator<Item = RawFd> {
    owned::all()
}

/// Whether a descriptor is the engine's, which the program must not close or replace.
#[inline]
pub fn owns(fd: RawFd) -> bool {
    owned::has(fd)
}
