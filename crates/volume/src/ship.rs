//! The changes that a leg which follows has yet to get, in their order.
//!
//! A change gets its number while its range is locked, after all legs that are
//! written have it and before it is acknowledged. So what has the numbers up to any one
//! is a state that the volume was in, and what was acknowledged before a change was
//! submitted has lower numbers than it.
//!
//! What guests change is in a [`Ring`] instead. Each change here notes how many places were
//! claimed there when it was appended, and comes behind those and before the others. Its
//! number is that count and the number of changes here; that of a place, its own and the
//! changes before it (RFD 018).
//!
//! Invariants: whoever appends never waits here; what must wait is its
//! acknowledgement, for the number that it is told. Numbers are never used again. What
//! was appended for a leg that follows no more is dropped.

use crate::guests::Segment;
use crate::hub::{Member, guard};
use crate::limits::{SHIP_AGE_MAX, SHIP_BYTES_MAX, SHIP_CHANGES_MAX};
use crate::ring::{Entry, PLACES, Ring};
use crate::status::Lag;
use crate::steps;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{Part, SliceRequest, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// What a change costs beside its bytes.
const CHANGE_COST_BYTES: u64 = 128;
/// What a place of the ring does.
const PLACE_COST_BYTES: u64 = CHANGE_COST_BYTES + PAGE_BYTES as u64;

/// A change on its way to the leg that follows.
pub(crate) struct Shipment {
    pub number: u64,
    /// Its stamp is another leg's.
    pub change: SliceRequest,
}

/// One that waits.
struct Waiting {
    /// So many places come before it.
    behind: u64,
    shipment: Shipment,
}

/// What changes cost that are not done, with their numbers.
#[derive(Default)]
struct Costs {
    each: VecDeque<(u64, u64)>,
    sum: u64,
}

impl Costs {
    fn add(&mut self, number: u64, cost: u64) {
        self.sum += cost;
        self.each.push_back((number, cost));
    }

    fn done(&mut self, number: u64) {
        while let Some(&(first, cost)) = self.each.front()
            && first <= number
        {
            self.each.pop_front();
            self.sum -= cost;
        }
    }
}

#[derive(Default)]
struct Queue {
    /// Of the leg's connection; 0 if none follows.
    serial: u64,
    /// Changes that were ever appended, and that were taken or dropped.
    appended: u64,
    passed: u64,
    /// Places below this were claimed before the leg followed.
    floor: u64,
    /// Not taken yet.
    waiting: VecDeque<Waiting>,
    /// Of all that were appended, and of what was taken from the ring.
    costs: Costs,
    ring_costs: Costs,
    /// The last numbers that there were at some times, while they are not done.
    seen: VecDeque<(u64, Duration)>,
    /// The oldest has been here for too long.
    is_late: bool,
    taker: Taker,
    /// Who waits for which number, by member.
    waiters: BTreeMap<u32, (u64, Arc<Member>)>,
}

/// What whoever takes changes does.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Taker {
    /// It looks for more, or was woken to do so.
    #[default]
    Called,
    /// It found nothing, and looks again soon. Only who waits for a change wakes it before:
    /// a wake-up for each costs more than to send it.
    Lingers,
    /// It found nothing for a while, and waits to be woken.
    Sleeps,
}

pub(crate) struct Ship {
    queue: Mutex<Queue>,
    /// What guests changed, once there may be some.
    segment: OnceLock<Arc<Segment>>,
    /// What has a number up to this one is on the leg, durable as its pool's class
    /// promises; [`NOBODY`] if no leg follows, and nothing is waited for.
    done: AtomicU64,
}

const NOBODY: u64 = u64::MAX;

impl Default for Ship {
    fn default() -> Ship {
        Ship {
            queue: Mutex::default(),
            segment: OnceLock::new(),
            done: AtomicU64::new(NOBODY),
        }
    }
}

/// What became of a change that was appended.
pub(crate) struct Appended {
    pub number: u64,
    /// So much is waiting that its acknowledgement has to, too.
    pub must_wait: bool,
    /// The taker has to be woken.
    pub wakes: bool,
}

/// Whether a number is done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    Done,
    /// The member is woken. With `wakes`, the taker has to be, too.
    Later {
        wakes: bool,
    },
}

impl Ship {
    /// Takes a change in, if the leg still follows.
    pub(crate) fn append(&self, serial: u64, change: SliceRequest) -> Option<Appended> {
        let mut queue = self.queue();
        if queue.serial != serial {
            return None;
        }
        queue.appended += 1;
        let behind = self.claimed();
        let (number, cost) = (behind + queue.appended, cost(&change));
        queue.costs.add(number, cost);
        let shipment = Shipment { number, change };
        let waiting = Waiting { behind, shipment };
        match defect::is(Defect::ShippedOutOfOrder) {
            true => queue.waiting.push_front(waiting),
            false => queue.waiting.push_back(waiting),
        }
        let must_wait = self.is_at_bound(&queue);
        self.keep_guests(must_wait);
        Some(Appended {
            number,
            must_wait,
            wakes: queue.wake_if(|taker| taker == Taker::Sleeps),
        })
    }

    /// The number of the last change that was appended, or claimed; 0 if no leg follows.
    /// Every durable write asks, so it takes no lock then.
    pub(crate) fn last(&self) -> u64 {
        match self.done.load(Ordering::Acquire) {
            NOBODY => 0,
            _ => self.last_of(&self.queue()),
        }
    }

    fn last_of(&self, queue: &Queue) -> u64 {
        queue.appended + self.claimed()
    }

    /// What guests change comes through this from now on.
    pub(crate) fn admit(&self, segment: &Arc<Segment>) {
        // There is one for good.
        let _ = self.segment.set(Arc::clone(segment));
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        steps::lock("ship", &self.queue);
        guard(&self.queue)
    }

    fn ring(&self) -> Option<Ring<'_>> {
        self.segment.get().map(|segment| segment.ring())
    }

    /// Places that were ever claimed.
    fn claimed(&self) -> u64 {
        self.ring().map_or(0, Ring::tail)
    }

    /// Places that were claimed since the leg follows, and not taken.
    fn untaken(&self, queue: &Queue) -> u64 {
        let untaken = |ring: Ring<'_>| {
            let head = ring.head().max(queue.floor);
            ring.tail().saturating_sub(head)
        };
        self.ring().map_or(0, untaken)
    }

    /// Whether acknowledgements have to wait.
    fn is_at_bound(&self, queue: &Queue) -> bool {
        let is_beyond = |untaken: u64| {
            let count = queue.costs.each.len() + queue.ring_costs.each.len() + untaken as usize;
            let bytes = queue.costs.sum + queue.ring_costs.sum + untaken * PLACE_COST_BYTES;
            bytes > SHIP_BYTES_MAX || count > SHIP_CHANGES_MAX
        };
        // Who claims would wait for a look at how many places are claimed.
        queue.is_late || is_beyond(PLACES) && is_beyond(self.untaken(queue))
    }

    fn keep_guests(&self, out: bool) {
        if let Some(ring) = self.ring() {
            ring.set_shut(out);
        }
    }

    /// Whether guests could not say all that they changed.
    pub(crate) fn is_spoiled(&self) -> bool {
        self.ring().is_some_and(Ring::is_spoiled)
    }

    /// Whether what waits for this number need not wait any more.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        number <= self.done.load(Ordering::Acquire) || defect::is(Defect::DurableNotAwaited)
    }

    /// Wakes a member once this number is done. Each member waits for one.
    pub(crate) fn await_done(&self, number: u64, who: u32, member: &Arc<Member>) -> Awaited {
        let mut queue = self.queue();
        // Under the lock, so that no wake-up falls between.
        if self.is_done(number) {
            return Awaited::Done;
        }
        queue.waiters.insert(who, (number, Arc::clone(member)));
        let has_to_be_sent = !queue.waiting.is_empty() || self.untaken(&queue) > 0;
        let wakes = has_to_be_sent && queue.wake_if(|taker| taker != Taker::Called);
        Awaited::Later { wakes }
    }

    /// A leg follows from the next change on.
    pub(crate) fn open(&self, serial: u64) {
        let mut queue = self.queue();
        self.restart(&mut queue, serial);
        let last = self.last_of(&queue);
        self.release(&mut queue, last);
    }

    /// No leg follows any more.
    pub(crate) fn close(&self) {
        let mut queue = self.queue();
        self.restart(&mut queue, 0);
        self.release(&mut queue, NOBODY);
    }

    /// The next change, for whoever has the leg's connection. If there is none, and it
    /// will look again soon, it is woken only for somebody who waits.
    pub(crate) fn take(&self, serial: u64, looks_again: bool) -> Option<Shipment> {
        let mut queue = self.queue();
        if queue.serial != serial {
            return None;
        }
        if self.is_spoiled() {
            return None;
        }
        let next = self.take_next(&mut queue).or_else(|| {
            let sleeps = !looks_again && self.ring().is_none_or(Ring::fall_asleep);
            match sleeps || looks_again {
                true => None,
                // Filled meanwhile.
                false => self.take_next(&mut queue),
            }
        });
        queue.taker = match (&next, looks_again) {
            (Some(_), _) => Taker::Called,
            (None, true) => Taker::Lingers,
            (None, false) => Taker::Sleeps,
        };
        if let Some(ring) = self.ring().filter(|_| next.is_some()) {
            ring.wake_up();
        }
        let is_at_bound = self.is_at_bound(&queue);
        self.keep_guests(is_at_bound);
        next
    }

    /// The next change, of either kind.
    fn take_next(&self, queue: &mut Queue) -> Option<Shipment> {
        loop {
            let behind = queue.waiting.front().map(|it| it.behind);
            let comes_first = |ring: &Ring<'_>| behind.is_none_or(|behind| ring.head() < behind);
            let Some(ring) = self.ring().filter(comes_first) else {
                let waiting = queue.waiting.pop_front()?;
                queue.passed += 1;
                return Some(waiting.shipment);
            };
            // Behind what is not there nothing may be sent.
            let entry = ring.take().filter(|_| !ring.is_spoiled())?;
            // What was claimed before is on the leg by other ways.
            if entry.place >= queue.floor {
                return Some(queue.pass(entry));
            }
        }
    }

    /// The leg has everything up to a number.
    pub(crate) fn done(&self, serial: u64, number: u64) {
        let mut queue = self.queue();
        if queue.serial != serial {
            return;
        }
        queue.costs.done(number);
        queue.ring_costs.done(number);
        while queue.seen.front().is_some_and(|&(last, _)| last <= number) {
            queue.seen.pop_front();
        }
        self.release(&mut queue, number);
    }

    /// Lets time pass.
    pub(crate) fn look(&self, now: Duration) {
        let mut queue = self.queue();
        let (last, is_empty) = (self.last_of(&queue), !self.has_undone(&queue));
        if !is_empty && queue.seen.back().is_none_or(|&(seen, _)| seen < last) {
            queue.seen.push_back((last, now));
        }
        let oldest = queue.seen.front();
        queue.is_late = oldest.is_some_and(|&(_, at)| now.saturating_sub(at) > SHIP_AGE_MAX);
        let is_at_bound = self.is_at_bound(&queue);
        self.keep_guests(is_at_bound);
    }

    /// Whether somebody waits for what the leg has to flush first.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.queue().waiters.is_empty()
    }

    /// Whether there is a change that the leg has yet to get.
    pub(crate) fn is_behind(&self) -> bool {
        self.has_undone(&self.queue())
    }

    fn has_undone(&self, queue: &Queue) -> bool {
        let in_flight = queue.costs.each.len() + queue.ring_costs.each.len();
        queue.serial != 0 && (in_flight > 0 || self.untaken(queue) > 0)
    }

    /// A member is gone.
    pub(crate) fn forget(&self, who: u32) {
        self.queue().waiters.remove(&who);
    }

    /// What the leg has yet to get; none if none follows.
    pub(crate) fn lag(&self, now: Duration) -> Option<Lag> {
        let queue = self.queue();
        let since = queue.seen.front().map_or(now, |&(_, at)| at);
        let untaken = self.untaken(&queue);
        let changes = (queue.costs.each.len() + queue.ring_costs.each.len()) as u64;
        let bytes = queue.costs.sum + queue.ring_costs.sum - changes * CHANGE_COST_BYTES;
        // A part of a page counts as a whole one until it is taken.
        (queue.serial != 0).then(|| Lag {
            changes: changes + untaken,
            bytes: bytes + untaken * PAGE_BYTES as u64,
            age_us: now.saturating_sub(since).as_micros() as u64,
        })
    }

    fn restart(&self, queue: &mut Queue, serial: u64) {
        queue.restart(serial, self.claimed());
        if let Some(ring) = self.ring() {
            ring.unspoil();
            ring.set_shut(false);
        }
    }

    fn release(&self, queue: &mut Queue, done: u64) {
        self.done.store(done, Ordering::Release);
        queue.waiters.retain(|_, (number, member)| {
            let waits = *number > done;
            if !waits {
                member.wake.raise();
            }
            waits
        });
    }
}

impl Queue {
    fn wake_if(&mut self, must: impl Fn(Taker) -> bool) -> bool {
        let wakes = must(self.taker);
        if wakes {
            self.taker = Taker::Called;
        }
        wakes
    }

    /// Counts what was taken from the ring.
    fn pass(&mut self, entry: Entry) -> Shipment {
        let number = entry.place + entry.places + self.passed;
        let cost = CHANGE_COST_BYTES + entry.data.len() as u64;
        self.ring_costs.add(number, cost);
        let stamp = Stamp {
            epoch: Epoch(0),
            op: 0,
            open: 0,
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
        Shipment { number, change }
    }

    fn restart(&mut self, serial: u64, claimed: u64) {
        self.serial = serial;
        self.passed = self.appended;
        self.floor = claimed;
        self.waiting.clear();
        self.costs = Costs::default();
        self.ring_costs = Costs::default();
        self.seen.clear();
        self.is_late = false;
        self.taker = Taker::Called;
    }
}

fn cost(change: &SliceRequest) -> u64 {
    let part = |part: &Part| match part {
        Part::Write { data, .. } => data.len() as u64,
        Part::Clear { .. } => 0,
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
    fn who_lingers_is_woken_for_those_who_wait() {
        let (ship, member) = (Ship::default(), Arc::new(Member::new().unwrap()));
        let clear = || SliceRequest::Flush;
        let append = || ship.append(7, clear()).expect("it follows");
        let awaits = |number, who| ship.await_done(number, who, &member);
        let take = |looks_again| ship.take(7, looks_again).map(|it| it.number);
        ship.open(7);
        assert_eq!(take(false), None);
        assert!(append().wakes, "it sleeps");
        assert!(!append().wakes, "it was woken");
        assert_eq!(
            [take(true), take(true), take(true)],
            [Some(1), Some(2), None]
        );
        assert!(!append().wakes, "it looks again soon");
        assert!(awaits(3, 1) == Awaited::Later { wakes: true });
        assert!(awaits(3, 2) == Awaited::Later { wakes: false });
        assert!(!append().wakes);
        assert_eq!(
            [take(true), take(true), take(true)],
            [Some(3), Some(4), None]
        );
        let sent = awaits(4, 1);
        assert!(sent == Awaited::Later { wakes: false }, "it is on its way");
        ship.done(7, 4);
        assert!(awaits(4, 1) == Awaited::Done && member.wake.take());
        assert_eq!(take(false), None);
        assert!(append().wakes);
        ship.close();
        ship.open(8);
        assert_eq!(ship.take(8, false).map(|it| it.number), None);
    }
}
