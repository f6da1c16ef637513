//! The session that demotes and promotes pages.
//!
//! Invariants: no lock of the pool is held while the disk reads or writes. A page that changes during its move stays
//! where it is.

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

/// Pages of one demotion, which share a sync of the disk.
const BATCH_PAGES: u64 = 512;
/// Pages that one step of the hand looks at: those of a leaf.
const STEP_PAGES: u64 = 512;
/// Passes over all tables without a page to take, before the hand gives up.
const PASSES_MAX: u32 = HEAT_MAX as u32 + 2;

/// The position of the clock's hand.
#[derive(Default)]
struct Hand {
    /// The objects of this pass, with their sizes in pages.
    objects: Vec<(SliceId, u64, TierPolicy)>,
    at: usize,
    page: u64,
}

pub(super) struct Mover<M: Media> {
    brick: Arc<Brick<M>>,
    session: Session<M>,
    heat: Arc<Heat>,
    hand: Hand,
}

type Batch = Vec<(Handle, Vec<PageMove>)>;

impl<M: Media + Send + Sync + 'static> Mover<M> {
    pub(super) fn new(brick: Arc<Brick<M>>, number: u32, heat: Arc<Heat>) -> Mover<M> {
        Mover {
            session: brick.session(number),
            brick,
            heat,
            hand: Hand::default(),
        }
    }

    fn counters(&self) -> &TierCounters {
        &self.brick.tier().counters
    }

    /// Demotes up to so many pages. Returns the number of moved pages; none if no page can be demoted.
    pub(super) fn demote(&mut self, want: u64) -> Option<u64> {
        let want = want.min(BATCH_PAGES);
        let frames = self.brick.pool().reserve_flash(want);
        let mut batch = self.collect(frames.len() as u64);
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

    /// Copies cold pages, up to so many. Ends with the tables if it has some: a next pass would find them again.
    fn collect(&mut self, want: u64) -> Batch {
        let mut batch = Batch::new();
        let mut found = 0;
        let mut passes = 0;
        while found < want && passes < PASSES_MAX && !self.brick.is_ending() {
            let Some((slice, pages, policy)) = self.hand.objects.get(self.hand.at).copied() else {
                if !batch.is_empty() {
                    break;
                }
                self.hand = Hand::default();
                self.hand.objects = self.list();
                passes += 1;
                continue;
            };
            if self.hand.page >= pages || policy == TierPolicy::Memory {
                self.hand.at += 1;
                self.hand.page = 0;
                continue;
            }
            let first = self.hand.page;
            let end = ((first / STEP_PAGES + 1) * STEP_PAGES).min(pages);
            self.hand.page = end;
            let Some((handle, moves)) = self.copy_cold(slice, first..end, policy, want - found)
            else {
                self.hand.page = pages;
                continue;
            };
            if let Some(last) = moves.last() {
                passes = 0;
                found += moves.len() as u64;
                if found == want {
                    self.hand.page = last.page().0 + 1;
                }
                batch.push((handle, moves));
            }
        }
        batch
    }

    fn list(&self) -> Vec<(SliceId, u64, TierPolicy)> {
        let pool = self.brick.pool();
        let objects = pool.list();
        let listed = objects.map(|it| (it.slice, it.size_bytes / PAGE_BYTES as u64, it.tier));
        let mut listed: Vec<_> = listed.collect();
        listed.sort_by_key(|(slice, _, policy)| (*policy != TierPolicy::Flash, *slice));
        listed
    }

    /// Copies cold pages of a range, at most so many. None if the object is gone.
    fn copy_cold(
        &mut self,
        slice: SliceId,
        pages: std::ops::Range<u64>,
        policy: TierPolicy,
        most: u64,
    ) -> Option<(Handle, Vec<PageMove>)> {
        let handle = self.brick.pool().handle(slice).ok()?;
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
