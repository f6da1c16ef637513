//! The state as operators see it.

use super::NfsState;
use super::clients::Client;
use super::ids::ClientId;
use std::net::SocketAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    pub address: SocketAddr,
    /// The lease.
    pub status: LeaseStatus,
    /// The time since its last request.
    pub lease_age: Duration,
    /// Whether it has completed its reclaims.
    pub has_reclaimed: bool,
    /// Whether it may still reclaim state.
    pub may_reclaim: bool,
    /// Sessions.
    pub sessions: usize,
    /// Requests in progress.
    pub running: usize,
    /// Open states.
    pub opens: usize,
    /// Lock states.
    pub lock_states: usize,
    /// Locked ranges.
    pub ranges: usize,
    /// The numbers of the file systems in which it has got state.
    pub file_systems: Vec<u32>,
}

/// Counts of all state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Client records, confirmed or not.
    pub clients: usize,
    /// Client records without a session so far.
    pub unconfirmed_clients: usize,
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

impl NfsState {
    /// At most `max` clients with ids above `after`, by id.
    #[must_use]
    pub fn clients(&self, after: Option<ClientId>, max: usize, now: Instant) -> Vec<ClientListing> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let clients = self.clients.iter_from(start).take(max);
        clients.map(|client| self.listing(client, now)).collect()
    }

    fn listing(&self, client: &Client, now: Instant) -> ClientListing {
        let file_systems = client.listed_in.union(&client.reclaimed_in);
        ClientListing {
            client: client.id,
            owner: client.owner.clone(),
            address: client.address,
            status: client.status,
            lease_age: now.saturating_duration_since(client.renewed_at),
            has_reclaimed: client.has_reclaimed,
            may_reclaim: self.has_reclaims(client),
            sessions: client.sessions.len(),
            running: client.running,
            opens: client.opens.len(),
            lock_states: client.lock_states.len(),
            ranges: self.ranges_of(client),
            file_systems: file_systems.copied().collect(),
        }
    }

    /// The locked ranges of a client.
    pub(super) fn ranges_of(&self, client: &Client) -> usize {
        let states = client.lock_states.iter();
        states.map(|state| self.locked_ranges(*state)).sum()
    }

    /// Whether an open denies access to others.
    #[must_use]
    pub fn has_denials(&self) -> bool {
        self.shares.has_denials()
    }

    /// Whether a file is open.
    #[must_use]
    pub fn has_opens(&self) -> bool {
        !self.shares.files.is_empty()
    }

    /// Counts of all state.
    #[must_use]
    pub fn counts(&self) -> StateCounts {
        StateCounts {
            clients: self.clients.len(),
            unconfirmed_clients: self.clients.with_status(LeaseStatus::Unconfirmed),
            courtesy_clients: self.clients.with_status(LeaseStatus::Courtesy),
            sessions: self.sessions.len(),
            opens: self.shares.opens.len(),
            lock_states: self.shares.locks.len(),
            ranges: self.shares.ranges(),
            files: self.shares.files.len(),
            owners: self.shares.owners.len(),
            cached_bytes_reserved: self.sessions.reserved_bytes(),
            cached_bytes: self.sessions.kept_bytes(),
        }
    }
}
