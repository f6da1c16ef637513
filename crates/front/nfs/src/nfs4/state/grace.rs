//! The grace period after a restart (RFC 8881 section 8.4.2).
//!
//! Invariant: while a client may reclaim, no client gets state but by a reclaim.

use super::ids::Principal;
use super::journal::{JournalRecord, KnownClients};
use super::limits::{GRACE, GRACE_EXTENSION, GRACE_MAX};
use super::{ClientId, NfsState, StateError, StateEvent};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The grace period.
#[derive(Debug)]
pub(super) struct Grace {
    /// The clients that have not completed their reclaims. The period is over if there is none.
    pending: HashMap<Arc<[u8]>, Principal>,
    ends: Instant,
    ends_at_latest: Instant,
}

impl Grace {
    pub(super) fn new(known: &KnownClients, now: Instant) -> Self {
        let pending = known.iter().map(|(owner, it)| (owner.clone(), it));
        Self {
            pending: pending.collect(),
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

    pub(super) fn may_reclaim(&self, owner: &[u8], principal: Principal) -> bool {
        self.pending.get(owner) == Some(&principal)
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
            self.end_grace();
        }
    }

    fn end_grace(&mut self) {
        let record = JournalRecord::GraceEnded;
        self.events.push(StateEvent::Journal(record));
        self.events.push(StateEvent::GraceEnded);
    }

    /// The client reclaims nothing more.
    pub(super) fn complete_reclaims(&mut self, owner: &[u8], principal: Principal) {
        if self.grace.may_reclaim(owner, principal) {
            self.grace.pending.remove(owner);
            if self.grace.is_over() {
                self.end_grace();
            }
        }
    }

    /// Whether clients may only reclaim state.
    #[must_use]
    pub fn is_in_grace(&self) -> bool {
        !self.grace.is_over()
    }

    /// Whether the client may get state, by a reclaim or not.
    pub(super) fn check_grace(
        &mut self,
        client: ClientId,
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
        if !self.grace.may_reclaim(&client.owner, client.principal) {
            return Err(StateError::ReclaimBad);
        }
        Ok(())
    }

    /// RECLAIM_COMPLETE (RFC 8881 section 18.51). For one file system it changes nothing: no file
    /// system moves here from another server.
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
        let client = self.clients.get_mut(client)?;
        if is_one_fs {
            return Ok(());
        }
        if client.has_reclaimed {
            return Err(StateError::CompleteAlready);
        }
        client.has_reclaimed = true;
        let (owner, principal) = (client.owner.clone(), client.principal);
        self.events.push(StateEvent::Journal(JournalRecord::Active {
            owner: owner.clone(),
            principal,
        }));
        self.complete_reclaims(&owner, principal);
        Ok(())
    }
}
