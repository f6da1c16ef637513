//! Counts the pages of each slice in memory and on flash, by a slow walk over the page tables.
//!
//! Invariants: a step looks at a bounded number of page table entries, and no lock of the pool is held meanwhile. Counts
//! are those of the last whole walk, and pages that move during it may count on either side.

use super::flash_touches::FlashTouches;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::pool::Pool;
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::Session;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// Entries of page tables that one operation looks at. An empty table counts as one.
const CHUNK_ENTRIES: u64 = 512;
/// Such operations in one step.
const STEP_CHUNKS: usize = 32;
/// The pause between two steps. So a walk takes less than a hundredth of a processor.
const STEP_PAUSE: Duration = Duration::from_millis(100);
/// The pause between two walks.
const WALK_PAUSE: Duration = Duration::from_secs(10);

/// The pages of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlicePages {
    /// The slice.
    pub slice: SliceId,
    /// Pages in memory.
    pub memory: u64,
    /// Pages on flash.
    pub flash: u64,
}

/// A walk over the page tables of all slices.
pub(super) struct Census {
    due: Instant,
    /// The slices of this walk, with their sizes in pages. The last one is next.
    left: Vec<(SliceId, u64)>,
    /// The next page of the slice.
    page: u64,
    counted: Vec<SlicePages>,
}

impl Census {
    pub(super) fn new(now: Instant) -> Census {
        Census {
            due: now,
            left: Vec::new(),
            page: 0,
            counted: Vec::new(),
        }
    }

    /// The time until the next step.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now)
    }

    /// Counts some pages, if a step is due. Returns the pages of all slices at the end of a walk.
    pub(super) fn step<'p, M: Media + 'p>(
        &mut self,
        now: Instant,
        pool: impl Fn() -> MutexGuard<'p, Pool<M>>,
        session: &mut Session<M>,
        touches: &FlashTouches,
    ) -> Option<Vec<SlicePages>> {
        if !self.wait(now).is_zero() {
            return None;
        }
        if self.left.is_empty() {
            let pool = pool();
            let slices = pool.list();
            let sized = slices.map(|it| (it.slice, it.size_bytes / PAGE_BYTES as u64));
            self.left = sized.collect();
        }
        for _ in 0..STEP_CHUNKS {
            let Some(&(slice, pages)) = self.left.last() else {
                break;
            };
            let handle = pool().handle(slice).ok();
            let reached =
                handle.and_then(|it| self.count_chunk(slice, pages, &it, session, touches));
            // A slice that was deleted meanwhile is over, too.
            self.page = reached.unwrap_or(pages);
            if self.page >= pages {
                self.left.pop();
                self.page = 0;
            }
        }
        let is_over = self.left.is_empty();
        self.due = now + if is_over { WALK_PAUSE } else { STEP_PAUSE };
        is_over.then(|| std::mem::take(&mut self.counted))
    }

    /// Counts pages of a slice. Returns the next page; none if the slice is gone.
    fn count_chunk<M: Media>(
        &mut self,
        slice: SliceId,
        pages: u64,
        handle: &Handle,
        session: &mut Session<M>,
        touches: &FlashTouches,
    ) -> Option<u64> {
        let (mut memory, mut flash, mut entries) = (0, 0, 0);
        let range = self.page..pages;
        let visited = session.visit_slots(handle, range, Epoch(u32::MAX), |_, _, slot| {
            if entries == CHUNK_ENTRIES {
                return false;
            }
            entries += 1;
            match slot.and_then(|slot| slot.frame()) {
                Some(frame) if touches.is_on_flash(frame) => flash += 1,
                Some(_) => memory += 1,
                None => {}
            }
            true
        });
        if self.page == 0 {
            self.counted.push(SlicePages {
                slice,
                memory: 0,
                flash: 0,
            });
        }
        if let Some(counts) = self.counted.last_mut() {
            counts.memory += memory;
            counts.flash += flash;
        }
        visited.ok()
    }
}
