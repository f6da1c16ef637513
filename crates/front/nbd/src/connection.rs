//! One client: a thread that owns a socket and a channel of the space.
//!
//! The thread receives all pending requests, submits them, reaps completions and sends all replies
//! in one call. Requests that complete inside `submit` are answered in the same pass.
//!
//! System calls per request at depth one, when spinning pays: one `recv` that finds a read or two
//! that find a write (clients send its header and payload apart), one `send`, and the `recv`s of
//! the spin that find nothing. Without spinning there is one `poll` more. At depth N up to
//! [`BATCH_REQUESTS`] requests share them.
//!
//! Invariants: a connection holds no more than [`REQUESTS_MAX`] requests and about
//! [`HELD_BYTES_MAX`] bytes; at these limits it does not read the socket. Before the channel is
//! dropped, the thread waits for submitted requests, up to the drain limit. The thread never blocks
//! except in `wait`, or in the space.
//!
//! # One write
//!
//! A client has sent a write of 4 KiB. Its thread does all of the following:
//!
//! 1. `nbd::Connection::serve` → `Connection::run_pass` → `nbd::Connection::receive` → `Receiver::receive_once`:
//!    one `recv` takes all bytes that have arrived.
//! 2. `Connection::submit_batch` → `Receiver::next_frame` yields a `RequestFrame::Whole` of header and
//!    payload. A short payload is copied out once; one above `COPIED_BYTES_MAX` is received in place.
//! 3. `Connection::start_request` → `requests::plan` checks the header: `RequestPlan::Submit` of a
//!    `Request::Write`, and `Continuation::Done`. `InFlight::begin` gives the token.
//! 4. The channel gets the request. A channel of a volume continues in `VolumeChannel::submit`, and
//!    over `map` the write is done when that returns.
//! 5. `Connection::reap` takes the completion from the channel; `InFlight::complete` checks it against
//!    its request; `ReplyQueue::push`, and at the end of the pass `ReplyQueue::send`: one `send` for all
//!    replies.

use crate::limits::{BATCH_REQUESTS, HELD_BYTES_MAX, Limits, REQUESTS_MAX, SPIN_US};
use crate::negotiation::{NegotiatedOptions, ProtocolViolation};
use crate::outbox::ReplyQueue;
use crate::receiver::{ReceiveOutcome, Receiver, RequestFrame};
use crate::requests::{CompletionStep, InFlight, RequestOutcome, RequestPlan, plan};
use crate::spin::SpinPolicy;
use crate::stop_signal::{StopLevel, StopSignal};
use crate::wait::{Interest, wait};
use crate::wire::command;
use pagemesh_base::cpu_latency::{
    BUSY_REQUESTS_MIN, CPU_DMA_LATENCY_DEVICE, CpuLatencyRequest, IDLE_GRACE,
};
use pagemesh_base::space::{Channel, Completion, SpaceError};
use pagemesh_base::spin_permit::SpinPermit;
use rustix::fd::{AsFd, OwnedFd, RawFd};
use rustix::net::{Shutdown, shutdown};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndReason {
    #[error("the client disconnected")]
    Disconnected,
    #[error("the client closed the connection without a disconnect request")]
    Closed,
    #[error("the server stopped the connection")]
    Stopped,
    #[error("the client broke the protocol: {0}")]
    Violated(#[from] ProtocolViolation),
    #[error("the handshake took too long")]
    HandshakeTimeout,
    #[error("the client stopped in the middle of a request")]
    ClientStalled,
    #[error("requests were still in flight at the drain limit")]
    DrainTimeout,
    #[error("the space no longer serves this connection: {0}")]
    ChannelFailed(SpaceError),
    #[error("the channel waits on a descriptor that is not open")]
    BrokenChannel,
    #[error("the socket failed: {0}")]
    Socket(#[from] rustix::io::Errno),
}

/// Waits with a closed descriptor before the channel counts as broken. A working channel names
/// other descriptors within that time.
const CLOSED_FD_WAITS_MAX: u32 = 100;

/// See the module.
pub struct Connection {
    socket: OwnedFd,
    signal: Arc<StopSignal>,
    channel: Box<dyn Channel>,
    session: NegotiatedOptions,
    limits: Limits,
    receiver: Receiver,
    /// A request that waits for room.
    waiting_frame: Option<RequestFrame>,
    in_flight: InFlight,
    completions: Vec<Completion>,
    reply_queue: ReplyQueue,
    spin: SpinPolicy,
    /// Consecutive waits with little time between them, and the time of the last one; none: idle
    /// processors may sleep.
    busy_waits: Option<(u32, Instant)>,
    awake: Option<CpuLatencyRequest>,
    /// Requests answered since the last wait.
    answered_requests: u64,
    descriptors: Vec<RawFd>,
    /// Consecutive waits in which the channel named a descriptor that was not open.
    closed_fd_waits: u32,
    /// Whether the socket may have bytes.
    may_receive_bytes: bool,
    /// Whether the receiver may have whole requests.
    may_have_requests: bool,
    /// The reason to take no more requests, and the drain limit of those in flight.
    ending: Option<(EndReason, Instant)>,
    /// The time of the last bytes of an unfinished request.
    last_received: Instant,
}

impl Connection {
    /// A connection after its handshake; `first` holds the bytes received after it.
    pub(crate) fn new(
        socket: OwnedFd,
        signal: Arc<StopSignal>,
        channel: Box<dyn Channel>,
        session: NegotiatedOptions,
        limits: Limits,
        first: &[u8],
    ) -> Self {
        Self {
            socket,
            signal,
            channel,
            session,
            limits,
            receiver: Receiver::new(first),
            waiting_frame: None,
            in_flight: InFlight::default(),
            completions: Vec::new(),
            reply_queue: ReplyQueue::default(),
            spin: SpinPolicy::new(),
            busy_waits: limits.may_keep_cpus_awake.then(|| (0, Instant::now())),
            closed_fd_waits: 0,
            awake: None,
            answered_requests: 0,
            descriptors: Vec::new(),
            may_receive_bytes: true,
            may_have_requests: true,
            ending: None,
            last_received: Instant::now(),
        }
    }

    /// Serves the client until it or the server ends the connection.
    pub fn serve(mut self) -> EndReason {
        let mut active = false;
        loop {
            active |= self.run_pass();
            if let Some(ended) = self.end_reason() {
                // Closing with unread requests would reset the connection, and lose the last
                // replies.
                let _ = shutdown(&self.socket, Shutdown::Write);
                return ended;
            }
            if self.may_admit() || (self.may_receive_bytes && self.may_receive()) {
                continue;
            }
            if active && self.may_spin() && self.spin() {
                continue;
            }
            active = false;
            if let Err(ended) = self.wait_for_event() {
                return ended;
            }
        }
    }

    /// Receives, submits, reaps and sends once. True if it made progress.
    fn run_pass(&mut self) -> bool {
        match self.signal.level() {
            StopLevel::Running => {}
            StopLevel::Drain => self.begin_end(EndReason::Stopped),
            StopLevel::Abandon => {
                self.begin_end(EndReason::Stopped);
                self.ending = Some((EndReason::Stopped, Instant::now()));
            }
        }
        let mut active = self.may_receive_bytes && self.may_receive() && self.receive();
        active |= self.submit_batch();
        active |= self.reap();
        if let Err(errno) = self.reply_queue.send(self.socket.as_fd()) {
            self.end_with_socket_error(errno);
        }
        active
    }

    /// Whether a pending request can be submitted.
    fn may_admit(&self) -> bool {
        self.ending.is_none()
            && self.has_room()
            && match &self.waiting_frame {
                Some(frame) => self.fits_in_limits(frame),
                None => self.may_have_requests,
            }
    }

    /// Whether to read more requests from the socket.
    fn may_receive(&self) -> bool {
        self.ending.is_none()
            && self.waiting_frame.is_none()
            && !self.may_have_requests
            && self.has_room()
    }

    fn has_room(&self) -> bool {
        self.in_flight.len() + self.reply_queue.replies() < REQUESTS_MAX
    }

    /// Receives once. True if bytes came, or the end.
    fn receive(&mut self) -> bool {
        match self.receiver.receive_once(self.socket.as_fd()) {
            Ok(ReceiveOutcome::Some { more }) => {
                self.may_receive_bytes = more;
                self.may_have_requests = true;
                if self.receiver.is_in_progress() {
                    self.last_received = Instant::now();
                }
                true
            }
            Ok(ReceiveOutcome::Empty) => {
                self.may_receive_bytes = false;
                false
            }
            Ok(ReceiveOutcome::End) => {
                self.begin_end(EndReason::Closed);
                true
            }
            Err(errno) => {
                self.end_with_socket_error(errno);
                true
            }
        }
    }

    /// Takes no more requests, for this reason unless there was one before.
    fn begin_end(&mut self, why: EndReason) {
        self.may_receive_bytes = false;
        if self.ending.is_none() {
            self.ending = Some((why, Instant::now() + self.limits.drain));
        }
    }

    /// Handles a socket error: the client is gone, so replies are dropped.
    fn end_with_socket_error(&mut self, errno: rustix::io::Errno) {
        use rustix::io::Errno as Os;
        self.reply_queue.clear();
        self.begin_end(match errno {
            Os::PIPE | Os::CONNRESET => EndReason::Closed,
            errno => EndReason::Socket(errno),
        });
    }

    /// Submits a batch of requests. True if there was any.
    fn submit_batch(&mut self) -> bool {
        for admitted in 0..BATCH_REQUESTS {
            if !self.may_admit() {
                return admitted > 0;
            }
            let Some(frame) = self.waiting_frame.take().or_else(|| self.next_frame()) else {
                return admitted > 0;
            };
            if self.fits_in_limits(&frame) {
                self.start_request(frame);
            } else {
                self.waiting_frame = Some(frame);
            }
        }
        true
    }

    fn next_frame(&mut self) -> Option<RequestFrame> {
        match self.receiver.next_frame() {
            Ok(frame) => {
                self.may_have_requests = frame.is_some();
                frame
            }
            Err(violation) => {
                self.begin_end(violation.into());
                None
            }
        }
    }

    /// Whether the bytes of a request fit now; the first request always fits.
    fn fits_in_limits(&self, frame: &RequestFrame) -> bool {
        let held = self.in_flight.held_bytes() + self.reply_queue.held_bytes();
        held == 0 || held + held_bytes(frame) <= HELD_BYTES_MAX
    }

    fn start_request(&mut self, frame: RequestFrame) {
        let held_bytes = held_bytes(&frame);
        let (header, planned) = match frame {
            RequestFrame::Refused(header, failure) => (header, RequestPlan::Fail(failure)),
            RequestFrame::Whole(header, payload) => (header, plan(&self.session, &header, payload)),
        };
        match planned {
            RequestPlan::Submit(request, then) => {
                let token = self.in_flight.begin(
                    header.cookie,
                    header.offset,
                    header.len,
                    held_bytes,
                    then,
                );
                self.channel.submit(token, request);
            }
            RequestPlan::Fail(failure) => {
                self.reply(header.cookie, RequestOutcome::Failed(failure))
            }
            RequestPlan::Disconnect => self.begin_end(EndReason::Disconnected),
        }
    }

    fn reply(&mut self, cookie: u64, outcome: RequestOutcome) {
        self.answered_requests += 1;
        self.reply_queue
            .push(self.session.has_structured_replies, cookie, outcome);
    }

    /// Takes completions. True if there were any.
    fn reap(&mut self) -> bool {
        self.channel.reap(&mut self.completions);
        if self.completions.is_empty() {
            return false;
        }
        let mut completions = std::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            let token = completion.token;
            // All later requests would fail in the same way. The client gets the errors of those in
            // flight, and may connect again.
            if let Err(error @ (SpaceError::Fenced | SpaceError::Busy(_))) = &completion.result {
                self.begin_end(EndReason::ChannelFailed(error.clone()));
            }
            match self.in_flight.complete(completion) {
                Some(CompletionStep::Submit(request)) => self.channel.submit(token, request),
                Some(CompletionStep::End { cookie, outcome }) => self.reply(cookie, outcome),
                None => tracing::error!(token = token.0, "the space completed an unknown request"),
            }
        }
        self.completions = completions;
        true
    }

    /// The reason, once no request and no reply is left.
    fn end_reason(&self) -> Option<EndReason> {
        let (why, until) = self.ending.as_ref()?;
        if self.in_flight.len() == 0 && self.reply_queue.is_empty() {
            return Some(why.clone());
        }
        if Instant::now() < *until {
            return None;
        }
        if self.in_flight.len() > 0 {
            return Some(EndReason::DrainTimeout);
        }
        Some(why.clone())
    }

    fn may_spin(&mut self) -> bool {
        let served = std::mem::take(&mut self.answered_requests);
        if self.ending.is_some() || !self.reply_queue.is_empty() {
            return false;
        }
        let now = Instant::now();
        self.keep_awake(now);
        self.spin.should_spin(now, served)
    }

    /// Keeps idle processors awake while the client is busy: waking one, above all the client's
    /// own, takes longer than serving a request.
    fn keep_awake(&mut self, now: Instant) {
        let Some((waits, last)) = &mut self.busy_waits else {
            return;
        };
        let paused = now.duration_since(std::mem::replace(last, now)) > IDLE_GRACE;
        *waits = if paused { 0 } else { waits.saturating_add(1) };
        if *waits >= BUSY_REQUESTS_MIN && self.awake.is_none() {
            match CpuLatencyRequest::open(Path::new(CPU_DMA_LATENCY_DEVICE)) {
                Ok(awake) => self.awake = Some(awake),
                Err(cause) => {
                    tracing::debug!(%cause, "{CPU_DMA_LATENCY_DEVICE} cannot be used");
                    self.busy_waits = None;
                }
            }
        }
    }

    /// Tries for a short while to receive or reap. True if it made progress.
    fn spin(&mut self) -> bool {
        let Some(_permit) = SpinPermit::take() else {
            return false;
        };
        let until = Instant::now() + Duration::from_micros(SPIN_US);
        while Instant::now() < until {
            if self.may_receive() && self.receive() {
                return true;
            }
            if self.in_flight.len() > 0 && self.reap() {
                return true;
            }
        }
        false
    }

    /// Waits until there is work.
    fn wait_for_event(&mut self) -> Result<(), EndReason> {
        self.descriptors.clear();
        self.channel.poll_fds(&mut self.descriptors);
        let interest = Interest {
            readable: self.may_receive(),
            writable: !self.reply_queue.is_empty(),
        };
        let stalled = self.stall_deadline(interest);
        let drained = self.ending.as_ref().map(|(_, until)| *until);
        let idle = self.awake.as_ref().map(|_| Instant::now() + IDLE_GRACE);
        let until = [stalled, drained, idle, self.channel.deadline()]
            .into_iter()
            .flatten()
            .min();
        let ready = wait(
            &self.signal,
            self.socket.as_fd(),
            interest,
            &self.descriptors,
            until,
        )?;
        // The threads behind a channel may close its descriptors meanwhile, and the channel then
        // names others. Only a channel that keeps naming closed ones is broken.
        self.closed_fd_waits = if ready.has_broken_channel {
            self.closed_fd_waits + 1
        } else {
            0
        };
        if self.closed_fd_waits > CLOSED_FD_WAITS_MAX {
            return Err(EndReason::BrokenChannel);
        }
        self.may_receive_bytes |= ready.readable;
        if !ready.readable && idle.is_some_and(|at| Instant::now() >= at) {
            self.awake = None;
        }
        if !ready.readable && stalled.is_some_and(|at| Instant::now() >= at) {
            return Err(EndReason::ClientStalled);
        }
        Ok(())
    }

    /// The time at which the client has taken too long to finish a request.
    fn stall_deadline(&self, interest: Interest) -> Option<Instant> {
        (interest.readable && self.receiver.is_in_progress())
            .then(|| self.last_received + self.limits.stalled_message)
    }
}

/// Bytes that a request holds until its reply is sent.
fn held_bytes(frame: &RequestFrame) -> u64 {
    match frame {
        RequestFrame::Whole(header, payload) if header.command == command::WRITE => {
            payload.len() as u64
        }
        RequestFrame::Whole(header, _) if header.command == command::READ => u64::from(header.len),
        _ => 0,
    }
}
