//! The session that demotes and promotes pages.
//!
//! Invariants: no lock of the pool is held while the disk reads or writes. A page that changes during its move stays
//! where it is.

use super::census::{Census, SlicePages};
use super::heat::{HEAT_MAX, Heat};
use super::{Promotion, TierCounters};
use crate::brick::Brick;
use pagemesh_base::ids::{Epoch, FrameNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::object::TierPolicy;
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::session::Session;
use pagemesh_store::session::tier::PageMove;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pages of one demotion, which share a sync of the disk.
const BATCH_PAGES: u64 = 512;
/// Pages that one step of the hand looks at: those of a leaf.
const STEP_PAGES: u64 = 512;
/// Passes over the tables of a class without a page to take, before its hand gives up.
const PASSES_MAX: u32 = HEAT_MAX as u32 + 2;
/// Steps of the hand over objects that prefer flash in one demotion, so that others are not delayed.
const FLASH_STEPS_MAX: u32 = 256;
/// For this long after a search without result, the next ones are short: pinned objects may fill memory.
const SHORT_SEARCHES: Duration = Duration::from_secs(1);
/// Steps of a short search.
const SHORT_STEPS_MAX: u32 = 4096;

/// The position of a clock's hand over the objects of one policy.
#[derive(Default)]
struct Hand {
    /// The objects of this pass, with their sizes in pages.
    objects: Vec<(SliceId, u64)>,
    at: usize,
    page: u64,
}

/// The limits of a walk.
struct WalkLimits {
    pages: u64,
    steps: u32,
    passes: u32,
}

pub(super) struct Mover<M: Media> {
    brick: Arc<Brick<M>>,
    session: Session<M>,
    heat: Arc<Heat>,
    /// By policy.
    hands: [Hand; 3],
    /// Whether objects had the policy when policies changed last. New ones are automatic.
    is_used: [bool; 3],
    /// When the last search of objects that are not pinned found nothing.
    found_none_at: Option<Instant>,
    /// Whether the last batch had pages of pinned objects.
    took_pinned: bool,
}

type Batch = Vec<(Handle, Vec<PageMove>)>;

impl<M: Media + Send + Sync + 'static> Mover<M> {
    pub(super) fn new(brick: Arc<Brick<M>>, number: u32, heat: Arc<Heat>) -> Mover<M> {
        Mover {
            session: brick.session(number),
            brick,
            heat,
            hands: Default::default(),
            is_used: [false; 3],
            found_none_at: None,
            took_pinned: false,
        }
    }

    fn counters(&self) -> &TierCounters {
        &self.brick.tier().counters
    }

    /// Demotes up to so many pages, those of pinned objects only if there are no others and `takes_pinned`. Returns the
    /// number of moved pages; none if no page can be demoted.
    pub(super) fn demote(&mut self, want: u64, takes_pinned: bool) -> Option<u64> {
        let want = want.min(BATCH_PAGES);
        let frames = self.brick.pool().reserve_flash(want);
        let mut batch = self.collect(frames.len() as u64, takes_pinned);
        let mapping = self.session.mapping().clone();
        let mut free = frames.into_iter();
        for (copy, frame) in batch.iter_mut().flat_map(|(_, moves)| moves).zip(&mut free) {
            copy.write_to_flash(&mapping, frame);
        }
        let unused: Vec<FrameNo> = free.collect();
        if batch.is_empty() {
            self.brick.pool().end_moves(&[], &unused);
            return None;
        }
        match self.session.sync_moves() {
            Ok(()) => self.commit(&mut batch),
            Err(cause) => self.brick.fail(&cause),
        }
        let mut pool = self.brick.pool();
        pool.end_moves(&[], &unused);
        let mut moved = 0;
        for (_, moves) in &batch {
            pool.end_moves(moves, &[]);
            let count = moves.iter().filter(|it| it.is_moved()).count() as u64;
            let stayed = moves.len() as u64 - count;
            self.counters()
                .abandoned
                .fetch_add(stayed, Ordering::Relaxed);
            moved += count;
        }
        self.counters().demoted.fetch_add(moved, Ordering::Relaxed);
        Some(moved)
    }

    fn commit(&mut self, batch: &mut Batch) {
        for (handle, moves) in batch {
            match self.session.commit_moves(handle, moves) {
                // The object was deleted meanwhile.
                Ok(()) | Err(StoreError::NoSuchObject | StoreError::OutOfRange { .. }) => {}
                // A promotion finds memory full.
                Err(StoreError::NoSpace | StoreError::TimedOut) => {}
                Err(cause) => tracing::warn!(%cause, "pages stay in their tier"),
            }
        }
    }

    /// Whether the pool has pinned objects.
    pub(super) fn has_pinned(&self) -> bool {
        self.is_used[TierPolicy::Memory as usize]
    }

    /// Lists the objects anew after a change of policies.
    fn note_policies(&mut self) {
        if !self.brick.tier().take_policy_change() {
            return;
        }
        self.hands = Default::default();
        self.found_none_at = None;
        self.is_used = [false; 3];
        let pool = self.brick.pool();
        pool.list()
            .for_each(|it| self.is_used[it.tier as usize] = true);
    }

    /// Whether the last demotion took pages of pinned objects.
    pub(super) fn took_pinned(&self) -> bool {
        self.took_pinned
    }

    /// Copies pages, up to so many: first of objects that prefer flash, then cold ones of others.
    fn collect(&mut self, want: u64, takes_pinned: bool) -> Batch {
        self.note_policies();
        let mut batch = Batch::new();
        let limits = |pages: u64, steps, passes| WalkLimits {
            pages,
            steps,
            passes,
        };
        let first = limits(want, FLASH_STEPS_MAX, 2);
        let found = match self.is_used[TierPolicy::Flash as usize] {
            true => self.walk(TierPolicy::Flash, &first, &mut batch),
            false => 0,
        };
        let is_short = |at: Instant| at.elapsed() < SHORT_SEARCHES;
        let steps = match self.found_none_at.is_some_and(is_short) {
            true => SHORT_STEPS_MAX,
            false => u32::MAX,
        };
        let more = limits(want - found, steps, PASSES_MAX);
        self.walk(TierPolicy::Automatic, &more, &mut batch);
        let has_none = batch.is_empty() && self.has_pinned();
        self.found_none_at = has_none.then(Instant::now);
        self.took_pinned = has_none && takes_pinned;
        if self.took_pinned {
            let pinned = limits(want, u32::MAX, PASSES_MAX);
            self.walk(TierPolicy::Memory, &pinned, &mut batch);
        }
        batch
    }

    /// Copies pages of objects with a policy. Ends with the tables if it has some: a next pass would find them again.
    fn walk(&mut self, policy: TierPolicy, limits: &WalkLimits, batch: &mut Batch) -> u64 {
        let mut hand = std::mem::take(&mut self.hands[policy as usize]);
        let (mut found, mut steps, mut passes) = (0, 0, 0);
        while found < limits.pages
            && steps < limits.steps
            && passes < limits.passes
            && !self.brick.is_ending()
        {
            let Some(&(slice, pages)) = hand.objects.get(hand.at) else {
                if found > 0 {
                    break;
                }
                hand = Hand::default();
                hand.objects = self.list(policy);
                passes += 1;
                if hand.objects.is_empty() {
                    break;
                }
                continue;
            };
            if hand.page >= pages {
                hand.at += 1;
                hand.page = 0;
                continue;
            }
            steps += 1;
            let first = hand.page;
            let end = ((first / STEP_PAGES + 1) * STEP_PAGES).min(pages);
            hand.page = end;
            let wanted = limits.pages - found;
            let Some((handle, moves)) = self.copy_cold(slice, first..end, policy, wanted) else {
                hand.page = pages;
                continue;
            };
            if let Some(last) = moves.last() {
                passes = 0;
                found += moves.len() as u64;
                if found == limits.pages {
                    hand.page = last.page().0 + 1;
                }
                batch.push((handle, moves));
            }
        }
        self.hands[policy as usize] = hand;
        found
    }

    /// The objects with a policy, and their sizes in pages.
    fn list(&self, policy: TierPolicy) -> Vec<(SliceId, u64)> {
        let pool = self.brick.pool();
        let objects = pool.list().filter(|it| it.tier == policy);
        let listed = objects.map(|it| (it.slice, it.size_bytes / PAGE_BYTES as u64));
        let mut listed: Vec<_> = listed.collect();
        listed.sort_by_key(|(slice, _)| *slice);
        listed
    }

    /// Copies cold pages of a range, at most so many. None if the object is gone, or has another policy by now.
    fn copy_cold(
        &mut self,
        slice: SliceId,
        pages: std::ops::Range<u64>,
        policy: TierPolicy,
        most: u64,
    ) -> Option<(Handle, Vec<PageMove>)> {
        let handle = self.brick.pool().handle(slice).ok()?;
        if self.session.mapping().tier_policy(&handle) != policy {
            return None;
        }
        let heat = self.heat.clone();
        let taken = Cell::new(0);
        let is_wanted = |frame: FrameNo| {
            let is_cold = taken.get() < most
                && !heat.is_on_flash(frame)
                && (policy == TierPolicy::Flash || heat.cool(frame));
            taken.set(taken.get() + u64::from(is_cold));
            is_cold
        };
        let copied = self.session.copy_pages(&handle, pages, is_wanted);
        copied.ok().map(|moves| (handle, moves))
    }

    /// Counts pages, if it is time. Returns the pages of all slices at the end of a walk.
    pub(super) fn count_some(&mut self, census: &mut Census) -> Option<Vec<SlicePages>> {
        let pool = || self.brick.pool();
        census.step(Instant::now(), pool, &mut self.session, &self.heat)
    }

    /// Moves pages to memory.
    pub(super) fn promote(&mut self, mut wanted: Vec<Promotion>) {
        wanted.sort_by_key(|it| (it.handle.object(), it.page));
        wanted.dedup();
        for pages in wanted.chunk_by(|a, b| a.handle == b.handle) {
            let handle = pages[0].handle;
            let mut moves = Vec::new();
            for page in pages.iter().map(|it| it.page) {
                let heat = self.heat.clone();
                let is_wanted = |frame: FrameNo| heat.is_on_flash(frame);
                let copied = self.session.copy_pages(&handle, page..page + 1, is_wanted);
                moves.extend(copied.into_iter().flatten());
            }
            let mut batch = vec![(handle, moves)];
            self.commit(&mut batch);
            let moved = batch[0].1.iter().filter(|it| it.is_moved());
            let moved: Vec<u64> = moved.map(|it| it.page().0).collect();
            let count = moved.len() as u64;
            self.counters().promoted.fetch_add(count, Ordering::Relaxed);
            for page in moved {
                self.warm(&handle, page);
            }
        }
    }

    /// Raises the heat of a promoted page, which was touched twice.
    fn warm(&mut self, handle: &Handle, page: u64) {
        let heat = self.heat.clone();
        let range = page..page + 1;
        let visited = self
            .session
            .visit_slots(handle, range, Epoch(u32::MAX), |_, _, slot| {
                if let Some(frame) = slot.and_then(|slot| slot.frame()) {
                    heat.warm(frame);
                    heat.warm(frame);
                }
                true
            });
        // The object may be gone.
        let _ = visited;
    }
}
