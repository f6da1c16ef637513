//! The state of NFSv4.1 (RFC 8881): clients, sessions, opens, byte-range locks, leases and the grace
//! period.
//!
//! The state machine is pure: no socket, no file system, no clock and no randomness. Each call gets
//! the time, and [`NfsState::new`] the instance (the boot verifier) and the lists of the run before.
//! The service holds one [`NfsState`] under a mutex and calls it from the operations of a COMPOUND:
//!
//! | operation | call |
//! |---|---|
//! | EXCHANGE_ID | [`NfsState::exchange_id`] |
//! | CREATE_SESSION, DESTROY_SESSION | [`NfsState::create_session`], [`NfsState::destroy_session`] |
//! | DESTROY_CLIENTID, BIND_CONN_TO_SESSION | [`NfsState::destroy_client`], [`NfsState::bind_connection`] |
//! | SEQUENCE, the end of the COMPOUND | [`NfsState::sequence`], [`NfsState::finish`] |
//! | RECLAIM_COMPLETE | [`NfsState::list_late_reclaims`], [`NfsState::reclaim_complete`] |
//! | OPEN | [`NfsState::check_open`], [`NfsState::check_new_open`] before the file system, [`NfsState::open`] after it |
//! | OPEN_DOWNGRADE, CLOSE | [`NfsState::open_downgrade`], [`NfsState::close`] |
//! | READ, WRITE, SETATTR of the size | [`NfsState::check_io`] |
//! | the same by NFSv3 | [`NfsState::check_io_without_state`] |
//! | LOCK | [`NfsState::prepare_lock`] before its records are durable, [`NfsState::lock`] after it |
//! | LOCKT, LOCKU | [`NfsState::test_lock`], [`NfsState::unlock`] |
//! | FREE_STATEID, TEST_STATEID | [`NfsState::free_stateid`], [`NfsState::test_stateid`] |
//! | the current stateid | [`CompoundStateIds`] |
//! | time | [`NfsState::tick`] at [`NfsState::next_deadline`] |
//! | operators | [`NfsState::clients`], [`NfsState::counts`], [`NfsState::expire_client`], [`NfsState::expiring`] |
//!
//! Every call may leave [`StateEvent`]s. The service takes them under the same mutex, in order. A reply that
//! grants state in a file system waits until all records for its list are durable; other replies do not.
//!
//! [`LockTable`] has no tie to NFSv4: other protocols may share it.

mod client_calls;
mod clients;
mod error;
mod events;
mod expiry;
mod grace;
mod ids;
mod io_checks;
mod journal;
mod leases;
pub mod limits;
mod listing;
mod lock_calls;
mod locks;
mod open_calls;
mod owner_states;
mod requests;
mod session_calls;
mod sessions;
mod shares;

pub use error::StateError;
pub use events::{RemovalReason, StateEvent};
pub use expiry::ExpiredState;
pub use grace::{GraceStatus, LateReclaims};
pub use ids::{
    ClientId, CompoundStateIds, FileKey, Instance, Principal, SessionId, StateId, StateNo, Verifier,
};
pub(crate) use journal::RECORD_BYTES_MAX;
pub use journal::{
    GROUP_BYTES_MAX, JournalEnd, JournalError, JournalRecord, KnownClients, RecordChain,
};
pub use listing::{ClientListing, LeaseStatus, StateCounts};
pub use locks::{Lock, LockKind, LockRange, LockRefusal, LockTable, LockTableLimits, TableFull};
pub use requests::*;

use clients::ClientTable;
use grace::Grace;
use sessions::SessionTable;
use shares::Shares;
use std::time::Instant;

/// The state of one server.
#[derive(Debug)]
pub struct NfsState {
    instance: Instance,
    clients: ClientTable,
    sessions: SessionTable,
    shares: Shares,
    grace: Grace,
    events: Vec<StateEvent>,
}

impl NfsState {
    /// The state of a new run with this number. The clients of the list of a file system, by its number,
    /// may reclaim state there for the time of the grace period; without any client there is none.
    #[must_use]
    pub fn new(instance: Instance, known: &[(u32, KnownClients)], now: Instant) -> Self {
        Self {
            instance,
            clients: ClientTable::new(instance),
            sessions: SessionTable::default(),
            shares: Shares::default(),
            grace: Grace::new(known, now),
            events: Vec::new(),
        }
    }

    /// The number of this run.
    #[must_use]
    pub fn instance(&self) -> Instance {
        self.instance
    }

    /// The effects of the calls since the last time, in order.
    pub fn take_events(&mut self) -> Vec<StateEvent> {
        std::mem::take(&mut self.events)
    }
}

#[cfg(test)]
mod tests;
