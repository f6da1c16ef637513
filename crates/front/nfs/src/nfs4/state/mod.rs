//! The state of NFSv4.1 (RFC 8881): clients, sessions, opens, byte-range locks, leases and the grace
//! period.
//!
//! The state machine is pure: no socket, no file system, no clock and no randomness. Each call gets
//! the time, and [`NfsState::new`] the instance (the boot verifier) and the clients of the run before.
//! The service holds one [`NfsState`] under a mutex and calls it from the operations of a COMPOUND:
//!
//! | operation | call |
//! |---|---|
//! | EXCHANGE_ID | [`NfsState::exchange_id`] |
//! | CREATE_SESSION, DESTROY_SESSION | [`NfsState::create_session`], [`NfsState::destroy_session`] |
//! | DESTROY_CLIENTID, BIND_CONN_TO_SESSION | [`NfsState::destroy_client`], [`NfsState::bind_connection`] |
//! | SEQUENCE, the end of the COMPOUND | [`NfsState::sequence`], [`NfsState::finish`] |
//! | RECLAIM_COMPLETE | [`NfsState::reclaim_complete`] |
//! | OPEN | [`NfsState::check_open`] before the file system, [`NfsState::open`] after it |
//! | OPEN_DOWNGRADE, CLOSE | [`NfsState::open_downgrade`], [`NfsState::close`] |
//! | READ, WRITE, SETATTR of the size | [`NfsState::check_io`] |
//! | the same by NFSv3 | [`NfsState::check_io_without_state`] |
//! | LOCK, LOCKT, LOCKU | [`NfsState::lock`], [`NfsState::test_lock`], [`NfsState::unlock`] |
//! | FREE_STATEID, TEST_STATEID | [`NfsState::free_stateid`], [`NfsState::test_stateid`] |
//! | the current stateid | [`CompoundStateIds`] |
//! | time | [`NfsState::tick`] at [`NfsState::next_deadline`] |
//! | operators | [`NfsState::clients`], [`NfsState::counts`], [`NfsState::expire_client`] |
//!
//! Every call may leave [`StateEvent`]s. The service takes them under the same mutex, in order, and
//! handles them before it sends the reply: journal records must be durable by then.
//!
//! [`LockTable`] has no tie to NFSv4: other protocols may share it.

mod error;
mod ids;
mod journal;
pub mod limits;
mod locks;
mod requests;

pub use error::StateError;
pub use ids::{
    ClientId, CompoundStateIds, FileKey, Instance, Principal, SessionId, StateId, StateNo, Verifier,
};
pub use journal::{JournalRecord, KnownClients};
pub use locks::{Lock, LockKind, LockRange, LockRefusal, LockTable, LockTableLimits, TableFull};
pub use requests::*;

use std::sync::Arc;
use std::time::{Duration, Instant};

/// The reason that the server removed a client with its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// The client asked for it.
    Destroyed,
    /// A restarted client has confirmed its new record, or another principal took an unused one.
    Replaced,
    /// The client did not confirm its record within a lease.
    Unconfirmed,
    /// The lease is over, and the client had no state.
    LeaseExpired,
    /// The lease is over, and another client needs a file or range of the client.
    Conflict,
    /// The lease is over for longer than expired clients keep their state.
    CourtesyEnded,
    /// The lease is over, and the server needs room for others.
    Limit,
    /// An operator asked for it.
    Operator,
}

/// An effect of a call outside of the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateEvent {
    /// Store the record durably before the next reply to any client.
    Journal(JournalRecord),
    /// The last open of the file is gone.
    FileUnused(FileKey),
    /// A client is gone with all its state.
    ClientRemoved {
        /// The client.
        client: ClientId,
        /// The reason.
        reason: RemovalReason,
    },
    /// The grace period is over.
    GraceEnded,
}

/// The lease of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStatus {
    /// The client has no session yet.
    Unconfirmed,
    /// The lease runs.
    Active,
    /// The lease is over; the state stays until another client needs it.
    Courtesy,
}

/// A client as operators see it.
#[derive(Clone, Debug)]
pub struct ClientListing {
    /// The client.
    pub client: ClientId,
    /// The client's owner (co_ownerid).
    pub owner: Arc<[u8]>,
    /// The address of its last SEQUENCE, or of its EXCHANGE_ID.
    pub address: std::net::SocketAddr,
    /// The lease.
    pub status: LeaseStatus,
    /// The time since its last request.
    pub lease_age: Duration,
    /// Whether it has completed its reclaims.
    pub has_reclaimed: bool,
    /// Sessions.
    pub sessions: usize,
    /// Requests in progress.
    pub running: usize,
    /// Open states.
    pub opens: usize,
    /// Lock states.
    pub lock_states: usize,
}

/// Counts of all state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Client records, confirmed or not.
    pub clients: usize,
    /// Expired clients that keep their state.
    pub courtesy_clients: usize,
    /// Sessions.
    pub sessions: usize,
    /// Open states.
    pub opens: usize,
    /// Lock states.
    pub lock_states: usize,
    /// Locked ranges.
    pub ranges: usize,
    /// Files with opens.
    pub files: usize,
    /// Names of open and lock owners.
    pub owners: usize,
    /// Bytes that sessions have reserved for replies.
    pub cached_bytes_reserved: usize,
    /// Bytes of replies that slots keep.
    pub cached_bytes: usize,
}

/// The state of one server.
#[derive(Debug)]
pub struct NfsState {
    instance: Instance,
}

#[expect(
    clippy::todo,
    unused_variables,
    missing_docs,
    clippy::missing_errors_doc
)]
impl NfsState {
    pub fn new(instance: Instance, known: KnownClients, now: Instant) -> Self {
        Self { instance }
    }
    pub fn exchange_id(
        &mut self,
        args: &ExchangeIdArgs<'_>,
        now: Instant,
    ) -> Result<ExchangeIdReply, StateError> {
        todo!()
    }
    pub fn create_session(
        &mut self,
        args: &CreateSessionArgs,
        now: Instant,
    ) -> Result<CreateSessionReply, StateError> {
        todo!()
    }
    pub fn destroy_session(&mut self, session: SessionId) -> Result<(), StateError> {
        todo!()
    }
    pub fn destroy_client(&mut self, client: ClientId) -> Result<(), StateError> {
        todo!()
    }
    pub fn bind_connection(
        &mut self,
        session: SessionId,
        direction: ChannelDirection,
    ) -> Result<ChannelDirection, StateError> {
        todo!()
    }
    pub fn sequence(
        &mut self,
        args: &SequenceArgs,
        now: Instant,
    ) -> Result<SequenceOutcome, StateError> {
        todo!()
    }
    /// The request of a slot has ended: `reply` is the whole result of the COMPOUND, none if there
    /// is none (the request has panicked, or the file system is fenced).
    pub fn finish(&mut self, slot: SlotUse, reply: Option<&[u8]>, now: Instant) {
        todo!()
    }
    pub fn reclaim_complete(
        &mut self,
        client: ClientId,
        is_one_fs: bool,
        now: Instant,
    ) -> Result<(), StateError> {
        todo!()
    }
    /// Whether the client may open files now: the rules of the grace period.
    pub fn check_open(
        &self,
        client: ClientId,
        is_reclaim: bool,
        now: Instant,
    ) -> Result<(), StateError> {
        todo!()
    }
    pub fn open(&mut self, args: &OpenArgs<'_>, now: Instant) -> Result<OpenGrant, StateError> {
        todo!()
    }
    pub fn open_downgrade(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
        access: ShareBits,
        deny: ShareBits,
    ) -> Result<StateId, StateError> {
        todo!()
    }
    /// Frees the open and its locks.
    pub fn close(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
    ) -> Result<StateId, StateError> {
        todo!()
    }
    /// Checks the stateid of READ, WRITE or SETATTR of the size, also a special one.
    pub fn check_io(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
        access: IoAccess,
        now: Instant,
    ) -> Result<(), StateError> {
        todo!()
    }
    /// Checks an access of a protocol without opens. NFSv3 answers [`StateError::Locked`] by
    /// NFS3ERR_JUKEBOX.
    pub fn check_io_without_state(
        &mut self,
        file: FileKey,
        access: IoAccess,
        now: Instant,
    ) -> Result<(), StateError> {
        todo!()
    }
    pub fn lock(&mut self, args: &LockArgs<'_>, now: Instant) -> Result<StateId, LockError> {
        todo!()
    }
    pub fn test_lock(
        &mut self,
        client: ClientId,
        file: FileKey,
        owner: &[u8],
        kind: LockKind,
        range: LockRange,
        now: Instant,
    ) -> Result<(), LockError> {
        todo!()
    }
    pub fn unlock(
        &mut self,
        client: ClientId,
        stateid: StateId,
        file: FileKey,
        range: LockRange,
    ) -> Result<StateId, StateError> {
        todo!()
    }
    pub fn free_stateid(&mut self, client: ClientId, stateid: StateId) -> Result<(), StateError> {
        todo!()
    }
    pub fn test_stateid(&self, client: ClientId, stateid: StateId) -> Result<(), StateError> {
        todo!()
    }
    /// Ends leases and the grace period whose time has come.
    pub fn tick(&mut self, now: Instant) {
        todo!()
    }
    /// The time of the next [`Self::tick`] that has work.
    pub fn next_deadline(&self) -> Option<Instant> {
        todo!()
    }
    pub fn take_events(&mut self) -> Vec<StateEvent> {
        todo!()
    }
    /// At most `max` clients with ids above `after`, in order.
    pub fn clients(&self, after: Option<ClientId>, max: usize, now: Instant) -> Vec<ClientListing> {
        todo!()
    }
    pub fn counts(&self) -> StateCounts {
        todo!()
    }
    /// Removes a client for an operator; false if there is none.
    pub fn expire_client(&mut self, client: ClientId) -> bool {
        todo!()
    }
}
