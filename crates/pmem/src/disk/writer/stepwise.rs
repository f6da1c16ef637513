//! The writes of a simulated disk: the same groups, in steps of one thread. A step never waits.

use super::{REQUESTS_MAX, WriteFailure, Writer, WriterTarget};

/// The first error of the group in flight.
pub(super) type SteppedGroup = Result<(), WriteFailure>;

/// The result of a step.
pub(in crate::disk) enum WriterStep {
    /// Nothing: there is nothing to do, or it waits for the device.
    None,
    /// Something.
    Some,
    /// It ended the writes of a group.
    Written(Result<(), WriteFailure>),
}

impl Writer {
    /// Whether the writes of a group are between two steps.
    pub(in crate::disk) fn is_in_group(&self) -> bool {
        self.stepped.is_some()
    }

    /// Begins a group, goes on with one, or ends it.
    pub(in crate::disk) fn step(&mut self, target: WriterTarget<'_>) -> WriterStep {
        let Some(result) = self.stepped.take() else {
            if !target.queue.try_next() {
                return WriterStep::None;
            }
            self.stepped = Some(self.start_group(target));
            return WriterStep::Some;
        };
        if self.free.len() == REQUESTS_MAX {
            return WriterStep::Written(result);
        }
        if !self.ring.has_ended() {
            self.stepped = Some(result);
            return WriterStep::None;
        }
        let reaped = self.reap(target);
        self.stepped = Some(result.and(reaped));
        if target.cache.has_room() {
            target.queue.signal_room();
        }
        WriterStep::Some
    }
}
