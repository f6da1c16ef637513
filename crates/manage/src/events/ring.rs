//! The ring in memory, and the plan of a change: the events that a transaction adds and removes.
//!
//! Pure: no clock, no I/O. A change is planned, committed by the caller, then applied.

use super::draft::EventDraft;
use super::record::{EventKind, EventRecord, Subject};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Events in the ring: with 400 bytes each, 4 MB in memory and in the store. A cluster that is well
/// has tens a day.
pub const EVENTS_MAX: usize = 10_000;
/// An event of the same kind and subject within this time is a repetition. Longer than the time
/// between two losses of a flapping brick, shorter than a shift of an operator.
pub const REPEAT_PERIOD: Duration = Duration::from_secs(3600);

type RepeatKey = (EventKind, Subject);

/// All events, by sequence number.
#[derive(Debug, Default)]
pub(crate) struct EventRing {
    events: BTreeMap<u64, Arc<EventRecord>>,
    by_kind: BTreeMap<EventKind, BTreeSet<u64>>,
    /// The last event of each kind and subject.
    last: BTreeMap<RepeatKey, u64>,
    /// The highest number ever used.
    last_seq: u64,
}

/// The events that a transaction adds and removes.
#[derive(Debug, Default)]
pub(crate) struct RingChange {
    /// Added or replaced events.
    pub put: Vec<Arc<EventRecord>>,
    /// The numbers of removed events.
    pub remove: BTreeSet<u64>,
}

impl EventRing {
    /// The ring of a store.
    pub(crate) fn new(records: Vec<EventRecord>) -> EventRing {
        let mut ring = EventRing::default();
        for record in records {
            ring.insert(Arc::new(record));
        }
        ring
    }

    pub(crate) fn get(&self, seq: u64) -> Option<&Arc<EventRecord>> {
        self.events.get(&seq)
    }

    /// The highest number ever used; 0 before the first event.
    pub(crate) fn last_seq(&self) -> u64 {
        self.last_seq
    }

    /// The events with higher numbers, in their order.
    pub(crate) fn after(&self, seq: u64) -> impl DoubleEndedIterator<Item = &Arc<EventRecord>> {
        let later = seq.checked_add(1).map(|first| self.events.range(first..));
        later.into_iter().flatten().map(|(_, event)| event)
    }

    /// Plans to add events, at this time in milliseconds since 1970.
    pub(crate) fn plan(&self, drafts: Vec<EventDraft>, now_unix_ms: u64) -> RingChange {
        let mut change = RingChange::default();
        let mut seq = self.last_seq;
        for draft in drafts {
            seq += 1;
            self.plan_one(draft, seq, now_unix_ms, &mut change);
        }
        self.plan_evictions(&mut change);
        change
    }

    /// Plans to replace an event by a form with the same number.
    pub(crate) fn plan_update(event: EventRecord) -> RingChange {
        RingChange {
            put: vec![Arc::new(event)],
            remove: BTreeSet::new(),
        }
    }

    fn plan_one(&self, draft: EventDraft, seq: u64, now: u64, change: &mut RingChange) {
        let repeats = |event: &Arc<EventRecord>| {
            let age_ms = now.saturating_sub(event.time_unix_ms);
            (event.kind, &event.subject) == (draft.kind, &draft.subject)
                && event.acknowledged.is_none()
                && u128::from(age_ms) < REPEAT_PERIOD.as_millis()
        };
        let in_change = change.put.iter().position(repeats);
        let before = match in_change {
            Some(at) => Some(change.put.remove(at)),
            None => {
                let last = self.last.get(&(draft.kind, draft.subject.clone()));
                let last = last
                    .and_then(|seq| self.events.get(seq))
                    .filter(|&it| repeats(it));
                change.remove.extend(last.map(|event| event.seq));
                last.cloned()
            }
        };
        let (count, first_unix_ms) = before.map_or((0, now), |it| (it.count, it.first_unix_ms));
        change.put.push(Arc::new(EventRecord {
            seq,
            time_unix_ms: now,
            kind: draft.kind,
            severity: draft.severity,
            subject: draft.subject,
            actor: draft.actor,
            text: draft.text,
            count: count.saturating_add(1),
            first_unix_ms,
            acknowledged: None,
        }));
    }

    /// Removes the oldest event of the most frequent kind until the ring fits.
    fn plan_evictions(&self, change: &mut RingChange) {
        let mut left = self.events.len() + change.put.len() - change.remove.len();
        if left <= EVENTS_MAX {
            return;
        }
        let mut counts: BTreeMap<EventKind, usize> = BTreeMap::new();
        for (kind, seqs) in &self.by_kind {
            counts.insert(*kind, seqs.difference(&change.remove).count());
        }
        while left > EVENTS_MAX {
            let most = counts.iter().max_by_key(|(_, count)| **count);
            let Some(kind) = most.map(|(kind, _)| *kind) else {
                return;
            };
            let seqs = self.by_kind.get(&kind).into_iter().flatten();
            let oldest = seqs.copied().find(|seq| !change.remove.contains(seq));
            let Some(oldest) = oldest else {
                return;
            };
            change.remove.insert(oldest);
            *counts.entry(kind).or_insert(1) -= 1;
            left -= 1;
        }
    }

    /// Applies a change that the store has committed.
    pub(crate) fn apply(&mut self, change: RingChange) {
        for seq in &change.remove {
            self.remove(*seq);
        }
        for event in change.put {
            self.insert(event);
        }
    }

    fn insert(&mut self, event: Arc<EventRecord>) {
        self.last_seq = self.last_seq.max(event.seq);
        self.by_kind
            .entry(event.kind)
            .or_default()
            .insert(event.seq);
        let last = self.last.entry((event.kind, event.subject.clone()));
        let last = last.or_insert(event.seq);
        *last = event.seq.max(*last);
        self.events.insert(event.seq, event);
    }

    fn remove(&mut self, seq: u64) {
        let Some(event) = self.events.remove(&seq) else {
            return;
        };
        if let Some(seqs) = self.by_kind.get_mut(&event.kind) {
            seqs.remove(&seq);
        }
        let key = (event.kind, event.subject.clone());
        if self.last.get(&key) == Some(&seq) {
            self.last.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests;
