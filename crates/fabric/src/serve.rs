//! One connection of a brick: requests in, replies out, in one thread.
//!
//! A round receives once, executes every request that has arrived in full, and sends all replies
//! with one send. An [`Exchange`] does all of that except waiting, over any [`Wire`]; `Connection`
//! is the thread around it.
//!
//! Invariants: replies that wait for a slow client are bounded, and so are deferred requests. At a
//! bound the connection takes no further request. A malformed message ends the connection. A
//! request beyond limits is refused before the handler sees it. Replies are sent only after
//! [`Handler::end_batch`]. Dropping a connection drops its handler.

use crate::limits::{DEFERRED_BYTES_MAX, DEFERRED_MAX, UNSENT_REPLY_BYTES_MAX};
use crate::message::reply::{self, Answer, Reply};
use crate::message::request::{
    Control, Request, check_dropped, check_limits, check_version_edits, check_version_range,
};
use crate::message::{Direction, Header, MalformedMessage, MessageKind};
use crate::receive_buffer::{Body, ReceiveBuffer};
use crate::send_queue::SendQueue;
use crate::service::{FinishedTicket, Handler, Outcome, Ticket};
use crate::spin_budget::SpinBudget;
use crate::stop::StopSignal;
use crate::stream::{HANGUP_FLAGS, Stream};
use crate::wire::{ReceiveResult, Wire};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    BrickControl, IS_MEASURED, LIST_ENTRIES_MAX, ServiceTime, SliceError, SliceReply, SliceRequest,
    TransactionPart, VERSION_LEAF_BYTES,
};
use pagemesh_base::spin_permit::SpinPermit;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

/// Why a connection ended other than by the client or by the [`StopSignal`].
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The transport failed.
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    /// The client does not speak the protocol.
    #[error(transparent)]
    Malformed(#[from] MalformedMessage),
    /// [`Handler::end_batch`] failed.
    #[error("a batch could not be ended: {0}")]
    Batch(SliceError),
    /// A defect of the handler.
    #[error("the handler used {0:?} for two requests at once")]
    DuplicateTicket(Ticket),
}

/// A request that is answered later.
struct DeferredRequest {
    kind: MessageKind,
    tag: u64,
    /// Bytes that the request holds, see [`DEFERRED_BYTES_MAX`].
    bytes: usize,
    times: RequestTimes,
}

/// The requests that one round takes up.
struct Batch<'a, W> {
    wire: &'a W,
    began: Instant,
}

impl<W: Wire> Batch<'_, W> {
    /// The times of a request that the handler gets now.
    fn times(&self) -> RequestTimes {
        RequestTimes {
            batch_began: self.began,
            started: if IS_MEASURED {
                self.wire.now()
            } else {
                self.began
            },
        }
    }
}

/// When a request was taken up.
#[derive(Clone, Copy)]
struct RequestTimes {
    batch_began: Instant,
    /// When the handler got it.
    started: Instant,
}

impl RequestTimes {
    fn service(&self, wire: &impl Wire) -> ServiceTime {
        if !IS_MEASURED {
            return ServiceTime::default();
        }
        let now = wire.now();
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        ServiceTime {
            brick_ns: nanos(now.saturating_duration_since(self.batch_began)),
            store_ns: nanos(now.saturating_duration_since(self.started)),
        }
    }
}

/// Opens a connection's handler.
pub type HandlerFactory<'a> = dyn FnMut() -> Result<Box<dyn Handler>, SliceError> + 'a;

/// Requests and replies of a connection, without any waiting.
pub struct Exchange {
    handler: Option<Box<dyn Handler>>,
    inflow: ReceiveBuffer,
    outflow: SendQueue,
    deferred: HashMap<Ticket, DeferredRequest>,
    /// Bytes held by all of `deferred`.
    deferred_bytes: usize,
    done: Vec<FinishedTicket>,
    /// Whether the handler has executed a request since its last batch.
    executed: bool,
    /// The tag of the last request taken: tags rise.
    last_tag: Option<u64>,
}

/// A connection that is served.
pub(crate) struct Connection<'a> {
    stream: &'a Stream,
    control: &'a dyn BrickControl,
    stop: &'a StopSignal,
    open: &'a mut HandlerFactory<'a>,
    exchange: Exchange,
    spin: SpinBudget,
}

impl<'a> Connection<'a> {
    /// A connection that opens its handler at the first attach.
    pub(crate) fn new(
        stream: &'a Stream,
        control: &'a dyn BrickControl,
        stop: &'a StopSignal,
        open: &'a mut HandlerFactory<'a>,
        spin_us_max: u32,
    ) -> Connection<'a> {
        Connection {
            stream,
            control,
            stop,
            open,
            exchange: Exchange::default(),
            spin: SpinBudget::new(spin_us_max),
        }
    }

    /// The same with a handler that is open already.
    pub(crate) fn with_handler(mut self, handler: Box<dyn Handler>) -> Connection<'a> {
        self.exchange.handler = Some(handler);
        self
    }

    /// Serves until the client or the [`StopSignal`] ends the connection.
    pub(crate) fn run(mut self) -> Result<(), ConnectionError> {
        while !self.stop.is_signaled() {
            let drained = self
                .exchange
                .advance(self.stream, self.control, self.open)?;
            let goes_on = match (self.exchange.may_accept(), drained) {
                (true, false) => true,
                (true, true) => self.receive()?,
                // The hang-up of the client would end this wait again and again.
                (false, _) => !self.sleep(PollFlags::RDHUP)?.intersects(HANGUP_FLAGS),
            };
            if !goes_on {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Receives, after waiting if necessary; false if the client is gone.
    fn receive(&mut self) -> io::Result<bool> {
        if self.exchange.inflow.is_within_large() {
            match self.exchange.inflow.receive(self.stream)? {
                ReceiveResult::WouldBlock => {}
                received => return Ok(received != ReceiveResult::End),
            }
        }
        let began = Instant::now();
        // The end of a deferred request takes as long as a device: polling for it costs more than the wake-up.
        let budget = match self.exchange.deferred.is_empty() {
            true => self.spin.budget(),
            false => Duration::ZERO,
        };
        let permit = (!budget.is_zero()).then(SpinPermit::take).flatten();
        while permit.is_some() && began.elapsed() < budget {
            match self.exchange.inflow.receive(self.stream)? {
                // The sender of the next request may need this core.
                ReceiveResult::WouldBlock => std::thread::yield_now(),
                received => {
                    self.spin.record_wait(began.elapsed());
                    return Ok(received != ReceiveResult::End);
                }
            }
        }
        drop(permit);
        let ready = self.sleep(PollFlags::IN)?;
        self.spin.record_wait(began.elapsed());
        if ready.is_empty() {
            return Ok(true);
        }
        Ok(self.exchange.inflow.receive(self.stream)? != ReceiveResult::End)
    }

    /// Sleeps until the socket is ready for `flags` or, if replies wait, for sending; until a
    /// ticket may be finished; or until the [`StopSignal`] is signaled. Returns the socket's ready
    /// flags.
    fn sleep(&self, flags: PollFlags) -> io::Result<PollFlags> {
        let flags = match self.exchange.outflow.is_empty() {
            true => flags,
            false => flags | PollFlags::OUT,
        };
        let fixed = [
            PollFd::new(self.stream, flags),
            PollFd::new(self.stop, PollFlags::IN),
        ];
        if self.exchange.deferred.is_empty() {
            let mut fds = fixed;
            until_ready(&mut fds, None)?;
            return Ok(fds[0].revents());
        }
        let mut handlers = Vec::new();
        if let Some(handler) = &self.exchange.handler {
            handler.poll_fds(&mut handlers);
        }
        let mut fds = fixed.to_vec();
        let watched = handlers.into_iter();
        fds.extend(watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        until_ready(&mut fds, None)?;
        Ok(fds[0].revents())
    }
}

impl Default for Exchange {
    /// An exchange that opens its handler at the first attach.
    fn default() -> Exchange {
        Exchange {
            handler: None,
            inflow: ReceiveBuffer::new(Direction::Request, true),
            outflow: SendQueue::default(),
            deferred: HashMap::new(),
            deferred_bytes: 0,
            done: Vec::new(),
            executed: false,
            last_tag: None,
        }
    }
}

impl Exchange {
    /// Executes the received requests and sends the ready replies. False if requests are left,
    /// because too many replies or deferred requests wait.
    ///
    /// # Errors
    /// When the connection must end.
    pub fn advance(
        &mut self,
        wire: &impl Wire,
        control: &dyn BrickControl,
        open: &mut HandlerFactory<'_>,
    ) -> Result<bool, ConnectionError> {
        let drained = self.take_requests(wire, control, open)?;
        // The end of the batch may finish tickets.
        self.end_batch()?;
        self.finish_deferred(wire);
        self.outflow.flush(wire)?;
        Ok(drained)
    }

    /// Receives once.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn receive(&mut self, wire: &impl Wire) -> io::Result<ReceiveResult> {
        self.inflow.receive(wire)
    }

    fn end_batch(&mut self) -> Result<(), ConnectionError> {
        match &mut self.handler {
            Some(handler) if std::mem::take(&mut self.executed) => {
                handler.end_batch().map_err(ConnectionError::Batch)
            }
            _ => Ok(()),
        }
    }

    /// Whether the exchange takes further requests now.
    #[must_use]
    pub fn may_accept(&self) -> bool {
        self.outflow.len() < UNSENT_REPLY_BYTES_MAX
            && self.deferred.len() < DEFERRED_MAX
            && self.deferred_bytes < DEFERRED_BYTES_MAX
    }

    /// Executes the received requests; false if it stopped because too many replies or deferred
    /// requests wait.
    fn take_requests(
        &mut self,
        wire: &impl Wire,
        control: &dyn BrickControl,
        open: &mut HandlerFactory<'_>,
    ) -> Result<bool, ConnectionError> {
        let batch = Batch {
            wire,
            began: wire.now(),
        };
        while self.may_accept() {
            let Some((header, body)) = self.inflow.next_message()? else {
                return Ok(true);
            };
            self.take_request(&batch, &header, body, control, open)?;
        }
        Ok(false)
    }

    fn take_request(
        &mut self,
        batch: &Batch<'_, impl Wire>,
        header: &Header,
        body: Body,
        control: &dyn BrickControl,
        open: &mut HandlerFactory<'_>,
    ) -> Result<(), ConnectionError> {
        // A change that is executed twice would undo changes that other clients made in between.
        if self
            .last_tag
            .replace(header.tag)
            .is_some_and(|last| header.tag <= last)
        {
            return Err(MalformedMessage::RepeatedTag(header.tag).into());
        }
        let request = Request::decode(header, self.inflow.share(body))?;
        let answer = match request {
            Request::Control(asked) => execute_control(control, asked),
            Request::Attach { slice, epoch } => self.handler(open).and_then(|handler| {
                let attached = handler.attach(slice, epoch)?;
                Ok(Reply::Attach(attached))
            }),
            Request::Slice { handle, request } => {
                let held = held_bytes(&request);
                let times = batch.times();
                match self.execute(handle, request, header.hint()) {
                    Outcome::Done(result) => {
                        let service = times.service(batch.wire);
                        self.answer_slice((header.kind, header.tag), held, result, service);
                    }
                    Outcome::Deferred(ticket) => self.defer(ticket, header, held, times)?,
                }
                return Ok(());
            }
        };
        self.answer(header.kind, header.tag, answer);
        Ok(())
    }

    fn defer(
        &mut self,
        ticket: Ticket,
        header: &Header,
        held: usize,
        times: RequestTimes,
    ) -> Result<(), ConnectionError> {
        let (kind, tag) = (header.kind, header.tag);
        self.deferred_bytes += held;
        match self.deferred.insert(
            ticket,
            DeferredRequest {
                kind,
                tag,
                bytes: held,
                times,
            },
        ) {
            None => Ok(()),
            Some(_) => Err(ConnectionError::DuplicateTicket(ticket)),
        }
    }

    fn handler(
        &mut self,
        open: &mut HandlerFactory<'_>,
    ) -> Result<&mut Box<dyn Handler>, SliceError> {
        match &mut self.handler {
            Some(handler) => Ok(handler),
            none => Ok(none.insert(open()?)),
        }
    }

    fn execute(&mut self, handle: u32, request: SliceRequest, hint: TierHint) -> Outcome {
        if let Err(cause) = check_limits(&request) {
            return Outcome::Done(Err(cause));
        }
        match &mut self.handler {
            Some(handler) => {
                self.executed = true;
                handler.execute_hinted(handle, request, hint)
            }
            None => Outcome::Done(Err(SliceError::OutOfRange(
                "nothing is attached to this connection".into(),
            ))),
        }
    }

    fn answer(&mut self, kind: MessageKind, tag: u64, answer: Answer) {
        let (header, body) = reply::encode(kind, tag, answer);
        self.outflow.push(&header, body);
    }

    fn answer_slice(
        &mut self,
        (kind, tag): (MessageKind, u64),
        held: usize,
        result: Result<SliceReply, SliceError>,
        service: ServiceTime,
    ) {
        if let Some(handler) = &mut self.handler {
            handler.record_served(kind, held, service);
        }
        let (header, body) = reply::encode(kind, tag, result.map(Reply::Slice));
        self.outflow.push(&header.with_service(service), body);
    }

    fn finish_deferred(&mut self, wire: &impl Wire) {
        if self.deferred.is_empty() {
            return;
        }
        if let Some(handler) = &mut self.handler {
            handler.poll(&mut self.done);
        }
        let mut done = std::mem::take(&mut self.done);
        for (ticket, result) in done.drain(..) {
            match self.deferred.remove(&ticket) {
                Some(DeferredRequest {
                    kind,
                    tag,
                    bytes: held,
                    times,
                }) => {
                    self.deferred_bytes -= held;
                    self.answer_slice((kind, tag), held, result, times.service(wire));
                }
                None => tracing::error!(?ticket, "a handler finished an unknown ticket"),
            }
        }
        self.done = done;
    }
}

fn execute_control(brick: &dyn BrickControl, asked: Control) -> Answer {
    let done = |()| Reply::Slice(SliceReply::Done);
    match asked {
        Control::Create { slice, size_bytes } => brick.create(slice, size_bytes).map(done),
        Control::Resize { slice, size_bytes } => brick.resize(slice, size_bytes).map(done),
        Control::Delete { slice } => brick.delete(slice).map(done),
        Control::List { after } => list(brick, after),
        Control::Status => brick.status().map(Reply::Status),
        Control::PrepareSnapshot { slice, snapshot } => {
            brick.prepare_snapshot(slice, snapshot).map(done)
        }
        Control::DropSnapshots { slice, snapshots } => {
            check_dropped(&snapshots)?;
            brick.drop_snapshots(slice, &snapshots).map(done)
        }
        Control::Snapshots { slice, after } => snapshots(brick, slice, after),
        Control::CreateClone {
            slice,
            source,
            size_bytes,
        } => {
            let created = brick.create_clone(slice, source, size_bytes);
            created.map(Reply::Progress)
        }
        Control::PromoteClone { slice } => brick.promote_clone(slice).map(Reply::Progress),
        Control::CountSeenPages { slice, from } => {
            brick.count_seen_pages(slice, from).map(Reply::SeenPages)
        }
        of_versions => execute_version_copy(brick, of_versions),
    }
}

/// Executes a request that copies versions of snapshots.
fn execute_version_copy(brick: &dyn BrickControl, asked: Control) -> Answer {
    let done = |()| Reply::Slice(SliceReply::Done);
    match asked {
        Control::AdoptSnapshots { slice, snapshots } => {
            check_dropped(&snapshots)?;
            brick.adopt_snapshots(slice, &snapshots).map(done)
        }
        Control::ListVersions { slice, range } => {
            check_version_range(&range)?;
            brick.list_versions(slice, &range).map(Reply::Versions)
        }
        Control::EditVersions { slice, edits } => {
            check_version_edits(&edits)?;
            brick.edit_versions(slice, &edits).map(done)
        }
        Control::ReadVersion {
            slice,
            snapshot,
            range,
        } => {
            check_limits(&SliceRequest::ReadVersion {
                snapshot,
                offset: range.0,
                len: range.1,
            })?;
            let read = brick.read_version(slice, snapshot, range);
            read.map(|data| Reply::Slice(SliceReply::Data(data)))
        }
        _ => Err(SliceError::Refused("it copies no versions".into())),
    }
}

fn list(brick: &dyn BrickControl, after: Option<SliceId>) -> Answer {
    let mut slices = brick.list()?;
    slices.retain(|info| after.is_none_or(|after| info.slice > after));
    slices.sort_unstable_by_key(|info| info.slice);
    let more = slices.len() > LIST_ENTRIES_MAX;
    slices.truncate(LIST_ENTRIES_MAX);
    Ok(Reply::List { slices, more })
}

fn snapshots(brick: &dyn BrickControl, slice: SliceId, after: Epoch) -> Answer {
    let mut snapshots = brick.snapshots(slice)?;
    snapshots.retain(|&snapshot| snapshot > after);
    let more = snapshots.len() > LIST_ENTRIES_MAX;
    snapshots.truncate(LIST_ENTRIES_MAX);
    Ok(Reply::Snapshots { snapshots, more })
}

/// Bytes that a request holds until it is finished: its own data, or its reply's.
fn held_bytes(request: &SliceRequest) -> usize {
    match request.without_flush() {
        SliceRequest::Write { data, .. } | SliceRequest::Copy { data, .. } => data.len(),
        SliceRequest::Transact { parts, .. } => parts.iter().map(written_bytes).sum(),
        SliceRequest::Read { len, .. } | SliceRequest::ReadVersion { len, .. } => *len as usize,
        SliceRequest::VersionLeaf { .. } => VERSION_LEAF_BYTES,
        _ => 0,
    }
}

fn written_bytes(part: &TransactionPart) -> usize {
    match part {
        TransactionPart::Write { data, .. } => data.len(),
        TransactionPart::Clear { .. } => 0,
    }
}
