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
    /// The taker has found nothing, and waits to be woken.
    is_asleep: bool,
    /// Who waits for which number, by member.
    waiters: BTreeMap<u32, (u64, Arc<Member>)>,
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
            wakes: std::mem::replace(&mut queue.is_asleep, false),
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

    /// Wakes a member once this number is done; false if it is already. Each member
    /// waits for one.
    pub(crate) fn await_done(&self, number: u64, who: u32, member: &Arc<Member>) -> bool {
        let mut queue = guard(&self.queue);
        // Under the lock, so that no wake-up falls between.
        if self.is_done(number) {
            return false;
        }
        queue.waiters.insert(who, (number, Arc::clone(member)));
        true
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

    /// The next change, for whoever has the leg's connection.
    pub(crate) fn take(&self, serial: u64) -> Option<Shipment> {
        let mut queue = guard(&self.queue);
        if queue.serial != serial {
            return None;
        }
        let next = queue.waiting.pop_front();
        queue.is_asleep = next.is_none();
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
    fn restart(&mut self, serial: u64) {
        self.serial = serial;
        self.waiting.clear();
        self.costs.clear();
        self.cost = 0;
        self.seen.clear();
        self.is_late = false;
        self.is_asleep = false;
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
