//! The way of a call: from its connection to the workers of its export, and to its reply.

use crate::connection::{Connection, EndReason, Input};
use crate::connections::Connections;
use crate::counters::{COMPOUND, count};
use crate::rpc::Reply;
use crate::service::{CallRoute, CallRun, NoReply, Route, Service};
use crate::supervisor::Nudge;
use crate::workers::call_figures::EndedCall;
use crate::workers::figures::Figures;
use crate::workers::queued_call::call_bytes;
use crate::workers::{EndedWork, ExportWorkers, InlineBudget, QueuedCall, Shares, Submitted};
use bytes::Bytes;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of a reply that no file system takes part in, as a connection admits it. It is shorter, but
/// for the list of exports.
const SMALL_REPLY_BYTES: usize = 512;

/// See the module.
pub(crate) struct Dispatcher {
    pub(crate) service: Service,
    pub(crate) connections: Arc<Connections>,
    pub(crate) nudge: Nudge,
    /// The workers of the exports, and of calls without an export.
    exports: Vec<ExportWorkers>,
    inline: InlineBudget,
    dropped_repetitions: AtomicU64,
}

/// The result of handling bytes.
pub(crate) enum Turn {
    /// All bytes are handled.
    Over,
    /// A call waits for room, in the input.
    Parked,
}

enum Dispatched {
    Done,
    NoRoom(Bytes),
}

/// The calls that a polling thread runs after it has read all others, with [`Dispatcher::run_deferred`].
pub(crate) struct Deferred {
    /// The place of the figures of the thread.
    thread: usize,
    /// The number of an export with queued calls. There is one export at a time: a slow call must not hold
    /// calls of other exports.
    export: Option<usize>,
}

impl Deferred {
    /// No calls of a polling thread.
    pub(crate) fn new(thread: usize) -> Self {
        Self {
            thread,
            export: None,
        }
    }
}

impl Dispatcher {
    pub(crate) fn new(service: Service, connections: Arc<Connections>, pollers: usize) -> Self {
        let names = service
            .exports
            .file_systems()
            .map(|fs| Some(fs.name.clone()));
        let names: Vec<_> = names.chain([None]).collect();
        let shares = Shares::of(names.len() - 1, pollers);
        let shares = shares.with_workers(connections.limits.fixed_workers);
        let workers = |name| ExportWorkers::new(name, shares, pollers);
        Self {
            exports: names.into_iter().map(workers).collect(),
            service,
            connections,
            nudge: Nudge::default(),
            inline: InlineBudget::new(pollers),
            dropped_repetitions: AtomicU64::new(0),
        }
    }

    /// All workers, with their numbers.
    pub(crate) fn exports(&self) -> impl Iterator<Item = (usize, &ExportWorkers)> {
        self.exports.iter().enumerate()
    }

    pub(crate) fn workers(&self, number: usize) -> Option<&ExportWorkers> {
        self.exports.get(number)
    }

    fn number_of(&self, route: &CallRoute) -> usize {
        let last = self.exports.len() - 1;
        route.export.unwrap_or(last).min(last)
    }

    fn workers_of(&self, route: &CallRoute) -> &ExportWorkers {
        &self.exports[self.number_of(route)]
    }

    /// Handles bytes of a client.
    pub(crate) fn take_bytes(
        &self,
        connection: &Arc<Connection>,
        input: &mut Input,
        bytes: &[u8],
        deferred: &mut Deferred,
    ) -> Result<Turn, EndReason> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (consumed, record) = input.push(rest)?;
            rest = rest.get(consumed..).unwrap_or_default();
            let Some(record) = record else { continue };
            match self.take_record(connection, record, deferred)? {
                Dispatched::Done => {}
                Dispatched::NoRoom(record) => {
                    input.park(record, rest);
                    return Ok(Turn::Parked);
                }
            }
        }
        Ok(Turn::Over)
    }

    /// Handles the call in a record, which is the last one that has come.
    pub(crate) fn take_last_record(
        &self,
        connection: &Arc<Connection>,
        input: &mut Input,
        record: Bytes,
        deferred: &mut Deferred,
    ) -> Result<Turn, EndReason> {
        match self.take_record(connection, record, deferred)? {
            Dispatched::Done => Ok(Turn::Over),
            Dispatched::NoRoom(record) => {
                input.park(record, &[]);
                Ok(Turn::Parked)
            }
        }
    }

    fn take_record(
        &self,
        connection: &Arc<Connection>,
        record: Bytes,
        deferred: &mut Deferred,
    ) -> Result<Dispatched, EndReason> {
        let route = self.service.route(&record);
        let route = route.map_err(EndReason::NotACall)?;
        connection.establish()?;
        match route {
            Route::AtOnce => self.answer_at_once(connection, record, deferred.thread),
            Route::Queue(route) => Ok(self.submit(connection, record, route, deferred)),
        }
    }

    fn answer_at_once(
        &self,
        connection: &Arc<Connection>,
        record: Bytes,
        thread: usize,
    ) -> Result<Dispatched, EndReason> {
        let bytes = record.len() + SMALL_REPLY_BYTES;
        if !connection.admit(bytes) {
            return Ok(Dispatched::NoRoom(record));
        }
        let (mut run, begun) = (CallRun::default(), Instant::now());
        match self.service.answer(connection.peer, &record, &mut run) {
            Ok(reply) => {
                if run.is_compound {
                    let times = (begun, begun);
                    let call = ended_call(Some(COMPOUND), times, &record, &reply);
                    let number = run.file_system.unwrap_or(self.exports.len() - 1);
                    self.exports[number].count(thread, false, &call);
                }
                connection.reply(reply, bytes);
            }
            Err(reason) => {
                connection.drop_call(bytes);
                return end_reason(reason).map_or(Ok(Dispatched::Done), Err);
            }
        }
        Ok(Dispatched::Done)
    }

    fn submit(
        &self,
        connection: &Arc<Connection>,
        record: Bytes,
        route: CallRoute,
        deferred: &mut Deferred,
    ) -> Dispatched {
        let number = self.number_of(&route);
        let workers = &self.exports[number];
        let bytes = call_bytes(&record, &route);
        if !connection.admit(bytes) {
            // Each export takes one call, so that calls to others do not stop it.
            if !workers.has_call_of(connection.id) {
                connection.admit_always(bytes);
            } else if workers.is_stalled_for(connection.id, Instant::now())
                && let Some(reply) = route.try_later(&record)
                && connection.takes_refusals()
            {
                workers.count_refused();
                connection.admit_always(bytes);
                connection.reply(reply, bytes);
                return Dispatched::Done;
            } else {
                return Dispatched::NoRoom(record);
            }
        }
        let call = QueuedCall::new(Arc::clone(connection), record, route);
        match workers.submit(call) {
            Submitted::Deferred => {
                if let Some(previous) = deferred.export.replace(number)
                    && previous != number
                {
                    self.nudge_if(self.exports[previous].hand_over());
                }
                Dispatched::Done
            }
            Submitted::Queued { needs_worker } => {
                self.nudge_if(needs_worker);
                Dispatched::Done
            }
            Submitted::Refused { call, reply } => {
                call.reply(reply);
                Dispatched::Done
            }
            Submitted::Full { call } => {
                self.nudge_if(true);
                Dispatched::NoRoom(call.record.clone())
            }
        }
    }

    fn nudge_if(&self, is_needed: bool) {
        if is_needed {
            self.nudge.send();
        }
    }

    /// Runs queued calls in a polling thread, until there are none, or workers must run them.
    pub(crate) fn run_deferred(&self, deferred: &mut Deferred) {
        let Some(workers) = deferred.export.take().and_then(|it| self.workers(it)) else {
            return;
        };
        while let Some((call, are_more_queued)) = workers.take_inline(&self.inline) {
            // If the call is slow, the supervisor wakes workers for the others.
            self.nudge_if(are_more_queued);
            self.run(call, deferred.thread, Some(&self.inline));
        }
        workers.send_queued();
        self.nudge_if(workers.hand_over());
    }

    /// Runs a call, and sends its reply. `thread` is the place of its figures.
    pub(crate) fn run(&self, call: QueuedCall, thread: usize, budget: Option<&InlineBudget>) {
        let workers = self.workers_of(&call.route);
        let ended = EndedWork::of(&call);
        if call.connection.is_closed() {
            let (send_time, needs_worker) = workers.end_call(&ended, budget);
            self.nudge_if(needs_worker);
            self.nudge_if(workers.send_reply(send_time, None));
            return;
        }
        let (route, received) = (call.route, call.received);
        let (record, connection) = (call.record.clone(), Arc::clone(&call.connection));
        let mut run = CallRun {
            waiting: Some(call),
            ..CallRun::default()
        };
        let answer = || self.service.answer(connection.peer, &record, &mut run);
        let answered = catch_unwind(AssertUnwindSafe(answer));
        let (send_time, needs_worker) = workers.end_call(&ended, budget);
        self.nudge_if(needs_worker);
        let mut unsent = None;
        match answered {
            Ok(Ok(reply)) => {
                let own = self.number_of(&route);
                let number = run.file_system.unwrap_or(own);
                let times = (received, ended.begun);
                let call = ended_call(procedure_of(&route, &run), times, &record, &reply);
                self.exports[number].count(thread, number == own, &call);
                unsent = run.waiting.and_then(|call| call.queue_reply(reply));
            }
            Ok(Err(NoReply::Running)) => {
                if run.waiting.is_some() {
                    count(&self.dropped_repetitions);
                }
            }
            Ok(Err(reason)) => {
                if let Some(reason) = end_reason(reason) {
                    connection.close(reason);
                }
            }
            // The thread goes on: a fault of one call must not take it from others.
            Err(_) => connection.close(EndReason::Fault),
        }
        self.nudge_if(workers.send_reply(send_time, unsent));
        self.submit_released();
    }

    /// Repetitions of calls that have ended are run, or get the reply.
    fn submit_released(&self) {
        for mut call in self.service.replies.take_released() {
            call.is_released = true;
            call.is_in_order = false;
            let workers = self.workers_of(&call.route);
            let needs_worker = workers.submit_again(call);
            self.nudge_if(needs_worker);
        }
    }

    pub(crate) fn figures(&self) -> Figures {
        let fenced = self.service.exports.file_systems().map(|fs| fs.is_fenced());
        let workers = self.exports.iter().zip(fenced.chain([false]));
        Figures {
            exports: workers
                .map(|(it, is_fenced)| it.figures(is_fenced))
                .collect(),
            connections: self.connections.count(),
            half_open: self.connections.half_open(),
            held_bytes: self.connections.held(),
            dropped_repetitions: self.dropped_repetitions.load(Ordering::Relaxed),
        }
    }

    /// Drops all calls that wait, and lets workers end.
    pub(crate) fn stop(&self) {
        for workers in &self.exports {
            workers.stop();
        }
        self.service.replies.drop_waiting();
    }
}

/// The place of a call in the figures.
fn procedure_of(route: &CallRoute, run: &CallRun) -> Option<usize> {
    match route.procedure {
        Some(procedure) => usize::try_from(procedure.number()).ok(),
        None => run.is_compound.then_some(COMPOUND),
    }
}

/// The figures of a call that was whole and begun at these times, and ends now.
fn ended_call(
    procedure: Option<usize>,
    (received, begun): (Instant, Instant),
    record: &Bytes,
    reply: &Reply,
) -> EndedCall {
    EndedCall {
        procedure,
        is_error: reply.status().is_some_and(|status| status != 0),
        received: record.len(),
        sent: reply.len(),
        time: received.elapsed(),
        queue_time: begun.saturating_duration_since(received),
    }
}

/// The end of a connection that gets no reply; none if it goes on.
fn end_reason(reason: NoReply) -> Option<EndReason> {
    match reason {
        NoReply::Fenced => Some(EndReason::Fenced),
        NoReply::NotACall(error) => Some(EndReason::NotACall(error)),
        NoReply::Running => None,
    }
}
