//! A brick's memory: the crash recorder, with a fuse that ends the brick at
//! some access, and pages that go wrong. Guests give the baton away at theirs.
//!
//! What a dying brick still does to its medium, such as burying sessions while
//! its stack unwinds, goes to a copy that nobody looks at: the state that
//! counts was set aside when the fuse blew.

use crate::dice::Dice;
use crate::guests::guest;
use pagemesh_base::checksum::Sums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::unreadable::PATTERN;
use pagemesh_pmem::{Fenced, Media, Recorder, Unfenced};
use pagemesh_store::geometry::{Geometry, OBJECT_BYTES};
use pagemesh_store::object::HEIGHT;
use pagemesh_store::slot::Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where the root slot lies in the entry of an object.
const ROOT_AT: usize = 64;

/// What is wrong with the next page that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mishap {
    /// It never arrives.
    Lost,
    /// It arrives in place of another page; the number chooses which.
    Misdirected(u64),
}

/// A slot of a page table that lost a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flipped {
    pub(crate) level: u8,
    /// Whether it named a frame.
    pub(crate) is_mapped: bool,
}

/// A slot that is sound and in use: its level, its byte, and what it says.
type Place = (u8, usize, Slot);

/// A brick's memory.
pub(crate) struct Medium {
    inner: Recorder,
    /// Accesses that change something until the brick dies; negative: never.
    fuse: AtomicI64,
    left: Mutex<Option<Recorder>>,
    mishap: Mutex<Option<Mishap>>,
    /// Where pages of data were written that have not become nodes since.
    pages: Mutex<BTreeSet<usize>>,
    /// Pages that cannot be read, and whether somebody has tried.
    spoilt: Mutex<BTreeMap<usize, bool>>,
    /// Whether there was ever one: every access asks.
    is_spoilt: AtomicBool,
    frames_at: usize,
}

/// The payload of the unwinding of a brick whose fuse blew.
struct Died;

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Medium {
    pub(crate) fn new(inner: Recorder) -> Medium {
        let plan = Geometry::plan(inner.len_bytes() as u64).expect("the size of a pool");
        Medium {
            frames_at: plan.frames.start as usize,
            inner: inner.without_past(),
            fuse: AtomicI64::new(-1),
            left: Mutex::default(),
            mishap: Mutex::default(),
            pages: Mutex::default(),
            spoilt: Mutex::default(),
            is_spoilt: AtomicBool::new(false),
        }
    }

    /// The brick dies at the access after so many.
    pub(crate) fn light(&self, accesses: u32) {
        self.fuse.store(i64::from(accesses), Ordering::Relaxed);
    }

    pub(crate) fn light_out(&self) {
        self.fuse.store(-1, Ordering::Relaxed);
    }

    pub(crate) fn is_lit(&self) -> bool {
        self.fuse.load(Ordering::Relaxed) >= 0
    }

    /// What a dead brick left behind: as its fuse blew, or as it is now.
    pub(crate) fn leave(&self) -> Recorder {
        self.fuse.store(-1, Ordering::Relaxed);
        guard(&self.left)
            .take()
            .unwrap_or_else(|| self.inner.fork())
    }

    /// What tells it from other media, and says nothing else.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Does an access that changes something. A guest does it to what its pool is by now.
    fn change_by<T>(&self, act: impl FnOnce(&Recorder) -> T) -> T {
        match guest::access(self.address()) {
            true => self.seen_by_guest(act),
            false => {
                self.step();
                act(&self.inner)
            }
        }
    }

    /// The same for one that only looks.
    fn look_by<T>(&self, act: impl FnOnce(&Recorder) -> T) -> T {
        match guest::access(self.address()) {
            true => self.seen_by_guest(act),
            false => act(&self.inner),
        }
    }

    /// A brick that died has left the pool to those who have it mapped.
    fn seen_by_guest<T>(&self, act: impl FnOnce(&Recorder) -> T) -> T {
        let left = guard(&self.left);
        act(left.as_ref().unwrap_or(&self.inner))
    }

    /// The brick has died: what it still does goes to a copy that nobody looks at.
    pub(crate) fn set_aside(&self) {
        self.fuse.store(-1, Ordering::Relaxed);
        guard(&self.left).get_or_insert_with(|| self.inner.fork());
    }

    /// The next page written goes wrong.
    pub(crate) fn bungle(&self, mishap: Mishap) {
        *guard(&self.mishap) = Some(mishap);
    }

    /// Nothing goes wrong any more.
    pub(crate) fn behave(&self) {
        *guard(&self.mishap) = None;
    }

    /// Flips a bit of a page of data; false if there is none.
    pub(crate) fn flip(&self, choice: u64) -> bool {
        let Some(page) = self.page(choice) else {
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

    /// Has a page of data that cannot be read; false if there is none.
    pub(crate) fn spoil(&self, choice: u64) -> bool {
        let Some(page) = self.page(choice) else {
            return false;
        };
        self.is_spoilt.store(true, Ordering::Relaxed);
        guard(&self.spoilt).insert(page, false).is_none()
    }

    /// The unreadable pages, if there was ever one.
    fn spoilt(&self) -> Option<MutexGuard<'_, BTreeMap<usize, bool>>> {
        let is_spoilt = self.is_spoilt.load(Ordering::Relaxed);
        is_spoilt.then(|| guard(&self.spoilt))
    }

    /// Spoilt pages come as the handler of a machine check shows them.
    fn read_spoilt(&self, offset: usize, into: &mut [u8]) {
        let Some(mut spoilt) = self.spoilt() else {
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

    /// A page that is overwritten before anybody tried to read it is well again; one that
    /// was found unreadable must not be used.
    fn overwrite(&self, offset: usize) {
        let removed = self.spoilt().and_then(|mut spoilt| spoilt.remove(&offset));
        if let Some(is_met) = removed {
            assert!(!is_met, "the unreadable page at {offset} is used again");
        }
    }

    /// What changes a part of an unreadable page ends the process.
    fn change(&self, offset: usize) {
        let page = offset / PAGE_BYTES * PAGE_BYTES;
        let is_spoilt = self
            .spoilt()
            .is_some_and(|spoilt| spoilt.contains_key(&page));
        assert!(!is_spoilt, "byte {offset} of an unreadable page is changed");
    }

    /// Flips a bit of a slot in use, if there is one. Above the leaves there are
    /// few, so that every second one is of those.
    pub(crate) fn flip_slot(&self, dice: &mut Dice) -> Option<Flipped> {
        let is_above = dice.one_in(2);
        let mut slots = self.slots();
        slots.retain(|(level, _, _)| (*level > 0) == is_above);
        let (level, at, slot) = dice.pick(&slots)?;
        self.flip_bit(at, dice.roll(64));
        Some(Flipped {
            level,
            is_mapped: slot.frame().is_some(),
        })
    }

    /// The slots of all page tables that are sound and not empty.
    fn slots(&self) -> Vec<Place> {
        let plan = Geometry::plan(self.inner.len_bytes() as u64).expect("the size of a pool");
        let roots = (0..u64::from(plan.object_count()))
            .map(|object| (plan.objects.start + object * OBJECT_BYTES) as usize)
            .map(|entry| (HEIGHT, entry + ROOT_AT));
        let (mut slots, mut next): (Vec<Place>, Vec<_>) = (vec![], roots.collect());
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

    fn page(&self, choice: u64) -> Option<usize> {
        let pages = guard(&self.pages);
        let nth = (choice % 1_000_003) as usize % pages.len().max(1);
        pages.iter().nth(nth).copied()
    }

    fn step(&self) {
        let left = self.fuse.load(Ordering::Relaxed);
        if left < 0 {
            return;
        }
        self.fuse.store(left - 1, Ordering::Relaxed);
        if left == 0 {
            *guard(&self.left) = Some(self.inner.fork());
            resume_unwind(Box::new(Died));
        }
    }

    /// Where a page goes; none if it gets lost.
    fn place(&self, offset: usize, page: &[u8; PAGE_BYTES]) -> Option<usize> {
        if offset < self.frames_at {
            return Some(offset);
        }
        // A node is zeroed before it is used, and data of zeroes is no loss.
        if page.iter().all(|byte| *byte == 0) {
            guard(&self.pages).remove(&offset);
            return Some(offset);
        }
        let place = match guard(&self.mishap).take() {
            None => Some(offset),
            Some(Mishap::Lost) => None,
            Some(Mishap::Misdirected(choice)) => {
                let is_else = |at: &usize| *at != offset && !guard(&self.spoilt).contains_key(at);
                self.page(choice).filter(is_else)
            }
        };
        guard(&self.pages).insert(offset);
        place
    }
}

impl Media for Medium {
    fn len_bytes(&self) -> usize {
        self.inner.len_bytes()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.look_by(|inner| inner.read(offset, into));
        self.read_spoilt(offset, into);
    }

    fn load(&self, offset: usize) -> u64 {
        let mut word = self.look_by(|inner| inner.load(offset)).to_le_bytes();
        self.read_spoilt(offset, &mut word);
        u64::from_le_bytes(word)
    }

    fn store(&self, offset: usize, word: u64) {
        self.change_by(|inner| {
            self.change(offset);
            inner.store(offset, word);
        });
    }

    fn swap(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.change_by(|inner| {
            self.change(offset);
            inner.swap(offset, old, new)
        })
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> Unfenced {
        self.change_by(|inner| {
            self.change(offset);
            inner.stream_line(offset, line)
        })
    }

    fn stream_page(targets: &[(&Self, usize)], page: &[u8; PAGE_BYTES]) -> (Sums, Unfenced) {
        let stream = |&(medium, offset): &(&Medium, usize)| {
            medium.change_by(|inner| {
                medium.overwrite(offset);
                match medium.place(offset, page) {
                    Some(at) => Recorder::stream_page(&[(inner, at)], page).1,
                    None => inner.flush(offset, PAGE_BYTES),
                }
            })
        };
        let stores = targets.iter().map(stream).reduce(Unfenced::and);
        (Sums::of(page), stores.expect("a page goes somewhere"))
    }

    fn flush(&self, offset: usize, len: usize) -> Unfenced {
        self.change_by(|inner| inner.flush(offset, len))
    }

    fn fence(&self, stores: Unfenced) -> Fenced {
        self.change_by(|inner| inner.fence(stores))
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        let page = offset / PAGE_BYTES * PAGE_BYTES;
        guard(&self.spoilt).get(&page).is_some_and(|is_met| *is_met)
    }

    fn unreadable(&self) -> Vec<usize> {
        let spoilt = guard(&self.spoilt);
        let met = spoilt.iter().filter(|(_, is_met)| **is_met);
        met.map(|(page, _)| *page).collect()
    }
}
