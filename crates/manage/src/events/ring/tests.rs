//! The ring against a model that looks at all events.

use super::*;
use crate::events::{Acknowledgement, Severity, SubjectKind};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum RingOp {
    /// Events of one transaction: kind and subject of each.
    Add(Vec<(usize, u8)>),
    Acknowledge(usize),
    Wait(u64),
}

const KINDS: [EventKind; 3] = [
    EventKind::BrickLost,
    EventKind::LegLost,
    EventKind::Attached,
];

fn ring_op() -> impl Strategy<Value = RingOp> {
    let event = || (0..KINDS.len(), any::<u8>());
    prop_oneof![
        8 => prop::collection::vec(event(), 0..6).prop_map(RingOp::Add),
        1 => prop::collection::vec((Just(0), 0..2u8), 1..30).prop_map(RingOp::Add),
        1 => any::<prop::sample::Index>().prop_map(|at| RingOp::Acknowledge(at.index(EVENTS_MAX))),
        2 => (0..2 * REPEAT_PERIOD.as_millis() as u64).prop_map(RingOp::Wait),
    ]
}

fn subject(number: u8) -> Subject {
    Subject {
        kind: SubjectKind::Brick,
        name: number.to_string(),
    }
}

fn draft(kind: usize, number: u8) -> EventDraft {
    EventDraft {
        kind: KINDS[kind],
        severity: Severity::Info,
        subject: subject(number),
        actor: "manager".into(),
        text: "It happened.".into(),
    }
}

/// Events that none repeats: acknowledged ones of the last kind.
fn filled(count: usize) -> Vec<EventRecord> {
    let event = |seq| EventRecord {
        seq,
        time_unix_ms: 0,
        kind: KINDS[seq as usize % KINDS.len()],
        severity: Severity::Info,
        subject: subject(seq as u8),
        actor: "manager".into(),
        text: String::new(),
        count: 1,
        first_unix_ms: 0,
        acknowledged: Some(Acknowledgement {
            by: "a".into(),
            time_unix_ms: 0,
        }),
    };
    (1..=count as u64).map(event).collect()
}

/// The rules of the ring, by searches over all events.
#[derive(Default)]
struct RingModel {
    events: Vec<EventRecord>,
    seq: u64,
}

impl RingModel {
    fn add(&mut self, draft: &EventDraft, now: u64) {
        self.seq += 1;
        let last = self
            .events
            .iter()
            .rposition(|it| (it.kind, &it.subject) == (draft.kind, &draft.subject));
        let repeated = last.filter(|&at| {
            let event = &self.events[at];
            event.acknowledged.is_none() && now - event.time_unix_ms < 3_600_000
        });
        let before = repeated.map(|at| self.events.remove(at));
        self.events.push(EventRecord {
            seq: self.seq,
            time_unix_ms: now,
            kind: draft.kind,
            severity: draft.severity,
            subject: draft.subject.clone(),
            actor: draft.actor.clone(),
            text: draft.text.clone(),
            count: before.as_ref().map_or(1, |it| it.count + 1),
            first_unix_ms: before.map_or(now, |it| it.first_unix_ms),
            acknowledged: None,
        });
    }

    /// Of the events before this transaction, drops the oldest of the most frequent kind.
    fn evict(&mut self, first_new: u64) {
        while self.events.len() > EVENTS_MAX {
            let old = || self.events.iter().filter(|it| it.seq < first_new);
            let count = |kind| old().filter(|it| it.kind == kind).count();
            let kind = KINDS.into_iter().max_by_key(|kind| (count(*kind), *kind));
            let at = self.events.iter().position(|it| Some(it.kind) == kind);
            self.events.remove(at.expect("an event of the kind"));
        }
    }
}

fn check_ring(filled_count: usize, ops: &[RingOp]) {
    let mut model = RingModel {
        events: filled(filled_count),
        seq: filled_count as u64,
    };
    let mut ring = EventRing::new(filled(filled_count));
    let mut stored: BTreeMap<u64, EventRecord> = filled(filled_count)
        .into_iter()
        .map(|it| (it.seq, it))
        .collect();
    let mut now = 0;
    for op in ops {
        let change = match op {
            RingOp::Add(events) => {
                let drafts: Vec<_> = events.iter().map(|&(kind, it)| draft(kind, it)).collect();
                let first_new = model.seq + 1;
                drafts.iter().for_each(|it| model.add(it, now));
                model.evict(first_new);
                ring.plan(drafts, now)
            }
            RingOp::Acknowledge(at) => {
                let Some(event) = model.events.get_mut(*at) else {
                    continue;
                };
                event.acknowledged = Some(Acknowledgement {
                    by: "b".into(),
                    time_unix_ms: now,
                });
                EventRing::plan_update(event.clone())
            }
            RingOp::Wait(ms) => {
                now += ms;
                continue;
            }
        };
        stored.retain(|seq, _| !change.remove.contains(seq));
        let put = change.put.iter();
        stored.extend(put.map(|it| (it.seq, EventRecord::clone(it))));
        ring.apply(change);
        let found: Vec<_> = ring.after(0).map(|it| EventRecord::clone(it)).collect();
        assert!(found.len() <= EVENTS_MAX);
        assert_eq!(found, model.events);
        assert!(found.iter().eq(stored.values()), "the store has the same");
        assert_eq!(ring.last_seq(), model.seq);
    }
    let reopened = EventRing::new(stored.into_values().collect());
    assert!(reopened.after(0).eq(ring.after(0)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_events_match_model(ops in prop::collection::vec(ring_op(), 1..80)) {
        check_ring(0, &ops);
    }

    #[test]
    fn full_ring_matches_model(ops in prop::collection::vec(ring_op(), 1..12)) {
        check_ring(EVENTS_MAX - 5, &ops);
    }
}

#[test]
fn flapping_brick_keeps_events_of_others() {
    let mut ring = EventRing::new(vec![]);
    let change = ring.plan(vec![draft(2, 1), draft(2, 2)], 0);
    ring.apply(change);
    // A brick that flaps every 20 s for a week, with legs of 200 volumes.
    for flap in 0..30_240u64 {
        let legs = (0..if flap % 1000 == 0 { 200 } else { 2 }).map(|volume| draft(1, volume));
        let drafts = legs.chain([draft(0, 0)]).collect();
        let change = ring.plan(drafts, flap * 20_000);
        ring.apply(change);
    }
    let attached = ring.after(0).filter(|it| it.kind == EventKind::Attached);
    assert_eq!(attached.count(), 2);
    let lost = ring.after(0).find(|it| it.kind == EventKind::BrickLost);
    assert_eq!(
        lost.map(|it| (it.count, it.first_unix_ms)),
        Some((30_240, 0))
    );
}

#[test]
fn most_frequent_kind_is_dropped_first() {
    let mut ring = EventRing::new(vec![]);
    let change = ring.plan(vec![draft(2, 1)], 0);
    ring.apply(change);
    // Repetitions are too far apart to count as such.
    for event in 0..EVENTS_MAX as u64 + 100 {
        let change = ring.plan(vec![draft(0, 0)], event * 3_600_000);
        ring.apply(change);
    }
    assert_eq!(ring.after(0).count(), EVENTS_MAX);
    assert_eq!(
        ring.after(0).next().map(|it| it.kind),
        Some(EventKind::Attached)
    );
}
