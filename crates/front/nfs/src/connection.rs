//! One client: a socket, the calls in progress, and the replies that are not sent.
//!
//! A connection has no thread. `epoll` reports it to one thread at a time (`EPOLLONESHOT`); that
//! thread owns its [`Input`] until it gives it back. Any thread may add a reply; one at a time
//! sends replies, and no lock is held meanwhile. An idle connection is this structure and a socket.
//!
//! Invariants: calls and replies are within the bounds of [`limits`](crate::limits), or else no call
//! is read. No thread waits for a client.

mod input;
mod output;

pub(crate) use input::{Input, Received};

use crate::connections::Connections;
use crate::limits::{CONNECTION_BYTES_MAX, CONNECTION_CALLS_MAX, Limits, STALL_LIMIT};
use crate::record::RecordError;
use crate::rpc::{CallError, Reply};
use pagemesh_base::poison;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// The number of a connection.
pub(crate) type ConnectionId = u64;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndReason {
    #[error("the client closed it")]
    Closed,
    #[error("the server stopped")]
    Stopped,
    #[error("no call came for a long time")]
    Idle,
    #[error("the client stopped in the middle of a call")]
    CallStalled,
    #[error("the client did not take a reply")]
    ReplyStalled,
    #[error("the client broke the protocol: {0}")]
    BrokenRecord(#[from] RecordError),
    #[error("the client broke the protocol: {0}")]
    NotACall(CallError),
    #[error("there are too many connections, or too many of this address")]
    TooMany,
    #[error("clients hold too many bytes of incomplete calls and untaken replies")]
    Overload,
    #[error("another host has the volume of the export")]
    Fenced,
    #[error("a call failed by a fault of the server")]
    Fault,
    #[error("the socket failed: {0}")]
    Socket(io::Error),
}

impl EndReason {
    /// Whether the client is at fault.
    pub(crate) fn is_violation(&self) -> bool {
        matches!(
            self,
            Self::CallStalled | Self::ReplyStalled | Self::BrokenRecord(_) | Self::NotACall(_)
        )
    }

    pub(crate) fn of_socket(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Socket(error),
        }
    }
}

/// A reply that is not sent as a whole.
struct UnsentReply {
    reply: Reply,
    sent: usize,
}

struct ConnectionState {
    /// None: the connection is closed. Calls that still run keep the connection, but no descriptor.
    socket: Option<Arc<TcpStream>>,
    /// None: a thread reads calls, or no more are read.
    input: Option<Box<Input>>,
    /// The events that `epoll` waits for.
    armed: EventFlags,
    /// A call waits in the input for room.
    is_paused: bool,
    /// The time since when it waits, or the end of another call after that.
    stuck_since: Option<Instant>,
    /// A thread must look at the input again, also without new bytes.
    is_kicked: bool,
    /// A call was refused because of the bounds of the connection.
    wants_room: bool,
    /// Calls without a sent reply.
    calls: usize,
    /// Bytes of these calls and replies.
    bytes: usize,
    /// Calls since the connection began.
    calls_total: u64,
    replies: VecDeque<UnsentReply>,
    is_writing: bool,
    /// The socket takes no bytes since this time; each sent reply renews it.
    blocked_since: Option<Instant>,
    /// Bytes that count against the bound of all connections: of the incomplete record, and of
    /// replies while the socket is blocked.
    held_input: usize,
    held_output: usize,
    /// No more calls are read. The connection ends after the last reply.
    end: Option<EndReason>,
    is_closed: bool,
    last_event: Instant,
    record_since: Option<Instant>,
}

/// See the module.
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) peer: SocketAddr,
    connections: Arc<Connections>,
    is_established: AtomicBool,
    state: Mutex<ConnectionState>,
}

impl Connection {
    pub(crate) fn new(
        id: ConnectionId,
        (socket, peer): (TcpStream, SocketAddr),
        connections: Arc<Connections>,
    ) -> Self {
        Self {
            id,
            peer,
            connections,
            is_established: AtomicBool::new(false),
            state: Mutex::new(ConnectionState {
                socket: Some(Arc::new(socket)),
                input: Some(Box::default()),
                armed: EventFlags::empty(),
                is_paused: false,
                stuck_since: None,
                is_kicked: false,
                wants_room: false,
                calls: 0,
                calls_total: 0,
                bytes: 0,
                replies: VecDeque::new(),
                is_writing: false,
                blocked_since: None,
                held_input: 0,
                held_output: 0,
                end: None,
                is_closed: false,
                last_event: Instant::now(),
                record_since: None,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        poison::lock(&self.state)
    }

    /// Runs code while other threads wait for this connection.
    #[cfg(test)]
    pub(crate) fn while_locked<T>(&self, run: impl FnOnce() -> T) -> T {
        let _held = self.lock();
        run()
    }

    /// The calls so far, and the time of the last event.
    pub(crate) fn activity(&self) -> (u64, Instant) {
        let state = self.lock();
        (state.calls_total, state.last_event)
    }

    /// The address of the client.
    pub(crate) fn client(&self) -> IpAddr {
        self.peer.ip()
    }

    pub(crate) fn is_established(&self) -> bool {
        self.is_established.load(Ordering::Relaxed)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// The first call has come: the connection is one of those with calls from now on.
    pub(crate) fn establish(&self) -> Result<(), EndReason> {
        if self.is_established() {
            return Ok(());
        }
        self.connections.establish(self)?;
        self.is_established.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The socket; none if the connection is closed.
    pub(crate) fn socket(&self) -> Option<Arc<TcpStream>> {
        self.lock().socket.clone()
    }

    /// Waits for events from now on.
    pub(crate) fn start(&self) -> io::Result<()> {
        let mut state = self.lock();
        let Some(socket) = state.socket.clone() else {
            return Ok(());
        };
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT;
        state.armed = flags;
        let data = EventData::new_u64(self.id);
        Ok(epoll::add(&self.connections.epoll, socket, data, flags)?)
    }

    /// Begins to handle an event. Returns the input if the caller must read calls; then it calls
    /// [`end_turn`](Self::end_turn) or [`end_input`](Self::end_input).
    pub(crate) fn begin_turn(&self, event: EventFlags) -> Option<Box<Input>> {
        let failed = EventFlags::HUP | EventFlags::ERR;
        let mut state = self.lock();
        state.armed = EventFlags::empty();
        state.last_event = Instant::now();
        if event.intersects(EventFlags::OUT | failed) && state.blocked_since.is_some() {
            drop(state);
            self.send_blocked();
            state = self.lock();
        }
        let is_readable = event.intersects(EventFlags::IN | EventFlags::RDHUP | failed);
        let is_wanted = (is_readable || state.is_kicked) && !state.is_paused;
        let input = match is_wanted && state.end.is_none() {
            true => state.input.take(),
            false => None,
        };
        match &input {
            Some(_) => state.is_kicked = false,
            None => self.arm(&mut state),
        }
        input
    }

    /// Gives the input back, and waits for further events.
    pub(crate) fn end_turn(&self, input: Box<Input>) {
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        state.record_since = input.record_since();
        let held = input.held_bytes();
        let is_overload = self.connections.hold(&mut state.held_input, held);
        // Room that came in the meantime is looked at at once.
        state.is_paused = input.is_parked() && !state.is_kicked;
        state.stuck_since = match input.is_parked() {
            true => state.stuck_since.or_else(|| Some(Instant::now())),
            false => None,
        };
        state.input = Some(input);
        self.arm(&mut state);
        drop(state);
        if is_overload {
            self.connections.make_room_for_bytes();
        }
        self.close_if_over();
    }

    /// Reads no more calls: the connection ends after the last reply.
    pub(crate) fn end_input(&self, reason: EndReason) {
        let mut state = self.lock();
        state.end.get_or_insert(reason);
        state.input = None;
        self.connections.hold(&mut state.held_input, 0);
        drop(state);
        self.close_if_over();
    }

    /// Looks at the input again: there may be room for a call that waits.
    pub(crate) fn resume(&self) {
        let mut state = self.lock();
        self.kick(&mut state);
    }

    fn kick(&self, state: &mut ConnectionState) {
        state.is_kicked = true;
        state.is_paused = false;
        self.arm(state);
    }

    /// Waits for the events that the connection needs now. A kick waits for a writable socket, which
    /// is one at once, or after a blocked reply.
    fn arm(&self, state: &mut ConnectionState) {
        let mut wanted = EventFlags::empty();
        if state.input.is_some() && state.end.is_none() && !state.is_paused {
            wanted |= EventFlags::IN | EventFlags::RDHUP;
            wanted.set(EventFlags::OUT, state.is_kicked);
        }
        if state.blocked_since.is_some() && !state.is_writing {
            wanted |= EventFlags::OUT;
        }
        let Some(socket) = &state.socket else {
            return;
        };
        if state.armed.contains(wanted) {
            return;
        }
        let flags = wanted | EventFlags::ONESHOT;
        let data = EventData::new_u64(self.id);
        let armed = epoll::modify(&self.connections.epoll, socket, data, flags);
        state.armed = flags;
        if let Err(errno) = armed {
            tracing::warn!(peer = %self.peer, %errno, "cannot wait for an NFS client");
            state.end.get_or_insert(EndReason::Socket(errno.into()));
        }
    }

    /// Adds a call, if the bounds allow one with this many bytes of call and reply. Else the
    /// connection is resumed when there is room.
    pub(crate) fn admit(&self, bytes: usize) -> bool {
        let mut state = self.lock();
        // Clients that take their replies do not pay for others.
        let is_throttled = state.held_output > 0 && self.connections.are_bytes_scarce();
        let (calls_max, bytes_max) = match is_throttled {
            true => (1, 0),
            false => (CONNECTION_CALLS_MAX, CONNECTION_BYTES_MAX),
        };
        let fits = state.calls < calls_max && state.bytes + bytes <= bytes_max;
        let fits = state.calls == 0 || fits;
        if fits {
            state.calls += 1;
            state.calls_total += 1;
            state.bytes += bytes;
        } else {
            state.wants_room = true;
        }
        fits
    }

    /// As [`admit`](Self::admit), beyond the bounds: the caller has a bound of its own.
    pub(crate) fn admit_always(&self, bytes: usize) {
        let mut state = self.lock();
        state.calls += 1;
        state.calls_total += 1;
        state.bytes += bytes;
        state.wants_room = false;
    }

    /// Whether a refusal may be sent although the bounds allow no call.
    pub(crate) fn takes_refusals(&self) -> bool {
        let state = self.lock();
        state.blocked_since.is_none() && state.replies.len() < CONNECTION_CALLS_MAX
    }

    /// Removes a call that gets no reply.
    pub(crate) fn drop_call(&self, bytes: usize) {
        let mut state = self.lock();
        self.release(&mut state, 1, bytes);
        drop(state);
        self.close_if_over();
    }

    fn release(&self, state: &mut ConnectionState, calls: usize, bytes: usize) {
        state.calls -= calls;
        state.bytes -= bytes;
        state.stuck_since = state.stuck_since.map(|_| Instant::now());
        if state.wants_room {
            state.wants_room = false;
            self.kick(state);
        }
    }

    fn close_if_over(&self) {
        let mut state = self.lock();
        let is_over = state.calls == 0 && state.replies.is_empty() && !state.is_writing;
        if !is_over || state.is_closed {
            return;
        }
        let Some(reason) = state.end.take() else {
            return;
        };
        drop(state);
        self.close_with(reason, Shutdown::Write);
    }

    /// Ends the connection now. Calls in progress go on, without replies.
    pub(crate) fn close(&self, reason: EndReason) {
        self.close_with(reason, Shutdown::Both);
    }

    fn close_with(&self, reason: EndReason, how: Shutdown) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.is_closed, true) {
            return;
        }
        let dropped = (state.input.take(), std::mem::take(&mut state.replies));
        let socket = state.socket.take();
        self.connections.hold(&mut state.held_input, 0);
        self.connections.hold(&mut state.held_output, 0);
        drop(state);
        drop(dropped);
        if let Some(socket) = socket {
            // It fails if the client has closed the connection.
            let _ = socket.shutdown(how);
        }
        self.connections.remove(self, &reason);
    }

    /// The time since when the bytes that the connection holds wait for its client; none without such bytes.
    pub(crate) fn holds_since(&self) -> Option<Instant> {
        let state = self.lock();
        let output = state.blocked_since.filter(|_| state.held_output > 0);
        let input = state.record_since.filter(|_| state.held_input > 0);
        output.into_iter().chain(input).min()
    }

    /// Whether calls or replies are in progress.
    pub(crate) fn is_busy(&self) -> bool {
        let state = self.lock();
        state.calls > 0 || !state.replies.is_empty()
    }

    /// Whether the connection is not read because of a stall, and its client sends no more: NFS clients do that only when they close
    /// a connection.
    fn is_abandoned(&self, now: Instant) -> bool {
        let state = self.lock();
        let is_stuck = |since| now.saturating_duration_since(since) >= STALL_LIMIT;
        let is_stuck = state.stuck_since.is_some_and(is_stuck);
        let socket = state.socket.clone().filter(|_| is_stuck);
        drop(state);
        let Some(socket) = socket else {
            return false;
        };
        let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Ends the connection if it is beyond a deadline. One that waits for room looks for it again.
    pub(crate) fn check_deadlines(&self, now: Instant, limits: &Limits) {
        if self.is_abandoned(now) {
            return self.close(EndReason::Closed);
        }
        let mut state = self.lock();
        if state.is_paused {
            self.kick(&mut state);
        }
        let is_after = |since: Option<Instant>, limit| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
        };
        let is_idle = state.calls == 0 && state.replies.is_empty() && !state.is_paused;
        let reason = if is_after(state.blocked_since, limits.reply) {
            EndReason::ReplyStalled
        } else if state.input.is_some() && is_after(state.record_since, limits.record) {
            EndReason::CallStalled
        } else if is_idle && is_after(Some(state.last_event), limits.idle) {
            EndReason::Idle
        } else {
            return;
        };
        drop(state);
        self.close(reason);
    }
}

/// The socket of a client, ready for a connection.
pub(crate) fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    // A failure of these is no reason to lose the client.
    let _ = socket.set_nodelay(true);
    let _ = rustix::net::sockopt::set_socket_keepalive(socket, true);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Connected, connected};
    use bytes::Bytes;

    /// A connection with a call that has no room, and that no queue knows.
    fn paused() -> Connected {
        let made = connected();
        let input = made.connection.begin_turn(EventFlags::IN);
        let mut input = input.expect("the input");
        input.park(Bytes::from_static(b"a call"), &[]);
        made.connection.end_turn(input);
        made
    }

    #[test]
    fn paused_connection_is_read_again_at_a_sweep() {
        let paused = paused();
        let (connections, connection) = (&paused.connections, &paused.connection);
        assert!(
            connection.begin_turn(EventFlags::IN).is_none(),
            "it is paused"
        );
        connection.check_deadlines(Instant::now(), &connections.limits);
        let mut events = Vec::with_capacity(1);
        let buffer = rustix::buffer::spare_capacity(&mut events);
        let limit = rustix::event::Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        epoll::wait(&connections.epoll, buffer, Some(&limit)).expect("an event");
        let event: &epoll::Event = events.first().expect("an event of the connection");
        let mut input = connection.begin_turn(event.flags).expect("the input");
        assert_eq!(input.take_parked().as_deref(), Some(&b"a call"[..]));
    }
}
