//! The operations of one channel on one column that may be incomplete on some leg. A stamp's
//! `open_ops` is computed from them.
//!
//! An operation is complete when every leg acknowledged it and, where legs buffer, flushed it.
//! Operations enter in rising order.

use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpState {
    InFlight,
    /// Acknowledged by all legs. A flush with a higher number completes it.
    Acknowledged(u64),
    Complete,
}

#[derive(Debug, Default)]
pub(crate) struct InFlightWindow {
    ops: VecDeque<(u64, OpState)>,
    acknowledged: usize,
    flushes: u64,
}

impl InFlightWindow {
    pub(crate) fn insert(&mut self, op: u64) {
        debug_assert!(self.ops.back().is_none_or(|(last, _)| *last < op));
        self.ops.push_back((op, OpState::InFlight));
    }

    /// The distance from `op` to the oldest operation that may be incomplete.
    pub(crate) fn open_distance(&self, op: u64) -> u32 {
        let oldest = self.ops.front().map_or(op, |(oldest, _)| *oldest);
        u32::try_from(op.saturating_sub(oldest)).unwrap_or(u32::MAX)
    }

    /// Marks the operation as acknowledged by every leg. That completes it if no leg buffers.
    pub(crate) fn acknowledge(&mut self, op: u64, buffered: bool) {
        self.set(op, OpState::Complete, buffered);
    }

    /// Removes an operation that will not be sent any more.
    pub(crate) fn remove(&mut self, op: u64) {
        self.set(op, OpState::Complete, false);
    }

    /// Starts a flush. It covers the operations that are acknowledged by now.
    pub(crate) fn start_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }

    /// Completes the operations that the flush covers; every leg has flushed.
    pub(crate) fn flushed(&mut self, flush: u64) {
        for (_, state) in &mut self.ops {
            if matches!(state, OpState::Acknowledged(after) if *after < flush) {
                *state = OpState::Complete;
                self.acknowledged -= 1;
            }
        }
        self.trim();
    }

    pub(crate) fn unflushed_count(&self) -> usize {
        self.acknowledged
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    fn set(&mut self, op: u64, mut to: OpState, buffered: bool) {
        if let Ok(at) = self.ops.binary_search_by_key(&op, |(op, _)| *op) {
            if matches!(self.ops[at].1, OpState::Acknowledged(_)) {
                self.acknowledged -= 1;
            }
            if buffered {
                self.acknowledged += 1;
                to = OpState::Acknowledged(self.flushes);
            }
            self.ops[at].1 = to;
        }
        self.trim();
    }

    fn trim(&mut self) {
        while matches!(self.ops.front(), Some((_, OpState::Complete))) {
            self.ops.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_distance_reaches_oldest_incomplete_op() {
        let mut window = InFlightWindow::default();
        for op in [10, 12, 15] {
            window.insert(op);
        }
        assert_eq!(window.open_distance(15), 5);
        window.acknowledge(12, false);
        assert_eq!(window.open_distance(15), 5);
        window.acknowledge(10, false);
        assert_eq!(window.open_distance(15), 0);
        window.remove(15);
        assert_eq!(window.open_distance(20), 0);
    }

    #[test]
    fn buffered_ops_complete_at_later_flush() {
        let mut window = InFlightWindow::default();
        window.insert(1);
        window.insert(2);
        window.acknowledge(1, true);
        let flush = window.start_flush();
        window.acknowledge(2, true);
        window.flushed(flush);
        assert_eq!((window.open_distance(3), window.unflushed_count()), (1, 1));
        let flush = window.start_flush();
        window.flushed(flush);
        assert_eq!(window.open_distance(3), 0);
    }
}
