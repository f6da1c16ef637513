//! The order of groups: their writes, one group after the other, and the FLUSHes after them.
//!
//! The writes of a group run while an earlier group is flushed. One FLUSH serves all groups that were written when it
//! began. A user's flush needs no group of its own: it follows the writes that were answered, and the user's earlier ones.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GroupNo {
    number: u64,
    end: GroupEnd,
}

/// The end of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// Whether a FLUSH must follow the group that runs.
    flushes_running: bool,
    /// Whether a FLUSH must follow the next group.
    flushes_next: bool,
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

impl Default for WriterState {
    /// The group before the first has ended its writes: an earlier process may have left writes that were not flushed.
    fn default() -> WriterState {
        WriterState {
            started: 1,
            written: 1,
            flush_due: 0,
            flushed: 0,
            is_flushing: false,
            wanted: 0,
            flushes_running: false,
            flushes_next: false,
            is_cleaning_wanted: false,
            is_stopping: false,
            has_failed: false,
            flush_took: Duration::ZERO,
            waiting_callers: 0,
            signals: Vec::new(),
            room_signals: Vec::new(),
        }
    }
}

/// The way of a flush of a caller without other requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InlineFlush {
    /// Nothing: no write has ended since the last FLUSH began.
    Unneeded,
    /// It runs the FLUSH, which serves all groups up to this one.
    Begun(u64),
    /// It leaves the FLUSH to the flusher.
    Left,
}

impl WriterQueue {
    /// Asks for a group that begins after this call and ends with a FLUSH.
    pub(super) fn request_flush(&self) -> GroupNo {
        let group = lock(&self.state).want(GroupEnd::Flush);
        self.work.notify_one();
        group
    }

    /// Asks for a group that begins after this call, and signals `ended` after its writes.
    pub(super) fn request_write(&self, ended: &Arc<EventFd>) -> GroupNo {
        self.request_and_signal(GroupEnd::Written, ended)
    }

    /// As [`WriterQueue::request_flush`], and signals `ended` after the FLUSH.
    pub(super) fn request_durable_write(&self, ended: &Arc<EventFd>) -> GroupNo {
        self.request_and_signal(GroupEnd::Flush, ended)
    }

    fn request_and_signal(&self, end: GroupEnd, ended: &Arc<EventFd>) -> GroupNo {
        let mut state = lock(&self.state);
        let group = state.want(end);
        state.signal_at(group, ended);
        self.work.notify_one();
        group
    }

    /// Asks for a FLUSH after all ended writes and the writes of `earlier`. Signals `ended` at its end.
    pub(super) fn request_flush_of_written(
        &self,
        earlier: Option<GroupNo>,
        ended: &Arc<EventFd>,
    ) -> GroupNo {
        let mut state = lock(&self.state);
        let group = state.want_flush_of_written(earlier);
        state.signal_at(group, ended);
        self.flush_work.notify_one();
        group
    }

    /// The result of a group that was asked for, once it has ended.
    #[cfg(any(test, feature = "test-api"))]
    pub(super) fn result(&self, group: GroupNo) -> Option<Result<(), MapError>> {
        lock(&self.state).result_of(group)
    }

    /// Moves the tags and results of groups that have ended.
    pub(super) fn take_ended(
        &self,
        groups: &mut Vec<(u64, GroupNo)>,
        ended: &mut Vec<(u64, Result<(), MapError>)>,
    ) {
        let state = lock(&self.state);
        groups.retain(|&(tag, group)| match state.result_of(group) {
            Some(result) => {
                ended.push((tag, result));
                false
            }
            None => true,
        });
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

    /// Waits for work, and begins a group. False: the writer ends.
    pub(super) fn next(&self) -> bool {
        let mut state = lock(&self.state);
        loop {
            if state.begin_wanted() {
                return true;
            }
            if state.started == state.written && state.is_stopping {
                return false;
            }
            state = recover(self.work.wait(state));
        }
    }

    /// Begins a group for the caller to write, if none is running. It saves the hand-over to the writer and back.
    pub(super) fn try_begin(&self) -> bool {
        let mut state = lock(&self.state);
        let is_idle = state.started == state.written;
        let begins = is_idle && !state.has_failed && !state.is_stopping;
        if begins {
            state.begin();
        }
        begins
    }

    /// Begins a FLUSH of all writes that have ended, for the caller to run, if none is running and FLUSHes are short.
    pub(super) fn try_begin_flush(&self) -> InlineFlush {
        let mut state = lock(&self.state);
        if state.has_failed || state.is_stopping {
            return InlineFlush::Left;
        }
        if state.flushed >= state.written {
            return InlineFlush::Unneeded;
        }
        let is_busy = state.is_flushing || state.flush_due > state.flushed;
        if is_busy || state.flush_took > INLINE_FLUSH_MAX {
            return InlineFlush::Left;
        }
        state.is_flushing = true;
        InlineFlush::Begun(state.written)
    }

    /// The writes of a group have ended.
    pub(super) fn end_writes(&self, is_done: bool) {
        let mut state = lock(&self.state);
        state.written = state.started;
        state.has_failed |= !is_done;
        if std::mem::take(&mut state.flushes_running) && is_done {
            state.flush_due = state.written;
            self.flush_work.notify_one();
        }
        if state.wanted > state.written || state.is_cleaning_wanted || state.is_stopping {
            self.work.notify_one();
        }
        if state.is_stopping {
            self.flush_work.notify_one();
        }
        self.tell(state);
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
    pub(super) fn try_next(&self) -> bool {
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
        self.flushes_next |= end == GroupEnd::Flush;
        GroupNo { number, end }
    }

    /// Asks for a FLUSH after all ended writes and the writes of a requested group.
    fn want_flush_of_written(&mut self, earlier: Option<GroupNo>) -> GroupNo {
        let earlier = earlier.map_or(0, |group| group.number);
        let number = self.written.max(earlier);
        if number > self.started {
            self.flushes_next = true;
        } else if number > self.written {
            self.flushes_running = true;
        } else if number > self.flushed {
            self.flush_due = self.flush_due.max(number);
        }
        GroupNo {
            number,
            end: GroupEnd::Flush,
        }
    }

    fn signal_at(&mut self, group: GroupNo, ended: &Arc<EventFd>) {
        match self.result_of(group) {
            Some(_) => ended.signal(),
            None => self.signals.push((group, ended.clone())),
        }
    }

    /// Begins a group for the writer, if one is wanted and none is running.
    fn begin_wanted(&mut self) -> bool {
        let is_idle = self.started == self.written;
        let begins = is_idle && (self.wanted > self.written || self.is_cleaning_wanted);
        if begins {
            self.begin();
        }
        begins
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
        Some(self.written)
    }

    /// Begins the next group.
    fn begin(&mut self) {
        self.started += 1;
        self.flushes_running = std::mem::take(&mut self.flushes_next);
        self.is_cleaning_wanted = false;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn signal() -> Arc<EventFd> {
        Arc::new(EventFd::new().expect("a descriptor"))
    }

    /// Whether a group has succeeded, once it has ended.
    fn outcome(queue: &WriterQueue, group: GroupNo) -> Option<bool> {
        queue.result(group).map(|result| result.is_ok())
    }

    /// A queue whose first group was flushed.
    fn flushed_queue() -> WriterQueue {
        let queue = WriterQueue::default();
        assert_eq!(queue.try_begin_flush(), InlineFlush::Begun(1));
        queue.end_flush(1, true, Duration::ZERO);
        queue
    }

    #[test]
    fn first_flush_covers_earlier_process() {
        let queue = WriterQueue::default();
        let flush = queue.request_flush_of_written(None, &signal());
        assert_eq!(outcome(&queue, flush), None);
        assert_eq!(queue.next_flush(), Some(1));
        queue.end_flush(1, true, Duration::ZERO);
        assert_eq!(outcome(&queue, flush), Some(true));
    }

    #[test]
    fn flush_without_new_writes_needs_no_flush() {
        let queue = flushed_queue();
        assert_eq!(queue.try_begin_flush(), InlineFlush::Unneeded);
        let flush = queue.request_flush_of_written(None, &signal());
        assert_eq!(outcome(&queue, flush), Some(true));
    }

    #[test]
    fn flush_waits_for_no_group_of_others() {
        let queue = flushed_queue();
        assert!(queue.try_begin());
        queue.end_writes(true);
        // The writes of another group are running.
        assert!(queue.try_begin());
        let flush = queue.request_flush_of_written(None, &signal());
        assert_eq!(queue.next_flush(), Some(2));
        queue.end_flush(2, true, Duration::ZERO);
        assert_eq!(outcome(&queue, flush), Some(true));
        queue.end_writes(true);
        assert_eq!(queue.try_begin_flush(), InlineFlush::Begun(3));
    }

    #[test]
    fn flush_covers_own_earlier_write() {
        let queue = flushed_queue();
        assert!(queue.try_begin());
        // It belongs to the group after the one that runs.
        let write = queue.request_write(&signal());
        let flush = queue.request_flush_of_written(Some(write), &signal());
        queue.end_writes(true);
        assert!(
            !lock(&queue.state).is_flush_due(),
            "the group does not hold the write"
        );
        assert!(queue.next());
        queue.end_writes(true);
        assert_eq!(outcome(&queue, write), Some(true));
        assert_eq!(outcome(&queue, flush), None);
        assert_eq!(queue.next_flush(), Some(3));
        queue.end_flush(3, true, Duration::ZERO);
        assert_eq!(outcome(&queue, flush), Some(true));
    }

    #[test]
    fn flush_fails_after_failed_group() {
        let queue = flushed_queue();
        assert!(queue.try_begin());
        let write = queue.request_write(&signal());
        let flush = queue.request_flush_of_written(Some(write), &signal());
        queue.end_writes(false);
        assert_eq!(outcome(&queue, flush), Some(false));
        assert_eq!(queue.try_begin_flush(), InlineFlush::Left);
    }
}
