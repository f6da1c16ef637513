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

use crate::engine::File;
use crate::lock::Lock;
use crate::stack;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Counters of users, each on a line of its own: threads that share a description do not
/// share a line for it.
const STRIPES: usize = 8;

/// The lower half of the word of names: 0 for nobody's entry, or the number of names plus
/// one. The upper half counts the names that there ever were.
const LOWER: u64 = u32::MAX as u64;
const BURIED: u64 = 0;
const UNNAMED: u64 = 1;
const NAMED_ONCE: u64 = 1 << 32 | 1;

/// What is done with the descriptors of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The engine has the file.
    Direct,
    /// A parent opened it; at its first use the engine is asked again.
    Inherited,
    /// Somebody is asking.
    Asking,
    /// The kernel has it, for good.
    Kernel,
}

/// What the engine has to know to open a file, and callers to refuse.
#[derive(Clone, Copy)]
pub struct Facts {
    pub dev: u64,
    pub ino: u64,
    pub is_readable: bool,
    pub is_writable: bool,
    /// Each write goes to the end.
    pub appends: bool,
    /// Every write is to be durable when it returns.
    pub is_durable: bool,
}

impl Facts {
    /// Whether both allow the same, whatever file they are of.
    pub fn is_opened_as(&self, other: &Facts) -> bool {
        let rights = |facts: &Facts| (facts.is_readable, facts.is_writable);
        rights(self) == rights(other)
            && self.appends == other.appends
            && self.is_durable == other.is_durable
    }
}

#[repr(align(64))]
struct Stripe(AtomicU32);

#[repr(align(64))]
pub struct Entry {
    names: AtomicU64,
    mode: AtomicU32,
    /// Others may move the description's offset, so that only the kernel knows it.
    is_shared: AtomicBool,
    /// There is a `file`.
    has_file: AtomicBool,
    /// Held while the kernel's offset is not what callers are to see.
    pub offset: Lock,
    /// In the list of free entries.
    pub next_free: AtomicU32,
    facts: UnsafeCell<MaybeUninit<Facts>>,
    file: UnsafeCell<MaybeUninit<File>>,
    users: [Stripe; STRIPES],
}

// SAFETY: what is not atomic is written only by who owns the entry alone (before its first
// name, after its burial, in a child's only thread) or who asks (`Mode::Asking`), and read
// only after that was published. `File` is `Send` and `Sync`.
unsafe impl Sync for Entry {}

const fn check_file<T: Send + Sync>() {}
const _: () = check_file::<File>();

impl Entry {
    /// Of zeroes, so that the table takes no memory until it is used.
    pub const fn new() -> Self {
        Entry {
            names: AtomicU64::new(0),
            mode: AtomicU32::new(0),
            is_shared: AtomicBool::new(false),
            has_file: AtomicBool::new(false),
            offset: Lock::new(),
            next_free: AtomicU32::new(0),
            facts: UnsafeCell::new(MaybeUninit::zeroed()),
            file: UnsafeCell::new(MaybeUninit::zeroed()),
            users: [const { Stripe(AtomicU32::new(0)) }; STRIPES],
        }
    }

    /// Makes it an open file with one name. It is the caller's alone.
    pub fn begin(&self, facts: Facts, file: File) {
        // SAFETY: nobody else has it.
        unsafe {
            (*self.facts.get()).write(facts);
            (*self.file.get()).write(file);
        }
        self.has_file.store(true, Release);
        self.is_shared.store(false, SeqCst);
        self.set_mode(Mode::Direct);
        let ever = self.names.load(Relaxed) & !LOWER;
        self.names
            .store((ever | UNNAMED).wrapping_add(NAMED_ONCE), SeqCst);
    }

    pub fn mode(&self) -> Mode {
        match self.mode.load(Acquire) {
            0 => Mode::Direct,
            1 => Mode::Inherited,
            2 => Mode::Asking,
            _ => Mode::Kernel,
        }
    }

    pub fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u32, Release);
    }

    /// True for the one who is to ask the engine.
    pub fn begin_asking(&self) -> bool {
        let (from, to) = (Mode::Inherited as u32, Mode::Asking as u32);
        self.mode
            .compare_exchange(from, to, AcqRel, Relaxed)
            .is_ok()
    }

    pub fn end_asking(&self, answer: Option<File>) {
        let Some(file) = answer else {
            return self.set_mode(Mode::Kernel);
        };
        // SAFETY: only who asks writes it, and nobody reads before the mode says so.
        unsafe { (*self.file.get()).write(file) };
        self.has_file.store(true, Release);
        // The flags may have changed meanwhile, and then it is the kernel's.
        let (from, to) = (Mode::Asking as u32, Mode::Direct as u32);
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
        self.offset.pass();
    }

    /// Of an entry that is used or named.
    pub fn facts(&self) -> Facts {
        // SAFETY: written before the entry had its first name.
        unsafe { (*self.facts.get()).assume_init() }
    }

    /// # Safety
    /// The caller uses the entry, and its mode was `Direct`.
    pub unsafe fn file(&self) -> &File {
        // SAFETY: the mode was published after the file was written, and it stays until the
        // entry is buried.
        unsafe { (*self.file.get()).assume_init_ref() }
    }

    /// The file, also after the kernel got the descriptor. The caller uses the entry.
    pub fn any_file(&self) -> Option<&File> {
        let has_file = self.has_file.load(Acquire);
        // SAFETY: it was written before that was said, and stays until the entry is buried.
        has_file.then(|| unsafe { (*self.file.get()).assume_init_ref() })
    }

    /// Counts a user; he has to look again whether his descriptor still leads here.
    #[inline]
    pub fn count_in(&self, thread: u32) {
        self.users[thread as usize % STRIPES].0.fetch_add(1, SeqCst);
    }

    #[inline]
    pub fn count_out(&self, thread: u32) {
        self.users[thread as usize % STRIPES].0.fetch_sub(1, SeqCst);
    }

    /// By a user, who so keeps it from being buried.
    pub fn add_name(&self) {
        self.names.fetch_add(NAMED_ONCE, SeqCst);
    }

    pub fn drop_name(&self) {
        self.names.fetch_sub(1, SeqCst);
    }

    #[inline]
    pub fn is_unnamed(&self) -> bool {
        self.names.load(SeqCst) & LOWER == UNNAMED
    }

    pub fn is_buried(&self) -> bool {
        self.names.load(SeqCst) & LOWER == BURIED
    }

    /// Whether no call uses it.
    pub fn is_unused(&self) -> bool {
        self.users.iter().all(|users| users.0.load(SeqCst) == 0)
    }

    /// Drops the file if there are neither names nor users. True: it is the caller's now.
    pub fn bury(&self) -> bool {
        let names = self.names.load(SeqCst);
        if names & LOWER != UNNAMED || !self.is_unused() {
            return false;
        }
        let buried = names & !LOWER | BURIED;
        if self
            .names
            .compare_exchange(names, buried, SeqCst, SeqCst)
            .is_err()
        {
            return false;
        }
        if self.has_file.swap(false, Relaxed) {
            // SAFETY: it is there, and the entry is this thread's alone.
            let end = || unsafe { (*self.file.get()).assume_init_drop() };
            if stack::on_own(end).is_none() {
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
        self.offset.reset();
        self.has_file.store(false, Relaxed);
        self.set_shared();
        if self.mode() != Mode::Kernel {
            self.set_mode(Mode::Inherited);
        }
        let ever = self.names.load(Relaxed) & !LOWER;
        self.names
            .store(ever.wrapping_add(1 << 32) | UNNAMED, SeqCst);
    }
}
