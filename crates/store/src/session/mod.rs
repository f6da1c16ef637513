//! A session: the right of one thread to change a pool's objects.
//!
//! [`write()`] changes pages, over one to three pools at once. [`transact`](transaction::transact)
//! changes several runs of pages as a whole. [`patch`] changes a part of a page in place. All of them
//! begin, lock and end as [`operation`] says.
//!
//! Invariants:
//! - nothing fails between the taking of a seq and the publication of its record;
//! - before the commit, the control segment and the journal hold all that the owner needs to roll a
//!   dead session's operation forward or to discard it;
//! - a session waits for the owner only between operations.
//!
//! # One write
//!
//! A write replaces a page of 4 KiB in all legs of a mirror. The page's leaf is linked, and the session
//! has granted frames. The caller's thread does all of the following, without a system call.
//!
//! 1. *Cut*: [`write::write`] → `write::write_merging` checks the range against the size of the
//!    object, and cuts the write into records, each of at most [`RECORD_PAGES_MAX`] pages of one leaf.
//!    This write is one record. `write::write_pages` takes the next six steps. A write of a part of
//!    a page takes the same steps in `partial_write`.
//! 2. *Begin*: [`operation::begin_run`] → [`operation::begin_all`], in each pool.
//!    [`Session::ensure_resources`] loads the journal's head and the number of recalls
//!    ([`Session::refresh_from_owner`]). It checks that there are enough granted frames and that the
//!    record fits into the journal, and wakes the owner when half of either is used
//!    ([`Session::ring_doorbell_if_low`]). [`Session::begin_op`] makes `active` odd.
//!    Then [`Session::check_admission`] checks that the session is not revoked, that the owner is there
//!    and recalled no grants, that the object is live, and that the client's epoch is not older than
//!    the object's. [`Session::slot_at`] finds the page's slot by the session's cache of leaves.
//! 3. *Lock*: [`operation::lock_run`] → [`operation::lock_all`]. The lock words of the pages are taken
//!    in ascending order ([`Control::lock`](crate::shared::control::Control::lock)), and the pools in
//!    the order of their UUIDs. A direct client takes its operation's number now.
//! 4. *Load*: [`Session::load_changes`] loads and checks the old slots. **After this only a slot that
//!    is found damaged when it is swapped fails (step 7), and then the record is already committed.**
//! 5. *Encode*: [`commit::encode_all`], in each pool. [`Session::take_frames`] takes the new frames,
//!    [`Session::begin_record`] reserves lines ([`Journal::reserve`]), and [`Session::take_seq`]
//!    publishes the floor and then takes the seq. [`Record::encode`] writes the record to the session's
//!    own memory, without its checksums. At last [`Session::flush_pending_slots`] flushes the slots of
//!    the session's record *before* this one ([`MappedMedia::flush`](pagemesh_pmem::MappedMedia)).
//! 6. *Stream*: [`commit::stream_page`] → [`MappedMedia::stream_page`](pagemesh_pmem::MappedMedia) copies
//!    the page past the caches into the new frames of *all* pools, which no other thread sees yet. The
//!    kernel for this processor, in [`copy`](pagemesh_pmem::copy) (`pmem/src/copy/page.rs`), loads each
//!    source byte once, and computes the checksums from the same registers.
//! 7. *Commit*: [`commit::commit`]. [`Session::stream_record`] adds the checksum of each record, which
//!    its address in the journal seeds ([`encode::add_checksum`](crate::format::record::add_checksum)),
//!    and streams its 64 bytes ([`Session::append`] → [`Journal::append`] →
//!    [`MappedMedia::stream_line`](pagemesh_pmem::MappedMedia)).
//!    [`commit::fence_all`] → [`MappedMedia::fence_each`](pagemesh_pmem::MappedMedia) is one `sfence`.
//!    **This is the commit, in all pools.** Then [`Session::publish_slots`] stores the page's checksum
//!    in the frame table, and [`Session::swap_slots`] swaps the slot, in each pool. At last
//!    [`Session::publish_record`] stores `complete`, `consumed`, `settled` and `committed`, and clears
//!    the floor. [`operation::unlock_and_end`] releases the lock words
//!    ([`Control::unlock`](crate::shared::control::Control::unlock)) and makes `active` even
//!    ([`Session::end_op`]).
//!
//! Locked instructions and wide stores come before the page is streamed (steps 2 to 5). A locked
//! instruction waits for all bytes streamed before it, and would cost a second drain. The copy of a
//! page takes half a microsecond; a death during the copy is handled like a death anywhere in the
//! operation.
//!
//! # Cold steps
//!
//! - The page's leaf is not linked: the operation ends on all legs, [`Session::link_leaf`] links the
//!   nodes down to the leaf, and the operation begins anew. A node is zeroed and fenced before a slot
//!   names it.
//! - Frames or journal lines are missing, or the owner recalls the grants: [`Session::request_frames`]
//!   and [`Session::wait_for_recall`] wait for the owner, before the operation begins.
//! - Another session holds a lock word: `Control::wait_for_lock_word` spins, then sleeps, and reports
//!   the holder to the owner.
//! - A leg fails before step 5: [`operation::abort_all`] unlocks and ends the operation on all legs.
//! - The record does not fit before the end of the ring: [`Journal::reserve`] writes a pad and fences
//!   it.

mod births;
mod clear;
mod commit;
pub mod consistent_read;
pub(crate) mod copy_pages;
mod defects;
mod grants;
pub(crate) mod leaf_cache;
mod links;
mod metadata_commit;
mod operation;
mod partial_pages;
mod partial_write;
pub mod patch;
mod prefetch;
mod read;
pub(crate) mod relocate;
pub mod requests;
pub mod tier;
pub mod transaction;
pub mod version_frames;
pub(crate) mod version_slots;
mod write;

use crate::format::journal::Journal;
use crate::format::record::{Record, RecordAddress};
use crate::shared::control::{FrameRun, LockWords, SessionCells};
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::{Handle, PoolMapping};
pub use clear::clear;
use grants::GrantCursor;
use leaf_cache::LeafCache;
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo};
use pagemesh_base::slice::SliceError;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, REQUEST_LIMIT, UnfencedStores};
use partial_pages::PartialPageCache;
use patch::{PATCH_MAX, PatchBuffer};
pub use relocate::MovedPages;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
pub use write::{write, write_numbered};

/// Pages of the longest record: half a node, so that an entry stays well below the length of a
/// journal.
pub const RECORD_PAGES_MAX: u64 = 256;
/// The limit of a wait for the owner to make room, unless the session sets a shorter one. The owner
/// answers in well under a millisecond, unless it is dead, stalled, or waits for its disk.
const OWNER_WAIT_MAX: Duration = Duration::from_secs(5);
/// The limit of a wait for frames of a pool with flash. Longer than [`REQUEST_LIMIT`], after which a disk without an
/// answer ends the brick.
pub const DEMOTION_WAIT_MAX: Duration = REQUEST_LIMIT.saturating_add(Duration::from_secs(5));

type Page = [u8; PAGE_BYTES];

/// A session of a pool. It belongs to one thread at a time.
pub struct Session<M> {
    pub(crate) mapping: Arc<PoolMapping<M>>,
    pub(crate) number: u32,
    pub(crate) journal: Journal,
    active: u64,
    grants: GrantCursor,
    /// Operations that may be incomplete on another leg: number, journal position.
    open_ops: VecDeque<(u64, u64)>,
    leaf_cache: LeafCache,
    /// The state of journal and grants for which the doorbell was rung last.
    doorbell_state: Option<(u64, u64)>,
    ticket: u32,
    /// Whether it is the session of the owner itself, which must not wait for the owner.
    is_owner: bool,
    /// The limit of a wait for the owner.
    owner_wait: Duration,
    /// Runs the owner's maintenance, if the owner is in this process.
    owner_work: Option<Box<dyn Fn() + Send>>,
    pub(crate) frames: Vec<FrameNo>,
    pub(crate) record: Record,
    pub(crate) encoded: Vec<[u8; LINE_BYTES]>,
    lock_words: LockWords,
    /// Slots of the last records, swapped and not flushed: first byte, end.
    unflushed_slots: Option<(usize, usize)>,
    /// Slots of earlier records, flushed for the fence of the present one.
    pending_slots: Option<UnfencedStores>,
    /// Bytes that the last record wrote in place, not flushed: first byte, end.
    unflushed_patch: Option<(usize, usize)>,
    /// Such bytes of earlier records, flushed for the fence of the present one.
    pending_patch: Option<UnfencedStores>,
    /// The changed bits of a patch in its page. The session keeps the buffer to reuse its memory.
    pub(crate) delta: Box<[u8; PATCH_MAX]>,
    /// The bytes of the next patch.
    pub(crate) patch_buffer: PatchBuffer,
    pub(crate) partial_pages: PartialPageCache,
    /// Whether the present record flushes the slots of all earlier ones.
    flushes_slots: bool,
    /// Unreadable slots were flushed: from now on no slots count as flushed.
    has_lost_flush: bool,
    /// The hint of the present requests.
    pub(crate) hint: TierHint,
}

/// One leg of an operation: a session, and the slice of its pool.
pub struct LegSession<'s, M> {
    /// The session.
    pub session: &'s mut Session<M>,
    /// The object.
    pub handle: Handle,
}

/// The leg that failed, and the cause. The other legs have not changed either, except for whole
/// pages before the failing one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("leg {leg}: {cause}")]
pub struct LegFailure {
    /// The leg's index.
    pub leg: usize,
    /// The cause.
    pub cause: StoreError,
}

impl From<LegFailure> for SliceError {
    fn from(failure: LegFailure) -> SliceError {
        failure.cause.into()
    }
}

impl<M: Media> Session<M> {
    /// Opens the session with the number that the owner gave it.
    #[must_use]
    pub fn new(mapping: Arc<PoolMapping<M>>, number: u32) -> Session<M> {
        let cells = mapping.control.session_cells(number);
        let first = RecordAddress::new(
            mapping.pool,
            mapping.incarnation,
            number,
            cells.head().load(Ordering::Acquire),
        );
        let length = mapping.geometry().journal_lines();
        let mut journal = Journal::new(mapping.geometry().journal_at(number), length, first);
        journal.resume(cells.committed().load(Ordering::Acquire));
        let grants = GrantCursor {
            run: FrameRun { start: 0, len: 0 },
            // No recall has this number, so the session reads the ring's start when it needs it.
            next: 0,
            consumed: 0,
            recalls: 1,
        };
        Session {
            number,
            journal,
            active: cells.active().load(Ordering::Acquire),
            grants,
            open_ops: VecDeque::new(),
            leaf_cache: LeafCache::new(),
            doorbell_state: None,
            ticket: cells.asked().load(Ordering::Acquire) as u32,
            is_owner: false,
            owner_wait: OWNER_WAIT_MAX,
            owner_work: None,
            frames: Vec::new(),
            record: Record::empty(),
            encoded: Vec::new(),
            lock_words: LockWords::of(ObjectId(0), PageNo(0), 1),
            unflushed_slots: None,
            pending_slots: None,
            unflushed_patch: None,
            pending_patch: None,
            delta: Box::new([0; PATCH_MAX]),
            patch_buffer: PatchBuffer::default(),
            partial_pages: PartialPageCache::default(),
            flushes_slots: false,
            has_lost_flush: false,
            hint: TierHint::None,
            mapping,
        }
    }

    pub(crate) fn for_owner(mapping: Arc<PoolMapping<M>>, number: u32) -> Session<M> {
        Session {
            is_owner: true,
            ..Session::new(mapping, number)
        }
    }

    /// The session of a thread in the owner's process. It calls `maintain` for the owner's work, which
    /// lets [`Pool::maintain`](crate::owner::pool::Pool::maintain) run. It does not sleep for another
    /// thread.
    #[must_use]
    pub fn in_owner_process(mut self, maintain: Box<dyn Fn() + Send>) -> Session<M> {
        self.owner_work = Some(maintain);
        self
    }

    /// Sets the limit of each wait for the owner.
    #[must_use]
    pub fn with_owner_wait(mut self, limit: Duration) -> Session<M> {
        self.owner_wait = limit;
        self
    }

    /// Sets the hint of the requests that follow.
    #[inline]
    pub fn set_hint(&mut self, hint: TierHint) {
        self.hint = hint;
    }

    /// The hint of the present requests.
    #[must_use]
    pub fn hint(&self) -> TierHint {
        self.hint
    }

    /// The mapping of the pool.
    #[must_use]
    pub fn mapping(&self) -> &Arc<PoolMapping<M>> {
        &self.mapping
    }

    /// The session's number, which is its journal's.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    fn session_cells(&self) -> SessionCells<'_> {
        self.mapping.control.session_cells(self.number)
    }

    /// Clears the leaf cache, because an object's number may be used again.
    pub fn clear_leaf_cache(&mut self) {
        self.leaf_cache.clear();
    }
}
