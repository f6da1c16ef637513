//! The cache of the data view's pages behind the head.
//!
//! The pages of a part of the cache are under the part's lock, so a copy is never torn. A load from the device
//! runs without the lock: it is discarded if the page was written meanwhile. It goes to memory of its own, or straight to
//! a reserved slot, which has no page until the load ends.
//!
//! Invariants: a dirty page, and one that is being written, is not evicted. One that is stored to while it is being written
//! is dirty again afterwards.

use super::memory::Memory;
use super::queue::EvictionQueue;
use crate::disk_figures::DiskFigures;
use crate::map_error::MapError;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Parts of the cache, each with a lock of its own.
const PARTS_MAX: usize = 64;
/// Dirty pages before changes wait: what a slow disk writes in a second, so that a sync takes no longer.
const DIRTY_PAGES_MAX: usize = 8192;
/// Loads reserve at most this part of the slots (one quarter).
const RESERVED_DIVISOR: usize = 4;
/// Pages of a run that is loaded for one of them, at most, and as a part of all pages: half of those that are not used yet.
const RUN_PAGES_MAX: usize = 64;
const RUN_DIVISOR: usize = 20;
/// Fewest pages of a part.
const PART_PAGES_MIN: usize = 16;

/// Keys are numbers of pages that the pool's allocator chose: they need no hash that resists an attack.
type PageMap<T> = HashMap<usize, T, foldhash::fast::RandomState>;

/// Pages in memory, by number in the pool.
pub(super) struct PageCache {
    memory: Memory,
    parts: Vec<Mutex<Part>>,
    /// Dirty pages and pages that are being written.
    dirty: AtomicUsize,
}

struct Part {
    slots: PageMap<u32>,
    first_slot: u32,
    entries: Vec<Entry>,
    free: Vec<u32>,
    queue: EvictionQueue,
    /// Pages that became dirty since the writer last asked.
    dirty: Vec<usize>,
    /// Pages that are being loaded: by how many, and whether the page was written meanwhile.
    loads: PageMap<Load>,
    has_failed: bool,
    /// Slots that loads have reserved.
    reserved: usize,
    hits: u64,
    misses: u64,
}

#[derive(Clone, Copy, Default)]
struct Load {
    count: u32,
    is_stale: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    page: usize,
    is_dirty: bool,
    is_being_written: bool,
    /// Loaded, and not used since.
    is_new: bool,
}

impl Entry {
    /// An entry without changes.
    fn clean(page: usize) -> Entry {
        Entry {
            page,
            is_dirty: false,
            is_being_written: false,
            is_new: false,
        }
    }
}

/// A page is not in the cache, and there is no slot for it: every page is dirty.
#[derive(Debug)]
pub(super) struct CacheFull;

impl PageCache {
    /// A cache of at least 16 pages.
    pub(super) fn new(bytes: usize) -> Result<PageCache, MapError> {
        let pages = (bytes / PAGE_BYTES).max(PART_PAGES_MIN);
        let parts = (pages / PART_PAGES_MIN).clamp(1, PARTS_MAX);
        let each = pages / parts;
        let part = |number| Mutex::new(Part::new((number * each) as u32, each));
        Ok(PageCache {
            memory: Memory::new(parts * each * PAGE_BYTES)?,
            parts: (0..parts).map(part).collect(),
            dirty: AtomicUsize::new(0),
        })
    }

    /// The figures of the cache.
    pub(super) fn figures(&self) -> DiskFigures {
        let mut figures = DiskFigures {
            cache_bytes_max: self.memory.len() as u64,
            dirty_pages: self.dirty.load(Ordering::Relaxed) as u64,
            ..DiskFigures::default()
        };
        for part in &self.parts {
            let part = lock(part);
            figures.cache_bytes += (part.slots.len() * PAGE_BYTES) as u64;
            figures.hits += part.hits;
            figures.misses += part.misses;
        }
        figures
    }

    /// Pages that the cache holds at most.
    fn capacity(&self) -> usize {
        self.memory.len() / PAGE_BYTES
    }

    /// Pages that one load may bring before they are used, of which most stay until then.
    pub(super) fn run_pages(&self) -> usize {
        (self.capacity() / RUN_DIVISOR).clamp(1, RUN_PAGES_MAX)
    }

    /// Whether the writer should begin to write without a sync.
    pub(super) fn is_filling(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > (self.capacity() / 4).min(DIRTY_PAGES_MAX / 2)
    }

    /// Whether changes need not wait for the writer.
    pub(super) fn has_room(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) < (self.capacity() / 2).min(DIRTY_PAGES_MAX)
    }

    fn part(&self, page: usize) -> MutexGuard<'_, Part> {
        // Neighbours lie in different parts, so that a run does not wait for one lock.
        lock(&self.parts[page % self.parts.len()])
    }

    fn at(slot: u32) -> usize {
        slot as usize * PAGE_BYTES
    }

    fn count_dirty(&self, became_dirty: bool) {
        if became_dirty {
            self.dirty.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the page is in the cache.
    pub(super) fn contains(&self, page: usize) -> bool {
        self.part(page).slots.contains_key(&page)
    }

    /// Calls `use_page` with the place of a cached page.
    pub(super) fn access<T>(
        &self,
        page: usize,
        use_page: impl FnOnce(&Memory, usize) -> T,
    ) -> Option<T> {
        let mut part = self.part(page);
        let slot = *part.slots.get(&page)?;
        part.queue.touch(slot);
        // The first use of a loaded page is the one that missed it.
        let was_new = std::mem::take(&mut part.entry(slot).is_new);
        part.hits += u64::from(!was_new);
        Some(use_page(&self.memory, Self::at(slot)))
    }

    /// The same for a change of the page.
    pub(super) fn change<T>(
        &self,
        page: usize,
        change_page: impl FnOnce(&Memory, usize) -> T,
    ) -> Option<T> {
        let mut part = self.part(page);
        let slot = *part.slots.get(&page)?;
        part.queue.touch(slot);
        part.mark_loads_stale(page);
        self.count_dirty(part.mark_dirty(slot));
        Some(change_page(&self.memory, Self::at(slot)))
    }

    /// Replaces a whole page.
    pub(super) fn replace(
        &self,
        page: usize,
        bytes: &[u8; PAGE_BYTES],
    ) -> Result<PageChecksums, CacheFull> {
        let mut part = self.part(page);
        let slot = part.slot_for(page)?;
        part.mark_loads_stale(page);
        self.count_dirty(part.mark_dirty(slot));
        Ok(self.memory.stream_page(Self::at(slot), bytes))
    }

    /// Announces a load of a page from the device.
    pub(super) fn begin_load(&self, page: usize) {
        self.part(page).begin_load(page);
    }

    /// Announces a load, and reserves a slot for it. None: there is none to spare.
    pub(super) fn begin_load_into_slot(&self, page: usize) -> Option<ReservedSlot> {
        let mut part = self.part(page);
        part.begin_load(page);
        // The others stay for changes, which may wait on the thread that ends this load.
        if part.reserved >= part.entries.len() / RESERVED_DIVISOR {
            return None;
        }
        let slot = part.free_slot()?;
        *part.entry(slot) = Entry::clean(page);
        part.reserved += 1;
        Some(ReservedSlot(slot))
    }

    /// The memory of a reserved slot.
    pub(super) fn address_of(&self, slot: &ReservedSlot) -> *mut u8 {
        self.memory.address(Self::at(slot.0), PAGE_BYTES)
    }

    /// Ends a load whose bytes are in a reserved slot.
    pub(super) fn end_load_in_slot(&self, page: usize, ReservedSlot(slot): ReservedSlot) {
        let mut part = self.part(page);
        part.reserved -= 1;
        let is_stale = part.end_load(page);
        if is_stale || part.slots.contains_key(&page) {
            part.free.push(slot);
            return;
        }
        part.entry(slot).is_new = true;
        part.misses += 1;
        part.slots.insert(page, slot);
        part.queue.push(slot, page);
    }

    /// Gives back a reserved slot whose load failed; the load itself goes on.
    pub(super) fn release(&self, page: usize, ReservedSlot(slot): ReservedSlot) {
        let mut part = self.part(page);
        part.reserved -= 1;
        part.free.push(slot);
    }

    /// Ends a load, and puts its page into the cache. A cached page without changes takes the bytes that were
    /// loaded if `replaces_clean`.
    pub(super) fn end_load(
        &self,
        page: usize,
        bytes: &[u8; PAGE_BYTES],
        replaces_clean: bool,
    ) -> LoadEnd {
        let mut part = self.part(page);
        let is_stale = part.end_load(page);
        if let Some(&slot) = part.slots.get(&page) {
            let entry = part.entry(slot);
            let is_clean = !entry.is_dirty && !entry.is_being_written;
            if replaces_clean && is_clean && !is_stale {
                self.memory.write(Self::at(slot), bytes);
            }
            return LoadEnd::Cached;
        }
        if is_stale {
            return LoadEnd::Stale;
        }
        match part.slot_for(page) {
            Ok(slot) => {
                part.entry(slot).is_new = true;
                part.misses += 1;
                self.memory.write(Self::at(slot), bytes);
                LoadEnd::Cached
            }
            Err(CacheFull) => LoadEnd::Full,
        }
    }

    /// Ends a load that brought nothing.
    pub(super) fn cancel_load(&self, page: usize) {
        self.part(page).end_load(page);
    }

    /// Has the writer write a cached page again. False if the page is not cached.
    pub(super) fn mark_for_rewrite(&self, page: usize) -> bool {
        let mut part = self.part(page);
        let Some(&slot) = part.slots.get(&page) else {
            return false;
        };
        self.count_dirty(part.mark_dirty(slot));
        true
    }

    /// Lets dirty pages be evicted: nothing is written any more.
    pub(super) fn give_up_dirty(&self) {
        self.parts
            .iter()
            .for_each(|part| lock(part).has_failed = true);
    }

    /// Drops the pages of a range, also with changes, and the results of loads that have begun. No page is being written.
    pub(super) fn discard(&self, pages: &Range<usize>) {
        for part in &self.parts {
            let dropped = lock(part).discard(pages);
            self.dirty.fetch_sub(dropped, Ordering::Relaxed);
        }
    }

    /// Moves the numbers of all dirty pages to `into`.
    pub(super) fn take_dirty(&self, into: &mut Vec<usize>) {
        for part in &self.parts {
            into.append(&mut lock(part).dirty);
        }
    }

    /// Copies a dirty page for the writer. False: it is no longer dirty.
    pub(super) fn begin_write(&self, page: usize, into: &Memory, at: usize) -> bool {
        let mut part = self.part(page);
        let Some(&slot) = part.slots.get(&page) else {
            return false;
        };
        let entry = part.entry(slot);
        if !entry.is_dirty {
            return false;
        }
        entry.is_dirty = false;
        entry.is_being_written = true;
        into.copy_page(at, &self.memory, Self::at(slot));
        true
    }

    /// Ends the write of a page.
    pub(super) fn end_write(&self, page: usize) {
        let mut part = self.part(page);
        let Some(&slot) = part.slots.get(&page) else {
            return;
        };
        part.entry(slot).is_being_written = false;
        self.dirty.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A slot without a page, for a load.
#[derive(Debug)]
pub(super) struct ReservedSlot(u32);

/// The end of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadEnd {
    /// The page is in the cache, loaded or written by another.
    Cached,
    /// It was written and evicted meanwhile: it must be loaded again.
    Stale,
    /// Every slot is dirty. The bytes are right, but not cached.
    Full,
}

impl Part {
    /// Drops the pages of a range. Returns how many of them were dirty. Their slots are evicted in their turn.
    fn discard(&mut self, pages: &Range<usize>) -> usize {
        let in_range = |(page, _): &(&usize, &mut Load)| pages.contains(page);
        for (_, load) in self.loads.iter_mut().filter(in_range) {
            load.is_stale = true;
        }
        let dropped = self.slots.extract_if(|page, _| pages.contains(page));
        let dropped: Vec<u32> = dropped.map(|(_, slot)| slot).collect();
        let mut dirty = 0;
        for slot in dropped {
            let entry = self.entry(slot);
            dirty += usize::from(entry.is_dirty) + usize::from(entry.is_being_written);
            *entry = Entry::clean(usize::MAX);
        }
        self.dirty.retain(|page| !pages.contains(page));
        dirty
    }

    fn begin_load(&mut self, page: usize) {
        let slot = self.slots.get(&page).copied();
        let is_newer = slot.is_some_and(|slot| {
            let entry = self.entry(slot);
            entry.is_dirty || entry.is_being_written
        });
        let load = self.loads.entry(page).or_default();
        load.count += 1;
        load.is_stale |= is_newer;
    }

    /// A page that is being loaded was written.
    fn mark_loads_stale(&mut self, page: usize) {
        if let Some(load) = self.loads.get_mut(&page) {
            load.is_stale = true;
        }
    }

    /// Whether the page was written since the load began.
    fn end_load(&mut self, page: usize) -> bool {
        let Some(load) = self.loads.get_mut(&page) else {
            return true;
        };
        load.count -= 1;
        let Load { count, is_stale } = *load;
        if count == 0 {
            self.loads.remove(&page);
        }
        is_stale && !defect::is(Defect::StaleLoadTaken)
    }

    fn new(first_slot: u32, slots: usize) -> Part {
        let entry = Entry::clean(usize::MAX);
        Part {
            slots: PageMap::default(),
            first_slot,
            entries: vec![entry; slots],
            free: (first_slot..first_slot + slots as u32).collect(),
            queue: EvictionQueue::new(first_slot, slots),
            dirty: Vec::new(),
            loads: PageMap::default(),
            has_failed: false,
            reserved: 0,
            hits: 0,
            misses: 0,
        }
    }

    fn entry(&mut self, slot: u32) -> &mut Entry {
        &mut self.entries[(slot - self.first_slot) as usize]
    }

    /// Whether the page became dirty.
    fn mark_dirty(&mut self, slot: u32) -> bool {
        let entry = self.entry(slot);
        if entry.is_dirty {
            return false;
        }
        entry.is_dirty = true;
        let page = entry.page;
        self.dirty.push(page);
        true
    }

    /// The slot of a page, which is evicted from another page if the page has none.
    fn slot_for(&mut self, page: usize) -> Result<u32, CacheFull> {
        if let Some(&slot) = self.slots.get(&page) {
            self.queue.touch(slot);
            return Ok(slot);
        }
        let slot = self.free_slot().ok_or(CacheFull)?;
        *self.entry(slot) = Entry::clean(page);
        self.slots.insert(page, slot);
        self.queue.push(slot, page);
        Ok(slot)
    }

    fn free_slot(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| self.evict())
    }

    fn evict(&mut self) -> Option<u32> {
        let (entries, first) = (&self.entries, self.first_slot);
        let entry = |slot: u32| entries[(slot - first) as usize];
        let has_failed = self.has_failed;
        let can_evict = |slot| {
            let is_clean = !entry(slot).is_dirty && !entry(slot).is_being_written;
            has_failed || is_clean || defect::is(Defect::DirtyPageEvicted)
        };
        let slot = self.queue.evict(can_evict, |slot| entry(slot).page)?;
        let page = self.entry(slot).page;
        self.slots.remove(&page);
        Some(slot)
    }
}
