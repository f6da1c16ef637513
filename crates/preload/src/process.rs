//! Copies of the process: `fork`, `vfork`, and functions that call them.
//!
//! A descriptor is shared with a child, and so is its offset. From then on only the kernel moves
//! the offset (`table::share_all`); reads and writes at a given offset stay direct. The child asks
//! the engine again for inherited files.
//!
//! `pthread_atfork` announces a child of `fork`. A page that the kernel clears in copies reveals
//! any other copy of this memory (`_Fork`, `clone` by a raw system call). Such a copy may not
//! allocate, and leaves everything to the kernel.
//!
//! A child of `vfork` runs in its parent's memory with descriptors of its own, so all of its calls
//! go to the kernel and change nothing here. The same holds for a `clone` child with the memory but
//! not the descriptors of its parent, if the parent sleeps meanwhile. If both run concurrently,
//! this library cannot tell cheaply which of them is calling. It also cannot see changes that
//! another process makes to shared descriptors. In both cases the kernel serves all descriptors,
//! for good.

use crate::{
    buffer, descriptors, engine, execs, real, report, signals, sys, table, thread, withdraw,
};
use libc::{c_int, c_long, c_uint, c_void, pid_t};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64};

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

/// Calls that may copy descriptors into another process.
static FORKS_BEGUN: AtomicU64 = AtomicU64::new(0);
static FORKS_ENDED: AtomicU64 = AtomicU64::new(0);

fn ownership_word() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a page that is never unmapped.
    NonNull::new(OWNERSHIP_WORD.load(Relaxed)).map(|word| unsafe { word.as_ref() })
}

/// Runs once, when the library is loaded.
pub fn begin() {
    let Some(page) = wipe_on_fork_page() else {
        return;
    };
    // SAFETY: the handlers are functions that live as long as the process.
    if unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) } != 0 {
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
    let Some(born) = ownership_word() else {
        return false;
    };
    if born.load(Relaxed) == 0 {
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
    IS_KERNEL_ONLY.load(SeqCst) || IS_UNANNOUNCED_COPY.load(SeqCst) || withdraw::is_withdrawn()
}

/// Leaves all descriptors to the kernel, before a child that shares memory or descriptors.
fn switch_to_kernel(flags: c_int) {
    if !thread::this().is_vforked() {
        let shares = flags & libc::CLONE_FILES != 0;
        MAY_SHARE_DESCRIPTORS.fetch_or(shares, SeqCst);
        IS_KERNEL_ONLY.store(true, SeqCst);
        descriptors::forget_range(0, c_uint::MAX);
    }
}

/// The resources that a child of `clone` shares with its parent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CloneKind {
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

fn clone_kind(flags: c_int) -> CloneKind {
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
        switch_to_kernel(flags);
    }
    after_fork();
}

/// Adopts the table in a child. It closes the engine's descriptors unless the parent may share the
/// descriptor table.
fn adopt_in_child(closes: bool) {
    engine::reset_in_child(closes);
    table::inherit();
    signals::reset_in_child();
    report::reset_in_child();
    PID.store(sys::getpid(), Relaxed);
}

fn claim_process() {
    if let Some(born) = ownership_word() {
        born.store(1, Relaxed);
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

/// Runs before descriptors may be copied into another process.
#[inline(never)]
pub extern "C" fn before_fork() {
    FORKS_BEGUN.fetch_add(1, SeqCst);
    if withdraw::is_withdrawn() {
        return;
    }
    // No handler may run while locks are held, wherever the thread is.
    let mask = sys::mask(libc::SIG_SETMASK, signals::ALL);
    if is_ours() {
        table::share_all();
    }
    engine::before_fork();
    sys::mask(libc::SIG_SETMASK, mask);
}

pub extern "C" fn after_fork() {
    if !withdraw::is_withdrawn() {
        engine::after_fork();
    }
    FORKS_ENDED.fetch_add(1, SeqCst);
}

extern "C" fn in_child() {
    thread::this().set_vforked(false);
    FORKS_ENDED.store(FORKS_BEGUN.load(SeqCst), SeqCst);
    if withdraw::is_withdrawn() {
        claim_process();
        return;
    }
    let inside = thread::this().enter();
    if ownership_word().is_some() {
        adopt_in_child(true);
        claim_process();
    }
    // Another library's fork handler may have called this library before.
    IS_UNANNOUNCED_COPY.store(false, SeqCst);
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
extern "C" fn begin_vfork() -> bool {
    before_fork();
    let was_vforked = thread::this().is_vforked();
    thread::this().set_vforked(true);
    was_vforked
}

/// Runs in the parent, when the child has left its memory.
extern "C" fn end_vfork(result: isize, was_vforked: bool) -> pid_t {
    thread::this().set_vforked(was_vforked);
    execs::unmap_exec_mapping();
    after_fork();
    sys::returned(result) as pid_t
}

/// The child returns from here first and overwrites the stack above. So the return address waits in
/// a register, which the kernel keeps for each of the two, as in the C library's own `vfork`. The
/// result of `begin_vfork` does the same.
#[unsafe(naked)]
unsafe extern "C" fn vfork() -> pid_t {
    std::arch::naked_asm!(
        "sub rsp, 8",
        "call {begin}",
        "add rsp, 8",
        "pop rdi",
        "movzx esi, al",
        "mov eax, {vfork}",
        "syscall",
        "push rdi",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "sub rsp, 8",
        "call {end}",
        "add rsp, 8",
        "2: ret",
        begin = sym begin_vfork,
        end = sym end_vfork,
        vfork = const libc::SYS_vfork as i32,
    )
}

macro_rules! copying {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($arg: $kind),*) -> $result {
                before_fork();
                // SAFETY: the arguments are the caller's.
                let result = unsafe { real::$name($($arg),*) };
                after_fork();
                result
            }
            names! { $name: crate::process::$name; }
        )*
    };
}

// In all of these the C library creates the child without `fork`. A thread that is cancelled in one
// of them never reports the end, and later files use only the kernel's offset.
copying! {
    system(command: *const c_void) -> c_int;
    popen(command: *const c_void, kind: *const c_void) -> *mut c_void;
    _Fork() -> pid_t;
}

/// # Safety
/// As the C library's. It takes up to seven arguments, of which the last is read from where
/// the caller has put it or has something else; on x86-64 both are the same call.
unsafe extern "C" fn clone(
    run: *const c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    local: *mut c_void,
    child: c_long,
) -> c_int {
    let child_is = clone_kind(flags);
    if child_is == CloneKind::Thread {
        // SAFETY: the arguments are the caller's.
        return unsafe { real::clone(run, stack, flags, argument, parent, local, child) };
    }
    before_fork();
    let thread = thread::this();
    let was_vforked = thread.is_vforked();
    match child_is {
        CloneKind::Vfork => thread.set_vforked(true),
        CloneKind::SharingProcess => switch_to_kernel(flags),
        CloneKind::Thread | CloneKind::Fork => {}
    }
    // SAFETY: as above.
    let result = unsafe { real::clone(run, stack, flags, argument, parent, local, child) };
    thread.set_vforked(was_vforked);
    if child_is == CloneKind::Vfork {
        execs::unmap_exec_mapping();
    }
    after_fork();
    result
}

names! {
    clone: crate::process::clone;
    vfork: crate::process::vfork;
    __clone: crate::process::clone;
    __vfork: crate::process::vfork;
}
