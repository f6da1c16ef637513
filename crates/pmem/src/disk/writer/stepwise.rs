//! The writes of a simulated disk: the same groups, in steps of one thread. A step never waits.

use super::{REQUESTS_MAX, WriteFailure, Writer, WriterTarget};
use crate::disk::group_queue::BegunGroup;

/// A group whose writes are in flight, with the first error.
pub(super) type SteppedGroup = (BegunGroup, Result<(), WriteFailure>);

/// What a step did.
pub(in crate::disk) enum WriterStep {
    /// Nothing: there is nothing to do, or it waits for the device.
    None,
    /// Something.
    Some,
    /// It ended the writes of a group.
    Written(BegunGroup, Result<(), WriteFailure>),
}

impl Writer {
    /// Whether the writes of a group are between two steps.
    pub(in crate::disk) fn is_in_group(&self) -> bool {
        self.stepped.is_some()
    }

    /// Begins a group, goes on with one, or ends it.
    pub(in crate::disk) fn step(&mut self, target: WriterTarget<'_>) -> WriterStep {
        let Some((group, result)) = self.stepped.take() else {
            let Some(group) = target.queue.try_next() else {
                return WriterStep::None;
            };
            let started = self.start_group(target);
            self.stepped = Some((group, started));
            return WriterStep::Some;
        };
        if self.free.len() == REQUESTS_MAX {
            return WriterStep::Written(group, result);
        }
        if !self.ring.has_ended() {
            self.stepped = Some((group, result));
            return WriterStep::None;
        }
        let reaped = self.reap(target);
        self.stepped = Some((group, result.and(reaped)));
        if target.cache.has_room() {
            target.queue.signal_room();
        }
        WriterStep::Some
    }
}
