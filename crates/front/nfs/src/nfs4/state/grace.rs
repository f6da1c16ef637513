//! The grace period after a restart (RFC 8881 section 8.4.2).
//!
//! Invariant: while a client may reclaim, no client gets state but by a reclaim.

use super::clients::Client;
use super::ids::Principal;
use super::journal::{JournalRecord, KnownClients};
use super::limits::{GRACE, GRACE_EXTENSION, GRACE_MAX, LATE_RECLAIM_WAIT};
use super::{ClientId, NfsState, StateError, StateEvent};
use std::collections::HashMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A right to reclaim: the number of the file system, and the principal that may.
type ReclaimRight = (u32, Principal);

/// The grace period.
#[derive(Debug)]
pub(super) struct Grace {
    /// The clients that have not completed their reclaims. The period is over if there is none.
    pending: HashMap<Arc<[u8]>, Vec<ReclaimRight>>,
    ends: Instant,
    ends_at_latest: Instant,
}

/// The grace period as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraceStatus {
    /// Clients that may still reclaim state.
    pub clients: usize,
    /// The time until it ends, if no reclaim extends it.
    pub left: Duration,
}

/// The state of a client that completes its reclaims after the grace period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LateReclaims {
    /// The file systems in which it has reclaimed state.
    pub exports: Vec<u32>,
    /// Whether RECLAIM_COMPLETE waits for the records there. After [`LATE_RECLAIM_WAIT`] it does not: a crash before they are
    /// durable loses the state there, as the client notices, and the other file systems do not wait for a stalled one.
    pub must_wait: bool,
}

impl Grace {
    pub(super) fn new(known: &[(u32, KnownClients)], now: Instant) -> Self {
        let mut pending: HashMap<Arc<[u8]>, Vec<ReclaimRight>> = HashMap::new();
        for (export, known) in known {
            for (owner, principal) in known.iter() {
                let rights = pending.entry(owner.clone()).or_default();
                rights.push((*export, principal));
            }
        }
        Self {
            pending,
            ends: now + GRACE,
            ends_at_latest: now + GRACE_MAX,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.pending.is_empty()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        (!self.is_over()).then_some(self.ends)
    }

    fn may_reclaim(&self, client: &Client, export: u32) -> bool {
        let rights = self.pending.get(&client.owner);
        rights.is_some_and(|it| it.contains(&(export, client.principal)))
    }

    /// The file systems in which the client may reclaim.
    pub(super) fn reclaimable(&self, owner: &[u8], principal: Principal) -> Vec<u32> {
        let rights = self.pending.get(owner).into_iter().flatten();
        let own = rights.filter(|(_, it)| *it == principal);
        own.map(|(export, _)| *export).collect()
    }

    /// A reclaim was granted: the client gets time for its next one.
    pub(super) fn extend(&mut self, now: Instant) {
        let extended = (now + GRACE_EXTENSION).min(self.ends_at_latest);
        self.ends = self.ends.max(extended);
    }
}

impl NfsState {
    /// Ends the grace period if its time has come.
    pub(super) fn update_grace(&mut self, now: Instant) {
        if self.grace.deadline().is_some_and(|it| it <= now) {
            self.grace.pending.clear();
            self.events.push(StateEvent::GraceEnded);
        }
    }

    /// The client reclaims nothing more.
    pub(super) fn complete_reclaims(&mut self, owner: &[u8], principal: Principal) {
        let Some(rights) = self.grace.pending.get_mut(owner) else {
            return;
        };
        rights.retain(|(_, it)| *it != principal);
        if rights.is_empty() {
            self.grace.pending.remove(owner);
            if self.grace.is_over() {
                self.events.push(StateEvent::GraceEnded);
            }
        }
    }

    /// Takes the right to reclaim from a client for ever.
    pub(super) fn revoke_reclaims(&mut self, client: ClientId) {
        let Ok(client) = self.clients.get(client) else {
            return;
        };
        if !client.is_confirmed() || client.has_reclaimed {
            return;
        }
        let (owner, principal) = (client.owner.clone(), client.principal);
        for export in self.grace.reclaimable(&owner, principal) {
            let owner = owner.clone();
            let record = JournalRecord::Removed { owner };
            self.events.push(StateEvent::Journal { export, record });
        }
        self.complete_reclaims(&owner, principal);
    }

    /// The grace period; none if it is over.
    #[must_use]
    pub fn grace_status(&self, now: Instant) -> Option<GraceStatus> {
        (!self.grace.is_over()).then(|| GraceStatus {
            clients: self.grace.pending.len(),
            left: self.grace.ends.saturating_duration_since(now),
        })
    }

    /// Whether clients may only reclaim state.
    #[must_use]
    pub fn is_in_grace(&self) -> bool {
        !self.grace.is_over()
    }

    /// Whether the client may get state in a file system, by a reclaim or not.
    pub(super) fn check_grace(
        &mut self,
        client: ClientId,
        export: u32,
        is_reclaim: bool,
        now: Instant,
    ) -> Result<(), StateError> {
        self.update_grace(now);
        let client = self.clients.get(client)?;
        if !is_reclaim {
            let is_allowed = self.grace.is_over() && client.has_reclaimed;
            return if is_allowed {
                Ok(())
            } else {
                Err(StateError::Grace)
            };
        }
        if self.grace.is_over() || client.has_reclaimed {
            return Err(StateError::NoGrace);
        }
        if !self.grace.may_reclaim(client, export) {
            return Err(StateError::ReclaimBad);
        }
        Ok(())
    }

    /// Whether a client may still reclaim state.
    pub(super) fn has_reclaims(&self, client: &Client) -> bool {
        let reclaimable = self.grace.reclaimable(&client.owner, client.principal);
        !client.has_reclaimed && !reclaimable.is_empty()
    }

    /// The file systems with lists that have the client, or get it with its RECLAIM_COMPLETE.
    pub(super) fn listing_file_systems(&self, client: &Client) -> Vec<u32> {
        let mut file_systems = &client.listed_in | &client.reclaimed_in;
        if client.is_confirmed() && !client.has_reclaimed {
            file_systems.extend(self.grace.reclaimable(&client.owner, client.principal));
        }
        file_systems.into_iter().collect()
    }

    /// Puts the client into the list of a file system, once in a run.
    pub(super) fn list_client(&mut self, client: ClientId, export: u32) -> Result<(), StateError> {
        let client = self.clients.get_mut(client)?;
        if client.listed_in.insert(export) {
            let record = JournalRecord::Active {
                owner: client.owner.clone(),
                principal: client.principal,
            };
            self.events.push(StateEvent::Journal { export, record });
        }
        Ok(())
    }

    /// A file system has a list from now on: puts the clients into it that may hold state there.
    pub fn list_again(&mut self, export: u32) {
        for client in self.clients.iter_from(Bound::Unbounded) {
            if client.listed_in.contains(&export) {
                let record = JournalRecord::Active {
                    owner: client.owner.clone(),
                    principal: client.principal,
                };
                self.events.push(StateEvent::Journal { export, record });
            }
        }
    }

    /// Puts a client that has reclaimed state, and is late with its RECLAIM_COMPLETE, into the lists of the
    /// file systems of that state, because the end of the grace period has dropped its entries. Their records must be
    /// durable before [`Self::reclaim_complete`], for a bounded time.
    ///
    /// # Errors
    /// If the client is gone.
    pub fn list_late_reclaims(
        &mut self,
        client: ClientId,
        now: Instant,
    ) -> Result<LateReclaims, StateError> {
        self.update_grace(now);
        let record = self.clients.get_mut(client)?;
        if !self.grace.is_over() || record.has_reclaimed {
            return Ok(LateReclaims::default());
        }
        let since = *record.late_since.get_or_insert(now);
        let exports: Vec<u32> = record.reclaimed_in.iter().copied().collect();
        for export in &exports {
            self.list_client(client, *export)?;
        }
        Ok(LateReclaims {
            exports,
            must_wait: now.saturating_duration_since(since) < LATE_RECLAIM_WAIT,
        })
    }

    /// RECLAIM_COMPLETE (RFC 8881 section 18.51). For one file system it changes nothing: no file
    /// system moves here from another server. The records of reclaimed state come before the end of the
    /// grace period in each list, so that no reply waits for them: until then the entry of the run before
    /// counts.
    ///
    /// # Errors
    /// If the client has completed its reclaims before, or is gone.
    pub fn reclaim_complete(
        &mut self,
        client: ClientId,
        is_one_fs: bool,
        now: Instant,
    ) -> Result<(), StateError> {
        self.update_grace(now);
        let record = self.clients.get_mut(client)?;
        if is_one_fs {
            return Ok(());
        }
        if record.has_reclaimed {
            return Err(StateError::CompleteAlready);
        }
        record.has_reclaimed = true;
        let (owner, principal) = (record.owner.clone(), record.principal);
        for export in std::mem::take(&mut record.reclaimed_in) {
            self.list_client(client, export)?;
        }
        self.complete_reclaims(&owner, principal);
        Ok(())
    }
}
