//! The changes that a leg which follows has yet to get, in their order.
//!
//! A change gets its number while its range is locked, after all legs that are
//! written have it and before it is acknowledged. So what has the numbers up to any one
//! is a state that the volume was in, and what was acknowledged before a change was
//! submitted has lower numbers than it.
//!
//! What guests change is in a [`ReplicationRing`] instead. Each change here notes how many places were
//! claimed there when it was appended, and comes behind those and before the others. Its
//! number is that count and the number of changes here; that of a place, its own and the
//! changes before it (RFD 018).
//!
//! Invariants: whoever appends never waits here; what must wait is its
//! acknowledgement, for the number that it is told. Numbers are never used again. What
//! was appended for a leg that follows no more is dropped.

use crate::direct_access::DirectSegment;
use crate::limits::{REPLICATION_AGE_MAX, REPLICATION_BYTES_MAX, REPLICATION_CHANGES_MAX};
use crate::replication_ring::{RING_SLOTS, ReplicationRing, RingEntry};
use crate::shared::{Member, lock_unpoisoned};
use crate::status::Lag;
use crate::steps;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceRequest, Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// What a change costs beside its bytes.
const CHANGE_COST_BYTES: u64 = 128;
/// What a place of the ring does.
const SLOT_COST_BYTES: u64 = CHANGE_COST_BYTES + PAGE_BYTES as u64;

/// A change on its way to the leg that follows.
pub(crate) struct ReplicationChange {
    pub number: u64,
    /// Its stamp is another leg's.
    pub change: SliceRequest,
}

/// One that waits.
struct QueuedChange {
    /// So many places come before it.
    ring_slots_before: u64,
    change: ReplicationChange,
}

/// What changes cost that are not done, with their numbers.
#[derive(Default)]
struct PendingCosts {
    by_number: VecDeque<(u64, u64)>,
    sum: u64,
}

impl PendingCosts {
    fn add(&mut self, number: u64, cost: u64) {
        self.sum += cost;
        self.by_number.push_back((number, cost));
    }

    fn remove_up_to(&mut self, number: u64) {
        while let Some(&(first, cost)) = self.by_number.front()
            && first <= number
        {
            self.by_number.pop_front();
            self.sum -= cost;
        }
    }
}

#[derive(Default)]
struct QueueState {
    /// Of the leg's connection; 0 if none follows.
    serial: u64,
    /// Changes that were ever appended, and that were taken or dropped.
    appended: u64,
    dequeued: u64,
    /// Places below this were claimed before the leg followed.
    floor: u64,
    /// Not taken yet.
    queued: VecDeque<QueuedChange>,
    /// Of all that were appended, and of what was taken from the ring.
    costs: PendingCosts,
    ring_costs: PendingCosts,
    /// The last numbers that there were at some times, while they are not done.
    age_marks: VecDeque<(u64, Duration)>,
    /// The oldest has been here for too long.
    is_late: bool,
    sender: SenderState,
    /// Who waits for which number, by member.
    waiters: BTreeMap<u32, (u64, Arc<Member>)>,
}

/// What whoever takes changes does.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SenderState {
    /// It looks for more, or was woken to do so.
    #[default]
    Awake,
    /// It found nothing, and looks again soon. Only who waits for a change wakes it before:
    /// a wake-up for each costs more than to send it.
    Lingering,
    /// It found nothing for a while, and waits to be woken.
    Asleep,
}

pub(crate) struct ReplicationQueue {
    state: Mutex<QueueState>,
    /// What guests changed, once there may be some.
    segment: OnceLock<Arc<DirectSegment>>,
    /// What has a number up to this one is on the leg, durable as its pool's class
    /// promises; [`NO_REPLICA`] if no leg follows, and nothing is waited for.
    done_number: AtomicU64,
}

const NO_REPLICA: u64 = u64::MAX;

impl Default for ReplicationQueue {
    fn default() -> ReplicationQueue {
        ReplicationQueue {
            state: Mutex::default(),
            segment: OnceLock::new(),
            done_number: AtomicU64::new(NO_REPLICA),
        }
    }
}

/// What became of a change that was appended.
pub(crate) struct AppendOutcome {
    pub number: u64,
    /// So much is waiting that its acknowledgement has to, too.
    pub must_wait: bool,
    /// The taker has to be woken.
    pub must_wake: bool,
}

/// Whether a number is done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DoneWait {
    Done,
    /// The member is woken. With `must_wake`, the taker has to be, too.
    Registered {
        must_wake: bool,
    },
}

impl ReplicationQueue {
    /// Takes a change in, if the leg still follows.
    pub(crate) fn append(&self, serial: u64, change: SliceRequest) -> Option<AppendOutcome> {
        let mut queue = self.lock_state();
        if queue.serial != serial {
            return None;
        }
        queue.appended += 1;
        let behind = self.claimed_slots();
        let (number, cost) = (behind + queue.appended, cost(&change));
        queue.costs.add(number, cost);
        let shipment = ReplicationChange { number, change };
        let waiting = QueuedChange {
            ring_slots_before: behind,
            change: shipment,
        };
        match defect::is(Defect::ReplicatedOutOfOrder) {
            true => queue.queued.push_front(waiting),
            false => queue.queued.push_back(waiting),
        }
        let must_wait = self.is_over_limit(&queue);
        self.throttle_direct_clients(must_wait);
        Some(AppendOutcome {
            number,
            must_wait,
            must_wake: queue.wake_sender_if(|taker| taker == SenderState::Asleep),
        })
    }

    /// The number of the last change that was appended, or claimed; 0 if no leg follows.
    /// Every durable write asks, so it takes no lock then.
    pub(crate) fn last_number(&self) -> u64 {
        match self.done_number.load(Ordering::Acquire) {
            NO_REPLICA => 0,
            _ => self.last_number_of(&self.lock_state()),
        }
    }

    fn last_number_of(&self, queue: &QueueState) -> u64 {
        queue.appended + self.claimed_slots()
    }

    /// What guests change comes through this from now on.
    pub(crate) fn attach_segment(&self, segment: &Arc<DirectSegment>) {
        // There is one for good.
        let _ = self.segment.set(Arc::clone(segment));
    }

    fn lock_state(&self) -> MutexGuard<'_, QueueState> {
        steps::lock("ship", &self.state);
        lock_unpoisoned(&self.state)
    }

    fn ring(&self) -> Option<ReplicationRing<'_>> {
        self.segment.get().map(|segment| segment.ring())
    }

    /// Places that were ever claimed.
    fn claimed_slots(&self) -> u64 {
        self.ring().map_or(0, ReplicationRing::tail)
    }

    /// Places that were claimed since the leg follows, and not taken.
    fn unsent_slots(&self, queue: &QueueState) -> u64 {
        let untaken = |ring: ReplicationRing<'_>| {
            let head = ring.head().max(queue.floor);
            ring.tail().saturating_sub(head)
        };
        self.ring().map_or(0, untaken)
    }

    /// Whether acknowledgements have to wait.
    fn is_over_limit(&self, queue: &QueueState) -> bool {
        let is_beyond = |untaken: u64| {
            let count =
                queue.costs.by_number.len() + queue.ring_costs.by_number.len() + untaken as usize;
            let bytes = queue.costs.sum + queue.ring_costs.sum + untaken * SLOT_COST_BYTES;
            bytes > REPLICATION_BYTES_MAX || count > REPLICATION_CHANGES_MAX
        };
        // Who claims would wait for a look at how many places are claimed.
        queue.is_late || is_beyond(RING_SLOTS) && is_beyond(self.unsent_slots(queue))
    }

    fn throttle_direct_clients(&self, out: bool) {
        if let Some(ring) = self.ring() {
            ring.set_throttled(out);
        }
    }

    /// Whether guests could not say all that they changed.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.ring().is_some_and(ReplicationRing::is_incomplete)
    }

    /// Whether what waits for this number need not wait any more.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        number <= self.done_number.load(Ordering::Acquire) || defect::is(Defect::DurableNotAwaited)
    }

    /// Wakes a member once this number is done. Each member waits for one.
    pub(crate) fn wait_for_done(&self, number: u64, who: u32, member: &Arc<Member>) -> DoneWait {
        let mut queue = self.lock_state();
        // Under the lock, so that no wake-up falls between.
        if self.is_done(number) {
            return DoneWait::Done;
        }
        queue.waiters.insert(who, (number, Arc::clone(member)));
        let has_to_be_sent = !queue.queued.is_empty() || self.unsent_slots(&queue) > 0;
        let wakes = has_to_be_sent && queue.wake_sender_if(|taker| taker != SenderState::Awake);
        DoneWait::Registered { must_wake: wakes }
    }

    /// A leg follows from the next change on.
    pub(crate) fn open(&self, serial: u64) {
        let mut queue = self.lock_state();
        self.restart(&mut queue, serial);
        let last = self.last_number_of(&queue);
        self.complete_up_to(&mut queue, last);
    }

    /// No leg follows any more.
    pub(crate) fn close(&self) {
        let mut queue = self.lock_state();
        self.restart(&mut queue, 0);
        self.complete_up_to(&mut queue, NO_REPLICA);
    }

    /// The next change, for whoever has the leg's connection. If there is none, and it
    /// will look again soon, it is woken only for somebody who waits.
    pub(crate) fn take_change(&self, serial: u64, looks_again: bool) -> Option<ReplicationChange> {
        let mut queue = self.lock_state();
        if queue.serial != serial {
            return None;
        }
        if self.is_incomplete() {
            return None;
        }
        let next = self.take_next(&mut queue).or_else(|| {
            let sleeps = !looks_again && self.ring().is_none_or(ReplicationRing::enter_sleep);
            match sleeps || looks_again {
                true => None,
                // Filled meanwhile.
                false => self.take_next(&mut queue),
            }
        });
        queue.sender = match (&next, looks_again) {
            (Some(_), _) => SenderState::Awake,
            (None, true) => SenderState::Lingering,
            (None, false) => SenderState::Asleep,
        };
        if let Some(ring) = self.ring().filter(|_| next.is_some()) {
            ring.leave_sleep();
        }
        let is_at_bound = self.is_over_limit(&queue);
        self.throttle_direct_clients(is_at_bound);
        next
    }

    /// The next change, of either kind.
    fn take_next(&self, queue: &mut QueueState) -> Option<ReplicationChange> {
        loop {
            let behind = queue.queued.front().map(|it| it.ring_slots_before);
            let comes_first =
                |ring: &ReplicationRing<'_>| behind.is_none_or(|behind| ring.head() < behind);
            let Some(ring) = self.ring().filter(comes_first) else {
                let waiting = queue.queued.pop_front()?;
                queue.dequeued += 1;
                return Some(waiting.change);
            };
            // Behind what is not there nothing may be sent.
            let entry = ring.take().filter(|_| !ring.is_incomplete())?;
            // What was claimed before is on the leg by other ways.
            if entry.slot >= queue.floor {
                return Some(queue.count_ring_entry(entry));
            }
        }
    }

    /// The leg has everything up to a number.
    pub(crate) fn record_done(&self, serial: u64, number: u64) {
        let mut queue = self.lock_state();
        if queue.serial != serial {
            return;
        }
        queue.costs.remove_up_to(number);
        queue.ring_costs.remove_up_to(number);
        while queue
            .age_marks
            .front()
            .is_some_and(|&(last, _)| last <= number)
        {
            queue.age_marks.pop_front();
        }
        self.complete_up_to(&mut queue, number);
    }

    /// Lets time pass.
    pub(crate) fn update_age(&self, now: Duration) {
        let mut queue = self.lock_state();
        let (last, is_empty) = (self.last_number_of(&queue), !self.has_unfinished(&queue));
        if !is_empty && queue.age_marks.back().is_none_or(|&(seen, _)| seen < last) {
            queue.age_marks.push_back((last, now));
        }
        let oldest = queue.age_marks.front();
        queue.is_late = oldest.is_some_and(|&(_, at)| now.saturating_sub(at) > REPLICATION_AGE_MAX);
        let is_at_bound = self.is_over_limit(&queue);
        self.throttle_direct_clients(is_at_bound);
    }

    /// Whether somebody waits for what the leg has to flush first.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.lock_state().waiters.is_empty()
    }

    /// Whether there is a change that the leg has yet to get.
    pub(crate) fn is_behind(&self) -> bool {
        self.has_unfinished(&self.lock_state())
    }

    fn has_unfinished(&self, queue: &QueueState) -> bool {
        let in_flight = queue.costs.by_number.len() + queue.ring_costs.by_number.len();
        queue.serial != 0 && (in_flight > 0 || self.unsent_slots(queue) > 0)
    }

    /// A member is gone.
    pub(crate) fn remove_waiter(&self, who: u32) {
        self.lock_state().waiters.remove(&who);
    }

    /// What the leg has yet to get; none if none follows.
    pub(crate) fn lag(&self, now: Duration) -> Option<Lag> {
        let queue = self.lock_state();
        let since = queue.age_marks.front().map_or(now, |&(_, at)| at);
        let untaken = self.unsent_slots(&queue);
        let changes = (queue.costs.by_number.len() + queue.ring_costs.by_number.len()) as u64;
        let bytes = queue.costs.sum + queue.ring_costs.sum - changes * CHANGE_COST_BYTES;
        // A part of a page counts as a whole one until it is taken.
        (queue.serial != 0).then(|| Lag {
            changes: changes + untaken,
            bytes: bytes + untaken * PAGE_BYTES as u64,
            age_us: now.saturating_sub(since).as_micros() as u64,
        })
    }

    fn restart(&self, queue: &mut QueueState, serial: u64) {
        queue.restart(serial, self.claimed_slots());
        if let Some(ring) = self.ring() {
            ring.clear_incomplete();
            ring.set_throttled(false);
        }
    }

    fn complete_up_to(&self, queue: &mut QueueState, done: u64) {
        self.done_number.store(done, Ordering::Release);
        queue.waiters.retain(|_, (number, member)| {
            let waits = *number > done;
            if !waits {
                member.wake.raise();
            }
            waits
        });
    }
}

impl QueueState {
    fn wake_sender_if(&mut self, must: impl Fn(SenderState) -> bool) -> bool {
        let wakes = must(self.sender);
        if wakes {
            self.sender = SenderState::Awake;
        }
        wakes
    }

    /// Counts what was taken from the ring.
    fn count_ring_entry(&mut self, entry: RingEntry) -> ReplicationChange {
        let number = entry.slot + entry.slot_count + self.dequeued;
        let cost = CHANGE_COST_BYTES + entry.data.len() as u64;
        self.ring_costs.add(number, cost);
        let stamp = Stamp {
            epoch: Epoch(0),
            op: 0,
            open_ops: 0,
        };
        let (offset, data) = (entry.offset, entry.data);
        // A claim of which nothing came has a number, too.
        let change = match data.is_empty() {
            true => SliceRequest::Clear {
                offset: 0,
                len: 0,
                stamp,
            },
            false => SliceRequest::Write {
                offset,
                data,
                stamp,
            },
        };
        ReplicationChange { number, change }
    }

    fn restart(&mut self, serial: u64, claimed: u64) {
        self.serial = serial;
        self.dequeued = self.appended;
        self.floor = claimed;
        self.queued.clear();
        self.costs = PendingCosts::default();
        self.ring_costs = PendingCosts::default();
        self.age_marks.clear();
        self.is_late = false;
        self.sender = SenderState::Awake;
    }
}

fn cost(change: &SliceRequest) -> u64 {
    let part = |part: &TransactionPart| match part {
        TransactionPart::Write { data, .. } => data.len() as u64,
        TransactionPart::Clear { .. } => 0,
    };
    CHANGE_COST_BYTES
        + match change {
            SliceRequest::Write { data, .. } => data.len() as u64,
            SliceRequest::Transact { parts, .. } => parts.iter().map(part).sum(),
            _ => 0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes that nobody waits for are gathered for a moment; who waits for one has it
    /// sent at once, and once.
    #[test]
    fn lingering_sender_is_woken_for_waiters() {
        let (ship, member) = (
            ReplicationQueue::default(),
            Arc::new(Member::new().unwrap()),
        );
        let clear = || SliceRequest::Flush;
        let append = || ship.append(7, clear()).expect("it follows");
        let awaits = |number, who| ship.wait_for_done(number, who, &member);
        let take = |looks_again| ship.take_change(7, looks_again).map(|it| it.number);
        ship.open(7);
        assert_eq!(take(false), None);
        assert!(append().must_wake, "it sleeps");
        assert!(!append().must_wake, "it was woken");
        assert_eq!(
            [take(true), take(true), take(true)],
            [Some(1), Some(2), None]
        );
        assert!(!append().must_wake, "it looks again soon");
        assert!(awaits(3, 1) == DoneWait::Registered { must_wake: true });
        assert!(awaits(3, 2) == DoneWait::Registered { must_wake: false });
        assert!(!append().must_wake);
        assert_eq!(
            [take(true), take(true), take(true)],
            [Some(3), Some(4), None]
        );
        let sent = awaits(4, 1);
        assert!(
            sent == DoneWait::Registered { must_wake: false },
            "it is on its way"
        );
        ship.record_done(7, 4);
        assert!(awaits(4, 1) == DoneWait::Done && member.wake.take());
        assert_eq!(take(false), None);
        assert!(append().must_wake);
        ship.close();
        ship.open(8);
        assert_eq!(ship.take_change(8, false).map(|it| it.number), None);
    }
}
