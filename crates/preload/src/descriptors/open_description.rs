//! Open descriptions that are on the direct path.
//!
//! *Descriptors* lead to an entry, and calls in progress *use* it. When it has neither, it is freed
//! and then used for another description. The memory stays an entry for ever. So a late caller may
//! count itself in, look again, and step back.
//!
//! No entry is freed while it has a user. The thread that frees it reads that there are no
//! descriptors, then no users, and then changes the word that it read, which every new descriptor
//! changes, too. Without descriptors no number leads to the entry. So a user that came after the
//! first read finds its descriptor changed and steps back; a user that came before was counted.

use super::attributes::OpenAttributes;
use crate::engine::EngineFile;
use crate::engine::stack;
use crate::kernel::lock::Lock;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Counters of users, each in a cache line of its own: threads that share a description do not
/// share a line for it.
const USER_COUNTERS: usize = 8;

/// The lower half of the word of descriptors: 0 for a free entry, or the number of descriptors plus
/// one. The upper half counts all descriptors that ever led to the entry.
const DESCRIPTORS_MASK: u64 = u32::MAX as u64;
const FREE: u64 = 0;
const NO_DESCRIPTOR: u64 = 1;
const ONE_DESCRIPTOR: u64 = 1 << 32 | 1;

/// The path of an entry's operations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IoMode {
    /// The engine has the file.
    Direct,
    /// A parent opened the file; at the first use the engine is asked again.
    Inherited,
    /// A thread is asking the engine.
    Reopening,
    /// The kernel serves it, for good.
    Kernel,
}

#[repr(align(64))]
struct UserCounter(AtomicU32);

#[repr(align(64))]
pub struct OpenDescription {
    descriptors: AtomicU64,
    mode: AtomicU32,
    /// Others may move the description's offset, so that only the kernel knows it.
    is_shared: AtomicBool,
    /// There is a `file`.
    has_file: AtomicBool,
    /// Held while the kernel's offset is not the one that callers are to see.
    pub offset_lock: Lock,
    /// The next entry in the list of free entries.
    pub next_free: AtomicU32,
    attributes: UnsafeCell<MaybeUninit<OpenAttributes>>,
    file: UnsafeCell<MaybeUninit<EngineFile>>,
    users: [UserCounter; USER_COUNTERS],
}

// SAFETY: the fields that are not atomic have a single writer: the exclusive owner of the entry
// (before its first descriptor, after it is freed, in a child's only thread), or the thread that
// asks (`IoMode::Reopening`). They are read only after that was published. `EngineFile` is `Send`
// and `Sync`.
unsafe impl Sync for OpenDescription {}

const fn check_file<T: Send + Sync>() {}
const _: () = check_file::<EngineFile>();

impl OpenDescription {
    /// All zeroes, so that the table takes no memory until it is used.
    pub const fn new() -> Self {
        OpenDescription {
            descriptors: AtomicU64::new(0),
            mode: AtomicU32::new(0),
            is_shared: AtomicBool::new(false),
            has_file: AtomicBool::new(false),
            offset_lock: Lock::new(),
            next_free: AtomicU32::new(0),
            attributes: UnsafeCell::new(MaybeUninit::zeroed()),
            file: UnsafeCell::new(MaybeUninit::zeroed()),
            users: [const { UserCounter(AtomicU32::new(0)) }; USER_COUNTERS],
        }
    }

    /// Makes it an open file with one descriptor. The caller owns the entry exclusively.
    pub fn begin(&self, attributes: OpenAttributes, file: EngineFile) {
        // SAFETY: the caller owns the entry.
        unsafe {
            (*self.attributes.get()).write(attributes);
            (*self.file.get()).write(file);
        }
        self.has_file.store(true, Release);
        self.is_shared.store(false, SeqCst);
        self.set_mode(IoMode::Direct);
        let ever = self.descriptors.load(Relaxed) & !DESCRIPTORS_MASK;
        self.descriptors
            .store((ever | NO_DESCRIPTOR).wrapping_add(ONE_DESCRIPTOR), SeqCst);
    }

    pub fn mode(&self) -> IoMode {
        match self.mode.load(Acquire) {
            0 => IoMode::Direct,
            1 => IoMode::Inherited,
            2 => IoMode::Reopening,
            _ => IoMode::Kernel,
        }
    }

    pub fn set_mode(&self, mode: IoMode) {
        self.mode.store(mode as u32, Release);
    }

    /// True for the one thread that must ask the engine.
    pub fn begin_reopen(&self) -> bool {
        let (from, to) = (IoMode::Inherited as u32, IoMode::Reopening as u32);
        self.mode
            .compare_exchange(from, to, AcqRel, Relaxed)
            .is_ok()
    }

    pub fn end_reopen(&self, answer: Option<EngineFile>) {
        let Some(file) = answer else {
            return self.set_mode(IoMode::Kernel);
        };
        // SAFETY: only the asking thread writes it, and readers check the mode first.
        unsafe { (*self.file.get()).write(file) };
        self.has_file.store(true, Release);
        // The flags may have changed meanwhile; then the kernel serves it.
        let (from, to) = (IoMode::Reopening as u32, IoMode::Direct as u32);
        let _ = self.mode.compare_exchange(from, to, AcqRel, Relaxed);
    }

    pub fn is_shared(&self) -> bool {
        self.is_shared.load(SeqCst)
    }

    pub fn set_shared(&self) {
        self.is_shared.store(true, SeqCst);
    }

    /// Leaves the offset to the kernel. When this returns, only single kernel calls move the
    /// offset, which are ordered with all others of the description. So this does not wait for a
    /// call that blocks in the kernel.
    pub fn share(&self) {
        self.set_shared();
        self.offset_lock.await_release();
    }

    /// The attributes of an entry that is in use or has a descriptor.
    pub fn attributes(&self) -> OpenAttributes {
        // SAFETY: written before the entry had its first descriptor.
        unsafe { (*self.attributes.get()).assume_init() }
    }

    /// # Safety
    /// The caller uses the entry, and its mode was `Direct`.
    pub unsafe fn file(&self) -> &EngineFile {
        // SAFETY: the mode was published after the file was written, and it stays until the
        // entry is freed.
        unsafe { (*self.file.get()).assume_init_ref() }
    }

    /// The file, also after the kernel serves the descriptor. The caller uses the entry.
    pub fn any_file(&self) -> Option<&EngineFile> {
        let has_file = self.has_file.load(Acquire);
        // SAFETY: it was written before that was said, and stays until the entry is freed.
        has_file.then(|| unsafe { (*self.file.get()).assume_init_ref() })
    }

    /// Counts a user; it must check again whether its descriptor still leads here.
    #[inline]
    pub fn add_user(&self, thread: u32) {
        self.users[thread as usize % USER_COUNTERS]
            .0
            .fetch_add(1, SeqCst);
    }

    #[inline]
    pub fn remove_user(&self, thread: u32) {
        self.users[thread as usize % USER_COUNTERS]
            .0
            .fetch_sub(1, SeqCst);
    }

    /// Adds a descriptor. The caller is a user, so the entry is not freed meanwhile.
    pub fn add_descriptor(&self) {
        self.descriptors.fetch_add(ONE_DESCRIPTOR, SeqCst);
    }

    pub fn remove_descriptor(&self) {
        self.descriptors.fetch_sub(1, SeqCst);
    }

    #[inline]
    pub fn has_no_descriptor(&self) -> bool {
        self.descriptors.load(SeqCst) & DESCRIPTORS_MASK == NO_DESCRIPTOR
    }

    pub fn is_free(&self) -> bool {
        self.descriptors.load(SeqCst) & DESCRIPTORS_MASK == FREE
    }

    /// Whether no call uses it.
    pub fn is_unused(&self) -> bool {
        self.users.iter().all(|users| users.0.load(SeqCst) == 0)
    }

    /// Drops the file if there are neither descriptors nor users. True: the caller owns the entry
    /// now.
    pub fn free_if_unused(&self) -> bool {
        let word = self.descriptors.load(SeqCst);
        if word & DESCRIPTORS_MASK != NO_DESCRIPTOR || !self.is_unused() {
            return false;
        }
        let freed = word & !DESCRIPTORS_MASK | FREE;
        if self
            .descriptors
            .compare_exchange(word, freed, SeqCst, SeqCst)
            .is_err()
        {
            return false;
        }
        if self.has_file.swap(false, Relaxed) {
            // SAFETY: it is there, and the entry is this thread's alone.
            let end = || unsafe { (*self.file.get()).assume_init_drop() };
            if stack::on_engine_stack(end).is_none() {
                end();
            }
        }
        true
    }

    /// Adopts the entry in a child, in its only thread: undoes calls of the parent's threads, and
    /// leaks the file. The caller then adds its descriptors.
    pub fn inherit(&self) {
        for users in &self.users {
            users.0.store(0, Relaxed);
        }
        self.offset_lock.reset();
        self.has_file.store(false, Relaxed);
        self.set_shared();
        if self.mode() != IoMode::Kernel {
            self.set_mode(IoMode::Inherited);
        }
        let ever = self.descriptors.load(Relaxed) & !DESCRIPTORS_MASK;
        self.descriptors
            .store(ever.wrapping_add(1 << 32) | NO_DESCRIPTOR, SeqCst);
    }
}
