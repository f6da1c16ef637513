//! What a brick implements to be served.

use crate::message::reply::AttachReply;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use uuid::Uuid;

/// Who is at the other end of a connection; it has proven the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Where it comes from.
    pub address: SocketAddr,
    /// What it calls itself.
    pub identity: Uuid,
}

/// A brick as its server sees it.
pub trait Service: Send + Sync {
    /// The brick's identity, told to clients.
    fn brick(&self) -> BrickId;

    /// Starts a session, when a connection first attaches a slice. Dropping
    /// the handler ends the session.
    ///
    /// # Errors
    /// When there are too many; the client gets the reason.
    fn open(&self, peer: PeerInfo) -> Result<Box<dyn Handler>, SliceError>;

    /// What managers ask; it may be called from many threads.
    fn control(&self) -> &dyn BrickControl;
}

/// A handler's name for a request that it finishes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Finished.
    Done(Result<SliceReply, SliceError>),
    /// [`FaultHandler::poll`] will tell. The ticket is not in use otherwise.
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

    /// Does a request of an attached slice, or begins to. Handles come from
    /// the client and may be any number.
    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome;

    /// Called after a batch of requests and before their replies are sent:
    /// what the batch shares, a fence for instance, belongs here.
    ///
    /// # Errors
    /// Ends the connection without these replies: the client does not know
    /// what became of its requests.
    fn end_batch(&mut self) -> Result<(), SliceError> {
        Ok(())
    }

    /// Moves what has been finished since to `call_control`. Called only while there
    /// are tickets.
    fn poll(&mut self, done: &mut Vec<FinishedTicket>) {
        let _ = done;
    }

    /// Descriptors that become readable when [`FaultHandler::poll`] may have
    /// something to tell.
    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        let _ = fds;
    }
}
