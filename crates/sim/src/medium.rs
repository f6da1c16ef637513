//! A brick's memory: the crash recorder, with a fuse that kills the brick at some access, and pages
//! with faults. Direct clients give the baton away at their accesses.
//!
//! A dying brick still changes its medium, for example when its stack unwinds and closes sessions.
//! Those changes go to a copy that is never read. The state that counts was saved when the fuse
//! blew.

use crate::direct_clients::client_thread;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::unreadable::PATTERN;
use pagemesh_pmem::{FenceProof, Media, Recorder, UnfencedStores};
use pagemesh_store::geometry::{Geometry, OBJECT_BYTES};
use pagemesh_store::object::HEIGHT;
use pagemesh_store::slot::Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Offset of the root slot in an object's entry.
const ROOT_SLOT_OFFSET: usize = 128;

/// The fault of the next page write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteFault {
    /// The page never arrives.
    Lost,
    /// The page arrives in place of another page; the number chooses which.
    Misdirected(u64),
}

/// A slot of a page table that lost a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlippedSlot {
    pub(crate) level: u8,
    /// Whether the slot named a frame.
    pub(crate) is_mapped: bool,
}

/// A sound slot in use: its level, its byte offset, and its value.
type SlotLocation = (u8, usize, Slot);

/// A brick's memory.
pub(crate) struct MemoryMedium {
    inner: Recorder,
    /// Changing accesses until the brick dies; negative: never.
    fuse: AtomicI64,
    surviving_state: Mutex<Option<Recorder>>,
    write_fault: Mutex<Option<WriteFault>>,
    /// Offsets of data pages that have not become nodes since.
    data_pages: Mutex<BTreeSet<usize>>,
    /// Unreadable pages, and whether a reader has met each.
    bad_pages: Mutex<BTreeMap<usize, bool>>,
    /// Whether there was ever one; every access checks this first.
    has_bad_pages: AtomicBool,
    frames_offset: usize,
}

/// Panic payload of a brick with a blown fuse.
pub(crate) struct FuseBlown;

impl MemoryMedium {
    pub(crate) fn new(inner: Recorder) -> MemoryMedium {
        let plan = Geometry::plan(inner.len_bytes() as u64).expect("the size of a pool");
        MemoryMedium {
            frames_offset: plan.frames.start as usize,
            inner: inner.without_crash_points(),
            fuse: AtomicI64::new(-1),
            surviving_state: Mutex::default(),
            write_fault: Mutex::default(),
            data_pages: Mutex::default(),
            bad_pages: Mutex::default(),
            has_bad_pages: AtomicBool::new(false),
        }
    }

    /// Makes the brick die after this many changing accesses.
    pub(crate) fn arm_fuse(&self, accesses: u32) {
        self.fuse.store(i64::from(accesses), Ordering::Relaxed);
    }

    pub(crate) fn disarm_fuse(&self) {
        self.fuse.store(-1, Ordering::Relaxed);
    }

    pub(crate) fn is_fuse_armed(&self) -> bool {
        self.fuse.load(Ordering::Relaxed) >= 0
    }

    /// The memory that a dead brick left: saved when its fuse blew, or the current one.
    pub(crate) fn take_surviving_state(&self) -> Recorder {
        self.fuse.store(-1, Ordering::Relaxed);
        lock(&self.surviving_state)
            .take()
            .unwrap_or_else(|| self.inner.fork())
    }

    /// A number that identifies the medium and has no other meaning.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Runs a changing access. A direct client's access goes to the pool's surviving state.
    fn with_write_access<T>(&self, act: impl FnOnce(&Recorder) -> T) -> T {
        match client_thread::count_access(self.address()) {
            true => self.with_client_state(act),
            false => {
                self.count_access();
                act(&self.inner)
            }
        }
    }

    /// The same for a reading access.
    fn with_read_access<T>(&self, act: impl FnOnce(&Recorder) -> T) -> T {
        match client_thread::count_access(self.address()) {
            true => self.with_client_state(act),
            false => act(&self.inner),
        }
    }

    /// A dead brick has left its pool to the direct clients that map it.
    fn with_client_state<T>(&self, act: impl FnOnce(&Recorder) -> T) -> T {
        let left = lock(&self.surviving_state);
        act(left.as_ref().unwrap_or(&self.inner))
    }

    /// The brick has died: its further changes go to a copy that is never read.
    pub(crate) fn freeze_state(&self) {
        self.fuse.store(-1, Ordering::Relaxed);
        lock(&self.surviving_state).get_or_insert_with(|| self.inner.fork());
    }

    /// Makes the next page write fail.
    pub(crate) fn inject_write_fault(&self, mishap: WriteFault) {
        *lock(&self.write_fault) = Some(mishap);
    }

    /// Cancels the write fault.
    pub(crate) fn clear_write_fault(&self) {
        *lock(&self.write_fault) = None;
    }

    /// Flips a bit of a data page; false if there is none.
    pub(crate) fn flip_data_bit(&self, choice: u64) -> bool {
        let Some(page) = self.data_page(choice) else {
            return false;
        };
        let at = page + (choice >> 32) as usize % (PAGE_BYTES / 8) * 8;
        self.flip_bit(at, (choice >> 20) % 64);
        true
    }

    fn flip_bit(&self, at: usize, bit: u64) {
        self.inner.store(at, self.inner.load(at) ^ 1 << bit);
        let flipped = self.inner.flush(at, 8);
        let _fenced = self.inner.fence(flipped);
    }

    /// Makes a data page unreadable; false if there is none.
    pub(crate) fn make_unreadable(&self, choice: u64) -> bool {
        let Some(page) = self.data_page(choice) else {
            return false;
        };
        self.has_bad_pages.store(true, Ordering::Relaxed);
        lock(&self.bad_pages).insert(page, false).is_none()
    }

    /// The unreadable pages, if there was ever one.
    fn bad_pages(&self) -> Option<MutexGuard<'_, BTreeMap<usize, bool>>> {
        let is_spoilt = self.has_bad_pages.load(Ordering::Relaxed);
        is_spoilt.then(|| lock(&self.bad_pages))
    }

    /// Fills bytes of unreadable pages as the handler of a machine check does.
    fn overlay_bad_pages(&self, offset: usize, into: &mut [u8]) {
        let Some(mut spoilt) = self.bad_pages() else {
            return;
        };
        let end = offset + into.len();
        let first = offset / PAGE_BYTES * PAGE_BYTES;
        for (&page, is_met) in spoilt.range_mut(first..end) {
            *is_met = true;
            let own = page.max(offset)..(page + PAGE_BYTES).min(end);
            for at in own {
                into[at - offset] = PATTERN.to_le_bytes()[at % 8];
            }
        }
    }

    /// A page that is overwritten before a read of it is readable again. A page that was found
    /// unreadable must not be reused.
    fn overwrite_bad_page(&self, offset: usize) {
        let removed = self
            .bad_pages()
            .and_then(|mut spoilt| spoilt.remove(&offset));
        if let Some(is_met) = removed {
            assert!(!is_met, "the unreadable page at {offset} is used again");
        }
    }

    /// A partial change of an unreadable page would kill the process.
    fn assert_readable(&self, offset: usize) {
        let page = offset / PAGE_BYTES * PAGE_BYTES;
        let is_spoilt = self
            .bad_pages()
            .is_some_and(|spoilt| spoilt.contains_key(&page));
        assert!(!is_spoilt, "byte {offset} of an unreadable page is changed");
    }

    /// Flips a bit of a slot in use, if there is one. Every second flip is above the leaves, where
    /// there are few slots.
    pub(crate) fn flip_slot(&self, rng: &mut SplitMix64) -> Option<FlippedSlot> {
        let is_above = rng.one_in(2);
        let mut slots = self.slots();
        slots.retain(|(level, _, _)| (*level > 0) == is_above);
        let (level, at, slot) = rng.pick(&slots)?;
        self.flip_bit(at, rng.below(64));
        Some(FlippedSlot {
            level,
            is_mapped: slot.frame().is_some(),
        })
    }

    /// The sound, nonempty slots of all page tables.
    fn slots(&self) -> Vec<SlotLocation> {
        let plan = Geometry::plan(self.inner.len_bytes() as u64).expect("the size of a pool");
        let roots = (0..u64::from(plan.object_count()))
            .map(|object| (plan.objects.start + object * OBJECT_BYTES) as usize)
            .map(|entry| (HEIGHT, entry + ROOT_SLOT_OFFSET));
        let (mut slots, mut next): (Vec<SlotLocation>, Vec<_>) = (vec![], roots.collect());
        while let Some((level, at)) = next.pop() {
            let found = Slot::decode(self.inner.load(at));
            let Some(slot) = found.ok().filter(|slot| *slot != Slot::EMPTY) else {
                continue;
            };
            slots.push((level, at, slot));
            if let (1.., Some(frame)) = (level, slot.frame()) {
                let node = frame.0 as usize * PAGE_BYTES;
                let below = (node..node + PAGE_BYTES).step_by(size_of::<Slot>());
                next.extend(below.map(|at| (level - 1, at)));
            }
        }
        slots
    }

    fn data_page(&self, choice: u64) -> Option<usize> {
        let pages = lock(&self.data_pages);
        let nth = (choice % 1_000_003) as usize % pages.len().max(1);
        pages.iter().nth(nth).copied()
    }

    fn count_access(&self) {
        let left = self.fuse.load(Ordering::Relaxed);
        if left < 0 {
            return;
        }
        self.fuse.store(left - 1, Ordering::Relaxed);
        if left == 0 {
            *lock(&self.surviving_state) = Some(self.inner.fork());
            resume_unwind(Box::new(FuseBlown));
        }
    }

    /// The offset at which a page arrives; none if it gets lost.
    fn write_location(&self, offset: usize, page: &[u8; PAGE_BYTES]) -> Option<usize> {
        if offset < self.frames_offset {
            return Some(offset);
        }
        // A node is zeroed before it is used, and data of zeroes is no loss.
        if page.iter().all(|byte| *byte == 0) {
            lock(&self.data_pages).remove(&offset);
            return Some(offset);
        }
        let place = match lock(&self.write_fault).take() {
            None => Some(offset),
            Some(WriteFault::Lost) => None,
            Some(WriteFault::Misdirected(choice)) => {
                let is_else = |at: &usize| *at != offset && !lock(&self.bad_pages).contains_key(at);
                self.data_page(choice).filter(is_else)
            }
        };
        lock(&self.data_pages).insert(offset);
        place
    }
}

impl Media for MemoryMedium {
    fn len_bytes(&self) -> usize {
        self.inner.len_bytes()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.with_read_access(|inner| inner.read(offset, into));
        self.overlay_bad_pages(offset, into);
    }

    fn load(&self, offset: usize) -> u64 {
        let mut word = self
            .with_read_access(|inner| inner.load(offset))
            .to_le_bytes();
        self.overlay_bad_pages(offset, &mut word);
        u64::from_le_bytes(word)
    }

    fn store(&self, offset: usize, word: u64) {
        self.with_write_access(|inner| {
            self.assert_readable(offset);
            inner.store(offset, word);
        });
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.with_write_access(|inner| {
            self.assert_readable(offset);
            inner.compare_exchange(offset, old, new)
        })
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        self.with_write_access(|inner| {
            self.assert_readable(offset);
            inner.stream_line(offset, line)
        })
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        let stream = |&(medium, offset): &(&MemoryMedium, usize)| {
            medium.with_write_access(|inner| {
                medium.overwrite_bad_page(offset);
                match medium.write_location(offset, page) {
                    Some(at) => Recorder::stream_page(&[(inner, at)], page).1,
                    None => inner.flush(offset, PAGE_BYTES),
                }
            })
        };
        let stores = targets.iter().map(stream).reduce(UnfencedStores::and);
        (
            PageChecksums::of(page),
            stores.expect("a page goes somewhere"),
        )
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        self.with_write_access(|inner| inner.flush(offset, len))
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        self.with_write_access(|inner| inner.fence(stores))
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        let page = offset / PAGE_BYTES * PAGE_BYTES;
        lock(&self.bad_pages)
            .get(&page)
            .is_some_and(|is_met| *is_met)
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        let spoilt = lock(&self.bad_pages);
        let met = spoilt.iter().filter(|(_, is_met)| **is_met);
        met.map(|(page, _)| *page).collect()
    }
}
