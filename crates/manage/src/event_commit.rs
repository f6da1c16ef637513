//! Changes of the manager's state together with their events.
//!
//! Invariant: [`Manager::commit`] is the only way to the store's transactions for changes that have
//! events. The ring changes in memory only after the commit, under the lock of the state.

use crate::events::{Acknowledgement, EventDraft, EventFilter, EventRecord, EventRing, RingChange};
use crate::fault::Fault;
use crate::manager::{Manager, ManagerState};
use crate::store::{StoreError, StoreWrite};
use std::sync::{Arc, MutexGuard, PoisonError};

impl Manager {
    /// The ring. Its lock is held for operations in memory only, never over a commit, so that
    /// readers of events do not wait for the disk. It is taken after the lock of the state.
    pub(crate) fn events(&self) -> MutexGuard<'_, EventRing> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Commits a change and its events in one transaction. `_state` proves that the caller holds
    /// the lock, so that no other change takes the same sequence numbers.
    pub(crate) fn commit(
        &self,
        _state: &mut ManagerState,
        writes: &[StoreWrite<'_>],
        drafts: Vec<EventDraft>,
    ) -> Result<(), StoreError> {
        if writes.is_empty() && drafts.is_empty() {
            return Ok(());
        }
        let change = self.events().plan(drafts, self.clock.unix_ms());
        self.commit_ring(writes, change)
    }

    fn commit_ring(&self, writes: &[StoreWrite<'_>], change: RingChange) -> Result<(), StoreError> {
        let removed = change
            .remove
            .iter()
            .map(|&seq| StoreWrite::RemoveEvent(seq));
        let put = change.put.iter().map(|event| StoreWrite::PutEvent(event));
        let dropped = change.dropped_seq.map(StoreWrite::SetDroppedEvent);
        let writes = writes.iter().cloned().chain(removed).chain(put);
        let writes: Vec<StoreWrite<'_>> = writes.chain(dropped).collect();
        self.store.commit(&writes)?;
        self.events().apply(change);
        self.feed.wake.notify_one();
        Ok(())
    }

    /// The events that match and that the caller may read, at most `limit`, and whether more follow.
    #[must_use]
    pub fn list_events(&self, filter: &EventFilter, limit: usize) -> (Vec<Arc<EventRecord>>, bool) {
        self.events().page(filter, limit, self.call.role)
    }

    /// Acknowledges an event. A second acknowledgement changes nothing.
    ///
    /// # Errors
    /// When there is no such event, the caller may not read it, or the store fails.
    pub fn acknowledge(&self, seq: u64) -> Result<Arc<EventRecord>, Fault> {
        let _state = self.state();
        let event = self.events().get(seq).cloned();
        let event = event.filter(|event| event.kind.is_readable_by(self.call.role));
        let event = event.ok_or(Fault::NoSuchEvent(seq))?;
        if event.acknowledged.is_some() {
            return Ok(event);
        }
        let mut acknowledged = EventRecord::clone(&event);
        acknowledged.acknowledged = Some(Acknowledgement {
            by: self.call.actor.to_string(),
            time_unix_ms: self.clock.unix_ms(),
        });
        self.commit_ring(&[], EventRing::plan_update(acknowledged))?;
        self.feed.mark_acknowledged(seq);
        let event = self.events().get(seq).cloned();
        event.ok_or(Fault::NoSuchEvent(seq))
    }

    /// Records the start of the manager.
    pub(crate) fn record_start(&self) -> Result<(), StoreError> {
        let started = EventDraft::manager_started(env!("CARGO_PKG_VERSION"));
        self.commit(&mut self.state(), &[], vec![started])
    }
}
