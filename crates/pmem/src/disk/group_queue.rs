//! The order of groups: their writes, one group after the other, and the FLUSHes after them.
//!
//! The writes of a group run while an earlier group is flushed. One FLUSH serves all groups that were written when it
//! began.
//!
//! Invariants: the writes of two groups do not overlap, so a page has at most one request. FLUSHes do not overlap. A
//! failed request or FLUSH fails this group and each later one.

use crate::map_error::MapError;
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::poison::{lock, recover};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// A FLUSH of a device that takes longer is left to the flusher: the caller has other requests to serve.
const INLINE_FLUSH_MAX: Duration = Duration::from_micros(500);

/// The end of a group that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupNo {
    number: u64,
    end: GroupEnd,
}

/// The end of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupEnd {
    /// Its pages are on the device.
    Written,
    /// A FLUSH has followed.
    Flush,
}

/// The groups that are asked for, and those that have ended.
#[derive(Default)]
pub(super) struct WriterQueue {
    state: Mutex<WriterState>,
    /// The writer waits here.
    work: Condvar,
    /// The flusher waits here.
    flush_work: Condvar,
    /// Callers wait here.
    ended: Condvar,
}

#[derive(Default)]
struct WriterState {
    /// The last group that began its writes.
    started: u64,
    /// The last group that ended its writes.
    written: u64,
    /// The last written group that must be flushed.
    flush_due: u64,
    /// A FLUSH has followed the writes of all groups up to this one.
    flushed: u64,
    is_flushing: bool,
    /// The last group that somebody waits for.
    wanted: u64,
    /// The last group that must end with a FLUSH.
    flush_wanted: u64,
    /// Whether a group without FLUSH is wanted, because the cache fills up.
    is_cleaning_wanted: bool,
    is_stopping: bool,
    has_failed: bool,
    /// The time of recent FLUSHes.
    flush_took: Duration,
    /// Callers that wait for the end of a group. Without any, a wake-up would be a system call for nobody.
    waiting_callers: u32,
    signals: Vec<(GroupNo, Arc<EventFd>)>,
    /// Signaled when pages were written.
    room_signals: Vec<Arc<EventFd>>,
}

/// A group that was begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct BegunGroup {
    end: GroupEnd,
    /// Whether its thread flushes as well.
    flushes_itself: bool,
}

impl WriterQueue {
    /// Asks for a group that begins after this call and ends with a FLUSH.
    pub(super) fn request_flush(&self) -> GroupNo {
        let group = lock(&self.state).want(GroupEnd::Flush);
        self.work.notify_one();
        group
    }

    /// Asks for a group that begins after this call, and signals `ended` at its end.
    pub(super) fn request(&self, end: GroupEnd, ended: &Arc<EventFd>) -> GroupNo {
        let mut state = lock(&self.state);
        let group = state.want(end);
        if state.has_failed {
            ended.signal();
        } else {
            state.signals.push((group, ended.clone()));
        }
        self.work.notify_one();
        group
    }

    /// The result of a group that was asked for, once it has ended.
    pub(super) fn result(&self, group: GroupNo) -> Option<Result<(), MapError>> {
        lock(&self.state).result_of(group)
    }

    /// Waits for the end of a group.
    pub(super) fn wait(&self, group: GroupNo) -> Result<(), MapError> {
        let mut state = lock(&self.state);
        loop {
            if let Some(result) = state.result_of(group) {
                return result;
            }
            state = self.wait_for_end(state);
        }
    }

    fn wait_for_end<'s>(
        &self,
        mut state: MutexGuard<'s, WriterState>,
    ) -> MutexGuard<'s, WriterState> {
        state.waiting_callers += 1;
        let mut state = recover(self.ended.wait(state));
        state.waiting_callers -= 1;
        state
    }

    /// Asks for a group without FLUSH.
    pub(super) fn request_cleaning(&self) {
        let mut state = lock(&self.state);
        if !state.is_cleaning_wanted {
            state.is_cleaning_wanted = true;
            self.work.notify_one();
        }
    }

    /// Asks for a group without FLUSH, and signals `written` when some pages were written.
    pub(super) fn request_room(&self, written: &Arc<EventFd>) {
        let mut state = lock(&self.state);
        if state.has_failed {
            written.signal();
            return;
        }
        state.room_signals.push(written.clone());
        state.is_cleaning_wanted = true;
        self.work.notify_one();
    }

    /// Signals callers that wait for room.
    pub(super) fn signal_room(&self) {
        let signals = std::mem::take(&mut lock(&self.state).room_signals);
        signals.iter().for_each(|signal| signal.signal());
    }

    /// Asks for a group, and waits until one was written. False: the writer has failed.
    pub(super) fn wait_for_cleaning(&self) -> bool {
        let mut state = lock(&self.state);
        let seen = state.written;
        state.is_cleaning_wanted = true;
        self.work.notify_one();
        while state.written == seen && !state.has_failed {
            state = self.wait_for_end(state);
        }
        !state.has_failed
    }

    /// Whether every later sync fails.
    pub(super) fn has_failed(&self) -> bool {
        lock(&self.state).has_failed
    }

    /// Fails all waits, now and later.
    pub(super) fn fail(&self) {
        let mut state = lock(&self.state);
        state.has_failed = true;
        self.tell(state);
    }

    /// Ends the writer and the flusher after their current groups.
    pub(super) fn stop(&self) {
        lock(&self.state).is_stopping = true;
        self.work.notify_one();
        self.flush_work.notify_one();
    }

    /// Waits for work, and begins a group. None: the writer ends.
    pub(super) fn next(&self) -> Option<BegunGroup> {
        let mut state = lock(&self.state);
        loop {
            if let Some(group) = state.begin_wanted() {
                return Some(group);
            }
            if state.started == state.written && state.is_stopping {
                return None;
            }
            state = recover(self.work.wait(state));
        }
    }

    /// Begins a group for the caller to write, if none is running. It saves the hand-over to the writer and back.
    pub(super) fn try_begin(&self, end: GroupEnd) -> Option<BegunGroup> {
        let mut state = lock(&self.state);
        if state.started != state.written || state.has_failed || state.is_stopping {
            return None;
        }
        if end == GroupEnd::Flush {
            let is_busy = state.is_flushing || state.flush_due > state.flushed;
            if is_busy || state.flush_took > INLINE_FLUSH_MAX {
                return None;
            }
            state.flush_wanted = state.started + 1;
        }
        Some(state.begin(end == GroupEnd::Flush))
    }

    /// The writes of a group have ended. Returns its number if the caller flushes it.
    pub(super) fn end_writes(&self, group: BegunGroup, is_done: bool) -> Option<u64> {
        let mut state = lock(&self.state);
        state.written = state.started;
        state.has_failed |= !is_done;
        let mut to_flush = None;
        if group.end == GroupEnd::Flush && is_done {
            match group.flushes_itself {
                true => {
                    state.is_flushing = true;
                    to_flush = Some(state.written);
                }
                false => {
                    state.flush_due = state.written;
                    self.flush_work.notify_one();
                }
            }
        }
        if state.wanted > state.written || state.is_cleaning_wanted || state.is_stopping {
            self.work.notify_one();
        }
        if state.is_stopping {
            self.flush_work.notify_one();
        }
        self.tell(state);
        to_flush
    }

    /// Waits for a written group that must be flushed. None: the flusher ends.
    pub(super) fn next_flush(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        loop {
            if let Some(number) = state.begin_flush() {
                return Some(number);
            }
            if state.is_stopping && !state.is_flush_due() && state.started == state.written {
                return None;
            }
            state = recover(self.flush_work.wait(state));
        }
    }

    /// A FLUSH that began after the writes of a group has ended.
    pub(super) fn end_flush(&self, number: u64, is_done: bool, took: Duration) {
        let mut state = lock(&self.state);
        state.is_flushing = false;
        state.flush_took = (state.flush_took * 7 + took) / 8;
        state.has_failed |= !is_done;
        if is_done {
            state.flushed = state.flushed.max(number);
        }
        if state.flush_due > state.flushed || state.is_stopping {
            self.flush_work.notify_one();
        }
        self.tell(state);
    }

    /// Begins a group, if one is wanted and none is running.
    #[cfg(feature = "test-api")]
    pub(super) fn try_next(&self) -> Option<BegunGroup> {
        lock(&self.state).begin_wanted()
    }

    /// Begins a FLUSH, if one is due and none is running.
    #[cfg(feature = "test-api")]
    pub(super) fn try_next_flush(&self) -> Option<u64> {
        lock(&self.state).begin_flush()
    }

    /// Asks for a group that begins after this call, without FLUSH.
    #[cfg(feature = "test-api")]
    pub(super) fn request_group(&self) -> GroupNo {
        lock(&self.state).want(GroupEnd::Written)
    }

    /// Wakes those whose groups have ended.
    fn tell(&self, mut state: MutexGuard<'_, WriterState>) {
        let (failed, written, flushed) = (state.has_failed, state.written, state.flushed);
        let has_ended = |group: GroupNo| match group.end {
            _ if failed => true,
            GroupEnd::Written => group.number <= written,
            GroupEnd::Flush => group.number <= flushed,
        };
        let signals = &mut state.signals;
        let over = signals.extract_if(.., |(group, _)| has_ended(*group));
        let over: Vec<_> = over.collect();
        let room = std::mem::take(&mut state.room_signals);
        if state.waiting_callers > 0 {
            self.ended.notify_all();
        }
        drop(state);
        room.iter().for_each(|signal| signal.signal());
        over.iter().for_each(|(_, signal)| signal.signal());
    }
}

impl WriterState {
    /// Asks for the next group.
    fn want(&mut self, end: GroupEnd) -> GroupNo {
        let number = self.started + 1;
        self.wanted = self.wanted.max(number);
        if end == GroupEnd::Flush {
            self.flush_wanted = self.flush_wanted.max(number);
        }
        GroupNo { number, end }
    }

    /// Begins a group for the writer, if one is wanted and none is running.
    fn begin_wanted(&mut self) -> Option<BegunGroup> {
        let is_idle = self.started == self.written;
        let is_wanted = self.wanted > self.written || self.is_cleaning_wanted;
        (is_idle && is_wanted).then(|| self.begin(false))
    }

    fn is_flush_due(&self) -> bool {
        self.flush_due > self.flushed && !self.has_failed
    }

    /// Begins a FLUSH, if one is due and none is running. Returns the last group that it serves.
    fn begin_flush(&mut self) -> Option<u64> {
        if self.is_flushing || !self.is_flush_due() {
            return None;
        }
        self.is_flushing = true;
        Some(self.flush_due)
    }

    /// Begins the next group.
    fn begin(&mut self, flushes_itself: bool) -> BegunGroup {
        self.started += 1;
        self.is_cleaning_wanted = false;
        let end = match self.flush_wanted >= self.started {
            true => GroupEnd::Flush,
            false => GroupEnd::Written,
        };
        BegunGroup {
            end,
            flushes_itself,
        }
    }

    fn result_of(&self, group: GroupNo) -> Option<Result<(), MapError>> {
        if self.has_failed {
            return Some(Err(MapError::SyncFailed));
        }
        let ended = match group.end {
            GroupEnd::Written => self.written,
            GroupEnd::Flush => self.flushed,
        };
        (ended >= group.number).then_some(Ok(()))
    }
}

/// A FLUSH that is in flight between two steps.
#[cfg(feature = "test-api")]
pub(super) struct SteppedFlush {
    /// The last group that it serves.
    pub(super) group: u64,
    /// Its number on the device.
    pub(super) number: u64,
}
