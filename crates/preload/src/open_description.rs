//! Open descriptions that are on the direct path.
//!
//! An entry is *named* by descriptors and *used* by calls that are under way. It is buried,
//! and then used for another description, when it has neither. The memory stays an entry
//! for ever, so a late caller may count itself in, look again, and step back.
//!
//! Why no entry is buried under a user: whoever buries has read that there are no names,
//! then no users, and then changes the word that he read, in which every new name leaves a
//! trace. Without names no descriptor leads to the entry, so that a user who came after the
//! first look finds his descriptor changed and steps back; one who came before it was seen.

use crate::engine::EngineFile;
use crate::lock::Lock;
use crate::stack;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Counters of users, each on a line of its own: threads that share a description do not
/// share a line for it.
const USER_COUNTERS: usize = 8;

/// The lower half of the word of names: 0 for nobody's entry, or the number of names plus
/// one. The upper half counts the names that there ever were.
const DESCRIPTORS_MASK: u64 = u32::MAX as u64;
const FREE: u64 = 0;
const NO_DESCRIPTOR: u64 = 1;
const ONE_DESCRIPTOR: u64 = 1 << 32 | 1;

/// What is done with the descriptors of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IoMode {
    /// The engine has the file.
    Direct,
    /// A parent opened it; at its first use the engine is asked again.
    Inherited,
    /// Somebody is asking.
    Reopening,
    /// The kernel has it, for good.
    Kernel,
}

/// What the engine has to know to open a file, and callers to refuse.
#[derive(Clone, Copy)]
pub struct OpenAttributes {
    pub dev: u64,
    pub ino: u64,
    pub is_readable: bool,
    pub is_writable: bool,
    /// Each write goes to the end.
    pub appends: bool,
    /// Every write is to be durable when it returns.
    pub is_durable: bool,
}

impl OpenAttributes {
    /// Whether both allow the same, whatever file they are of.
    pub fn has_same_access(&self, other: &OpenAttributes) -> bool {
        let rights = |attributes: &OpenAttributes| (attributes.is_readable, attributes.is_writable);
        rights(self) == rights(other)
            && self.appends == other.appends
            && self.is_durable == other.is_durable
    }
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
    /// Held while the kernel's offset is not what callers are to see.
    pub offset_lock: Lock,
    /// In the list of free entries.
    pub next_free: AtomicU32,
    attributes: UnsafeCell<MaybeUninit<OpenAttributes>>,
    file: UnsafeCell<MaybeUninit<EngineFile>>,
    users: [UserCounter; USER_COUNTERS],
}

// SAFETY: what is not atomic is written only by who owns the entry alone (before its first
// name, after its burial, in a child's only thread) or who asks (`IoMode::Reopening`), and read
// only after that was published. `File` is `Send` and `Sync`.
unsafe impl Sync for OpenDescription {}

const fn check_file<T: Send + Sync>() {}
const _: () = check_file::<EngineFile>();

impl OpenDescription {
    /// Of zeroes, so that the table takes no memory until it is used.
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

    /// Makes it an open file with one name. It is the caller's alone.
    pub fn begin(&self, attributes: OpenAttributes, file: EngineFile) {
        // SAFETY: nobody else has it.
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

    /// True for the one who is to ask the engine.
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
        // SAFETY: only who asks writes it, and nobody reads before the mode says so.
        unsafe { (*self.file.get()).write(file) };
        self.has_file.store(true, Release);
        // The flags may have changed meanwhile, and then it is the kernel's.
        let (from, to) = (IoMode::Reopening as u32, IoMode::Direct as u32);
        let _ = self.mode.compare_exchange(from, to, AcqRel, Relaxed);
    }

    pub fn is_shared(&self) -> bool {
        self.is_shared.load(SeqCst)
    }

    pub fn set_shared(&self) {
        self.is_shared.store(true, SeqCst);
    }

    /// Behind it nobody moves the offset but by one call of the kernel's, which takes turns with
    /// whoever has the description. So a call that waits in the kernel is not waited for.
    pub fn share(&self) {
        self.set_shared();
        self.offset_lock.await_release();
    }

    /// Of an entry that is used or named.
    pub fn attributes(&self) -> OpenAttributes {
        // SAFETY: written before the entry had its first name.
        unsafe { (*self.attributes.get()).assume_init() }
    }

    /// # Safety
    /// The caller uses the entry, and its mode was `Direct`.
    pub unsafe fn file(&self) -> &EngineFile {
        // SAFETY: the mode was published after the file was written, and it stays until the
        // entry is buried.
        unsafe { (*self.file.get()).assume_init_ref() }
    }

    /// The file, also after the kernel got the descriptor. The caller uses the entry.
    pub fn any_file(&self) -> Option<&EngineFile> {
        let has_file = self.has_file.load(Acquire);
        // SAFETY: it was written before that was said, and stays until the entry is buried.
        has_file.then(|| unsafe { (*self.file.get()).assume_init_ref() })
    }

    /// Counts a user; he has to look again whether his descriptor still leads here.
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

    /// By a user, who so keeps it from being buried.
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

    /// Drops the file if there are neither names nor users. True: it is the caller's now.
    pub fn free_if_unused(&self) -> bool {
        let names = self.descriptors.load(SeqCst);
        if names & DESCRIPTORS_MASK != NO_DESCRIPTOR || !self.is_unused() {
            return false;
        }
        let buried = names & !DESCRIPTORS_MASK | FREE;
        if self
            .descriptors
            .compare_exchange(names, buried, SeqCst, SeqCst)
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

    /// In a child, by its only thread: what the parent's threads were doing is undone, and
    /// the file left alone. Its names are to be added.
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
