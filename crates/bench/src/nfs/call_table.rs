//! Calls in flight. The xid of a call is its slot and a count, so that a late answer finds no other call.

use super::mix::Operation;

/// Most calls in flight. Their records take at most 70 MB. More calls wait in the schedule.
pub const CALLS_MAX: usize = 8192;

/// A call in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingCall {
    pub(crate) operation: Operation,
    /// The status of a right answer.
    pub(crate) expected: u32,
    /// The time at which it was due, in nanoseconds after the start.
    pub(crate) due_ns: u64,
    /// The time at which it was sent.
    pub(crate) sent_ns: u64,
    /// The directory and number of the file that it creates.
    pub(crate) creates: Option<(u32, u64)>,
}

pub(crate) struct CallTable {
    slots: Vec<(u16, Option<PendingCall>)>,
    free: Vec<u16>,
}

impl CallTable {
    pub(crate) fn new() -> CallTable {
        CallTable {
            slots: vec![(0, None); CALLS_MAX],
            free: (0..CALLS_MAX as u16).rev().collect(),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        CALLS_MAX - self.free.len()
    }

    /// Adds a call, and returns its xid; none if the table is full.
    pub(crate) fn add(&mut self, call: PendingCall) -> Option<u32> {
        let at = self.free.pop()?;
        let (count, slot) = &mut self.slots[usize::from(at)];
        *count = count.wrapping_add(1);
        *slot = Some(call);
        Some(u32::from(*count) << 16 | u32::from(at))
    }

    /// Removes the call of an answer; none if it is not in flight.
    pub(crate) fn take(&mut self, xid: u32) -> Option<PendingCall> {
        let at = (xid & 0xffff) as u16;
        let (count, slot) = self.slots.get_mut(usize::from(at))?;
        if u32::from(*count) != xid >> 16 {
            return None;
        }
        let call = slot.take()?;
        self.free.push(at);
        Some(call)
    }

    /// Removes the calls that were sent before this time.
    pub(crate) fn take_sent_before(&mut self, time_ns: u64) -> Vec<PendingCall> {
        let mut taken = Vec::new();
        for (at, (_, slot)) in self.slots.iter_mut().enumerate() {
            if let Some(call) = slot.take_if(|call| call.sent_ns < time_ns) {
                self.free.push(at as u16);
                taken.push(call);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(sent_ns: u64) -> PendingCall {
        PendingCall {
            operation: Operation::Read,
            expected: 0,
            due_ns: sent_ns,
            sent_ns,
            creates: None,
        }
    }

    #[test]
    fn late_answer_finds_no_other_call() {
        let mut table = CallTable::new();
        let first = table.add(call(1)).expect("room");
        assert_eq!(table.take_sent_before(2), [call(1)]);
        let second = table.add(call(3)).expect("room");
        assert_eq!(first & 0xffff, second & 0xffff, "the same slot");
        assert_eq!(table.take(first), None);
        assert_eq!(table.take(second), Some(call(3)));
        assert_eq!(table.take(second), None);
        assert_eq!(table.len(), 0);
        assert_eq!(table.take(u32::MAX), None);
    }

    #[test]
    fn full_table_takes_no_call() {
        let mut table = CallTable::new();
        (0..CALLS_MAX as u64).for_each(|n| assert!(table.add(call(n)).is_some()));
        assert!(table.is_full());
        assert_eq!(table.add(call(0)), None);
        assert_eq!(table.take_sent_before(10).len(), 10);
        assert_eq!(table.len(), CALLS_MAX - 10);
    }
}
