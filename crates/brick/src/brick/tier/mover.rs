//! The session that demotes and promotes pages.
//!
//! Invariants: no lock of the pool is held while the disk reads or writes. A page that changes during its move stays
//! where it is.

use super::census::{Census, SlicePages};
use super::flash_touches::FlashTouches;
use super::{IDLE_SEARCH_PAUSE_MAX, Promotion, SEARCH_PAUSE, TierCounters};
use crate::brick::Brick;
use pagemesh_base::ids::FrameNo;
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::control::HEAT_MAX;
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
/// Steps of the first walk over objects that prefer flash, so that the pages of others are not delayed.
const FLASH_STEPS_MAX: u32 = 256;
/// Passes over the tables of objects that prefer flash: each page there may go at once.
const FLASH_PASSES_MAX: u32 = 2;
/// For this long after a full search without result, those for sessions are short: pinned objects may fill memory.
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

/// The pause between searches without result that no session waits for.
struct SearchPause {
    /// The next one.
    len: Duration,
    end: Option<Instant>,
}

impl SearchPause {
    const NONE: SearchPause = SearchPause {
        len: SEARCH_PAUSE,
        end: None,
    };

    fn start(&mut self, now: Instant) {
        if !self.is_over(now) {
            return;
        }
        self.end = Some(now + self.len);
        self.len = (2 * self.len).min(IDLE_SEARCH_PAUSE_MAX);
    }

    fn is_over(&self, now: Instant) -> bool {
        self.end.is_none_or(|end| now >= end)
    }
}

pub(super) struct Mover<M: Media> {
    brick: Arc<Brick<M>>,
    session: Session<M>,
    touches: Arc<FlashTouches>,
    /// By policy.
    hands: [Hand; 3],
    /// Whether objects had the policy when policies changed last. New ones are automatic.
    is_used: [bool; 3],
    /// When the last full search of objects that are not pinned found nothing.
    found_none_at: Option<Instant>,
    pause: SearchPause,
    /// Whether the last search ended early for a session that waits.
    is_interrupted: bool,
    /// Whether the last batch had pinned pages.
    took_pinned: bool,
    /// Whether a search passed pages that requests pinned, since the last one that took pinned pages.
    saw_pinned: bool,
    /// Whether the present walk takes pinned pages.
    takes_pinned: bool,
}

type Batch = Vec<(Handle, Vec<PageMove>)>;

impl<M: Media + Send + Sync + 'static> Mover<M> {
    pub(super) fn new(brick: Arc<Brick<M>>, number: u32, touches: Arc<FlashTouches>) -> Mover<M> {
        Mover {
            session: brick.session(number),
            brick,
            touches,
            hands: Default::default(),
            is_used: [false; 3],
            found_none_at: None,
            pause: SearchPause::NONE,
            is_interrupted: false,
            took_pinned: false,
            saw_pinned: false,
            takes_pinned: false,
        }
    }

    fn counters(&self) -> &TierCounters {
        &self.brick.tier().counters
    }

    /// Demotes up to so many pages, those of pinned objects only if there are no others and a session waits. Returns the
    /// number of moved pages; none if no page can be demoted, or if the search was interrupted.
    pub(super) fn demote(&mut self, want: u64, is_session_waiting: bool) -> Option<u64> {
        let want = want.min(BATCH_PAGES);
        let frames = self.brick.pool().reserve_flash(want);
        let mut batch = self.collect(frames.len() as u64, is_session_waiting);
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
        match self.took_pinned {
            true => self.pause_searches(Instant::now()),
            false => self.pause = SearchPause::NONE,
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

    /// Whether the pool has pinned objects or pages.
    fn has_pinned(&self) -> bool {
        self.is_used[TierPolicy::Memory as usize] || self.saw_pinned
    }

    /// Whether the last search ended early, because a session began to wait.
    pub(super) fn was_interrupted(&self) -> bool {
        self.is_interrupted
    }

    /// Pauses searches for which no session waits. Each pause is twice as long as the last one.
    pub(super) fn pause_searches(&mut self, now: Instant) {
        self.pause.start(now);
    }

    /// Whether searches pause. After a session that waits, and after a change of policies, pauses are short again.
    pub(super) fn is_paused(&mut self, now: Instant, is_session_waiting: bool) -> bool {
        if self.brick.tier().has_policy_change() {
            self.pause = SearchPause::NONE;
        } else if is_session_waiting {
            self.pause.len = SEARCH_PAUSE;
        }
        !is_session_waiting && !self.pause.is_over(now)
    }

    /// The time until the pause is over. None if there is no pause.
    pub(super) fn pause_left(&self, now: Instant) -> Option<Duration> {
        let end = self.pause.end?;
        Some(end.saturating_duration_since(now))
    }

    /// Ends a pause that is over. True if there was one.
    pub(super) fn take_pause_end(&mut self, now: Instant) -> bool {
        self.pause.is_over(now) && self.pause.end.take().is_some()
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

    /// Copies pages, up to so many: first of objects that prefer flash, then cold ones of others. Pinned ones follow if
    /// a session waits.
    fn collect(&mut self, want: u64, is_session_waiting: bool) -> Batch {
        self.note_policies();
        self.is_interrupted = false;
        let mut batch = Batch::new();
        let is_recent = |at: Instant| at.elapsed() < SHORT_SEARCHES;
        let may_take = is_session_waiting && self.has_pinned();
        let is_short = may_take && self.found_none_at.is_some_and(is_recent);
        self.search(want, is_short, is_session_waiting, &mut batch);
        let has_none = batch.is_empty();
        if is_session_waiting && has_none && self.has_pinned() {
            let pinned = WalkLimits {
                pages: want,
                steps: u32::MAX,
                passes: PASSES_MAX,
            };
            self.takes_pinned = true;
            self.saw_pinned = false;
            for policy in [TierPolicy::Flash, TierPolicy::Automatic, TierPolicy::Memory] {
                if batch.is_empty() {
                    self.walk(policy, &pinned, true, &mut batch);
                }
            }
            self.takes_pinned = false;
        }
        self.took_pinned = has_none && !batch.is_empty();
        if is_short && batch.is_empty() {
            self.search(want, false, is_session_waiting, &mut batch);
        }
        batch
    }

    /// Copies pages of objects that are not pinned. Only a search that is not short can tell that there is none.
    fn search(&mut self, want: u64, is_short: bool, is_session_waiting: bool, batch: &mut Batch) {
        let limits = |pages: u64, steps, passes| WalkLimits {
            pages,
            steps,
            passes,
        };
        let has_flash = self.is_used[TierPolicy::Flash as usize];
        let first = limits(want, FLASH_STEPS_MAX, FLASH_PASSES_MAX);
        let found = match has_flash {
            true => self.walk(TierPolicy::Flash, &first, is_session_waiting, batch),
            false => 0,
        };
        // A walk that ends with the tables may find fewer pages than wanted: the next one finds more.
        if found == 0 {
            let steps = if is_short { SHORT_STEPS_MAX } else { u32::MAX };
            let others = limits(want, steps, PASSES_MAX);
            self.walk(TierPolicy::Automatic, &others, is_session_waiting, batch);
        }
        // The first walk may have ended in a part without pages.
        if has_flash && !is_short && batch.is_empty() {
            let all = limits(want, u32::MAX, FLASH_PASSES_MAX);
            self.walk(TierPolicy::Flash, &all, is_session_waiting, batch);
        }
        if !batch.is_empty() {
            self.found_none_at = None;
        } else if !is_short && !self.is_interrupted {
            self.found_none_at = Some(Instant::now());
        }
    }

    /// Copies pages of objects with a policy. Ends with the tables if it has some: a next pass would find them again. A
    /// pass without a page in memory is the last one. Ends at once if a session waits that it is not for.
    fn walk(
        &mut self,
        policy: TierPolicy,
        limits: &WalkLimits,
        is_session_waiting: bool,
        batch: &mut Batch,
    ) -> u64 {
        let mut hand = std::mem::take(&mut self.hands[policy as usize]);
        let (mut found, mut steps, mut passes) = (0, 0, 0);
        let saw_memory = Cell::new(false);
        while found < limits.pages
            && steps < limits.steps
            && passes < limits.passes
            && !self.must_end_walk(is_session_waiting)
        {
            let Some(&(slice, pages)) = hand.objects.get(hand.at) else {
                let was_useless = passes > 0 && !saw_memory.replace(false);
                if found > 0 || was_useless {
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
            let copied = self.copy_cold(slice, first..end, policy, wanted, &saw_memory);
            let Some((handle, moves)) = copied else {
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

    /// Whether the brick ends, or a session waits that the walk is not for.
    fn must_end_walk(&mut self, is_session_waiting: bool) -> bool {
        self.is_interrupted |= !is_session_waiting && self.brick.tier().has_waiting_session();
        self.is_interrupted || self.brick.is_ending()
    }

    /// The objects with a policy, and their sizes in pages.
    fn list(&self, policy: TierPolicy) -> Vec<(SliceId, u64)> {
        let pool = self.brick.pool();
        let objects = pool.list_movable().filter(|it| it.tier == policy);
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
        saw_memory: &Cell<bool>,
    ) -> Option<(Handle, Vec<PageMove>)> {
        let handle = self.brick.pool().movable_handle(slice).ok()?.1;
        if self.session.mapping().tier_policy(&handle) != policy {
            return None;
        }
        let touches = self.touches.clone();
        let mapping = self.session.mapping().clone();
        let control = mapping.control();
        let (taken, saw_pinned) = (Cell::new(0), Cell::new(false));
        let takes_pinned = self.takes_pinned;
        let is_wanted = |frame: FrameNo| {
            if touches.is_on_flash(frame) {
                return false;
            }
            let is_pinned = control.is_pinned(frame);
            saw_pinned.set(saw_pinned.get() || is_pinned);
            let is_passed = is_pinned && !takes_pinned;
            if is_passed {
                return false;
            }
            saw_memory.set(true);
            let goes_at_once = is_pinned || policy == TierPolicy::Flash;
            let is_cold = taken.get() < most && (goes_at_once || control.cool_frame(frame));
            taken.set(taken.get() + u64::from(is_cold));
            is_cold
        };
        let copied = self.session.copy_pages(&handle, pages, is_wanted);
        self.saw_pinned |= saw_pinned.get();
        copied.ok().map(|moves| (handle, moves))
    }

    /// Counts pages, if it is time. Returns the pages of all slices at the end of a walk.
    pub(super) fn count_some(&mut self, census: &mut Census) -> Option<Vec<SlicePages>> {
        let pool = || self.brick.pool();
        census.step(Instant::now(), pool, &mut self.session, &self.touches)
    }

    /// Moves pages to memory.
    pub(super) fn promote(&mut self, mut wanted: Vec<Promotion>) {
        wanted.sort_by_key(|it| (it.handle.object(), it.page, !it.is_pinned));
        wanted.dedup_by_key(|it| (it.handle, it.page));
        for pages in wanted.chunk_by(|a, b| a.handle == b.handle) {
            let handle = pages[0].handle;
            let mut moves = Vec::new();
            for &Promotion {
                page, is_pinned, ..
            } in pages
            {
                let touches = self.touches.clone();
                let is_wanted = |frame: FrameNo| touches.is_on_flash(frame);
                let copied = self.session.copy_pages(&handle, page..page + 1, is_wanted);
                let mut copied = copied.unwrap_or_default();
                if is_pinned {
                    copied.iter_mut().for_each(PageMove::pin);
                }
                moves.append(&mut copied);
            }
            let mut batch = vec![(handle, moves)];
            self.commit(&mut batch);
            let moved = batch[0].1.iter().filter(|it| it.is_moved());
            let count = moved.count() as u64;
            self.counters().promoted.fetch_add(count, Ordering::Relaxed);
        }
    }
}
