//! The ends of leases.
//!
//! An expired client keeps its state until another client needs it, or the server needs room. The
//! state goes as a whole, so that a client never has a part of it: it gets NFS4ERR_BADSESSION, and
//! recovers as after a restart of the server.

use super::events::RemovalReason;
use super::ids::{ClientId, FileKey};
use super::limits::{COURTESY, COURTESY_CLIENTS_MAX, COURTESY_STATES_MAX, LEASE};
use super::listing::LeaseStatus;
use super::{NfsState, StateError};
use std::time::Instant;

impl NfsState {
    /// The time of the next [`Self::tick`] that has work; none while there are no clients. A tick at
    /// this time may find that the client has renewed its lease since.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let client = self.clients.next_deadline().map(|(it, _)| it);
        client.into_iter().chain(self.grace.deadline()).min()
    }

    /// Ends the leases and the grace period that are over. It looks at no other client.
    pub fn tick(&mut self, now: Instant) {
        self.update_grace(now);
        while let Some((deadline, id)) = self.clients.next_deadline() {
            if deadline > now {
                break;
            }
            self.end_lease(id, now);
        }
    }

    /// The deadline of a client's status has come.
    fn end_lease(&mut self, id: ClientId, now: Instant) {
        let Ok(client) = self.clients.get(id) else {
            return;
        };
        match client.status {
            LeaseStatus::Unconfirmed => {
                self.remove_client(id, RemovalReason::Unconfirmed);
            }
            LeaseStatus::Courtesy => {
                self.remove_client(id, RemovalReason::CourtesyEnded);
            }
            LeaseStatus::Active if !client.is_expired(now) => {
                let base = if client.running > 0 {
                    now
                } else {
                    client.renewed_at
                };
                self.clients
                    .set_status(id, LeaseStatus::Active, base + LEASE);
            }
            LeaseStatus::Active if client.has_locking_state() => {
                // By the end of the lease, and not by this look at it: the one that expired first makes room.
                let deadline = client.renewed_at + LEASE + COURTESY;
                self.clients.set_status(id, LeaseStatus::Courtesy, deadline);
                self.bound_courtesy();
            }
            LeaseStatus::Active => {
                self.remove_client(id, RemovalReason::LeaseExpired);
            }
        }
    }

    /// Removes the clients that expired first, while there are too many or they have too much state.
    fn bound_courtesy(&mut self) {
        while self.clients.with_status(LeaseStatus::Courtesy) > COURTESY_CLIENTS_MAX
            || self.clients.courtesy_states() > COURTESY_STATES_MAX
        {
            if !self.remove_first(LeaseStatus::Courtesy) {
                break;
            }
        }
    }

    /// A file has lost its last name. If only expired clients have it open, they lose their state: it would keep the space of the file.
    pub fn file_removed(&mut self, file: FileKey, now: Instant) {
        let Some(open_file) = self.shares.files.get(&file) else {
            return;
        };
        let states = open_file.states.iter();
        let opens = states.filter_map(|it| self.shares.opens.get(&it));
        let mut clients: Vec<ClientId> = opens.map(|it| it.client).collect();
        clients.sort_unstable();
        clients.dedup();
        // An open of a client with a lease keeps the file: nothing changes.
        let _ = self.expire_for_conflict(&clients, now, StateError::Delay);
    }

    /// Removes clients in the way of a request if the leases of all of them are over.
    ///
    /// # Errors
    /// The error that the request gets if one lease runs. Nothing has changed then.
    pub(super) fn expire_for_conflict(
        &mut self,
        clients: &[ClientId],
        now: Instant,
        error: StateError,
    ) -> Result<(), StateError> {
        let is_expired = |id| self.clients.get(id).map_or(true, |it| it.is_expired(now));
        if !clients.iter().all(|id| is_expired(*id)) {
            return Err(error);
        }
        for id in clients {
            self.remove_client(*id, RemovalReason::Conflict);
        }
        Ok(())
    }
}
