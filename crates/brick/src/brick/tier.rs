//! A tier: pages of a pool that move between its memory and the disks behind it.
//!
//! Workers report touches, and the maintenance says when memory is short. A thread with a session of its own then
//! demotes cold pages, and promotes pages that were touched twice.
//!
//! Invariants: a pool without flash has no thread at work and counts nothing. The queue of promotions is bounded: a page that
//! finds it full waits for its next touch.

mod census;
mod flash_touches;
mod mover;
mod policies;
mod read_counts;
mod recent;

use crate::brick::Brick;
use census::Census;
pub use census::SlicePages;
use flash_touches::{FlashTouch, FlashTouches};
use mover::Mover;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::poison::{lock, recover};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_pmem::{MapError, Media};
use pagemesh_store::devices::Device;
use pagemesh_store::object::TierPolicy;
use pagemesh_store::pool::TierUsage;
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::recovery::PoolError;
use pagemesh_store::session::{DEMOTION_WAIT_MAX, RECORD_PAGES_MAX, Session};
pub use policies::POLICY_CHANGES_MAX;
use policies::ReportedPolicies;
use read_counts::ReadCounters;
pub(crate) use read_counts::ReadCounts;
use recent::RecentTouches;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Demotion starts when less than one part in so many of the memory frames is free.
pub const DEMOTION_START_PART: u64 = 10;
/// Demotion ends when one part in so many is free.
pub const DEMOTION_END_PART: u64 = 6;
/// Promotions that wait, at most.
pub const PROMOTIONS_MAX: usize = 1024;
/// Promotions in one step, so that demotions are not delayed.
const PROMOTION_STEP: usize = 64;
/// The interval at which it looks whether the brick ends.
const DEMOTION_POLL: Duration = Duration::from_millis(50);
/// The longest wait for work.
const WORK_WAIT_MAX: Duration = Duration::from_secs(3600);
/// The pause after a search that found no page to demote.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between such searches while no session waits.
const IDLE_SEARCH_PAUSE_MAX: Duration = Duration::from_secs(30);
/// Batches in a row without a moved page, before the search counts as without result.
const UNMOVED_BATCHES_MAX: u32 = 4;
/// Pause between attempts to open the session of the tier's thread.
const SESSION_PAUSE: Duration = Duration::from_secs(1);
/// The pause after a batch without a moved page, and after demotions until their frames are free.
const CHECKPOINT_PAUSE: Duration = Duration::from_millis(5);

/// Counts of a tier since the brick's start.
#[derive(Default)]
pub(crate) struct TierCounters {
    pub(crate) demoted: AtomicU64,
    pub(crate) promoted: AtomicU64,
    pub(crate) abandoned: AtomicU64,
    waits: AtomicU64,
}

/// The figures of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierFigures {
    /// Frames by class.
    pub usage: TierUsage,
    /// Pages that were moved to flash since the brick's start.
    pub demoted: u64,
    /// Pages that were moved to memory.
    pub promoted: u64,
    /// Pages that changed during their move and stayed.
    pub abandoned: u64,
    /// Pages that requests over tcp found in memory.
    pub hits: u64,
    /// Pages that such requests read from flash.
    pub misses: u64,
    /// How often a session waited for a demotion, because memory was full.
    pub waits: u64,
}

/// A page that should be in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Promotion {
    handle: Handle,
    page: u64,
    /// Whether a request with a hint asked for it.
    is_pinned: bool,
}

#[derive(Default)]
struct TierWork {
    /// Memory is short, or the pool got its first flash device.
    is_memory_low: bool,
    /// A session waits for frames.
    is_session_waiting: bool,
    promotions: Vec<Promotion>,
    /// Steps of demotion so far.
    steps: u64,
}

/// The tier of a brick, as its threads share it.
#[derive(Default)]
pub(crate) struct Tier {
    /// Set once the pool has flash.
    touches: OnceLock<Arc<FlashTouches>>,
    work: Mutex<TierWork>,
    /// Wakes the thread.
    wake: Condvar,
    /// Wakes sessions that wait for frames.
    freed: Condvar,
    counters: TierCounters,
    reads: ReadCounters,
    /// Whether a policy changed since the thread listed the objects.
    policies_changed: AtomicBool,
    /// Locked before the pool.
    reported: Mutex<ReportedPolicies>,
    recent: Mutex<RecentTouches>,
    /// The pages of slices, by the last walk, and the number of walks.
    counted: Mutex<(Arc<Vec<SlicePages>>, u64)>,
}

impl Tier {
    fn take_policy_change(&self) -> bool {
        self.policies_changed.swap(false, Ordering::AcqRel)
    }

    fn has_policy_change(&self) -> bool {
        self.policies_changed.load(Ordering::Acquire)
    }

    fn has_waiting_session(&self) -> bool {
        lock(&self.work).is_session_waiting
    }
}

/// The thread that moves pages. Dropping it ends the thread.
pub(crate) struct TierThread<M: Media> {
    brick: Arc<Brick<M>>,
    thread: Option<JoinHandle<()>>,
}

impl<M: Media + Send + Sync + 'static> TierThread<M> {
    /// Starts the thread, if the pool may have flash.
    pub(crate) fn start(brick: &Arc<Brick<M>>) -> std::io::Result<Option<TierThread<M>>> {
        if brick.mapping().media().buffers_from().is_none() {
            return Ok(None);
        }
        let runner = brick.clone();
        let thread = std::thread::Builder::new().name("tier".into());
        let thread = thread.spawn(move || runner.tier_loop())?;
        Ok(Some(TierThread {
            brick: brick.clone(),
            thread: Some(thread),
        }))
    }
}

impl<M: Media> Drop for TierThread<M> {
    /// The brick is ending.
    fn drop(&mut self) {
        drop(lock(&self.brick.tier().work));
        self.brick.tier().wake.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the tier's thread panicked");
        }
    }
}

/// Whether a page that was touched on flash moves to memory.
fn is_promoted(policy: TierPolicy, hint: TierHint, touch: FlashTouch) -> bool {
    match (hint, policy) {
        (TierHint::Memory, _) => true,
        (TierHint::Flash, _) => false,
        (_, TierPolicy::Memory) => true,
        (_, TierPolicy::Automatic) => touch == FlashTouch::Again,
        (_, TierPolicy::Flash) => false,
    }
}

/// The numbers of free memory frames at which demotion starts and ends.
fn watermarks(usage: TierUsage) -> (u64, u64) {
    let start = usage.memory_frames / DEMOTION_START_PART;
    (start, usage.memory_frames / DEMOTION_END_PART)
}

impl<M: Media> Brick<M> {
    /// The figures of the pool's tier. None for a pool without flash.
    #[must_use]
    pub fn tier_figures(&self) -> Option<TierFigures> {
        self.mapping().geometry().flash_start()?;
        let usage = self.pool().tier_usage();
        let counters = &self.tier().counters;
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (hits, misses) = self.tier().reads.sum();
        Some(TierFigures {
            usage,
            demoted: count(&counters.demoted),
            promoted: count(&counters.promoted),
            abandoned: count(&counters.abandoned),
            hits,
            misses,
            waits: count(&counters.waits),
        })
    }

    /// The hits and misses of the last minute before `now`, as far as earlier calls within it have seen the counts.
    #[must_use]
    pub fn recent_tier_touches(&self, now: Instant) -> (u64, u64) {
        let (hits, misses) = self.tier().reads.sum();
        let [hits, misses] = lock(&self.tier().recent).since_minute(now, [hits, misses]);
        (hits, misses)
    }

    /// The pages of each slice, by the last walk over the page tables, and the number of walks so far.
    #[must_use]
    pub fn tier_counts(&self) -> (Arc<Vec<SlicePages>>, u64) {
        lock(&self.tier().counted).clone()
    }

    /// Adds a disk behind the memory of the pool. `attach` makes it a part of the medium, at its planned place.
    ///
    /// **Data loss:** everything on the disk is lost.
    ///
    /// # Errors
    /// When the pool has no place for it, or the disk fails.
    pub fn add_disk(
        &self,
        id: Uuid,
        bytes: u64,
        attach: impl FnOnce(&Device, &M) -> Result<(), MapError>,
    ) -> Result<(), PoolError> {
        let mut pool = self.pool();
        let planned = pool.plan_device(id, bytes)?;
        attach(&planned, self.mapping().media())?;
        pool.add_device(planned)?;
        drop(pool);
        self.wake_tier();
        Ok(())
    }

    /// Wakes the tier's thread if memory is short, or if the pool got its first flash device. After each maintenance.
    pub(crate) fn wake_tier(&self) {
        if self.mapping().media().buffers_from().is_none() {
            return;
        }
        let mut pool = self.pool();
        if !pool.is_tiered() {
            return;
        }
        let usage = pool.tier_usage();
        let is_waiting = pool.take_demotion_request();
        drop(pool);
        // Without room on flash there is nothing to do.
        let is_low = usage.memory_free < watermarks(usage).0 && usage.flash_free > 0;
        if is_low || is_waiting || self.tier().touches.get().is_none() {
            let mut work = lock(&self.tier().work);
            work.is_memory_low = true;
            work.is_session_waiting |= is_waiting;
            drop(work);
            self.tier().wake.notify_all();
        }
    }

    /// Maintains the pool for a session that waits, until it is answered. It waits for demotions as long as a disk may
    /// be silent.
    pub(crate) fn maintain_for(&self, number: u32) {
        self.maintain();
        let end = Instant::now() + DEMOTION_WAIT_MAX;
        let mut has_waited = false;
        while self.tier().touches.get().is_some()
            && self.pool().is_unanswered(number)
            && !self.is_ending()
            && Instant::now() < end
        {
            if !std::mem::replace(&mut has_waited, true) {
                self.tier().counters.waits.fetch_add(1, Ordering::Relaxed);
            }
            let work = lock(&self.tier().work);
            let before = work.steps;
            let waits = |work: &mut TierWork| work.steps == before;
            let waited = self
                .tier()
                .freed
                .wait_timeout_while(work, DEMOTION_POLL, waits);
            drop(recover(waited));
            self.maintain();
        }
    }

    /// The counts of the reads of a connection.
    pub(crate) fn open_read_counts(&self) -> Arc<ReadCounts> {
        self.tier().reads.open()
    }

    /// Counts a read's touches of pages on flash, and promotes pages. Pages in memory are warmed by the read itself.
    /// Returns the numbers of pages in memory and on flash.
    pub(crate) fn touch_pages(
        &self,
        session: &mut Session<M>,
        handle: &Handle,
        pages: Range<u64>,
        epoch: Epoch,
    ) -> (u64, u64) {
        let tier = self.tier();
        let Some(touches) = tier.touches.get() else {
            return (0, 0);
        };
        let (policy, hint) = (session.mapping().tier_policy(handle), session.hint());
        let mut promoted = Vec::new();
        let (mut hits, mut misses) = (0, 0);
        let mut touch = |page: PageNo, frame| {
            if !touches.is_on_flash(frame) {
                hits += 1;
                return;
            }
            misses += 1;
            let touch = match hint {
                TierHint::Flash => FlashTouch::First,
                _ => touches.touch(frame),
            };
            if is_promoted(policy, hint, touch) {
                promoted.push(Promotion {
                    handle: *handle,
                    page: page.0,
                    is_pinned: hint == TierHint::Memory,
                });
            }
        };
        let visited = session.visit_slots(handle, pages, epoch, |page, _, slot| {
            if let Some(frame) = slot.and_then(|slot| slot.frame()) {
                touch(page, frame);
            }
            true
        });
        if visited.is_err() {
            // The request itself will tell.
            return (0, 0);
        }
        if !promoted.is_empty() {
            let mut work = lock(&tier.work);
            let room = PROMOTIONS_MAX - work.promotions.len();
            work.promotions.extend(promoted.into_iter().take(room));
            drop(work);
            tier.wake.notify_all();
        }
        (hits, misses)
    }
}

impl<M: Media + Send + Sync + 'static> Brick<M> {
    /// Opens the session of the tier's thread, as soon as one is free. None at the end of the brick.
    fn open_tier_session(self: &Arc<Self>) -> Option<u32> {
        let pid = std::process::id();
        let start_time = crate::process::start_time(pid).unwrap_or(0);
        let mut is_reported = false;
        loop {
            match self.open_session(pid, start_time) {
                Ok(number) => return Some(number),
                Err(cause) if !is_reported => {
                    tracing::error!(%cause, "pages do not move between memory and flash before a session is free");
                    is_reported = true;
                }
                Err(_) => {}
            }
            if !self.wait_for_tier_work(SESSION_PAUSE) {
                return None;
            }
            lock(&self.tier().work).is_memory_low = false;
        }
    }

    fn tier_loop(self: &Arc<Self>) {
        // Before the first disk joins, so that clients do not take all sessions before.
        let Some(number) = self.open_tier_session() else {
            return;
        };
        while !self.pool().is_tiered() {
            if !self.wait_for_tier_work(Duration::MAX) {
                return;
            }
            lock(&self.tier().work).is_memory_low = false;
        }
        let geometry = *self.mapping().geometry();
        let flash_start = geometry.flash_start().unwrap_or(u64::MAX);
        let memory_frames = geometry.first_frames().end;
        let touches = Arc::new(FlashTouches::new(memory_frames, flash_start));
        let touches = self.tier().touches.get_or_init(|| touches).clone();
        self.tier().policies_changed.store(true, Ordering::Release);
        self.pool().set_tier_mover(Some(number));
        let mut mover = Mover::new(self.clone(), number, touches);
        self.wake_tier();
        let mut census = Census::new(Instant::now());
        loop {
            let now = Instant::now();
            let limit = census.wait(now);
            let limit = mover.pause_left(now).map_or(limit, |left| limit.min(left));
            if !self.wait_for_tier_work(limit) {
                break;
            }
            if mover.take_pause_end(Instant::now()) {
                self.wake_tier();
            }
            self.tier_step(&mut mover);
            if let Some(counts) = mover.count_some(&mut census) {
                let mut counted = lock(&self.tier().counted);
                *counted = (Arc::new(counts), counted.1 + 1);
            }
        }
        self.pool().set_tier_mover(None);
        drop(mover);
        self.close_session(number);
    }

    /// Waits until there is work, or for a time. False when the brick ends.
    fn wait_for_tier_work(&self, limit: Duration) -> bool {
        let work = lock(&self.tier().work);
        let has_none = |work: &mut TierWork| {
            !self.is_ending() && !work.is_memory_low && work.promotions.is_empty()
        };
        // A condition variable cannot wait for ever by a time.
        let limit = limit.min(WORK_WAIT_MAX);
        let wake = &self.tier().wake;
        drop(recover(wake.wait_timeout_while(work, limit, has_none)));
        !self.is_ending()
    }

    /// Demotes until enough memory is free, then promotes some pages.
    fn tier_step(&self, mover: &mut Mover<M>) {
        let (is_low, is_waiting) = {
            let mut work = lock(&self.tier().work);
            let is_low = std::mem::take(&mut work.is_memory_low);
            (is_low, std::mem::take(&mut work.is_session_waiting))
        };
        // After a pause the thread looks again whether memory is short.
        if is_low && !mover.is_paused(Instant::now(), is_waiting) {
            self.demote(mover, is_waiting);
        }
        let promotions = {
            let mut work = lock(&self.tier().work);
            let count = work.promotions.len().min(PROMOTION_STEP);
            work.promotions.drain(..count).collect::<Vec<_>>()
        };
        let usage = self.pool().tier_usage();
        // A promotion without room would make the pages of others wait for demotions.
        if !promotions.is_empty() && usage.memory_free > watermarks(usage).0 / 2 {
            mover.promote(promotions);
            self.wake_tier();
        }
    }

    fn demote(&self, mover: &mut Mover<M>, is_session_waiting: bool) {
        let usage = self.pool().tier_usage();
        let mut wanted = watermarks(usage).1.saturating_sub(usage.memory_free);
        if is_session_waiting {
            wanted = wanted.max(RECORD_PAGES_MAX);
        }
        let mut unmoved = 0;
        while wanted > 0 && !self.is_ending() {
            if self.pool().tier_usage().flash_free == 0 {
                break;
            }
            // Pinned pages move only for a session that waits, one batch each time.
            let moved = mover.demote(wanted, is_session_waiting);
            if moved.is_none() && !is_session_waiting {
                if !mover.was_interrupted() {
                    mover.pause_searches(Instant::now());
                }
                self.end_demotion_step();
                return;
            }
            unmoved = if moved == Some(0) { unmoved + 1 } else { 0 };
            // Pages that change during each of their moves are as good as none.
            let moved = moved.filter(|_| unmoved < UNMOVED_BATCHES_MAX);
            self.pool().set_can_demote(moved.is_some());
            wanted = match moved {
                Some(moved) if !mover.took_pinned() => wanted.saturating_sub(moved),
                Some(0) => wanted,
                _ => 0,
            };
            self.end_demotion_step();
            match moved {
                None => {
                    unmoved = 0;
                    self.pause_search();
                }
                Some(0) => self.pause(CHECKPOINT_PAUSE),
                Some(_) => {}
            }
        }
        // Sessions that wait are refused if flash is full.
        self.end_demotion_step();
        if self.pool().tier_usage().memory_free <= usage.memory_free {
            // An operation in progress keeps the checkpoint from freeing the frames. More demotions would not help.
            self.pause(CHECKPOINT_PAUSE);
        }
    }

    /// Frees the frames of the pages that were demoted, and answers sessions.
    fn end_demotion_step(&self) {
        self.maintain();
        lock(&self.tier().work).steps += 1;
        self.tier().freed.notify_all();
    }

    fn pause_search(&self) {
        self.pause(SEARCH_PAUSE);
        self.pool().set_can_demote(true);
    }

    /// Waits for a time, or for the end of the brick.
    fn pause(&self, time: Duration) {
        let work = lock(&self.tier().work);
        let is_running = |_: &mut TierWork| !self.is_ending();
        drop(recover(
            self.tier().wake.wait_timeout_while(work, time, is_running),
        ));
    }
}
