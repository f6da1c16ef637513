//! The descriptors on the direct path: descriptor → entry.
//!
//! The kernel serves a descriptor that is not in the table, which is always correct. So each call
//! that may end or replace a descriptor removes it *before* the kernel does it. Only a call that
//! has surely created a descriptor adds it, afterwards. In between the descriptor is *changing*: a
//! thread that looks it up waits for the end of the change. So no call acts by number on another
//! description than it meant, and no call overtakes those that are queued for its offset.
//!
//! A change begins under the lock of the description's offset, and holds no lock afterwards. So a
//! thread that holds that lock and finds that a number leads to the entry may use the number. A
//! thread waits for a change only while it has no change of its own in progress, and holds no lock.
//!
//! Looking up a descriptor that is not in the table is one load. This module does not allocate.

use super::attributes::OpenAttributes;
use super::open_description::OpenDescription;
use crate::engine::EngineFile;
use crate::kernel::lock::LockGuard;
use crate::kernel::sys;
use crate::state::thread;
use libc::c_int;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// The kernel serves descriptors from here on. It is sixteen times the limit of open files that
/// programs usually get at most.
pub const FDS_MAX: usize = 65536;

/// Open descriptions on the direct path; the kernel serves further ones. Each takes about 700 bytes
/// once it is used.
pub const ENTRIES_MAX: usize = 8192;

/// Value of a slot while its descriptor is changing.
const CHANGING: u32 = u32::MAX;
/// As `CHANGING`, and a thread may sleep until the change has ended.
const CHANGING_AWAITED: u32 = CHANGING - 1;

/// 0, or the number of an entry plus one, or a mark that the descriptor is changing.
static SLOTS: [AtomicU32; FDS_MAX] = [const { AtomicU32::new(0) }; FDS_MAX];
static ENTRIES: [OpenDescription; ENTRIES_MAX] = [const { OpenDescription::new() }; ENTRIES_MAX];

/// The [`EngineFile::change_count`] at which a descriptor was last seen to lead to its entry's
/// file; 0: it was not checked.
static CHECKED_AT: [AtomicU64; FDS_MAX] = [const { AtomicU64::new(0) }; FDS_MAX];

/// Entries below it were used at least once.
static ENTRIES_USED: AtomicU32 = AtomicU32::new(0);
/// Descriptors from here on never were in the table, nor about to be.
static FDS_END: AtomicU32 = AtomicU32::new(0);
/// The first free entry plus one; above it a count of changes, against ABA (Treiber's stack).
static FREE_LIST: AtomicU64 = AtomicU64::new(0);
/// An entry could not be freed when it lost its last descriptor.
static HAS_UNFREED: AtomicBool = AtomicBool::new(false);

#[inline]
fn slot(fd: c_int) -> Option<&'static AtomicU32> {
    SLOTS.get(fd as u32 as usize)
}

#[inline]
pub fn is_ours(fd: c_int) -> bool {
    slot(fd).is_some_and(|slot| slot.load(Relaxed) != 0)
}

/// No descriptor ever was in the table.
#[inline]
pub fn is_untouched() -> bool {
    FDS_END.load(Relaxed) == 0
}

/// A use of an entry: the entry is not reused until this is dropped. Its thread is *inside*.
pub struct DescriptionUse {
    entry: &'static OpenDescription,
    number: u32,
    thread: u32,
}

impl DescriptionUse {
    /// Takes the lock of its offset.
    #[inline]
    pub fn lock_offset(&self) -> LockGuard<'static> {
        self.entry.offset_lock.hold()
    }

    /// Whether a number still leads to this entry. As long as the offset's lock is held, so does
    /// the kernel's descriptor.
    #[inline]
    pub fn is_entry_of(&self, fd: c_int) -> bool {
        slot(fd).is_some_and(|slot| slot.load(SeqCst) == self.number)
    }

    /// Whether a descriptor was seen to lead to this entry's file since this count.
    #[inline]
    pub fn is_checked(&self, fd: c_int, changes: u64) -> bool {
        let seen = CHECKED_AT.get(fd as u32 as usize);
        seen.is_some_and(|seen| seen.load(SeqCst) == changes)
    }

    /// Records that a descriptor was seen to lead here, after the count was read.
    pub fn record_checked(&self, fd: c_int, changes: u64) {
        if let Some(seen) = CHECKED_AT.get(fd as u32 as usize) {
            seen.store(changes, SeqCst);
            // The number may have been given another entry meanwhile.
            if !self.is_entry_of(fd) {
                seen.store(0, SeqCst);
            }
        }
    }

    /// Removes a number that leads elsewhere in the kernel without notice: the kernel serves it
    /// from now on.
    pub fn remove_stale(&self, fd: c_int) {
        let left = slot(fd).map(|slot| slot.compare_exchange(self.number, 0, SeqCst, SeqCst));
        if let Some(Ok(_)) = left {
            self.entry.remove_descriptor();
        }
    }

    /// Leaves the offset to the kernel. When this returns, no call that has not seen that moves the
    /// offset any more.
    pub fn share(&self) {
        self.entry.share();
    }
}

/// Begins a use of a descriptor's entry. None: it is not in the table. The caller's thread is
/// inside.
#[inline]
pub fn enter(fd: c_int) -> Option<DescriptionUse> {
    let slot = slot(fd)?;
    loop {
        let mut number = slot.load(SeqCst);
        if number >= CHANGING_AWAITED {
            number = await_change(slot);
        }
        let entry = ENTRIES.get((number as usize).wrapping_sub(1))?;
        let thread = thread::this().number();
        entry.add_user(thread);
        let found = DescriptionUse {
            entry,
            number,
            thread,
        };
        if slot.load(SeqCst) == number {
            return Some(found);
        }
    }
}

/// The value of a slot when it is not changing.
#[cold]
fn await_change(slot: &AtomicU32) -> u32 {
    loop {
        let number = slot.load(SeqCst);
        if number < CHANGING_AWAITED {
            return number;
        }
        let _ = slot.compare_exchange(CHANGING, CHANGING_AWAITED, SeqCst, SeqCst);
        sys::futex_wait(slot, CHANGING_AWAITED);
    }
}

/// A change in progress: a descriptor is closed or replaced.
#[must_use]
pub struct FdChange {
    slot: &'static AtomicU32,
    before: u32,
}

/// Begins a change when no call at the offset is in progress by this number. None: the table has no
/// slot for it. The caller's thread is inside until it has ended the change.
pub fn begin_change(fd: c_int) -> Option<FdChange> {
    let slot = slot(fd)?;
    FDS_END.fetch_max(fd as u32 + 1, SeqCst);
    loop {
        let used = enter(fd);
        let before = used.as_ref().map_or(0, |used| used.number);
        let held = used.as_ref().map(DescriptionUse::lock_offset);
        let began = slot.compare_exchange(before, CHANGING, SeqCst, SeqCst);
        drop(held);
        if began.is_ok() {
            CHECKED_AT[fd as u32 as usize].store(0, SeqCst);
            return Some(FdChange { slot, before });
        }
    }
}

impl FdChange {
    /// Ends the change: the descriptor leads to the same entry as before.
    pub fn undo(self) {
        self.set_slot(self.before);
    }

    /// Ends the change: the kernel serves the descriptor.
    pub fn end(self) {
        self.end_with(0);
    }

    /// Ends the change: the descriptor leads to this entry.
    pub fn end_as(self, entry: &DescriptionUse) {
        entry.add_descriptor();
        self.end_with(entry.number);
    }

    fn end_with(self, number: u32) {
        self.set_slot(number);
        remove_descriptor(self.before);
    }

    fn set_slot(&self, number: u32) {
        if self.slot.swap(number, SeqCst) == CHANGING_AWAITED {
            sys::futex_wake_all(self.slot);
        }
    }
}

impl std::ops::Deref for DescriptionUse {
    type Target = OpenDescription;

    #[inline]
    fn deref(&self) -> &OpenDescription {
        self.entry
    }
}

impl Drop for DescriptionUse {
    #[inline]
    fn drop(&mut self) {
        self.entry.remove_user(self.thread);
        if self.entry.has_no_descriptor() {
            free_or_defer(self.number);
        }
    }
}

/// Adds a description that was just opened. None: there are too many.
pub fn add(
    fd: c_int,
    attributes: OpenAttributes,
    file: EngineFile,
) -> Option<&'static OpenDescription> {
    slot(fd)?;
    let number = take_free()?;
    let entry = &ENTRIES[number as usize - 1];
    entry.begin(attributes, file);
    set(fd, number);
    Some(entry)
}

/// Adds a second descriptor of a description. If the table has no slot for it, only the kernel
/// moves the offset.
pub fn add_descriptor(fd: c_int, of: &DescriptionUse) {
    match begin_change(fd) {
        Some(change) => change.end_as(of),
        None => of.share(),
    }
}

fn set(fd: c_int, number: u32) {
    if let Some(change) = begin_change(fd) {
        change.end_with(number);
    }
}

/// Removes a descriptor. The caller's thread is inside.
pub fn remove(fd: c_int) {
    if is_ours(fd)
        && let Some(change) = begin_change(fd)
    {
        change.end();
    }
}

/// The descriptors of a range that are in the table.
pub fn ours_in(first: u32, last: u32) -> impl Iterator<Item = c_int> {
    let end = FDS_END.load(SeqCst).min(last.saturating_add(1));
    (first..end).map(|fd| fd as c_int).filter(|fd| is_ours(*fd))
}

fn remove_descriptor(number: u32) {
    if let Some(entry) = ENTRIES.get((number as usize).wrapping_sub(1)) {
        entry.remove_descriptor();
        if entry.has_no_descriptor() {
            free_or_defer(number);
        }
    }
}

/// Frees an entry without descriptors, unless the engine must not be called now.
fn free_or_defer(number: u32) {
    if thread::this().is_in_handler() {
        HAS_UNFREED.store(true, SeqCst);
    } else if ENTRIES[number as usize - 1].free_if_unused() {
        put_free(number);
    }
}

/// Frees deferred entries, if the engine may be called now. The caller's thread is inside.
pub fn free_deferred() {
    if HAS_UNFREED.load(Relaxed)
        && !thread::this().is_in_handler()
        && HAS_UNFREED.swap(false, SeqCst)
    {
        for number in 1..=entries_used() {
            if ENTRIES[number as usize - 1].has_no_descriptor() {
                free_or_defer(number);
            }
        }
    }
}

/// Whether no call uses an entry.
pub fn is_unused() -> bool {
    let entries = &ENTRIES[..entries_used() as usize];
    entries.iter().all(OpenDescription::is_unused)
}

/// Frees all entries without descriptors. The caller's thread is inside.
pub fn free_all_unused() {
    HAS_UNFREED.store(true, SeqCst);
    free_deferred();
}

fn entries_used() -> u32 {
    ENTRIES_USED.load(SeqCst).min(ENTRIES_MAX as u32)
}

fn take_free() -> Option<u32> {
    let mut head = FREE_LIST.load(SeqCst);
    while head as u32 != 0 {
        let number = head as u32;
        let next = ENTRIES[number as usize - 1].next_free.load(SeqCst);
        let new = tagged_head(head, next);
        match FREE_LIST.compare_exchange(head, new, SeqCst, SeqCst) {
            Ok(_) => return Some(number),
            Err(now) => head = now,
        }
    }
    let below = |touched| (touched < ENTRIES_MAX as u32).then_some(touched + 1);
    let before = ENTRIES_USED.fetch_update(SeqCst, SeqCst, below).ok()?;
    Some(before + 1)
}

fn put_free(number: u32) {
    let mut head = FREE_LIST.load(SeqCst);
    loop {
        ENTRIES[number as usize - 1]
            .next_free
            .store(head as u32, SeqCst);
        match FREE_LIST.compare_exchange(head, tagged_head(head, number), SeqCst, SeqCst) {
            Ok(_) => return,
            Err(now) => head = now,
        }
    }
}

fn tagged_head(head: u64, number: u32) -> u64 {
    (head >> 32).wrapping_add(1) << 32 | u64::from(number)
}

/// Leaves the offsets of all open descriptions to the kernel. Returns when no direct call moves one
/// any more; a kernel call in progress finishes in its own turn.
pub fn share_all() {
    for entry in &ENTRIES[..entries_used() as usize] {
        if !entry.is_free() {
            entry.share();
        }
    }
}

/// Adopts the table in a child, in its only thread: its descriptors are copies of the parent's, and
/// the engine will be asked again about each file.
pub fn inherit() {
    FREE_LIST.store(0, SeqCst);
    let entries = &ENTRIES[..entries_used() as usize];
    entries.iter().for_each(OpenDescription::inherit);
    for (slot, seen) in SLOTS
        .iter()
        .zip(&CHECKED_AT)
        .take(FDS_END.load(SeqCst) as usize)
    {
        // The mount may restart its count for a file that is requested again.
        seen.store(0, SeqCst);
        let number = slot.load(SeqCst);
        if let Some(entry) = entries.get((number as usize).wrapping_sub(1)) {
            entry.add_descriptor();
        } else if number != 0 {
            // The thread that was changing it is not in the child. The descriptor may be the old or
            // the new one; the kernel serves it.
            slot.store(0, SeqCst);
        }
    }
    for (entry, number) in entries.iter().zip(1..) {
        if entry.free_if_unused() {
            put_free(number);
        }
    }
}
