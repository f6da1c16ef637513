//! The calls of one export that wait for a worker: a queue for each connection, served in turn
//! (round robin). A turn has one call, or several short ones, so that their replies are sent together.
//! So a connection with many calls delays a call of another one by one turn.
//!
//! Invariants: `turns` has each connection with a queued call once. A connection has an entry while
//! it has queued or running calls. `calls` and `bytes` are the sums of the entries.

use crate::connection::ConnectionId;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::hash::DefaultHasher;
use std::time::{Duration, Instant};

/// The calls of one connection.
struct Share<T> {
    queued: VecDeque<T>,
    /// Calls, queued and running.
    calls: usize,
    /// Their bytes.
    bytes: usize,
    running: usize,
    /// The last time that a call ended, or the first one of several began to run.
    progress_at: Option<Instant>,
}

impl<T> Default for Share<T> {
    fn default() -> Self {
        Self {
            queued: VecDeque::new(),
            calls: 0,
            bytes: 0,
            running: 0,
            progress_at: None,
        }
    }
}

/// The calls and bytes that a queue or a connection has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallSum {
    pub(crate) calls: usize,
    pub(crate) bytes: usize,
}

impl CallSum {
    /// Whether a call with these bytes is within the bounds. A first call always is.
    pub(crate) fn fits(self, bytes: usize, calls_max: usize, bytes_max: usize) -> bool {
        self.calls == 0 || (self.calls < calls_max && self.bytes + bytes <= bytes_max)
    }
}

/// See the module.
pub(crate) struct FairQueue<T> {
    shares: HashMap<ConnectionId, Share<T>, BuildHasherDefault<DefaultHasher>>,
    turns: VecDeque<ConnectionId>,
    /// Calls of the first connection in this turn.
    served: usize,
    /// Calls, queued and running.
    all: CallSum,
    queued: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self {
            shares: HashMap::default(),
            turns: VecDeque::new(),
            served: 0,
            all: CallSum::default(),
            queued: 0,
        }
    }
}

impl<T> FairQueue<T> {
    /// The calls that wait.
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// All calls, queued and running.
    pub(crate) fn all(&self) -> CallSum {
        self.all
    }

    /// The calls of a connection, queued and running.
    pub(crate) fn of(&self, connection: ConnectionId) -> CallSum {
        let share = self.shares.get(&connection);
        share.map_or(CallSum::default(), |share| CallSum {
            calls: share.calls,
            bytes: share.bytes,
        })
    }

    /// Adds a call that runs at once.
    pub(crate) fn begin(&mut self, connection: ConnectionId, bytes: usize) {
        let share = self.shares.entry(connection).or_default();
        share.calls += 1;
        share.bytes += bytes;
        self.all.calls += 1;
        self.all.bytes += bytes;
    }

    /// Lets a call wait that [`begin`](Self::begin) has added.
    pub(crate) fn push(&mut self, connection: ConnectionId, call: T) {
        self.queued += 1;
        if let Some(share) = self.shares.get_mut(&connection) {
            if share.queued.is_empty() {
                self.turns.push_back(connection);
            }
            share.queued.push_back(call);
        }
    }

    /// The next call, which runs from now on. A turn has at most so many calls.
    pub(crate) fn pop(&mut self, turn_max: usize, now: Instant) -> Option<T> {
        let connection = *self.turns.front()?;
        let share = self.shares.get_mut(&connection)?;
        let call = share.queued.pop_front()?;
        if share.running == 0 {
            share.progress_at = Some(now);
        }
        share.running += 1;
        self.served += 1;
        if share.queued.is_empty() || self.served >= turn_max {
            self.served = 0;
            self.turns.pop_front();
            if !share.queued.is_empty() {
                self.turns.push_back(connection);
            }
        }
        self.queued -= 1;
        Some(call)
    }

    /// The calls at the front of all connections.
    pub(crate) fn fronts(&self) -> impl Iterator<Item = &T> {
        let shares = self.turns.iter().filter_map(|it| self.shares.get(it));
        shares.filter_map(|share| share.queued.front())
    }

    /// Whether calls of a connection run, and none of them has ended for so long.
    pub(crate) fn is_stalled(
        &self,
        connection: ConnectionId,
        limit: Duration,
        now: Instant,
    ) -> bool {
        let share = self.shares.get(&connection).filter(|it| it.running > 0);
        let progress_at = share.and_then(|share| share.progress_at);
        progress_at.is_some_and(|at| now.saturating_duration_since(at) >= limit)
    }

    /// Removes a call that has run.
    pub(crate) fn end(&mut self, connection: ConnectionId, bytes: usize, now: Instant) {
        let Some(share) = self.shares.get_mut(&connection) else {
            return;
        };
        share.running = share.running.saturating_sub(1);
        share.progress_at = Some(now);
        share.calls -= 1;
        share.bytes -= bytes;
        self.all.calls -= 1;
        self.all.bytes -= bytes;
        if share.calls == 0 {
            self.shares.remove(&connection);
        }
    }

    /// Removes all calls that wait, without their sums: the queue is not used any more.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.turns.clear();
        self.queued = 0;
        let queues = self.shares.values_mut().map(|share| &mut share.queued);
        queues.flat_map(std::mem::take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn push<T>(queue: &mut FairQueue<T>, connection: ConnectionId, bytes: usize, call: T) {
        queue.begin(connection, bytes);
        queue.push(connection, call);
    }

    #[test]
    fn connections_take_turns() {
        let mut queue = FairQueue::default();
        for number in 0..1000 {
            push(&mut queue, 1, 10, (1, number));
        }
        push(&mut queue, 2, 10, (2, 0));
        push(&mut queue, 3, 10, (3, 0));
        push(&mut queue, 2, 10, (2, 1));
        let first: Vec<_> = (0..6)
            .filter_map(|_| queue.pop(1, Instant::now()))
            .collect();
        assert_eq!(first, [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (1, 2)]);
        assert_eq!(queue.queued(), 997);
        assert_eq!(queue.all().calls, 1003, "running calls count");
    }

    #[test]
    fn connection_stalls_while_none_of_its_calls_ends() {
        let (start, limit) = (Instant::now(), Duration::from_secs(1));
        let at = |millis| start + Duration::from_millis(millis);
        let mut queue = FairQueue::default();
        (0..3).for_each(|number| push(&mut queue, 1, 10, number));
        push(&mut queue, 2, 10, 3);
        assert!(!queue.is_stalled(1, limit, at(9000)), "queued calls wait");
        assert!(queue.pop(1, at(9000)).is_some());
        assert!(queue.pop(1, at(9500)).is_some());
        assert!(!queue.is_stalled(1, limit, at(9999)));
        assert!(queue.is_stalled(1, limit, at(10_000)));
        queue.end(2, 10, at(10_000));
        assert!(queue.is_stalled(1, limit, at(10_000)), "another one's call");
        assert!(queue.pop(1, at(10_000)).is_some());
        queue.end(1, 10, at(10_100));
        assert!(!queue.is_stalled(1, limit, at(11_000)));
        assert!(queue.is_stalled(1, limit, at(11_100)));
        queue.end(1, 10, at(11_200));
        assert!(
            !queue.is_stalled(1, limit, at(99_000)),
            "a queued call is left"
        );
    }

    #[test]
    fn first_call_fits_any_bound() {
        assert!(CallSum::default().fits(100, 1, 10));
        let one = CallSum { calls: 1, bytes: 5 };
        assert!(one.fits(5, 2, 10));
        assert!(!one.fits(6, 2, 10));
        assert!(!one.fits(1, 1, 10));
    }

    proptest! {
        #[test]
        fn sums_and_order_match_a_model(
            steps in prop::collection::vec((0u8..4, 0u64..5, 0usize..100), 0..300),
            turn_max in 1usize..5,
        ) {
            let mut queue = FairQueue::default();
            let mut running: Vec<(u64, usize)> = Vec::new();
            let mut waiting: Vec<(u64, usize, usize)> = Vec::new();
            for (number, (action, connection, bytes)) in steps.into_iter().enumerate() {
                match action {
                    0 => {
                        queue.begin(connection, bytes);
                        running.push((connection, bytes));
                    }
                    1 => {
                        push(&mut queue, connection, bytes, (connection, bytes, number));
                        waiting.push((connection, bytes, number));
                    }
                    2 => {
                        let popped = queue.pop(turn_max, Instant::now());
                        prop_assert_eq!(popped.is_none(), waiting.is_empty());
                        if let Some(call) = popped {
                            let first = waiting.iter().position(|it| it.0 == call.0);
                            let first = first.map(|at| waiting.remove(at));
                            prop_assert_eq!(first, Some(call), "order of a connection");
                            running.push((call.0, call.1));
                        }
                    }
                    _ => {
                        if let Some((connection, bytes)) = running.pop() {
                            queue.end(connection, bytes, Instant::now());
                        }
                    }
                }
                let all = running.iter().copied().chain(waiting.iter().map(|it| (it.0, it.1)));
                let sum = |connection: Option<u64>| {
                    let of = all.clone().filter(|it| connection.is_none_or(|id| id == it.0));
                    of.fold(CallSum::default(), |sum, (_, bytes)| CallSum {
                        calls: sum.calls + 1,
                        bytes: sum.bytes + bytes,
                    })
                };
                prop_assert_eq!(queue.all(), sum(None));
                for connection in 0..5 {
                    prop_assert_eq!(queue.of(connection), sum(Some(connection)));
                }
                prop_assert_eq!(queue.queued(), waiting.len());
            }
            prop_assert_eq!(queue.drain().len(), waiting.len());
            prop_assert_eq!(queue.queued(), 0);
        }
    }
}
