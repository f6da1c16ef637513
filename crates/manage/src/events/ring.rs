//! The ring in memory, and the plan of a change: the events that a transaction adds and removes.
//!
//! Pure: no clock, no I/O. A change is planned, committed by the caller, then applied.

use super::draft::EventDraft;
use super::record::{EventKind, EventRecord, Severity, Subject};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// Events in the ring: with 400 bytes each, 4 MB in memory and in the store. A cluster that is well
/// has tens a day.
pub const EVENTS_MAX: usize = 10_000;
/// An equal event within this time is a repetition. Longer than the time between two losses of a
/// flapping brick, shorter than a shift of an operator.
pub const REPEAT_PERIOD: Duration = Duration::from_secs(3600);
/// Events about refused logins in the ring. Anyone who reaches the port causes them, from many
/// addresses, so they may not take the room of other events.
pub const LOGIN_REFUSED_MAX: usize = 256;

/// The facts that an event and its repetition share.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct RepeatKey<'e> {
    kind: EventKind,
    severity: Severity,
    subject: &'e Subject,
    actor: &'e str,
    /// `None` if the texts may differ.
    text: Option<&'e str>,
}

impl<'e> RepeatKey<'e> {
    /// The key of an event; `None` for a kind of which each event stays.
    ///
    /// Only kinds that one cause produces again and again have a key. All others are decisions of
    /// people or of single clients: a merged event would hide all but the last one.
    fn new(
        kind: EventKind,
        severity: Severity,
        subject: &'e Subject,
        (actor, text): (&'e str, &'e str),
    ) -> Option<RepeatKey<'e>> {
        let text = match kind {
            EventKind::BrickLost
            | EventKind::BrickReturned
            | EventKind::LegLost
            | EventKind::LegReturned
            | EventKind::LoginRefused
            | EventKind::ManagerStarted => Some(text),
            // A scrub reports each heartbeat in which its sums have risen.
            EventKind::ScrubFound | EventKind::DeviceDrainFailed => None,
            _ => return None,
        };
        Some(RepeatKey {
            kind,
            severity,
            subject,
            actor,
            text,
        })
    }

    fn of_draft(draft: &'e EventDraft) -> Option<RepeatKey<'e>> {
        let words = (draft.actor.as_str(), draft.text.as_str());
        RepeatKey::new(draft.kind, draft.severity, &draft.subject, words)
    }

    fn of_record(event: &'e EventRecord) -> Option<RepeatKey<'e>> {
        let words = (event.actor.as_str(), event.text.as_str());
        RepeatKey::new(event.kind, event.severity, &event.subject, words)
    }

    /// The index of the key. Two keys with the same index are compared, so a collision costs a merge.
    fn index(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// Whether an event of the past is recent enough to be repeated. A time in the future comes from a
/// wall clock that was corrected since: it says nothing about the age.
fn is_recent(event: &EventRecord, now_unix_ms: u64) -> bool {
    let age_ms = now_unix_ms.checked_sub(event.time_unix_ms);
    age_ms.is_some_and(|age_ms| u128::from(age_ms) < REPEAT_PERIOD.as_millis())
}

/// All events, by sequence number.
#[derive(Debug, Default)]
pub(crate) struct EventRing {
    events: BTreeMap<u64, Arc<EventRecord>>,
    by_kind: BTreeMap<EventKind, BTreeSet<u64>>,
    /// The last event of each [`RepeatKey`], by its index.
    last: BTreeMap<u64, u64>,
    /// The highest number ever used.
    last_seq: u64,
    /// The highest number of an event that was dropped for lack of room; 0 if none was.
    dropped_seq: u64,
}

/// The events that a transaction adds and removes.
#[derive(Debug, Default)]
pub(crate) struct RingChange {
    /// Added or replaced events.
    pub put: Vec<Arc<EventRecord>>,
    /// The numbers of removed events.
    pub remove: BTreeSet<u64>,
    /// The highest number that was ever dropped for lack of room, if it rises.
    pub dropped_seq: Option<u64>,
}

impl RingChange {
    /// Removes an event for lack of room.
    fn drop_event(&mut self, seq: u64) {
        self.remove.insert(seq);
        self.dropped_seq = self.dropped_seq.max(Some(seq));
    }
}

impl EventRing {
    /// The ring of a store, and the highest number of an event that it has dropped.
    pub(crate) fn new(records: Vec<EventRecord>, dropped_seq: u64) -> EventRing {
        let mut ring = EventRing {
            dropped_seq,
            ..EventRing::default()
        };
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

    /// The highest number of an event that was dropped for lack of room; 0 if none was.
    pub(crate) fn dropped_seq(&self) -> u64 {
        self.dropped_seq
    }

    /// The critical events without an acknowledgement.
    pub(crate) fn unacknowledged_critical(&self) -> usize {
        let open = |event: &&Arc<EventRecord>| {
            event.severity == Severity::Critical && event.acknowledged.is_none()
        };
        self.events.values().filter(open).count()
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
        self.plan_login_evictions(&mut change);
        self.plan_evictions(&mut change);
        change.dropped_seq = change.dropped_seq.filter(|seq| *seq > self.dropped_seq);
        change
    }

    /// Plans to replace an event by a form with the same number.
    pub(crate) fn plan_update(event: EventRecord) -> RingChange {
        RingChange {
            put: vec![Arc::new(event)],
            ..RingChange::default()
        }
    }

    fn plan_one(&self, draft: EventDraft, seq: u64, now: u64, change: &mut RingChange) {
        let before =
            RepeatKey::of_draft(&draft).and_then(|key| self.take_repeated(key, now, change));
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

    /// The event that an event with this key repeats; it leaves the ring.
    fn take_repeated(
        &self,
        key: RepeatKey<'_>,
        now: u64,
        change: &mut RingChange,
    ) -> Option<Arc<EventRecord>> {
        let repeats = |event: &Arc<EventRecord>| {
            RepeatKey::of_record(event) == Some(key)
                && event.acknowledged.is_none()
                && is_recent(event, now)
        };
        if let Some(at) = change.put.iter().position(repeats) {
            return Some(change.put.remove(at));
        }
        let last = self.last.get(&key.index());
        let last = last.and_then(|seq| self.events.get(seq));
        let last = last.filter(|&it| repeats(it) && !change.remove.contains(&it.seq))?;
        change.remove.insert(last.seq);
        Some(last.clone())
    }

    /// Removes the oldest events about refused logins until at most [`LOGIN_REFUSED_MAX`] are left.
    fn plan_login_evictions(&self, change: &mut RingChange) {
        let is_login = |event: &&Arc<EventRecord>| event.kind == EventKind::LoginRefused;
        let new = change.put.iter().filter(is_login).count();
        let old = self.by_kind.get(&EventKind::LoginRefused);
        let old = old.into_iter().flatten();
        let old: Vec<u64> = old
            .copied()
            .filter(|seq| !change.remove.contains(seq))
            .collect();
        let excess = (old.len() + new).saturating_sub(LOGIN_REFUSED_MAX);
        for seq in old.into_iter().take(excess) {
            change.drop_event(seq);
        }
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
            change.drop_event(oldest);
            *counts.entry(kind).or_insert(1) -= 1;
            left -= 1;
        }
    }

    /// Applies a change that the store has committed.
    pub(crate) fn apply(&mut self, change: RingChange) {
        for seq in &change.remove {
            self.remove(*seq);
        }
        self.dropped_seq = self.dropped_seq.max(change.dropped_seq.unwrap_or(0));
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
        if let Some(key) = RepeatKey::of_record(&event) {
            let last = self.last.entry(key.index()).or_insert(event.seq);
            *last = event.seq.max(*last);
        }
        self.events.insert(event.seq, event);
    }

    fn remove(&mut self, seq: u64) {
        let Some(event) = self.events.remove(&seq) else {
            return;
        };
        if let Some(seqs) = self.by_kind.get_mut(&event.kind) {
            seqs.remove(&seq);
        }
        let index = RepeatKey::of_record(&event).map(|key| key.index());
        if let Some(index) = index.filter(|it| self.last.get(it) == Some(&seq)) {
            self.last.remove(&index);
        }
    }
}

#[cfg(test)]
mod tests;
