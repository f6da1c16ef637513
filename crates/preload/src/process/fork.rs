//! Copies of the process: `fork`, `vfork`, and functions that call them.
//!
//! A descriptor is shared with a child, and so is its offset. From then on only the kernel moves
//! the offset (`table::share_all`); reads and writes at a given offset stay direct. The child asks
//! the engine again for inherited files.
//!
//! `pthread_atfork` announces a child of `fork`; `ownership` reveals other copies. A child of
//! `vfork`, or a `clone` child with the memory but not the descriptors of its parent, is marked in
//! the thread if the parent sleeps meanwhile. If both run concurrently, the kernel serves all
//! descriptors, for good.

use super::ownership;
use crate::descriptors::table;
use crate::engine;
use crate::kernel::buffer;
use crate::kernel::sys::{self, ALL_SIGNALS};
use crate::state::{thread, withdrawal};
use libc::{c_int, c_long, pid_t};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// Calls that may copy descriptors into another process.
static FORKS_BEGUN: AtomicU64 = AtomicU64::new(0);

static FORKS_ENDED: AtomicU64 = AtomicU64::new(0);

/// Runs once, when the library is loaded.
pub fn begin() {
    ownership::begin(|| {
        // SAFETY: the handlers are functions that live as long as the process.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) == 0 }
    });
}

/// The resources that a child of `clone` shares with its parent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CloneKind {
    /// Memory and descriptors, in the same process.
    Thread,
    /// Neither.
    Fork,
    /// This thread's memory, while this thread sleeps: a child of `vfork`.
    Vfork,
    /// Memory alone, or descriptors alone, or both, in another process: this library cannot tell
    /// which process calls, or see changes that the other one makes to descriptors.
    SharingProcess,
}

pub fn clone_kind(flags: c_int) -> CloneKind {
    let has = |flag| flags & flag != 0;
    match (has(libc::CLONE_VM), has(libc::CLONE_FILES)) {
        (_, true) if has(libc::CLONE_THREAD) => CloneKind::Thread,
        (false, false) => CloneKind::Fork,
        (true, false) if has(libc::CLONE_VFORK) && !has(libc::CLONE_SETTLS) => CloneKind::Vfork,
        _ => CloneKind::SharingProcess,
    }
}

/// Handles a system call that makes a process or a thread, before the call. Nothing runs after it,
/// so this library does not learn when a child in the same memory has gone.
pub fn before_clone_syscall(number: c_long, first: c_long) {
    let flags = match number {
        libc::SYS_vfork => libc::CLONE_VM | libc::CLONE_VFORK,
        libc::SYS_clone => first as c_int,
        // `struct clone_args` begins with the flags.
        libc::SYS_clone3 => buffer::read_checked(first as *const u64).unwrap_or(0) as c_int,
        _ => 0,
    };
    before_fork();
    if matches!(
        clone_kind(flags),
        CloneKind::Vfork | CloneKind::SharingProcess
    ) {
        ownership::switch_to_kernel(flags);
    }
    after_fork();
}

/// Runs before descriptors may be copied into another process.
#[inline(never)]
pub extern "C" fn before_fork() {
    FORKS_BEGUN.fetch_add(1, SeqCst);
    if withdrawal::is_withdrawn() {
        return;
    }
    // No handler may run while locks are held, wherever the thread is.
    let mask = sys::mask(libc::SIG_SETMASK, ALL_SIGNALS);
    if ownership::is_ours() {
        table::share_all();
    }
    engine::before_fork();
    sys::mask(libc::SIG_SETMASK, mask);
}

pub extern "C" fn after_fork() {
    if !withdrawal::is_withdrawn() {
        engine::after_fork();
    }
    FORKS_ENDED.fetch_add(1, SeqCst);
}

extern "C" fn in_child() {
    thread::this().set_vforked(false);
    FORKS_ENDED.store(FORKS_BEGUN.load(SeqCst), SeqCst);
    if withdrawal::is_withdrawn() {
        ownership::claim_process();
        return;
    }
    let inside = thread::this().enter();
    ownership::adopt_announced_copy();
    drop(inside);
}

/// Taken before a descriptor is created. If descriptors may have been copied since, only the kernel
/// moves its offset.
pub struct ForkStamp(Option<u64>);

impl ForkStamp {
    pub fn now() -> ForkStamp {
        let ended = FORKS_ENDED.load(SeqCst);
        ForkStamp((FORKS_BEGUN.load(SeqCst) == ended).then_some(ended))
    }

    pub fn may_have_forked_since(&self) -> bool {
        Some(FORKS_BEGUN.load(SeqCst)) != self.0
    }
}

/// Returns whether the caller is a child of `vfork` itself.
pub extern "C" fn begin_vfork() -> bool {
    before_fork();
    let was_vforked = thread::this().is_vforked();
    thread::this().set_vforked(true);
    was_vforked
}

/// Runs in the parent, when the child has left its memory.
pub extern "C" fn end_vfork(result: isize, was_vforked: bool) -> pid_t {
    thread::this().set_vforked(was_vforked);
    thread::this().unmap_exec_mapping();
    after_fork();
    sys::returned(result) as pid_t
}
