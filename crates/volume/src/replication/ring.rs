//! The ring through which the changes of direct clients reach an asynchronous replica (RFD
//! 018). It lies behind the rows of the segment. Many direct clients fill it, and the
//! controller takes entries out.
//!
//! ```text
//!   136  slots claimed 8                          (on the line of the operation numbers)
//!   192  has a replica 4, throttled 4, incomplete 4   (seldom changed)
//!   256  slots taken 8                            (the consumer's line)
//!   320  consumer sleeps 4
//! 151552  heads of slots, 32 bytes each:
//!     0  filled 8 (the slot's number plus one), first byte 8, bytes 8,
//!        epoch 4, the slot's number plus one again 4
//! 217088  pages of slots
//! ```
//!
//! Slot numbers are never used again. Slot n lies at n modulo [`RING_SLOTS`]. A record takes as
//! many consecutive slots as it has pages, and has one head, in the first slot. A head with
//! zero bytes means that nothing was changed, and counts for one slot. The epoch is that of the
//! change's stamp: the replica gives it to its versions. A client of an earlier release leaves the
//! last word as it was, and so the second number tells that the epoch is unknown. Bytes are streamed to
//! their pages past the caches: otherwise the writer would have to fetch lines that the
//! consumer has read.
//!
//! Invariants:
//! - A direct client checks for room before each claim, and claims once per check. So a
//!   claimed slot is always free.
//! - The consumer takes slots in order, and only once they are filled. So no earlier owner
//!   can still fill a slot that is claimed anew.

use crate::direct_access::segment::RUNS_END_AT;
use crate::direct_access::{ClientRow, DirectSegment, ROWS};
use crate::steps::step;
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::SharedSegment;
use pagemesh_pmem::copy::store_fence;
use pagemesh_store::pool_mapping::NODE_SLOTS;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The slots of the ring. One half is for waiting changes, which a replica gets within
/// milliseconds. The other half is for clients that found room at the same time.
pub const RING_SLOTS: u64 = 2048;
/// The maximum of slots of a record: the usual write size of databases.
pub const RECORD_SLOTS_MAX: u64 = 4;
/// The maximum of bytes of a record.
pub const RECORD_BYTES_MAX: usize = RECORD_SLOTS_MAX as usize * PAGE_BYTES;
const _: () = assert!(ROWS as u64 * RECORD_SLOTS_MAX <= RING_SLOTS / 2, "room");

/// On the line of the operation numbers.
pub(crate) const TAIL_AT: usize = 136;
const HAS_REPLICA_AT: usize = 192;
const THROTTLED_AT: usize = 196;
const INCOMPLETE_AT: usize = 200;
const HEAD_AT: usize = 256;
const CONSUMER_SLEEPS_AT: usize = 320;
const HEADS_AT: usize = RUNS_END_AT;
const HEAD_BYTES: usize = 32;
const DATA_AT: usize = HEADS_AT + RING_SLOTS as usize * HEAD_BYTES;
/// The position in the segment at which the ring ends.
pub(crate) const RING_END_AT: usize = DATA_AT + RING_SLOTS as usize * PAGE_BYTES;
const PAGE: u64 = PAGE_BYTES as u64;

/// The claim word of a row that is claiming slots, and has not recorded which.
pub const CLAIM_PENDING: u64 = u64::MAX;

/// The ring of a segment.
#[derive(Clone, Copy)]
pub struct ReplicationRing<'s> {
    shared: &'s SharedSegment,
}

/// A change that was taken from the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingEntry {
    /// The first slot of the change.
    pub slot: u64,
    pub slot_count: u64,
    pub offset: u64,
    /// The changed bytes; empty if nothing was changed.
    pub data: Bytes,
    /// The epoch of the change's stamp; 0 if it is unknown.
    pub epoch: Epoch,
}

/// The claim that a dead direct client left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnfilledClaim {
    /// There is no claim, or its slot is filled.
    Absent,
    /// The claim that begins at this slot is not filled.
    FromSlot(u64),
    /// The client may have claimed slots, but which ones is unknown.
    Unknown,
}

/// The bytes of a change that fit into one record: a part of a page, or whole pages of one
/// leaf, as the store writes them. The two records of a longer claim might not be in the order
/// of their slots.
#[must_use]
pub fn record_len(offset: u64, len: u64) -> u64 {
    let within = offset % PAGE;
    let in_leaf = NODE_SLOTS - offset / PAGE % NODE_SLOTS;
    match within != 0 || len < PAGE {
        true => len.min(PAGE - within),
        false => (len / PAGE).min(RECORD_SLOTS_MAX).min(in_leaf) * PAGE,
    }
}

/// The last word of a head.
fn epoch_word(place: u64, epoch: Epoch) -> u64 {
    u64::from(epoch.0) | (place + 1) << 32
}

/// The epoch in the last word of a head; 0 if the word is of an earlier use of the slot.
fn epoch_of_word(place: u64, word: u64) -> Epoch {
    match word >> 32 == (place + 1) & u64::from(u32::MAX) {
        true => Epoch(word as u32),
        false => Epoch(0),
    }
}

/// The number of slots of a record.
#[must_use]
pub fn slots_of(offset: u64, len: u64) -> u64 {
    (offset % PAGE).saturating_add(len).div_ceil(PAGE)
}

impl DirectSegment {
    /// The ring of this segment.
    #[inline]
    #[must_use]
    pub fn ring(&self) -> ReplicationRing<'_> {
        ReplicationRing {
            shared: self.shared(),
        }
    }
}

impl<'s> ReplicationRing<'s> {
    fn tail_word(self) -> &'s AtomicU64 {
        self.shared.word(TAIL_AT)
    }

    fn flag(self, at: usize) -> &'s AtomicU32 {
        self.shared.half_word(at)
    }

    fn head_word(self, place: u64, index: usize) -> &'s AtomicU64 {
        self.shared
            .word(ReplicationRing::head_at(place) + index * 8)
    }

    fn head_at(place: u64) -> usize {
        HEADS_AT + (place % RING_SLOTS) as usize * HEAD_BYTES
    }

    fn is_filled(self, place: u64) -> bool {
        self.head_word(place, 0).load(Ordering::Acquire) == place + 1
    }

    /// The positions of a record's bytes in the segment: one contiguous piece each, up to the
    /// end of the ring and from its start.
    fn data_ranges(place: u64, len: usize) -> [(usize, std::ops::Range<usize>); 2] {
        let at = (place % RING_SLOTS) as usize * PAGE_BYTES;
        let first = len.min(RING_SLOTS as usize * PAGE_BYTES - at);
        [(DATA_AT + at, 0..first), (DATA_AT, first..len)]
    }
}

/// The calls of direct clients.
impl ReplicationRing<'_> {
    /// Whether changes must be recorded here, for a replica.
    #[inline]
    #[must_use]
    pub fn has_replica(self) -> bool {
        self.flag(HAS_REPLICA_AT).load(Ordering::SeqCst) != 0
    }

    /// Whether one record may be claimed now. If not, the write goes through the kernel, which
    /// waits as it should. `taken` caches the number of taken slots, so that the consumer's
    /// line is read only when the cached number is too old.
    #[inline]
    #[must_use]
    pub fn has_room(self, taken: &mut u64) -> bool {
        let tail = self.tail();
        if tail - *taken >= RING_SLOTS / 2 {
            *taken = self.head();
        }
        tail - *taken < RING_SLOTS / 2 && self.flag(THROTTLED_AT).load(Ordering::Relaxed) == 0
    }

    /// Claims slots for a record in the row's range. The caller holds the lock words of its
    /// pages.
    #[inline]
    #[must_use]
    pub fn claim(self, row: ClientRow<'_>, places: u64) -> u64 {
        debug_assert!((1..=RECORD_SLOTS_MAX).contains(&places), "{places} places");
        row.claim().store(CLAIM_PENDING, Ordering::Release);
        step("ring");
        let place = self.tail_word().fetch_add(places, Ordering::AcqRel);
        step("ring");
        row.claim().store(place + 1, Ordering::Release);
        place
    }

    /// Prefetches the head of a claimed slot that will be filled soon.
    #[inline]
    pub fn prefetch_head(self, place: u64) {
        self.shared.prefetch(ReplicationRing::head_at(place));
    }

    /// Fills a claimed slot with the changed bytes, and the epoch of their stamp. True: the caller
    /// must wake the consumer.
    #[inline]
    #[must_use]
    pub fn fill(self, place: u64, offset: u64, bytes: &[u8], epoch: Epoch) -> bool {
        for (at, range) in ReplicationRing::data_ranges(place, bytes.len()) {
            self.shared.stream(at, &bytes[range]);
        }
        store_fence();
        let word = epoch_word(place, epoch);
        self.head_word(place, 3).store(word, Ordering::Relaxed);
        self.publish_head(place, offset, bytes.len() as u64);
        self.must_wake_consumer()
    }

    /// Gives up a claim after a change with an unknown outcome, and marks the ring incomplete.
    /// True: the caller must wake the consumer.
    #[cold]
    #[must_use]
    pub fn abandon_claim(self, place: u64, places: u64) -> bool {
        self.mark_incomplete();
        (place..place + places).for_each(|place| self.fill_empty(place));
        self.must_wake_consumer()
    }

    /// Requests a wake-up of the consumer again, because the caller could not deliver one.
    pub fn rearm_wakeup(self) {
        self.flag(CONSUMER_SLEEPS_AT).store(1, Ordering::SeqCst);
    }

    fn publish_head(self, place: u64, offset: u64, len: u64) {
        self.head_word(place, 1).store(offset, Ordering::Relaxed);
        self.head_word(place, 2).store(len, Ordering::Relaxed);
        step("ring");
        self.head_word(place, 0).store(place + 1, Ordering::Release);
    }

    fn must_wake_consumer(self) -> bool {
        // Either the consumer sees the filled slot before it sleeps, or this sees that the
        // consumer sleeps.
        fence(Ordering::SeqCst);
        step("ring");
        let sleeps = self.flag(CONSUMER_SLEEPS_AT);
        sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::SeqCst) != 0
    }
}

/// The calls of the volume's controller.
impl ReplicationRing<'_> {
    /// The first slot that is not claimed.
    #[inline]
    pub fn tail(self) -> u64 {
        step("ring");
        self.tail_word().load(Ordering::Acquire)
    }

    /// The first slot that is not taken.
    #[inline]
    pub fn head(self) -> u64 {
        self.shared.word(HEAD_AT).load(Ordering::Acquire)
    }

    /// The next slot to be taken, if it is claimed and not filled.
    #[must_use]
    pub fn next_unfilled(self) -> Option<u64> {
        let head = self.head();
        (head < self.tail() && !self.is_filled(head)).then_some(head)
    }

    /// Whether the next slot is filled.
    pub fn has_next(self) -> bool {
        let head = self.head();
        step("ring");
        // A filled slot was claimed, so the claim count need not be read. That read would slow
        // the clients that claim.
        self.is_filled(head)
    }

    /// Takes the next change. None if there is none, or if its slot is not filled yet.
    pub fn take(self) -> Option<RingEntry> {
        if !self.has_next() {
            return None;
        }
        let place = self.head();
        let (offset, len) = self.read_head(place);
        let word = self.head_word(place, 3).load(Ordering::Relaxed);
        let mut data = vec![0; len as usize];
        for (at, range) in ReplicationRing::data_ranges(place, data.len()) {
            self.shared.get(at, &mut data[range]);
        }
        let places = slots_of(offset, len).max(1);
        step("ring");
        let taken = self.shared.word(HEAD_AT);
        taken.store(place + places, Ordering::Release);
        Some(RingEntry {
            slot: place,
            slot_count: places,
            offset,
            data: data.into(),
            epoch: epoch_of_word(place, word),
        })
    }

    /// Reads the head of a filled slot. An impossible head counts as no change, and marks the
    /// ring incomplete.
    fn read_head(self, place: u64) -> (u64, u64) {
        let [offset, len] =
            [1, 2].map(|index| self.head_word(place, index).load(Ordering::Relaxed));
        let is_one = len == 0 || record_len(offset, len) == len;
        if !is_one || offset.checked_add(len).is_none() {
            self.mark_incomplete();
            return (0, 0);
        }
        (offset, len)
    }

    /// Fills a slot with no change.
    pub fn fill_empty(self, place: u64) {
        self.publish_head(place, 0, 0);
    }

    /// Marks that the ring lacks some changes. The replica must then be resynced.
    pub fn mark_incomplete(self) {
        self.flag(INCOMPLETE_AT).store(1, Ordering::SeqCst);
    }

    pub fn is_incomplete(self) -> bool {
        self.flag(INCOMPLETE_AT).load(Ordering::SeqCst) != 0
    }

    /// Clears the mark, for a new replica.
    pub fn clear_incomplete(self) {
        self.flag(INCOMPLETE_AT).store(0, Ordering::SeqCst);
    }

    pub fn set_has_replica(self, followed: bool) {
        let flag = self.flag(HAS_REPLICA_AT);
        flag.store(u32::from(followed), Ordering::SeqCst);
    }

    /// Sets whether direct clients must write through the kernel.
    pub fn set_throttled(self, shut: bool) {
        let (flag, shut) = (self.flag(THROTTLED_AT), u32::from(shut));
        // Direct clients read this line, so it is written only on a change.
        if flag.load(Ordering::Relaxed) != shut {
            flag.store(shut, Ordering::Relaxed);
        }
    }

    /// Requests a wake-up from the next client that fills a slot. True: the consumer may sleep,
    /// as the next slot is not filled.
    pub fn enter_sleep(self) -> bool {
        step("ring");
        self.flag(CONSUMER_SLEEPS_AT).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let may_sleep = !self.has_next();
        if !may_sleep {
            self.leave_sleep();
        }
        may_sleep
    }

    pub fn leave_sleep(self) {
        let sleeps = self.flag(CONSUMER_SLEEPS_AT);
        if sleeps.load(Ordering::Relaxed) != 0 {
            sleeps.store(0, Ordering::SeqCst);
        }
    }
}

/// The calls that clean up after dead direct clients. Their rows are as they left them.
impl ReplicationRing<'_> {
    pub fn unfilled_claim_of(self, row: ClientRow<'_>) -> UnfilledClaim {
        match row.claim().load(Ordering::Acquire) {
            0 => UnfilledClaim::Absent,
            CLAIM_PENDING => UnfilledClaim::Unknown,
            claim if claim - 1 < self.head() || self.is_filled(claim - 1) => UnfilledClaim::Absent,
            claim => UnfilledClaim::FromSlot(claim - 1),
        }
    }

    /// Whether a later claim may overlap the bytes of this entry. No live direct client has an
    /// operation in progress on them.
    pub fn has_later_overlap(self, segment: &DirectSegment, left: &RingEntry) -> bool {
        let (start, end) = page_bounds(left.offset, left.data.len() as u64);
        let mut place = left.slot + left.slot_count;
        while place < self.tail() {
            let Some((offset, len)) = self.range_of(segment, place) else {
                return true;
            };
            let (first, last) = page_bounds(offset, len);
            if first < end && start < last {
                return true;
            }
            place += slots_of(offset, len).max(1);
        }
        false
    }

    /// The range of a claim; none if it is unknown.
    fn range_of(self, segment: &DirectSegment, place: u64) -> Option<(u64, u64)> {
        if self.is_filled(place) {
            return Some(self.read_head(place));
        }
        let claimed = claimed_range(segment, place);
        // A client that has filled the slot meanwhile may show the range of its next record in
        // the row.
        match self.is_filled(place) {
            true => Some(self.read_head(place)),
            false => claimed,
        }
    }

    /// Fills the claims that no client owns any more with no change. False: a live direct
    /// client is claiming right now.
    pub fn fill_unowned_claims(
        self,
        segment: &DirectSegment,
        is_dead: impl Fn(usize) -> bool,
    ) -> bool {
        let tail = self.tail();
        let is_claiming = |number: usize| {
            let row = segment.row(number);
            row.active_range().is_some() && row.claim().load(Ordering::Acquire) == CLAIM_PENDING
        };
        // Claims from now on get slots behind `tail`.
        if (0..ROWS).any(|number| is_claiming(number) && !is_dead(number)) {
            return false;
        }
        let mut place = self.head();
        while place < tail {
            let told = self.range_of(segment, place);
            if told.is_none() {
                self.fill_empty(place);
            }
            let (offset, len) = told.unwrap_or_default();
            place += slots_of(offset, len).max(1);
        }
        true
    }
}

/// Rounds a range to whole pages, in bytes.
fn page_bounds(offset: u64, len: u64) -> (u64, u64) {
    let end = offset.saturating_add(len);
    (
        offset / PAGE * PAGE,
        end.div_ceil(PAGE).saturating_mul(PAGE),
    )
}

/// The range of the row that claimed this slot; none if no row claims it, or if the range is
/// not one record.
fn claimed_range(segment: &DirectSegment, place: u64) -> Option<(u64, u64)> {
    let mut active = segment.active_ops();
    let (_, about) = active.find(|&(number, _)| {
        let claim = segment.row(number).claim();
        claim.load(Ordering::Acquire) == place + 1
    })?;
    let (offset, len) = (about.offset, about.len);
    (record_len(offset, len) == len).then_some((offset, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoch_counts_for_its_use_of_the_slot_only() {
        let place = 3 + RING_SLOTS;
        let word = epoch_word(place, Epoch(9));
        assert_eq!(epoch_of_word(place, word), Epoch(9));
        assert_eq!(epoch_of_word(place + RING_SLOTS, word), Epoch(0));
        assert_eq!(epoch_of_word(3, 0), Epoch(0));
        let last = u64::from(u32::MAX);
        assert_eq!(epoch_of_word(last, epoch_word(last, Epoch(7))), Epoch(7));
    }

    #[test]
    fn claim_covers_one_record() {
        assert_eq!(record_len(100, 10_000), PAGE - 100);
        assert_eq!(record_len(PAGE, 100), 100);
        assert_eq!(record_len(0, 9 * PAGE), RECORD_SLOTS_MAX * PAGE);
        // The store begins a new record with each leaf.
        let border = NODE_SLOTS * PAGE;
        assert_eq!(record_len(border - 2 * PAGE, 4 * PAGE), 2 * PAGE);
        assert_eq!(record_len(border, 3 * PAGE + 7), 3 * PAGE);
    }
}
