//! The table of client records.
//!
//! Invariants: an owner has at most one confirmed and one unconfirmed record. Each record is in the
//! queue of its status, once, with its deadline. The deadline of an active record may be too early: a
//! SEQUENCE only notes its time, and the queue looks at it when the deadline has come. So a request
//! moves nothing in a queue, and no search over all clients is needed.

use super::events::RemovalReason;
use super::ids::{ClientId, Instance, OwnerNo, Principal, SessionId, StateNo, Verifier};
use super::limits::LEASE;
use super::listing::LeaseStatus;
use super::requests::CreateSessionReply;
use super::{JournalRecord, NfsState, StateError, StateEvent};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

/// A client record.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) owner: Arc<[u8]>,
    pub(super) verifier: Verifier,
    pub(super) principal: Principal,
    pub(super) address: SocketAddr,
    pub(super) status: LeaseStatus,
    deadline: Instant,
    /// The time of the last SEQUENCE, or of the EXCHANGE_ID.
    pub(super) renewed_at: Instant,
    /// The sequence number of the next CREATE_SESSION.
    pub(super) next_sequence: u32,
    /// The result of the last CREATE_SESSION, for a repeated one.
    pub(super) last_session: Option<CreateSessionReply>,
    pub(super) sessions: Vec<SessionId>,
    /// Requests in progress.
    pub(super) running: usize,
    /// An operator expires it: its state goes after its requests in progress.
    pub(super) is_expiring: bool,
    /// RECLAIM_COMPLETE was there.
    pub(super) has_reclaimed: bool,
    /// The file systems with lists that have the client as active in this run.
    pub(super) listed_in: BTreeSet<u32>,
    /// The file systems in which it has reclaimed state, before its RECLAIM_COMPLETE.
    pub(super) reclaimed_in: BTreeSet<u32>,
    /// The first RECLAIM_COMPLETE after the grace period.
    pub(super) late_since: Option<Instant>,
    pub(super) opens: BTreeSet<StateNo>,
    pub(super) lock_states: BTreeSet<StateNo>,
    pub(super) open_owners: HashMap<Arc<[u8]>, OwnerNo>,
    pub(super) lock_owners: HashMap<Arc<[u8]>, OwnerNo>,
}

/// The fields of a new client record.
pub(super) struct NewClient {
    pub(super) owner: Arc<[u8]>,
    pub(super) verifier: Verifier,
    pub(super) principal: Principal,
    pub(super) address: SocketAddr,
}

impl Client {
    pub(super) fn is_confirmed(&self) -> bool {
        self.status != LeaseStatus::Unconfirmed
    }

    /// Whether it has opens or locks.
    pub(super) fn has_locking_state(&self) -> bool {
        !self.opens.is_empty() || !self.lock_states.is_empty()
    }

    /// Whether it has opens, locks or sessions.
    pub(super) fn has_state(&self) -> bool {
        self.has_locking_state() || !self.sessions.is_empty()
    }

    /// Whether the lease is over. A request in progress keeps it.
    pub(super) fn is_expired(&self, now: Instant) -> bool {
        self.running == 0 && now.saturating_duration_since(self.renewed_at) >= LEASE
    }
}

/// The client records.
#[derive(Debug)]
pub(super) struct ClientTable {
    instance: Instance,
    next_number: u32,
    /// The keys of client ids. A client that guesses an id could make sessions of another client.
    keys: RandomState,
    by_id: BTreeMap<ClientId, Client>,
    confirmed: HashMap<Arc<[u8]>, ClientId>,
    unconfirmed: HashMap<Arc<[u8]>, ClientId>,
    /// Deadlines by status.
    queues: [BTreeSet<(Instant, ClientId)>; 3],
}

fn queue_of(status: LeaseStatus) -> usize {
    match status {
        LeaseStatus::Unconfirmed => 0,
        LeaseStatus::Active => 1,
        LeaseStatus::Courtesy => 2,
    }
}

impl ClientTable {
    pub(super) fn new(instance: Instance) -> Self {
        Self {
            instance,
            next_number: 1,
            keys: RandomState::new(),
            by_id: BTreeMap::new(),
            confirmed: HashMap::new(),
            unconfirmed: HashMap::new(),
            queues: Default::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn with_status(&self, status: LeaseStatus) -> usize {
        self.queues[queue_of(status)].len()
    }

    /// Opens and lock states of expired clients.
    pub(super) fn courtesy_states(&self) -> usize {
        let expired = self.queues[queue_of(LeaseStatus::Courtesy)].iter();
        let expired = expired.filter_map(|(_, id)| self.by_id.get(id));
        expired
            .map(|it| it.opens.len() + it.lock_states.len())
            .sum()
    }

    pub(super) fn get(&self, id: ClientId) -> Result<&Client, StateError> {
        self.by_id.get(&id).ok_or(StateError::StaleClientId)
    }

    pub(super) fn get_mut(&mut self, id: ClientId) -> Result<&mut Client, StateError> {
        self.by_id.get_mut(&id).ok_or(StateError::StaleClientId)
    }

    pub(super) fn confirmed(&self, owner: &[u8]) -> Option<&Client> {
        self.by_id.get(self.confirmed.get(owner)?)
    }

    pub(super) fn unconfirmed(&self, owner: &[u8]) -> Option<ClientId> {
        self.unconfirmed.get(owner).copied()
    }

    pub(super) fn iter_from(&self, start: Bound<ClientId>) -> impl Iterator<Item = &Client> {
        let clients = self.by_id.range((start, Bound::Unbounded));
        clients.map(|(_, client)| client)
    }

    /// The earliest deadline of a status.
    pub(super) fn first(&self, status: LeaseStatus) -> Option<(Instant, ClientId)> {
        self.queues[queue_of(status)].first().copied()
    }

    /// The earliest deadline.
    pub(super) fn next_deadline(&self) -> Option<(Instant, ClientId)> {
        let firsts = self.queues.iter().filter_map(BTreeSet::first);
        firsts.min().copied()
    }

    /// A permutation of the numbers by the keys: four rounds of a Feistel network (Luby and Rackoff
    /// 1988). So no number returns before all were used.
    fn permuted(&self, number: u32) -> u32 {
        let (mut left, mut right) = ((number >> 16) as u16, number as u16);
        for round in 0..4_u8 {
            let mixed = left ^ self.keys.hash_one((round, right)) as u16;
            (left, right) = (right, mixed);
        }
        u32::from(left) << 16 | u32::from(right)
    }

    /// The next number without a client: a flood of EXCHANGE_ID may go through all numbers.
    fn next_id(&mut self) -> ClientId {
        loop {
            let id = ClientId::new(self.instance, self.permuted(self.next_number));
            self.next_number = self.next_number.wrapping_add(1);
            if !self.by_id.contains_key(&id) {
                return id;
            }
        }
    }

    /// Adds an unconfirmed record. The owner has none.
    pub(super) fn insert(&mut self, new: NewClient, now: Instant) -> &Client {
        let id = self.next_id();
        let deadline = now + LEASE;
        self.unconfirmed.insert(new.owner.clone(), id);
        self.queues[queue_of(LeaseStatus::Unconfirmed)].insert((deadline, id));
        let client = Client {
            id,
            owner: new.owner,
            verifier: new.verifier,
            principal: new.principal,
            address: new.address,
            status: LeaseStatus::Unconfirmed,
            deadline,
            renewed_at: now,
            next_sequence: 1,
            last_session: None,
            sessions: Vec::new(),
            running: 0,
            is_expiring: false,
            has_reclaimed: false,
            listed_in: BTreeSet::new(),
            reclaimed_in: BTreeSet::new(),
            late_since: None,
            opens: BTreeSet::new(),
            lock_states: BTreeSet::new(),
            open_owners: HashMap::new(),
            lock_owners: HashMap::new(),
        };
        self.by_id.entry(id).or_insert(client)
    }

    /// Moves a record to the queue of a status.
    pub(super) fn set_status(&mut self, id: ClientId, status: LeaseStatus, deadline: Instant) {
        let Some(client) = self.by_id.get_mut(&id) else {
            return;
        };
        self.queues[queue_of(client.status)].remove(&(client.deadline, id));
        if !client.is_confirmed() && status != LeaseStatus::Unconfirmed {
            self.unconfirmed.remove(&client.owner);
            self.confirmed.insert(client.owner.clone(), id);
        }
        client.status = status;
        client.deadline = deadline;
        self.queues[queue_of(status)].insert((deadline, id));
    }

    /// Renews the lease.
    pub(super) fn renew(&mut self, id: ClientId, now: Instant) {
        let Some(client) = self.by_id.get_mut(&id) else {
            return;
        };
        client.renewed_at = client.renewed_at.max(now);
        if client.status == LeaseStatus::Courtesy {
            self.set_status(id, LeaseStatus::Active, now + LEASE);
        }
    }

    fn remove(&mut self, id: ClientId) -> Option<Client> {
        let client = self.by_id.remove(&id)?;
        self.queues[queue_of(client.status)].remove(&(client.deadline, id));
        let owners = if client.is_confirmed() {
            &mut self.confirmed
        } else {
            &mut self.unconfirmed
        };
        owners.remove(&client.owner);
        Some(client)
    }
}

impl NfsState {
    /// Removes a client with all its state; false if there is none. No request of it runs, except for the caller's own: it would change
    /// files without the locks.
    pub(super) fn remove_client(&mut self, id: ClientId, reason: RemovalReason) -> bool {
        let Some(mut client) = self.clients.remove(id) else {
            return false;
        };
        debug_assert!(client.running <= 1, "requests of a removed client run");
        for session in &client.sessions {
            self.sessions.remove(*session);
        }
        for open in std::mem::take(&mut client.opens) {
            self.shares.remove_open(open, &mut client, &mut self.events);
        }
        for export in client.listed_in {
            let owner = client.owner.clone();
            let record = JournalRecord::Removed { owner };
            self.events.push(StateEvent::Journal { export, record });
        }
        let client = id;
        self.events
            .push(StateEvent::ClientRemoved { client, reason });
        true
    }
}
