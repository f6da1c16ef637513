//! The way of a call: from its connection to the workers of its export, and to its reply.

use crate::connection::{Connection, EndReason, Input};
use crate::connections::Connections;
use crate::counters::count;
use crate::nfs3::Procedure;
use crate::service::{CallRoute, NoReply, Route, Service};
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
    /// The caller runs this call, after it has given the input back.
    Run(QueuedCall),
}

enum Dispatched {
    Done,
    Run(QueuedCall),
    NoRoom(Bytes),
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

    fn workers_of(&self, route: &CallRoute) -> &ExportWorkers {
        let last = self.exports.len() - 1;
        &self.exports[route.export.unwrap_or(last).min(last)]
    }

    /// Handles bytes of a client. The caller may run a call itself if `may_run`.
    pub(crate) fn take_bytes(
        &self,
        connection: &Arc<Connection>,
        input: &mut Input,
        bytes: &[u8],
        may_run: bool,
    ) -> Result<Turn, EndReason> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (consumed, record) = input.push(rest)?;
            rest = rest.get(consumed..).unwrap_or_default();
            let Some(record) = record else { continue };
            match self.take_record(connection, record, may_run && rest.is_empty())? {
                Dispatched::Done => {}
                Dispatched::Run(call) => return Ok(Turn::Run(call)),
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
        may_run: bool,
    ) -> Result<Turn, EndReason> {
        match self.take_record(connection, record, may_run)? {
            Dispatched::Done => Ok(Turn::Over),
            Dispatched::Run(call) => Ok(Turn::Run(call)),
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
        may_run: bool,
    ) -> Result<Dispatched, EndReason> {
        let route = self.service.route(&record);
        let route = route.map_err(EndReason::NotACall)?;
        connection.establish()?;
        match route {
            Route::AtOnce => self.answer_at_once(connection, record),
            Route::Queue(route) => Ok(self.submit(connection, record, route, may_run)),
        }
    }

    fn answer_at_once(
        &self,
        connection: &Arc<Connection>,
        record: Bytes,
    ) -> Result<Dispatched, EndReason> {
        let bytes = record.len() + SMALL_REPLY_BYTES;
        if !connection.admit(bytes) {
            return Ok(Dispatched::NoRoom(record));
        }
        match self.service.answer(connection.peer, &record, &mut None) {
            Ok(reply) => connection.reply(reply, bytes),
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
        may_run: bool,
    ) -> Dispatched {
        let workers = self.workers_of(&route);
        let bytes = call_bytes(&record, &route);
        if !connection.admit(bytes) {
            // Each export takes one call, so that calls to others do not stop it.
            if !workers.has_call_of(connection.id) {
                connection.admit_always(bytes);
            } else if workers.is_stalled(Instant::now())
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
        let inline = may_run.then_some(&self.inline);
        match workers.submit(call, inline) {
            Submitted::Inline(call) => Dispatched::Run(call),
            Submitted::Queued { needs_worker } => {
                self.nudge_if(needs_worker);
                Dispatched::Done
            }
            Submitted::Full { call, is_stalled } => match call.route.try_later(&call.record) {
                Some(reply) if is_stalled => {
                    call.reply(reply);
                    Dispatched::Done
                }
                _ => {
                    self.nudge_if(true);
                    Dispatched::NoRoom(call.record.clone())
                }
            },
        }
    }

    fn nudge_if(&self, is_needed: bool) {
        if is_needed {
            self.nudge.send();
        }
    }

    /// Runs a call in a polling thread.
    pub(crate) fn run_inline(&self, call: QueuedCall, thread: usize) {
        self.run(call, thread, Some(&self.inline));
    }

    /// Runs a call, and sends its reply. `thread` is the place of its figures.
    pub(crate) fn run(&self, call: QueuedCall, thread: usize, budget: Option<&InlineBudget>) {
        let workers = self.workers_of(&call.route);
        let ended = EndedWork::of(&call);
        if call.connection.is_closed() {
            self.nudge_if(workers.end_call(&ended, budget));
            return;
        }
        let (route, received, begun) = (call.route, call.received, Instant::now());
        let (record, connection) = (call.record.clone(), Arc::clone(&call.connection));
        let mut waiting = Some(call);
        let answer = || self.service.answer(connection.peer, &record, &mut waiting);
        let answered = catch_unwind(AssertUnwindSafe(answer));
        self.nudge_if(workers.end_call(&ended, budget));
        match answered {
            Ok(Ok(reply)) => {
                let call = EndedCall {
                    procedure: route.procedure.map_or(u32::MAX, Procedure::number),
                    is_error: reply.status().is_some_and(|status| status != 0),
                    received: record.len(),
                    sent: reply.len(),
                    time: received.elapsed(),
                    queue_time: begun.saturating_duration_since(received),
                };
                workers.count(thread, &call);
                if let Some(call) = waiting {
                    call.reply(reply);
                }
            }
            Ok(Err(NoReply::Running)) => {
                if waiting.is_some() {
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

/// The end of a connection that gets no reply; none if it goes on.
fn end_reason(reason: NoReply) -> Option<EndReason> {
    match reason {
        NoReply::Fenced => Some(EndReason::Fenced),
        NoReply::NotACall(error) => Some(EndReason::NotACall(error)),
        NoReply::Running => None,
    }
}
