//! Clients that an operator expires.
//!
//! Invariant: no request of such a client runs when its opens and locks go. Another client may get them then, and a WRITE in progress
//! would change its file.

use super::clients::Client;
use super::events::RemovalReason;
use super::ids::ClientId;
use super::{NfsState, StateError};

/// The state that an expired client loses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpiredState {
    /// Open states.
    pub opens: usize,
    /// Locked ranges.
    pub ranges: usize,
    /// The numbers of the file systems with lists that have the client.
    pub file_systems: Vec<u32>,
}

impl NfsState {
    /// Expires a client for an operator; none if there is no such client. Its sessions end at once: its next request gets BADSESSION. Its
    /// opens, its locks and its right to reclaim go with its last request in progress, which is at once if there is none.
    pub fn expire_client(&mut self, id: ClientId) -> Option<ExpiredState> {
        let client = self.clients.get_mut(id).ok()?;
        client.is_expiring = true;
        for session in &client.sessions {
            self.sessions.close(*session);
        }
        let client = self.clients.get(id).ok()?;
        let expired = ExpiredState {
            opens: client.opens.len(),
            ranges: self.ranges_of(client),
            file_systems: self.listing_file_systems(client),
        };
        self.end_expiry(id);
        Some(expired)
    }

    /// The requests in progress that an expiry waits for; none if it has ended.
    #[must_use]
    pub fn expiring(&self, client: ClientId) -> Option<usize> {
        let client = self.clients.get(client).ok()?;
        client.is_expiring.then_some(client.running)
    }

    /// Removes an expiring client without requests in progress.
    pub(super) fn end_expiry(&mut self, id: ClientId) {
        let is_due = |client: &Client| client.is_expiring && client.running == 0;
        if self.clients.get(id).is_ok_and(is_due) {
            self.revoke_reclaims(id);
            self.remove_client(id, RemovalReason::Operator);
        }
    }

    /// A client gets no new record before the state of its expired one is gone.
    pub(super) fn check_not_expiring(&self, owner: &[u8]) -> Result<(), StateError> {
        match self.clients.confirmed(owner) {
            Some(client) if client.is_expiring => Err(StateError::Delay),
            _ => Ok(()),
        }
    }
}
