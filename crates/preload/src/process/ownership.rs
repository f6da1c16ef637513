//! Which process this memory belongs to, and whether the table is its own.
//!
//! A page that the kernel clears in copies reveals a copy of this memory that `pthread_atfork` did
//! not announce (`_Fork`, `clone` by a raw system call). Such a copy may not allocate, and leaves
//! everything to the kernel.
//!
//! A child of `vfork` runs in its parent's memory with descriptors of its own, so all of its calls
//! go to the kernel and change nothing here. If two processes with the same memory or descriptors
//! run concurrently, this library cannot tell cheaply which of them is calling, nor see changes
//! that the other one makes. Then the kernel serves all descriptors, for good.

use crate::descriptors::table;
use crate::engine;
use crate::kernel::sys;
use crate::process::signals;
use crate::state::thread::{self, ChangeGuard};
use crate::state::{log, withdrawal};
use libc::{c_int, c_uint};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};

/// A word that is 1 in the process that this library has adopted, and 0 in a copy of it. Null
/// before the library is ready.
static OWNERSHIP_WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

static PID: AtomicI32 = AtomicI32::new(0);

/// Another process shares or shared this memory, or these descriptors.
static IS_KERNEL_ONLY: AtomicBool = AtomicBool::new(false);
/// This is an unannounced copy, or not announced yet.
static IS_UNANNOUNCED_COPY: AtomicBool = AtomicBool::new(false);
/// An unannounced copy may share the descriptor table of its parent.
static MAY_SHARE_DESCRIPTORS: AtomicBool = AtomicBool::new(false);

fn ownership_word() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a page that is never unmapped.
    NonNull::new(OWNERSHIP_WORD.load(Relaxed)).map(|word| unsafe { word.as_ref() })
}

/// Runs once, when the library is loaded. `register` announces forks; if it fails, the library
/// stays unused.
pub fn begin(register: impl FnOnce() -> bool) {
    let Some(page) = wipe_on_fork_page() else {
        return;
    };
    if !register() {
        return;
    }
    PID.store(sys::getpid(), Relaxed);
    // SAFETY: a fresh page, aligned and zeroed.
    unsafe { page.as_ref() }.store(1, Relaxed);
    OWNERSHIP_WORD.store(page.as_ptr(), SeqCst);
}

fn wipe_on_fork_page() -> Option<NonNull<AtomicU32>> {
    const BYTES: usize = 4096;
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a fresh mapping wherever there is room.
    let page = unsafe { libc::mmap(ptr::null_mut(), BYTES, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page is ours. An old kernel does not know the advice.
    if unsafe { libc::madvise(page, BYTES, libc::MADV_WIPEONFORK) } != 0 {
        return None;
    }
    NonNull::new(page.cast())
}

/// Whether the table belongs to this process; an unannounced copy empties it first. False before
/// the library is ready. The caller's thread is inside, or has its signals blocked.
#[inline]
pub fn is_ours() -> bool {
    let Some(word) = ownership_word() else {
        return false;
    };
    if word.load(Relaxed) == 0 {
        adopt_unannounced_copy();
    }
    true
}

/// Whether this process may change the table: it is not another process in the same memory.
pub fn may_change() -> bool {
    is_ours() && sys::getpid() == PID.load(Relaxed)
}

/// Whether the table accepts no more descriptors.
pub fn is_kernel_only() -> bool {
    IS_KERNEL_ONLY.load(SeqCst) || IS_UNANNOUNCED_COPY.load(SeqCst) || withdrawal::is_withdrawn()
}

/// Enters, if this process may change the table. None: the caller is a child in the same memory,
/// and must change nothing.
pub fn begin_change() -> Option<ChangeGuard> {
    thread::this().enter_to_change().filter(|_| may_change())
}

/// Runs before all descriptors of a range are closed.
#[inline(never)]
pub extern "C" fn forget_range(first: c_uint, last: c_uint) {
    if let Some(_inside) = begin_change() {
        table::ours_in(first, last).for_each(table::remove);
    }
}

/// Leaves all descriptors to the kernel, before a child that shares memory or descriptors.
pub fn switch_to_kernel(flags: c_int) {
    if !thread::this().is_vforked() {
        let shares = flags & libc::CLONE_FILES != 0;
        MAY_SHARE_DESCRIPTORS.fetch_or(shares, SeqCst);
        IS_KERNEL_ONLY.store(true, SeqCst);
        forget_range(0, c_uint::MAX);
    }
}

/// Adopts the table in a child. It closes the engine's descriptors unless the parent may share the
/// descriptor table.
fn adopt_in_child(closes: bool) {
    engine::reset_in_child(closes);
    table::inherit();
    signals::reset_in_child();
    log::reset_in_child();
    PID.store(sys::getpid(), Relaxed);
}

pub fn claim_process() {
    if let Some(word) = ownership_word() {
        word.store(1, Relaxed);
    }
}

/// The parent may have had other threads, and their locks (in `malloc`) have no owner here. Only
/// functions that are safe in a signal handler may be called, and the engine is not.
#[cold]
fn adopt_unannounced_copy() {
    IS_UNANNOUNCED_COPY.store(true, SeqCst);
    adopt_in_child(!MAY_SHARE_DESCRIPTORS.load(SeqCst));
    table::ours_in(0, c_uint::MAX).for_each(table::remove);
    claim_process();
}

/// Adopts this memory in a child that was announced. The caller's thread is inside.
pub fn adopt_announced_copy() {
    if ownership_word().is_some() {
        adopt_in_child(true);
        claim_process();
    }
    // Another library's fork handler may have called this library before.
    IS_UNANNOUNCED_COPY.store(false, SeqCst);
}
