//! The changes that a leg which follows has yet to get, in their order.
//!
//! A change gets its number while its range is locked, after all legs that are
//! written have it and before it is acknowledged. So what has the numbers up to any one
//! is a state that the volume was in, and what was acknowledged before a change was
//! submitted has lower numbers than it.
//!
//! Invariants: whoever appends never waits here; what must wait is its
//! acknowledgement, for the number that it is told. Numbers are never used again. What
//! was appended for a leg that follows no more is dropped.

use crate::hub::{Member, guard};
use crate::limits::{SHIP_AGE_MAX, SHIP_BYTES_MAX, SHIP_CHANGES_MAX};
use crate::status::Lag;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::slice::{Part, SliceRequest};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a change costs beside its bytes.
const CHANGE_COST_BYTES: u64 = 128;

/// A change on its way to the leg that follows.
pub(crate) struct Shipment {
    pub number: u64,
    /// Its stamp is another leg's.
    pub change: SliceRequest,
}

#[derive(Default)]
struct Queue {
    /// Of the leg's connection; 0 if none follows.
    serial: u64,
    /// The number of the last change.
    last: u64,
    /// Not taken yet.
    waiting: VecDeque<Shipment>,
    /// Of all that are not done, with their numbers.
    costs: VecDeque<(u64, u64)>,
    cost: u64,
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
    /// What has a number up to this one is on the leg, durable as its pool's class
    /// promises; [`NOBODY`] if no leg follows, and nothing is waited for.
    done: AtomicU64,
}

const NOBODY: u64 = u64::MAX;

impl Default for Ship {
    fn default() -> Ship {
        Ship {
            queue: Mutex::default(),
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
        let mut queue = guard(&self.queue);
        if queue.serial != serial {
            return None;
        }
        queue.last += 1;
        let (number, cost) = (queue.last, cost(&change));
        queue.cost += cost;
        queue.costs.push_back((number, cost));
        let shipment = Shipment { number, change };
        match defect::is(Defect::ShippedOutOfOrder) {
            true => queue.waiting.push_front(shipment),
            false => queue.waiting.push_back(shipment),
        }
        let is_full = queue.cost > SHIP_BYTES_MAX || queue.costs.len() > SHIP_CHANGES_MAX;
        Some(Appended {
            number,
            must_wait: is_full || queue.is_late,
            wakes: queue.wake_if(|taker| taker == Taker::Sleeps),
        })
    }

    /// The number of the last change that was appended; 0 if no leg follows. Every
    /// durable write asks, so it takes no lock then.
    pub(crate) fn last(&self) -> u64 {
        match self.done.load(Ordering::Acquire) {
            NOBODY => 0,
            _ => guard(&self.queue).last,
        }
    }

    /// Whether what waits for this number need not wait any more.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        number <= self.done.load(Ordering::Acquire) || defect::is(Defect::DurableNotAwaited)
    }

    /// Wakes a member once this number is done. Each member waits for one.
    pub(crate) fn await_done(&self, number: u64, who: u32, member: &Arc<Member>) -> Awaited {
        let mut queue = guard(&self.queue);
        // Under the lock, so that no wake-up falls between.
        if self.is_done(number) {
            return Awaited::Done;
        }
        queue.waiters.insert(who, (number, Arc::clone(member)));
        let has_to_be_sent = !queue.waiting.is_empty();
        let wakes = has_to_be_sent && queue.wake_if(|taker| taker != Taker::Called);
        Awaited::Later { wakes }
    }

    /// A leg follows from the next change on.
    pub(crate) fn open(&self, serial: u64) {
        let mut queue = guard(&self.queue);
        queue.restart(serial);
        let last = queue.last;
        self.release(&mut queue, last);
    }

    /// No leg follows any more.
    pub(crate) fn close(&self) {
        let mut queue = guard(&self.queue);
        queue.restart(0);
        self.release(&mut queue, NOBODY);
    }

    /// The next change, for whoever has the leg's connection. If there is none, and it
    /// will look again soon, it is woken only for somebody who waits.
    pub(crate) fn take(&self, serial: u64, looks_again: bool) -> Option<Shipment> {
        let mut queue = guard(&self.queue);
        if queue.serial != serial {
            return None;
        }
        let next = queue.waiting.pop_front();
        queue.taker = match (&next, looks_again) {
            (Some(_), _) => Taker::Called,
            (None, true) => Taker::Lingers,
            (None, false) => Taker::Sleeps,
        };
        next
    }

    /// The leg has everything up to a number.
    pub(crate) fn done(&self, serial: u64, number: u64) {
        let mut queue = guard(&self.queue);
        if queue.serial != serial {
            return;
        }
        while let Some(&(first, cost)) = queue.costs.front()
            && first <= number
        {
            queue.costs.pop_front();
            queue.cost -= cost;
        }
        while queue.seen.front().is_some_and(|&(last, _)| last <= number) {
            queue.seen.pop_front();
        }
        self.release(&mut queue, number);
    }

    /// Lets time pass.
    pub(crate) fn look(&self, now: Duration) {
        let mut queue = guard(&self.queue);
        let (last, is_empty) = (queue.last, queue.costs.is_empty());
        if !is_empty && queue.seen.back().is_none_or(|&(seen, _)| seen < last) {
            queue.seen.push_back((last, now));
        }
        let oldest = queue.seen.front();
        queue.is_late = oldest.is_some_and(|&(_, at)| now.saturating_sub(at) > SHIP_AGE_MAX);
    }

    /// Whether somebody waits for what the leg has to flush first.
    pub(crate) fn is_awaited(&self) -> bool {
        !guard(&self.queue).waiters.is_empty()
    }

    /// Whether there is a change that the leg has yet to get.
    pub(crate) fn is_behind(&self) -> bool {
        !guard(&self.queue).costs.is_empty()
    }

    /// A member is gone.
    pub(crate) fn forget(&self, who: u32) {
        guard(&self.queue).waiters.remove(&who);
    }

    /// What the leg has yet to get; none if none follows.
    pub(crate) fn lag(&self, now: Duration) -> Option<Lag> {
        let queue = guard(&self.queue);
        let since = queue.seen.front().map_or(now, |&(_, at)| at);
        (queue.serial != 0).then(|| Lag {
            changes: queue.costs.len() as u64,
            bytes: queue.cost - queue.costs.len() as u64 * CHANGE_COST_BYTES,
            age_us: now.saturating_sub(since).as_micros() as u64,
        })
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

    fn restart(&mut self, serial: u64) {
        self.serial = serial;
        self.waiting.clear();
        self.costs.clear();
        self.cost = 0;
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
