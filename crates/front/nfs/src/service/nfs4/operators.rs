//! The clients of NFSv4.1 as operators see and expire them.

use super::Nfs4;
use super::lists::ListStatus;
use crate::nfs4::state::{
    ClientId, ClientListing, ExpiredState, GraceStatus, RemovalReason, StateCounts,
};
use pagemesh_base::poison;

/// Clients that are listed in one hold of the state's lock.
const PAGE_CLIENTS: usize = 32;

/// NFSv4.1 as operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nfs4Status {
    /// The grace period; none if it is over.
    pub grace: Option<GraceStatus>,
    /// The stable lists.
    pub lists: Vec<ListStatus>,
    /// Counts of the state of all clients.
    pub counts: StateCounts,
    /// The clients removed since the start, in the order of [`RemovalReason::ALL`].
    pub removals: [u64; RemovalReason::COUNT],
}

/// A client and its state.
#[derive(Clone, Debug)]
pub struct Nfs4ClientStatus {
    /// The client.
    pub listing: ClientListing,
    /// The names of the file systems in which it has got state.
    pub file_systems: Vec<String>,
}

/// The state of an expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryProgress {
    /// The client keeps its state until this many requests in progress have ended.
    Running(usize),
    /// The client has lost its state. A crash now could bring its right to reclaim back, so no other client gets it yet.
    Unwritten,
    /// The client has lost its state and the right to reclaim it.
    Ended,
}

impl Nfs4 {
    /// The state for operators.
    pub(crate) fn status(&self) -> Nfs4Status {
        let now = (self.clock)();
        let lists = self.lists.status();
        let locked = poison::lock(&self.inner);
        Nfs4Status {
            grace: locked.state.grace_status(now),
            lists,
            counts: locked.state.counts(),
            removals: locked.removals,
        }
    }

    /// All clients, by id. The state's lock is released between pages.
    pub(crate) fn clients(&self) -> Vec<Nfs4ClientStatus> {
        let now = (self.clock)();
        let mut clients = Vec::new();
        let mut last = None;
        loop {
            let locked = poison::lock(&self.inner);
            let page = locked.state.clients(last, PAGE_CLIENTS, now);
            drop(locked);
            let is_last = page.len() < PAGE_CLIENTS;
            last = page.last().map(|listing| listing.client);
            clients.extend(page.into_iter().map(|listing| self.named(listing)));
            if is_last {
                return clients;
            }
        }
    }

    fn named(&self, listing: ClientListing) -> Nfs4ClientStatus {
        let names = listing.file_systems.iter();
        let names = names.filter_map(|number| self.lists.name(*number));
        Nfs4ClientStatus {
            file_systems: names.map(str::to_owned).collect(),
            listing,
        }
    }

    /// Begins to expire a client; none if there is no such client.
    pub(crate) fn expire(&self, client: ClientId) -> Option<ExpiredState> {
        self.call(|locked, _| locked.state.expire_client(client))
    }

    /// The progress of an expiry of a client in these lists. Sweeps of the server write the records.
    pub(crate) fn expiry_progress(&self, client: ClientId, file_systems: &[u32]) -> ExpiryProgress {
        let running = poison::lock(&self.inner).state.expiring(client);
        match running {
            Some(running) => ExpiryProgress::Running(running),
            None if self.lists.are_durable(file_systems) => ExpiryProgress::Ended,
            None => ExpiryProgress::Unwritten,
        }
    }
}
