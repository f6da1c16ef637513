//! The interface that a brick implements to be served.

use crate::message::MessageKind;
use crate::message::reply::AttachReply;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{BrickControl, ServiceTime, SliceError, SliceReply, SliceRequest};
use pagemesh_base::tier_hint::TierHint;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use uuid::Uuid;

/// The peer of a connection. It has proven the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// The peer's address. None at a unix socket.
    pub address: Option<SocketAddr>,
    /// The identity that the peer stated.
    pub identity: Uuid,
}

/// The interface of a brick to its server.
pub trait Service: Send + Sync {
    /// The brick's identity, sent to clients.
    fn brick(&self) -> BrickId;

    /// Starts a session when a connection first attaches a slice. Dropping the handler ends the
    /// session.
    ///
    /// # Errors
    /// When all sessions are in use. The client gets the reason.
    fn open(&self, peer: PeerInfo) -> Result<Box<dyn Handler>, SliceError>;

    /// The control interface, for managers. It may be called from many threads.
    fn control(&self) -> &dyn BrickControl;
}

/// A handler's number for a request that it finishes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Finished.
    Done(Result<SliceReply, SliceError>),
    /// [`Handler::poll`] returns the result. No other open request has this ticket.
    Deferred(Ticket),
}

/// A finished ticket.
pub type FinishedTicket = (Ticket, Result<SliceReply, SliceError>);

/// One connection's session. It is used by one thread, and dropped when the
/// connection ends.
pub trait Handler: Send {
    /// Makes a slice known to the session; the handle names it in requests.
    ///
    /// # Errors
    /// When there is no such slice, or it has a newer epoch.
    fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<AttachReply, SliceError>;

    /// Executes a request of an attached slice, or starts it. Handles come from the client and may
    /// be any number.
    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome;

    /// As [`Handler::execute`], with the tier hint of the request.
    fn execute_hinted(&mut self, handle: u32, request: SliceRequest, hint: TierHint) -> Outcome {
        let _ = hint;
        self.execute(handle, request)
    }

    /// Called after a batch of requests and before their replies are sent. It is for work that a
    /// batch could share. The handlers of a brick have none: each of their changes fences itself.
    ///
    /// # Errors
    /// Ends the connection without these replies: the client then does not know the outcome of its
    /// requests.
    fn end_batch(&mut self) -> Result<(), SliceError> {
        Ok(())
    }

    /// Called once for each answer to a request of a slice: the kind, the bytes of data in the request or
    /// the answer, and the time that the brick spent.
    fn record_served(&mut self, kind: MessageKind, bytes: usize, service: ServiceTime) {
        let _ = (kind, bytes, service);
    }

    /// Moves the tickets finished since the last call to `done`. Called only while tickets are
    /// open.
    fn poll(&mut self, done: &mut Vec<FinishedTicket>) {
        let _ = done;
    }

    /// Descriptors that become readable when [`Handler::poll`] may have results.
    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        let _ = fds;
    }
}
