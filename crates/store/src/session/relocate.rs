//! Moves pages to other frames of the same pool: off a device that leaves it, or off frames that a clone shares with its
//! origin.
//!
//! Invariant: a move keeps the bytes and the birth of a page, so its pages have one birth. A page that a clone gets for its own
//! is born at the base of the clone. Its record has no operation number, because other legs have nothing to move.

use super::commit::RecordStamp;
use super::operation::{lock_run, unlock_and_end};
use super::{LegSession, Page, Session};
use crate::format::geometry::frame_at;
use crate::format::record::{Change, NO_SUMS, lines};
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

/// Pages of one move: those of one lock word.
pub(crate) const MOVE_PAGES_MAX: u64 = 16;

/// The progress of [`Session::move_pages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedPages {
    /// The page to continue with.
    pub next: PageNo,
    /// Pages that were moved.
    pub moved: u64,
    /// Damaged pages, which stay where they are.
    pub damaged: u64,
}

/// The pages that a move takes.
struct MoveFilter<'f> {
    is_leaving: &'f dyn Fn(FrameNo) -> bool,
    /// The birth of the moved pages; none: they keep theirs, and shared pages stay.
    new_birth: Option<Epoch>,
}

impl<M: Media> Session<M> {
    /// Moves the first run of pages of a range to granted frames, if their frames are leaving. It looks at up to 16
    /// pages, or at one leaf without any. The caller loads the pages into memory before.
    ///
    /// # Errors
    /// When the object is gone, or the pool lacks room.
    pub fn move_pages(
        &mut self,
        handle: &Handle,
        pages: std::ops::Range<u64>,
        is_leaving: impl Fn(FrameNo) -> bool,
    ) -> Result<MovedPages, StoreError> {
        let filter = MoveFilter {
            is_leaving: &is_leaving,
            new_birth: None,
        };
        self.move_filtered(handle, pages, &filter)
    }

    /// Moves the first run of pages of a clone that were born before its base, as [`Session::move_pages`] does. The pages are
    /// born at the base from then on.
    pub(crate) fn own_shared_pages(
        &mut self,
        handle: &Handle,
        pages: std::ops::Range<u64>,
        base: Epoch,
    ) -> Result<MovedPages, StoreError> {
        let mapping = self.mapping.clone();
        let is_shared = |frame| mapping.frame_word(frame).birth().unwrap_or(Epoch(0)) < base;
        let filter = MoveFilter {
            is_leaving: &is_shared,
            new_birth: Some(base),
        };
        self.move_filtered(handle, pages, &filter)
    }

    fn move_filtered(
        &mut self,
        handle: &Handle,
        pages: std::ops::Range<u64>,
        filter: &MoveFilter<'_>,
    ) -> Result<MovedPages, StoreError> {
        let page = PageNo(pages.start);
        let in_leaf = (page.0 / NODE_SLOTS + 1) * NODE_SLOTS;
        let in_lock = (page.0 / MOVE_PAGES_MAX + 1) * MOVE_PAGES_MAX;
        let end = pages.end.min(in_lock);
        let count = end.saturating_sub(page.0).min(self.pages_max());
        let none_moved = |next| MovedPages {
            next: PageNo(next),
            moved: 0,
            damaged: 0,
        };
        self.ensure_resources(count, lines(count as usize))?;
        match self.begin_op(handle, Epoch(u32::MAX)) {
            // The owner recalled the grants in between: the caller begins again.
            Err(StoreError::TimedOut) => return Ok(none_moved(page.0)),
            entered => entered?,
        };
        let at = match self.slot_at(handle, page) {
            Ok(Some(at)) => at,
            other => {
                self.end_op();
                return other.map(|_| none_moved(in_leaf));
            }
        };
        let mut leg = LegSession {
            session: self,
            handle: *handle,
        };
        lock_run(std::slice::from_mut(&mut leg), page, count).map_err(|failure| failure.cause)?;
        let moved = leg.session.move_locked(handle, page, (at, count), filter);
        unlock_and_end(&mut leg);
        moved
    }

    /// Moves the first run of leaving pages. The caller holds the locks.
    fn move_locked(
        &mut self,
        handle: &Handle,
        page: PageNo,
        (at, count): (usize, u64),
        filter: &MoveFilter<'_>,
    ) -> Result<MovedPages, StoreError> {
        let mut bytes: Vec<Box<Page>> = Vec::new();
        let (mut skipped, mut damaged) = (0, 0);
        let mut birth = None;
        self.record.changes.clear();
        for index in 0..count {
            let of_page = PageNo(page.0 + index);
            match self.load_leaving(handle, at + index as usize * 8, of_page, filter) {
                Ok(Some((_, of_page, _))) if birth.is_some_and(|birth| birth != of_page) => break,
                Ok(Some((change, of_page, page))) => {
                    birth = Some(of_page);
                    self.record.changes.push(change);
                    bytes.push(page);
                }
                _ if !bytes.is_empty() => break,
                Ok(None) => skipped += 1,
                Err(_) => {
                    skipped += 1;
                    damaged += 1;
                }
            }
        }
        let first = PageNo(page.0 + skipped);
        let moved = bytes.len() as u64;
        if let Some(birth) = birth {
            let at = at + skipped as usize * 8;
            self.commit_move(handle, (first, birth), at, &bytes)?;
        }
        Ok(MovedPages {
            next: PageNo(first.0 + moved),
            moved,
            damaged,
        })
    }

    /// The change, the birth and the bytes of a page on a leaving frame. An unknown birth is 0. None for a page elsewhere.
    fn load_leaving(
        &self,
        handle: &Handle,
        at: usize,
        page: PageNo,
        filter: &MoveFilter<'_>,
    ) -> Result<Option<(Change, Epoch, Box<Page>)>, StoreError> {
        let old = self.mapping.slot(at, page)?;
        let Some(frame) = old.frame().filter(|&frame| (filter.is_leaving)(frame)) else {
            return Ok(None);
        };
        let birth = self.mapping.frame_word(frame).birth().unwrap_or(Epoch(0));
        if filter.new_birth.is_none() && self.mapping.clone_bounds(handle).is_shared(birth) {
            return Ok(None);
        }
        let mut bytes = Box::new([0; PAGE_BYTES]);
        self.mapping.copy_frame(frame, page, &mut bytes)?;
        let change = Change {
            old,
            new: old,
            sums: NO_SUMS,
        };
        Ok(Some((change, filter.new_birth.unwrap_or(birth), bytes)))
    }

    fn commit_move(
        &mut self,
        handle: &Handle,
        (first, birth): (PageNo, Epoch),
        at: usize,
        bytes: &[Box<Page>],
    ) -> Result<(), StoreError> {
        self.take_frames(bytes.len() as u64);
        for (change, &frame) in self.record.changes.iter_mut().zip(&self.frames) {
            change.new = change.old.map(frame);
            self.mapping.control.move_heat(change.old.frame(), frame);
        }
        self.encode_move(handle, (first, birth), at);
        let mut stores: Option<UnfencedStores> = None;
        for (index, page) in bytes.iter().enumerate() {
            let target = (&*self.mapping.data, frame_at(self.frames[index]));
            let (sums, streamed) = M::stream_page(&[target], page);
            self.set_sums(index, sums);
            stores = Some(streamed.after(stores.take()));
        }
        self.commit_encoded_move(first, at, stores)
    }

    /// Encodes the record of `self.record.changes`, which move pages of one birth from `first` on.
    pub(super) fn encode_move(
        &mut self,
        handle: &Handle,
        (first, birth): (PageNo, Epoch),
        at: usize,
    ) {
        let stamp = RecordStamp {
            stamp: Stamp {
                epoch: Epoch(0),
                op: 0,
                open_ops: 0,
            },
            kept_birth: Some(birth),
        };
        self.encode_record(handle, 0, first, stamp, true);
        self.flush_pending_slots(at);
    }

    /// Commits the encoded record, whose pages are in their frames, and publishes it.
    pub(super) fn commit_encoded_move(
        &mut self,
        first: PageNo,
        at: usize,
        stores: Option<UnfencedStores>,
    ) -> Result<(), StoreError> {
        let stores = self.stream_record().after(stores);
        let _committed = self.mapping.data.fence(stores);
        let published = self.publish_slots(at, first);
        self.publish_record(None);
        published
    }
}
