//! Groups of the writer, and callers that wait for them.

use super::group_queue::{GroupNo, InlineFlush};
use super::parts::{DiskParts, or_panicked};
use super::writer::{WriteFailure, Writer, WriterTarget, flush_devices};
use crate::map_error::MapError;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison::lock;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

impl DiskParts {
    pub(super) fn target(&self) -> WriterTarget<'_> {
        WriterTarget {
            devices: &self.devices,
            cache: &self.cache,
            queue: &self.queue,
        }
    }

    /// Writes a group that was begun.
    pub(super) fn run_group(&self) {
        let result = or_panicked(|| lock(&self.writer).write_group(self.target()));
        self.end_writes(&result);
    }

    /// The writes of a group have ended.
    pub(super) fn end_writes(&self, result: &Result<(), WriteFailure>) {
        if let Err(failure) = result {
            self.note_unwritten(failure);
        }
        self.queue.end_writes(result.is_ok());
    }

    /// Flushes the groups that were written, up to a number.
    pub(super) fn flush(&self, number: u64) {
        let began = Instant::now();
        let result = match is_flush_skipped(number) {
            false => or_panicked(|| flush_devices(&self.devices)),
            true => Ok(()),
        };
        // A simulation does not depend on the clock.
        let took = match self.devices.is_simulated() {
            false => began.elapsed(),
            true => Duration::ZERO,
        };
        self.end_flush(number, &result, took);
    }

    pub(super) fn end_flush(&self, number: u64, result: &Result<(), WriteFailure>, took: Duration) {
        if let Err(failure) = result {
            self.note_unwritten(failure);
        }
        self.queue.end_flush(number, result.is_ok(), took);
    }

    /// Waits for the end of a group.
    pub(super) fn wait_for_group(&self, group: GroupNo) -> Result<(), MapError> {
        #[cfg(feature = "test-api")]
        if self.devices.is_simulated() {
            return self.wait_in_steps(group);
        }
        self.queue.wait(group)
    }

    /// Locks the writer while no group is written.
    pub(super) fn lock_writer(&self) -> MutexGuard<'_, Writer> {
        #[cfg(feature = "test-api")]
        if self.devices.is_simulated() {
            self.finish_writes();
        }
        lock(&self.writer)
    }

    pub(super) fn wait_for_cleaning(&self) -> bool {
        #[cfg(feature = "test-api")]
        if self.devices.is_simulated() {
            return self.clean_in_steps();
        }
        self.queue.wait_for_cleaning()
    }

    /// Writes all dirty pages on this thread, if no group is running.
    pub(super) fn try_write_inline(&self) -> bool {
        let begins = self.allows_inline() && self.queue.try_begin();
        if begins {
            self.run_group();
        }
        begins
    }

    /// Flushes all writes that have ended on this thread. False: the flusher must do it.
    pub(super) fn try_flush_inline(&self) -> bool {
        if !self.allows_inline() {
            return false;
        }
        match self.queue.try_begin_flush() {
            InlineFlush::Unneeded => true,
            InlineFlush::Begun(number) => {
                self.flush(number);
                true
            }
            InlineFlush::Left => false,
        }
    }

    /// Whether a user may write and flush on its own thread. In a simulation the writer and the flusher do it, in steps.
    fn allows_inline(&self) -> bool {
        #[cfg(feature = "test-api")]
        return self.devices.allows_inline();
        #[cfg(not(feature = "test-api"))]
        true
    }
}

/// Whether a defect takes the FLUSH of a group.
pub(super) fn is_flush_skipped(number: u64) -> bool {
    defect::is(Defect::SecondFlushSkipped) && number.is_multiple_of(2)
}
