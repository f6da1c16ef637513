//! The queue of changes that the asynchronous replica has yet to get, in order.
//!
//! A change gets its number while its range is locked, after all written legs have it and
//! before it is acknowledged. So the changes up to any number form a state that the volume was
//! in. A change that was acknowledged before another one was submitted has the lower number.
//!
//! Changes of direct clients are in a [`ReplicationRing`] instead. Each change here records how
//! many ring slots were claimed when it was appended. It comes after those slots and before the
//! others. Its number is that count plus the number of changes here. The number of a slot is
//! its own plus the changes before it (RFD 018).
//!
//! Invariants:
//! - An append never waits. If the replica lags too far behind, the change's acknowledgement
//!   waits for its number.
//! - Numbers are never used again.
//! - Changes that were appended for a former replica are dropped.

use crate::direct_access::DirectSegment;
use crate::limits::{REPLICATION_AGE_MAX, REPLICATION_BYTES_MAX, replication_changes_max};
use crate::replication::ring::{RING_SLOTS, ReplicationRing, RingEntry};
use crate::steps;
use crate::wake::Wake;
use pagemesh_base::authority::Lag;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison;
use pagemesh_base::slice::{SliceRequest, Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// The cost of a change in addition to its bytes.
const CHANGE_COST_BYTES: u64 = 128;
/// The cost of a ring slot.
const SLOT_COST_BYTES: u64 = CHANGE_COST_BYTES + PAGE_BYTES as u64;

/// A change on its way to the replica.
pub struct ReplicationChange {
    pub number: u64,
    /// The change with the stamp of another leg. The sender keeps its epoch, if that is known.
    pub change: SliceRequest,
}

/// A change that waits in the queue.
struct QueuedChange {
    /// The number of ring slots that come before it.
    ring_slots_before: u64,
    change: ReplicationChange,
}

/// The costs of the changes that are not done, by number.
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
    /// The serial of the replica's connection; 0 if there is no replica.
    serial: u64,
    /// Counts all changes that were appended, and those that were taken or dropped.
    appended: u64,
    dequeued: u64,
    /// Slots below this were claimed before the replica was connected.
    floor: u64,
    /// Changes that the sender has not taken yet.
    queued: VecDeque<QueuedChange>,
    /// The costs of all appended changes, and of the entries taken from the ring.
    costs: PendingCosts,
    ring_costs: PendingCosts,
    /// The last number at some points in time, for numbers that are not done.
    age_marks: VecDeque<(u64, Duration)>,
    /// The oldest change is too old.
    is_late: bool,
    sender: SenderState,
    /// By member: the number that it waits for.
    waiters: BTreeMap<u32, (u64, Arc<Wake>)>,
}

/// The state of the task that takes changes and sends them.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SenderState {
    /// It looks for more changes, or was woken to do so.
    #[default]
    Awake,
    /// It found no change, and looks again soon. Only an acknowledgement that waits for a
    /// change wakes it earlier: a wake-up for each change costs more than sending it.
    Lingering,
    /// It found no change for a while, and waits for a wake-up.
    Asleep,
}

pub struct ReplicationQueue {
    state: Mutex<QueueState>,
    /// The segment with the changes of direct clients, once direct access is enabled.
    segment: OnceLock<Arc<DirectSegment>>,
    /// The replica has all changes up to this number, as durable as its pool's class promises.
    /// [`NO_REPLICA`] if there is no replica: then every number counts as done.
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

/// The outcome of an append.
pub struct AppendOutcome {
    pub number: u64,
    /// The replica lags so far behind that the acknowledgement of this change must wait.
    pub must_wait: bool,
    /// The caller must wake the sender.
    pub must_wake: bool,
}

/// The result of [`ReplicationQueue::wait_for_done`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DoneWait {
    Done,
    /// The member will be woken. With `must_wake`, the caller must wake the sender, too.
    Registered {
        must_wake: bool,
    },
}

impl ReplicationQueue {
    /// Appends a change; none if `serial` is no longer the replica's connection.
    pub fn append(&self, serial: u64, change: SliceRequest) -> Option<AppendOutcome> {
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

    /// The number of the last appended change or claimed slot; 0 if there is no replica. Every
    /// durable write calls this, so that case takes no lock.
    pub fn last_number(&self) -> u64 {
        match self.done_number.load(Ordering::Acquire) {
            NO_REPLICA => 0,
            _ => self.last_number_of(&self.lock_state()),
        }
    }

    fn last_number_of(&self, queue: &QueueState) -> u64 {
        queue.appended + self.claimed_slots()
    }

    /// Attaches the segment through which the changes of direct clients come.
    pub fn attach_segment(&self, segment: &Arc<DirectSegment>) {
        // The segment is set once, for good.
        let _ = self.segment.set(Arc::clone(segment));
    }

    fn lock_state(&self) -> MutexGuard<'_, QueueState> {
        steps::lock("ship", &self.state);
        poison::lock(&self.state)
    }

    fn ring(&self) -> Option<ReplicationRing<'_>> {
        self.segment.get().map(|segment| segment.ring())
    }

    /// The number of all slots that were ever claimed.
    fn claimed_slots(&self) -> u64 {
        self.ring().map_or(0, ReplicationRing::tail)
    }

    /// The number of slots that were claimed since the replica was connected, and are not
    /// taken.
    fn unsent_slots(&self, queue: &QueueState) -> u64 {
        let untaken = |ring: ReplicationRing<'_>| {
            let head = ring.head().max(queue.floor);
            ring.tail().saturating_sub(head)
        };
        self.ring().map_or(0, untaken)
    }

    /// Whether acknowledgements must wait.
    fn is_over_limit(&self, queue: &QueueState) -> bool {
        let is_beyond = |untaken: u64| {
            let count =
                queue.costs.by_number.len() + queue.ring_costs.by_number.len() + untaken as usize;
            let bytes = queue.costs.sum + queue.ring_costs.sum + untaken * SLOT_COST_BYTES;
            bytes > REPLICATION_BYTES_MAX || count > replication_changes_max()
        };
        // Reading the count of claimed slots slows the direct clients that claim, so it is read
        // only near the limit.
        queue.is_late || is_beyond(RING_SLOTS) && is_beyond(self.unsent_slots(queue))
    }

    fn throttle_direct_clients(&self, out: bool) {
        if let Some(ring) = self.ring() {
            ring.set_throttled(out);
        }
    }

    /// Whether the ring lacks some changes of direct clients.
    pub fn is_incomplete(&self) -> bool {
        self.ring().is_some_and(ReplicationRing::is_incomplete)
    }

    /// Whether the replica has all changes up to this number.
    pub fn is_done(&self, number: u64) -> bool {
        number <= self.done_number.load(Ordering::Acquire) || defect::is(Defect::DurableNotAwaited)
    }

    /// The last number, for the replica with this connection; none if there is none any more.
    pub fn last_number_on(&self, serial: u64) -> Option<u64> {
        let queue = self.lock_state();
        (queue.serial == serial).then(|| self.last_number_of(&queue))
    }

    /// Whether the replica with this connection has all changes up to a number; none if the
    /// connection has ended.
    pub fn is_done_on(&self, serial: u64, number: u64) -> Option<bool> {
        let queue = self.lock_state();
        let done = self.done_number.load(Ordering::Acquire);
        (queue.serial == serial).then_some(number <= done)
    }

    /// Wakes a member once this number is done. Each member waits for one number.
    pub fn wait_for_done(&self, number: u64, member: u32, wake: &Arc<Wake>) -> DoneWait {
        let mut queue = self.lock_state();
        // The check is under the lock, so that no wake-up is lost.
        if self.is_done(number) {
            return DoneWait::Done;
        }
        queue.waiters.insert(member, (number, Arc::clone(wake)));
        let has_to_be_sent = !queue.queued.is_empty() || self.unsent_slots(&queue) > 0;
        let wakes = has_to_be_sent && queue.wake_sender_if(|taker| taker != SenderState::Awake);
        DoneWait::Registered { must_wake: wakes }
    }

    /// Starts to queue changes for a replica, from the next change on.
    pub fn open(&self, serial: u64) {
        let mut queue = self.lock_state();
        self.restart(&mut queue, serial);
        let last = self.last_number_of(&queue);
        self.complete_up_to(&mut queue, last);
    }

    /// Ends the queue: there is no replica any more.
    pub fn close(&self) {
        let mut queue = self.lock_state();
        self.restart(&mut queue, 0);
        self.complete_up_to(&mut queue, NO_REPLICA);
    }

    /// Takes the next change for the sender with this connection. If there is none and
    /// `looks_again` is set, only an acknowledgement that waits wakes the sender.
    pub fn take_change(&self, serial: u64, looks_again: bool) -> Option<ReplicationChange> {
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
                // A slot was filled meanwhile.
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

    /// Takes the next change from the queue or the ring, whichever comes first.
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
            // Nothing may be sent after a missing change.
            let entry = ring.take().filter(|_| !ring.is_incomplete())?;
            // The replica gets slots that were claimed before it was connected by the resync.
            if entry.slot >= queue.floor {
                return Some(queue.count_ring_entry(entry));
            }
        }
    }

    /// Records that the replica has all changes up to a number.
    pub fn record_done(&self, serial: u64, number: u64) {
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

    /// Updates the age of the oldest change.
    pub fn update_age(&self, now: Duration) {
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

    /// Whether an acknowledgement waits, which needs a flush of the replica.
    pub fn has_waiters(&self) -> bool {
        !self.lock_state().waiters.is_empty()
    }

    /// Whether the replica has yet to get a change.
    pub fn is_behind(&self) -> bool {
        self.has_unfinished(&self.lock_state())
    }

    fn has_unfinished(&self, queue: &QueueState) -> bool {
        let in_flight = queue.costs.by_number.len() + queue.ring_costs.by_number.len();
        queue.serial != 0 && (in_flight > 0 || self.unsent_slots(queue) > 0)
    }

    /// Removes a member that is gone.
    pub fn remove_waiter(&self, member: u32) {
        self.lock_state().waiters.remove(&member);
    }

    /// The changes that the replica has yet to get; none if there is no replica.
    pub fn lag(&self, now: Duration) -> Option<Lag> {
        let queue = self.lock_state();
        let since = queue.age_marks.front().map_or(now, |&(_, at)| at);
        let untaken = self.unsent_slots(&queue);
        let changes = (queue.costs.by_number.len() + queue.ring_costs.by_number.len()) as u64;
        let bytes = queue.costs.sum + queue.ring_costs.sum - changes * CHANGE_COST_BYTES;
        // A part of a page counts as a whole page until it is taken.
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
        queue.waiters.retain(|_, (number, wake)| {
            let waits = *number > done;
            if !waits {
                wake.raise();
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

    /// Numbers an entry from the ring, and counts its cost.
    fn count_ring_entry(&mut self, entry: RingEntry) -> ReplicationChange {
        let number = entry.slot + entry.slot_count + self.dequeued;
        let cost = CHANGE_COST_BYTES + entry.data.len() as u64;
        self.ring_costs.add(number, cost);
        let stamp = Stamp {
            epoch: entry.epoch,
            op: 0,
            open_ops: 0,
        };
        let (offset, data) = (entry.offset, entry.data);
        // A claim that changed nothing has a number, too.
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

    /// The sender batches changes that no acknowledgement waits for. A change with a waiting
    /// acknowledgement wakes it at once, and only once.
    #[test]
    fn lingering_sender_is_woken_for_waiters() {
        let (ship, wake) = (ReplicationQueue::default(), Arc::new(Wake::new().unwrap()));
        let clear = || SliceRequest::Flush;
        let append = || ship.append(7, clear()).expect("it follows");
        let awaits = |number, member| ship.wait_for_done(number, member, &wake);
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
        assert!(awaits(4, 1) == DoneWait::Done && wake.take());
        assert_eq!(take(false), None);
        assert!(append().must_wake);
        ship.close();
        ship.open(8);
        assert_eq!(ship.take_change(8, false).map(|it| it.number), None);
    }
}
