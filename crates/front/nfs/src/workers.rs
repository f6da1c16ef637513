//! The calls of one export, and the threads that run them.
//!
//! All calls go to the queue. The polling thread that has read them runs them itself if calls of the
//! export are short, or one call is the only one: a handover to another thread would cost more.
//! Workers of the export take the others, and those behind a call that turns out to be slow.
//! [`sizing`] decides the number of workers.
//!
//! An export has hard shares of everything: workers, queued calls and their bytes. A polling thread
//! runs no call of an export with a slow one, and one polling thread never runs calls. So a stalled
//! export stops no other one, and neither the other calls of its connections.

pub(crate) mod call_figures;
pub(crate) mod fair_queue;
pub(crate) mod figures;
pub(crate) mod processors;
pub(crate) mod queued_call;
pub(crate) mod shares;
pub(crate) mod sizing;
mod supervision;
pub(crate) mod unsent_replies;
mod waiting_connections;
pub(crate) mod write_order;

pub(crate) use queued_call::{EndedWork, QueuedCall};
pub(crate) use shares::{InlineBudget, Shares};

use crate::connection::{Connection, ConnectionId};
use crate::limits::{
    CONNECTION_STALL_LIMIT, EXPORT_CALLS_MAX, MEAN_CALLS, QUEUE_WAIT_LIMIT, SHARE_BYTES_MAX,
    SHARE_CALLS_MAX, SHORT_CALL, STALL_LIMIT, TURN_CALLS, WORKER_IDLE_LIMIT,
};
use crate::rpc::Reply;
use call_figures::{CallCells, EndedCall};
use fair_queue::FairQueue;
use pagemesh_base::poison;
use sizing::Sizing;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};
use unsent_replies::{SendTime, UnsentReplies};
use waiting_connections::WaitingConnections;
use write_order::WriteOrder;

/// The result of [`ExportWorkers::submit`].
pub(crate) enum Submitted {
    /// It waits for a worker. The flag says that no worker is free.
    Queued { needs_worker: bool },
    /// It waits for the caller, see [`ExportWorkers::take_inline`].
    Deferred,
    /// The share of the connection or the export is used. The connection is resumed when there is
    /// room.
    Full { call: QueuedCall },
    /// The share is used in a stall. The client gets this reply, and tries again later.
    Refused { call: QueuedCall, reply: Reply },
}

/// The next duty of a worker.
pub(crate) enum Work {
    Call(QueuedCall),
    SendReplies(UnsentReplies),
    /// Drop the pins that are not used.
    SweepPins,
    End,
}

#[derive(Clone, Copy, Default)]
struct WorkerSlot {
    is_used: bool,
    /// The thread id of the system.
    thread: u32,
    is_in_call: bool,
}

struct IdleWorker {
    slot: usize,
    thread: Thread,
}

struct WorkersState {
    queue: FairQueue<QueuedCall>,
    writes: WriteOrder<QueuedCall>,
    sizing: Sizing,
    slots: Vec<WorkerSlot>,
    /// The workers without a call. The last one is woken first, so that the others become idle.
    idle: Vec<IdleWorker>,
    /// A worker was woken and has not taken a call yet.
    is_waking: bool,
    /// Calls that run, in workers and polling threads.
    running: usize,
    inline: usize,
    /// The start of the inline call, or the end of another one after it.
    inline_since: Instant,
    /// The last time that a call ended, or the first one of several began.
    progress_at: Instant,
    /// The time of a call, as a moving average.
    mean_call: Duration,
    unsent: UnsentReplies,
    /// Connections with a call that has no room.
    waiting: WaitingConnections,
    /// The same in a stall, with calls that no reply can refuse. They wait for the end of the stall.
    parked: WaitingConnections,
    is_sweep_due: bool,
    /// A worker drops pins. There is one such worker at a time: it may wait for the volume.
    is_sweeping: bool,
    is_stopping: bool,
    refused: u64,
    most_queued: usize,
}

/// See the module.
pub(crate) struct ExportWorkers {
    /// The name of the export; none: calls without one.
    pub(crate) name: Option<String>,
    shares: Shares,
    state: Mutex<WorkersState>,
    /// Calls or connections wait, so the supervisor looks at this export.
    is_pending: AtomicBool,
    /// The figures of the polling threads, and then of the workers.
    cells: Box<[OnceLock<Box<CallCells>>]>,
    /// The figures of workers of other exports.
    shared_cells: OnceLock<Box<CallCells>>,
    pollers: usize,
}

impl ExportWorkers {
    pub(crate) fn new(name: Option<String>, shares: Shares, pollers: usize) -> Self {
        let threads = pollers + shares.workers_max;
        let now = Instant::now();
        Self {
            name,
            shares,
            state: Mutex::new(WorkersState {
                queue: FairQueue::default(),
                writes: WriteOrder::default(),
                sizing: match shares.are_workers_fixed {
                    true => Sizing::fixed(shares.workers_max),
                    false => Sizing::new(shares.workers_max),
                },
                slots: vec![WorkerSlot::default(); shares.workers_max],
                idle: Vec::new(),
                is_waking: false,
                running: 0,
                inline: 0,
                inline_since: now,
                progress_at: now,
                mean_call: Duration::ZERO,
                unsent: UnsentReplies::default(),
                waiting: WaitingConnections::default(),
                parked: WaitingConnections::default(),
                is_sweep_due: false,
                is_sweeping: false,
                is_stopping: false,
                refused: 0,
                most_queued: 0,
            }),
            is_pending: AtomicBool::new(false),
            cells: (0..threads).map(|_| OnceLock::new()).collect(),
            shared_cells: OnceLock::new(),
            pollers,
        }
    }

    /// Takes a call of a polling thread, unless the shares are used.
    pub(crate) fn submit(&self, mut call: QueuedCall) -> Submitted {
        let (id, bytes) = (call.connection.id, call.bytes());
        let mut state = poison::lock(&self.state);
        let now = call.received;
        let (own, all) = (state.queue.of(id), state.queue.all());
        let fits = own.fits(bytes, SHARE_CALLS_MAX, SHARE_BYTES_MAX)
            && all.fits(bytes, EXPORT_CALLS_MAX, self.shares.bytes_max);
        if !fits {
            let is_stalled = state.is_stalled_for(id, now);
            if is_stalled && let Some(reply) = call.route.try_later(&call.record) {
                state.refused += 1;
                return Submitted::Refused { call, reply };
            }
            let connection = Arc::clone(&call.connection);
            if state.is_stalled(now) {
                state.parked.add(connection);
            } else {
                state.waiting.add(connection);
                self.is_pending.store(true, Ordering::Release);
            }
            return Submitted::Full { call };
        }
        if let Some(range) = call.route.write {
            call.is_in_order = state.writes.begin(range);
            match state.writes.follow(range, call) {
                Err(returned) => call = returned,
                Ok(()) => {
                    state.queue.begin(id, bytes);
                    return Submitted::Queued {
                        needs_worker: false,
                    };
                }
            }
        }
        if state.defers_calls(&self.shares, now) {
            state.queue.begin(id, bytes);
            self.push(&mut state, call);
            return Submitted::Deferred;
        }
        if state.is_drained(now) {
            state.queue.begin(id, bytes);
            self.push(&mut state, call);
            // If one of their calls is slow, the supervisor wakes a worker.
            return Submitted::Queued { needs_worker: true };
        }
        Submitted::Queued {
            needs_worker: self.enqueue(&mut state, call),
        }
    }

    /// Takes a call again that has waited elsewhere, beyond the shares: it was taken before.
    pub(crate) fn submit_again(&self, call: QueuedCall) -> bool {
        self.enqueue(&mut poison::lock(&self.state), call)
    }

    /// Returns whether no worker is free.
    fn enqueue(&self, state: &mut WorkersState, call: QueuedCall) -> bool {
        state.queue.begin(call.connection.id, call.bytes());
        self.enqueue_begun(state, call)
    }

    fn enqueue_begun(&self, state: &mut WorkersState, call: QueuedCall) -> bool {
        self.push(state, call);
        !state.wake_one()
    }

    fn push(&self, state: &mut WorkersState, call: QueuedCall) {
        state.queue.push(call.connection.id, call);
        state.most_queued = state.most_queued.max(state.queue.queued());
        self.is_pending.store(true, Ordering::Release);
    }

    /// The next queued call for a polling thread, and whether others are queued; none: workers run
    /// them, or there is none.
    pub(crate) fn take_inline(&self, budget: &InlineBudget) -> Option<(QueuedCall, bool)> {
        let mut state = poison::lock(&self.state);
        let now = Instant::now();
        let may_run = state.queue.queued() > 0 && state.allows_inline(&self.shares, now);
        if !may_run || !budget.take() {
            return None;
        }
        let Some(call) = state.next_call(now) else {
            budget.give_back();
            return None;
        };
        state.begin(now);
        state.inline += 1;
        if state.inline == 1 {
            state.inline_since = now;
        }
        Some((call, state.queue.queued() > 0))
    }

    /// Wakes a worker for the queued calls. Returns whether there are any, and no worker is free.
    pub(crate) fn hand_over(&self) -> bool {
        let mut state = poison::lock(&self.state);
        state.queue.queued() > 0 && !state.wake_one()
    }

    /// Sends the queued reply of a connection, or lets it wait. The time is the one of
    /// [`end_call`](Self::end_call). Returns whether the supervisor must look at it soon.
    pub(crate) fn send_reply(&self, time: SendTime, connection: Option<Arc<Connection>>) -> bool {
        match time {
            SendTime::Now(mut unsent) => {
                unsent.add(connection);
                unsent.send();
                false
            }
            SendTime::Later => {
                poison::lock(&self.state).unsent.add(connection);
                self.is_pending.store(true, Ordering::Release);
                true
            }
        }
    }

    /// Sends all queued replies.
    pub(crate) fn send_queued(&self) {
        let unsent = std::mem::take(&mut poison::lock(&self.state).unsent);
        unsent.send();
    }

    /// Whether a connection has a call here, queued or running.
    pub(crate) fn has_call_of(&self, connection: ConnectionId) -> bool {
        poison::lock(&self.state).queue.of(connection).calls > 0
    }

    /// Whether calls run, and none at all, or none of the connection, has ended for a long time.
    pub(crate) fn is_stalled_for(&self, connection: ConnectionId, now: Instant) -> bool {
        poison::lock(&self.state).is_stalled_for(connection, now)
    }

    pub(crate) fn count_refused(&self) {
        poison::lock(&self.state).refused += 1;
    }

    /// Ends a call that ran. Returns the time to send its reply, and whether another call waits now and
    /// no worker is free.
    pub(crate) fn end_call(
        &self,
        call: &EndedWork,
        budget: Option<&InlineBudget>,
    ) -> (SendTime, bool) {
        let mut state = poison::lock(&self.state);
        let now = Instant::now();
        state.queue.end(call.connection, call.bytes, now);
        state.end(now);
        let time = now.saturating_duration_since(call.begun);
        state.mean_call = (state.mean_call * (MEAN_CALLS - 1) + time) / MEAN_CALLS;
        let successor = call.write.and_then(|range| state.writes.end(range));
        let needs_worker = successor.is_some_and(|next| self.enqueue_begun(&mut state, next));
        if let Some(budget) = budget {
            state.inline -= 1;
            state.inline_since = state.progress_at;
            budget.give_back();
        }
        let may_wait = state.queue.queued() > 0 && state.mean_call <= SHORT_CALL;
        let send_time = state.unsent.send_time(may_wait);
        let mut resumed = state.take_waiting();
        resumed.append(&mut state.parked.take());
        drop(state);
        resumed.iter().for_each(|connection| connection.resume());
        (send_time, needs_worker)
    }

    /// Counts a call in the figures of a thread; `is_own`: it is a worker of this export.
    pub(crate) fn count(&self, thread: usize, is_own: bool, call: &EndedCall) {
        let is_poller = thread < self.pollers;
        match self.cells.get(thread).filter(|_| is_own || is_poller) {
            Some(cells) => cells.get_or_init(Box::default).count(call),
            None => self
                .shared_cells
                .get_or_init(Box::default)
                .count_shared(call),
        }
    }

    /// The figures' place of a worker.
    pub(crate) fn thread_of_worker(&self, slot: usize) -> usize {
        self.pollers + slot
    }

    /// A worker begins. Call it in its thread.
    pub(crate) fn begin_worker(&self, slot: usize) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        if let Some(slot) = poison::lock(&self.state).slots.get_mut(slot) {
            slot.thread = thread.cast_unsigned();
        }
    }

    /// A worker ends, or could not be started.
    pub(crate) fn end_worker(&self, slot: usize, is_counted: bool) {
        let mut state = poison::lock(&self.state);
        if let Some(slot) = state.slots.get_mut(slot) {
            *slot = WorkerSlot::default();
        }
        if is_counted {
            state.sizing.record_end();
        }
    }

    /// The next duty of a worker; it waits for one. The second value: whether [`sizing`] has counted
    /// the end.
    pub(crate) fn next_work(&self, slot: usize) -> (Work, bool) {
        let mut state = poison::lock(&self.state);
        let idle_since = Instant::now();
        loop {
            if let Some(work) = self.take_work(&mut state, slot) {
                return (work, false);
            }
            if state.is_stopping {
                return (Work::End, false);
            }
            let thread = std::thread::current();
            state.idle.push(IdleWorker { slot, thread });
            loop {
                drop(state);
                let idle = idle_since.elapsed();
                std::thread::park_timeout(WORKER_IDLE_LIMIT.saturating_sub(idle));
                state = poison::lock(&self.state);
                let Some(at) = state.idle.iter().position(|it| it.slot == slot) else {
                    break;
                };
                if state.sizing.shrink(idle_since.elapsed()) {
                    state.idle.remove(at);
                    return (Work::End, true);
                }
            }
        }
    }

    fn take_work(&self, state: &mut WorkersState, slot: usize) -> Option<Work> {
        state.is_waking = false;
        let now = Instant::now();
        let work = if std::mem::take(&mut state.is_sweep_due) {
            state.is_sweeping = true;
            Work::SweepPins
        } else if let Some(call) = state.next_call(now) {
            Work::Call(call)
        } else if !state.unsent.is_empty() {
            return Some(Work::SendReplies(std::mem::take(&mut state.unsent)));
        } else {
            return None;
        };
        state.begin(now);
        if let Some(slot) = state.slots.get_mut(slot) {
            slot.is_in_call = true;
        }
        if state.queue.queued() > 0 {
            state.wake_one();
        }
        Some(work)
    }

    /// A worker has ended its duty.
    pub(crate) fn leave_call(&self, slot: usize) {
        let mut state = poison::lock(&self.state);
        if let Some(slot) = state.slots.get_mut(slot) {
            slot.is_in_call = false;
        }
    }

    /// Ends a sweep of pins.
    pub(crate) fn end_sweep(&self) {
        let mut state = poison::lock(&self.state);
        state.is_sweeping = false;
        state.end(Instant::now());
    }

    /// Drops queued calls, and lets workers end.
    pub(crate) fn stop(&self) {
        let mut state = poison::lock(&self.state);
        state.is_stopping = true;
        state.is_sweep_due = false;
        let calls = (state.queue.drain(), state.writes.drain());
        let dropped = (calls, state.waiting.take(), state.parked.take());
        for idle in std::mem::take(&mut state.idle) {
            idle.thread.unpark();
        }
        drop(state);
        drop(dropped);
    }
}

impl WorkersState {
    fn is_stalled(&self, now: Instant) -> bool {
        self.running > 0 && now.saturating_duration_since(self.progress_at) >= STALL_LIMIT
    }

    fn is_stalled_for(&self, connection: ConnectionId, now: Instant) -> bool {
        let limit = CONNECTION_STALL_LIMIT;
        self.is_stalled(now) || self.queue.is_stalled(connection, limit, now)
    }

    /// The connection that gets the room of a call that has ended; all, if no further call will end.
    fn take_waiting(&mut self) -> Vec<Arc<Connection>> {
        if self.queue.all().calls == 0 {
            return self.waiting.take();
        }
        self.waiting.pop().into_iter().collect()
    }

    /// The next queued call, which runs from now on.
    fn next_call(&mut self, now: Instant) -> Option<QueuedCall> {
        let turn_max = match self.mean_call <= SHORT_CALL {
            true => TURN_CALLS,
            false => 1,
        };
        self.queue.pop(turn_max, now)
    }

    /// Whether the polling thread with a new call runs it.
    fn defers_calls(&self, shares: &Shares, now: Instant) -> bool {
        let is_short = self.queue.queued() == 0 || self.mean_call <= SHORT_CALL;
        is_short && self.allows_inline(shares, now)
    }

    /// Whether polling threads run calls, and soon the queued ones.
    fn is_drained(&self, now: Instant) -> bool {
        self.inline > 0 && self.mean_call <= SHORT_CALL && !self.is_slow(now)
    }

    /// Whether a polling thread may run a call.
    fn allows_inline(&self, shares: &Shares, now: Instant) -> bool {
        self.inline < shares.inline_max
            && self.running < shares.workers_max
            && !self.is_slow(now)
            && !self.is_stopping
    }

    /// Whether a call of a polling thread is slow.
    fn is_slow(&self, now: Instant) -> bool {
        self.inline > 0 && now.saturating_duration_since(self.inline_since) >= QUEUE_WAIT_LIMIT
    }

    fn begin(&mut self, now: Instant) {
        if self.running == 0 {
            self.progress_at = now;
        }
        self.running += 1;
    }

    fn end(&mut self, now: Instant) {
        self.running -= 1;
        self.progress_at = now;
    }

    /// Wakes an idle worker, unless one is on its way. Returns whether one will come.
    fn wake_one(&mut self) -> bool {
        if self.is_waking {
            return true;
        }
        let Some(idle) = self.idle.pop() else {
            return false;
        };
        self.is_waking = true;
        idle.thread.unpark();
        true
    }
}
