//! One client: a thread that owns a socket and a channel of the space.
//!
//! The thread receives as many requests as there are, submits them, reaps
//! what has completed and sends all replies in one call. What completes
//! inside `submit` is answered in the same pass. System calls per request
//! at depth one, when spinning pays: one `recv` that finds a read or two that
//! find a write (clients send its header and payload apart), one `send`, plus
//! the `recv`s of the spin that find nothing; without spinning one `poll`
//! more. At depth N they are shared by up to [`BATCH_REQUESTS`] requests.
//!
//! Invariants: no more than [`REQUESTS_MAX`] requests and about
//! [`HELD_BYTES_MAX`] bytes are held; at that, the socket is not read. A
//! request that was submitted is waited for before the channel is dropped, up
//! to the drain limit. The thread never blocks except in `wait`, or where the
//! space does.

use crate::in_flight::{InFlight, Outcome, Progress};
use crate::limits::{BATCH_REQUESTS, HELD_BYTES_MAX, Limits, REQUESTS_MAX, SPIN_US};
use crate::negotiation::{Session, Violation};
use crate::outbox::Outbox;
use crate::plan::{Plan, plan};
use crate::receiver::{Filled, Frame, Receiver};
use crate::signal::{Level, Signal};
use crate::spin::Spin;
use crate::wait::{Interest, wait};
use crate::wire::command;
use pagemesh_base::awake::{Awake, BUSY_MIN, DEVICE, LINGER};
use pagemesh_base::space::{Channel, Completion, SpaceError};
use rustix::fd::{AsFd, OwnedFd, RawFd};
use rustix::net::{Shutdown, shutdown};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ended {
    #[error("the client disconnected")]
    Disconnected,
    #[error("the client closed the connection without saying so")]
    Closed,
    #[error("the server asked it to end")]
    Stopped,
    #[error("the client broke the protocol: {0}")]
    Violated(#[from] Violation),
    #[error("the handshake took too long")]
    HandshakeTimeout,
    #[error("the client stopped in the middle of a request")]
    Stalled,
    #[error("requests were still in flight at the drain limit")]
    DrainTimeout,
    #[error("its space serves this connection no more: {0}")]
    ChannelDead(SpaceError),
    #[error("the channel waits on a descriptor that is not open")]
    BrokenChannel,
    #[error("the socket failed: {0}")]
    Socket(#[from] rustix::io::Errno),
}

/// Such waits before the channel is taken for broken: each takes a moment, in which one that
/// is not has named others.
const CLOSED_MAX: u32 = 100;

/// See the module.
pub(crate) struct Connection {
    socket: OwnedFd,
    signal: Arc<Signal>,
    channel: Box<dyn Channel>,
    session: Session,
    limits: Limits,
    receiver: Receiver,
    /// A request that waits for others to make room.
    waiting: Option<Frame>,
    in_flight: InFlight,
    completions: Vec<Completion>,
    outbox: Outbox,
    spin: Spin,
    /// Waits in a row with little time between them, and when the last one was;
    /// none: idle processors may sleep.
    busy: Option<(u32, Instant)>,
    awake: Option<Awake>,
    /// Requests answered since the last wait.
    served: u64,
    descriptors: Vec<RawFd>,
    /// Waits in a row in which the channel named a descriptor that was not open.
    closed: u32,
    /// Whether the socket may have bytes.
    readable: bool,
    /// Whether the receiver may have whole requests.
    unparsed: bool,
    /// Why no more requests are taken, and until when those in flight may run.
    ending: Option<(Ended, Instant)>,
    /// When the last bytes of an unfinished request came.
    last_received: Instant,
}

impl Connection {
    /// A connection after its handshake; `first` came behind it.
    pub(crate) fn new(
        socket: OwnedFd,
        signal: Arc<Signal>,
        channel: Box<dyn Channel>,
        session: Session,
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
            waiting: None,
            in_flight: InFlight::default(),
            completions: Vec::new(),
            outbox: Outbox::default(),
            spin: Spin::new(),
            busy: limits.may_keep_awake.then(|| (0, Instant::now())),
            closed: 0,
            awake: None,
            served: 0,
            descriptors: Vec::new(),
            readable: true,
            unparsed: true,
            ending: None,
            last_received: Instant::now(),
        }
    }

    /// Serves the client until it or the server ends the connection.
    pub(crate) fn serve(mut self) -> Ended {
        let mut active = false;
        loop {
            active |= self.pass();
            if let Some(ended) = self.has_ended() {
                // Closing with requests unread would reset the connection,
                // and the last replies with it.
                let _ = shutdown(&self.socket, Shutdown::Write);
                return ended;
            }
            if self.may_admit() || (self.readable && self.may_receive()) {
                continue;
            }
            if active && self.may_spin() && self.spin() {
                continue;
            }
            active = false;
            if let Err(ended) = self.sleep() {
                return ended;
            }
        }
    }

    /// Receives, submits, reaps and sends once. True if it brought anything.
    fn pass(&mut self) -> bool {
        match self.signal.level() {
            Level::Run => {}
            Level::Drain => self.end(Ended::Stopped),
            Level::Abandon => {
                self.end(Ended::Stopped);
                self.ending = Some((Ended::Stopped, Instant::now()));
            }
        }
        let mut active = self.readable && self.may_receive() && self.receive();
        active |= self.admit();
        active |= self.reap();
        if let Err(errno) = self.outbox.send(self.socket.as_fd()) {
            self.lose(errno);
        }
        active
    }

    /// Whether a request that is there can be submitted.
    fn may_admit(&self) -> bool {
        self.ending.is_none()
            && self.has_room()
            && match &self.waiting {
                Some(frame) => self.fits(frame),
                None => self.unparsed,
            }
    }

    /// Whether more requests are wanted from the socket.
    fn may_receive(&self) -> bool {
        self.ending.is_none() && self.waiting.is_none() && !self.unparsed && self.has_room()
    }

    fn has_room(&self) -> bool {
        self.in_flight.len() + self.outbox.replies() < REQUESTS_MAX
    }

    /// Receives once. True if something came, be it the end.
    fn receive(&mut self) -> bool {
        match self.receiver.fill(self.socket.as_fd()) {
            Ok(Filled::Some { more }) => {
                self.readable = more;
                self.unparsed = true;
                if self.receiver.is_amid() {
                    self.last_received = Instant::now();
                }
                true
            }
            Ok(Filled::Empty) => {
                self.readable = false;
                false
            }
            Ok(Filled::End) => {
                self.end(Ended::Closed);
                true
            }
            Err(errno) => {
                self.lose(errno);
                true
            }
        }
    }

    /// Takes no more requests, for this reason unless there was one before.
    fn end(&mut self, why: Ended) {
        self.readable = false;
        if self.ending.is_none() {
            self.ending = Some((why, Instant::now() + self.limits.drain));
        }
    }

    /// The client is gone: nothing can be sent any more.
    fn lose(&mut self, errno: rustix::io::Errno) {
        use rustix::io::Errno as Os;
        self.outbox.clear();
        self.end(match errno {
            Os::PIPE | Os::CONNRESET => Ended::Closed,
            errno => Ended::Socket(errno),
        });
    }

    /// Submits a batch of requests. True if there was any.
    fn admit(&mut self) -> bool {
        for admitted in 0..BATCH_REQUESTS {
            if !self.may_admit() {
                return admitted > 0;
            }
            let Some(frame) = self.waiting.take().or_else(|| self.parse()) else {
                return admitted > 0;
            };
            if self.fits(&frame) {
                self.start(frame);
            } else {
                self.waiting = Some(frame);
            }
        }
        true
    }

    fn parse(&mut self) -> Option<Frame> {
        match self.receiver.next() {
            Ok(frame) => {
                self.unparsed = frame.is_some();
                frame
            }
            Err(violation) => {
                self.end(violation.into());
                None
            }
        }
    }

    /// Whether the bytes of a request may be held now; the first always may.
    fn fits(&self, frame: &Frame) -> bool {
        let held = self.in_flight.held_bytes() + self.outbox.held_bytes();
        held == 0 || held + held_bytes(frame) <= HELD_BYTES_MAX
    }

    fn start(&mut self, frame: Frame) {
        let held_bytes = held_bytes(&frame);
        let (header, planned) = match frame {
            Frame::Refused(header, failure) => (header, Plan::Fail(failure)),
            Frame::Whole(header, payload) => (header, plan(&self.session, &header, payload)),
        };
        match planned {
            Plan::Submit(request, then) => {
                let token = self.in_flight.begin(
                    header.cookie,
                    header.offset,
                    header.len,
                    held_bytes,
                    then,
                );
                self.channel.submit(token, request);
            }
            Plan::Fail(failure) => self.reply(header.cookie, Outcome::Failed(failure)),
            Plan::Disconnect => self.end(Ended::Disconnected),
        }
    }

    fn reply(&mut self, cookie: u64, outcome: Outcome) {
        self.served += 1;
        self.outbox.put(self.session.structured, cookie, outcome);
    }

    /// Takes what has completed. True if anything has.
    fn reap(&mut self) -> bool {
        self.channel.reap(&mut self.completions);
        if self.completions.is_empty() {
            return false;
        }
        let mut completions = std::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            let token = completion.token;
            // All later requests would fail in the same way. The client gets the errors of
            // those in flight, and may connect anew.
            if let Err(error @ (SpaceError::Fenced | SpaceError::Busy(_))) = &completion.result {
                self.end(Ended::ChannelDead(error.clone()));
            }
            match self.in_flight.complete(completion) {
                Some(Progress::Submit(request)) => self.channel.submit(token, request),
                Some(Progress::End { cookie, outcome }) => self.reply(cookie, outcome),
                None => tracing::error!(token = token.0, "the space completed an unknown request"),
            }
        }
        self.completions = completions;
        true
    }

    /// The reason, once nothing is left to wait for.
    fn has_ended(&self) -> Option<Ended> {
        let (why, until) = self.ending.as_ref()?;
        if self.in_flight.len() == 0 && self.outbox.is_empty() {
            return Some(why.clone());
        }
        if Instant::now() < *until {
            return None;
        }
        if self.in_flight.len() > 0 {
            return Some(Ended::DrainTimeout);
        }
        Some(why.clone())
    }

    fn may_spin(&mut self) -> bool {
        let served = std::mem::take(&mut self.served);
        if self.ending.is_some() || !self.outbox.is_empty() {
            return false;
        }
        let now = Instant::now();
        self.keep_awake(now);
        self.spin.is_worth_it(now, served)
    }

    /// Sees to it that idle processors do not sleep while the client is busy:
    /// waking one, its own above all, takes longer than serving a request.
    fn keep_awake(&mut self, now: Instant) {
        let Some((waits, last)) = &mut self.busy else {
            return;
        };
        let paused = now.duration_since(std::mem::replace(last, now)) > LINGER;
        *waits = if paused { 0 } else { waits.saturating_add(1) };
        if *waits >= BUSY_MIN && self.awake.is_none() {
            match Awake::hold(Path::new(DEVICE)) {
                Ok(awake) => self.awake = Some(awake),
                Err(cause) => {
                    tracing::debug!(%cause, "{DEVICE} cannot be used");
                    self.busy = None;
                }
            }
        }
    }

    /// Tries for a short while to receive or reap. True if it brought
    /// something.
    fn spin(&mut self) -> bool {
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

    /// Waits until something can be done.
    fn sleep(&mut self) -> Result<(), Ended> {
        self.descriptors.clear();
        self.channel.wait_on(&mut self.descriptors);
        let interest = Interest {
            readable: self.may_receive(),
            writable: !self.outbox.is_empty(),
        };
        let stalled = self.stalled_at(interest);
        let drained = self.ending.as_ref().map(|(_, until)| *until);
        let idle = self.awake.as_ref().map(|_| Instant::now() + LINGER);
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
        // What waits behind a channel may close its descriptors meanwhile, and the channel
        // then names others: only one that goes on naming closed ones is broken.
        self.closed = if ready.broken_channel {
            self.closed + 1
        } else {
            0
        };
        if self.closed > CLOSED_MAX {
            return Err(Ended::BrokenChannel);
        }
        self.readable |= ready.readable;
        if !ready.readable && idle.is_some_and(|at| Instant::now() >= at) {
            self.awake = None;
        }
        if !ready.readable && stalled.is_some_and(|at| Instant::now() >= at) {
            return Err(Ended::Stalled);
        }
        Ok(())
    }

    /// When the client has taken too long to finish a request.
    fn stalled_at(&self, interest: Interest) -> Option<Instant> {
        (interest.readable && self.receiver.is_amid())
            .then(|| self.last_received + self.limits.stalled_message)
    }
}

/// Bytes that a request holds until its reply is sent.
fn held_bytes(frame: &Frame) -> u64 {
    match frame {
        Frame::Whole(header, payload) if header.command == command::WRITE => payload.len() as u64,
        Frame::Whole(header, _) if header.command == command::READ => u64::from(header.len),
        _ => 0,
    }
}
