//! The ring against a model that looks at all events.

use super::*;
use crate::events::{Acknowledgement, Severity, SubjectKind};
use proptest::prelude::*;

/// Kind, subject, severity and text of an event.
type EventChoice = (usize, u8, bool, u8);

#[derive(Clone, Debug)]
enum RingOp {
    /// Events of one transaction.
    Add(Vec<EventChoice>),
    Acknowledge(usize),
    Wait(u64),
    /// The wall clock is set back.
    SetBack(u64),
}

/// All but the last one repeat; a scrub also with another text.
const KINDS: [EventKind; 4] = [
    EventKind::BrickLost,
    EventKind::ScrubFound,
    EventKind::LoginRefused,
    EventKind::Attached,
];
const BRICK_LOST: usize = 0;
const SCRUB_FOUND: usize = 1;
const LOGIN_REFUSED: usize = 2;
const ATTACHED: usize = 3;

fn ring_op() -> impl Strategy<Value = RingOp> {
    let event = || (0..KINDS.len(), 0..40u8, any::<bool>(), 0..2u8);
    let period = || 0..2 * REPEAT_PERIOD.as_millis() as u64;
    let same = (Just(BRICK_LOST), 0..2u8, Just(false), Just(0));
    prop_oneof![
        8 => prop::collection::vec(event(), 0..6).prop_map(RingOp::Add),
        1 => prop::collection::vec(same, 1..30).prop_map(RingOp::Add),
        1 => any::<prop::sample::Index>().prop_map(|at| RingOp::Acknowledge(at.index(EVENTS_MAX))),
        2 => period().prop_map(RingOp::Wait),
        1 => period().prop_map(RingOp::SetBack),
    ]
}

fn subject(number: u8) -> Subject {
    Subject {
        kind: SubjectKind::Brick,
        name: number.to_string(),
    }
}

fn draft_of((kind, number, is_critical, text): EventChoice) -> EventDraft {
    EventDraft {
        kind: KINDS[kind],
        severity: if is_critical {
            Severity::Critical
        } else {
            Severity::Warning
        },
        subject: subject(number),
        actor: "manager".into(),
        text: format!("It happened {text}."),
    }
}

fn draft(kind: usize, number: u8) -> EventDraft {
    draft_of((kind, number, false, 0))
}

/// Events that none repeats: acknowledged ones. None is about a login, of which few may stay.
fn filled(count: usize) -> Vec<EventRecord> {
    let event = |seq| EventRecord {
        seq,
        time_unix_ms: 0,
        kind: KINDS[[BRICK_LOST, SCRUB_FOUND, ATTACHED][seq as usize % 3]],
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
    dropped_seq: u64,
}

impl RingModel {
    fn add(&mut self, draft: &EventDraft, now: u64) {
        self.seq += 1;
        let is_equal = |it: &EventRecord| {
            let same = (it.kind, it.severity, &it.subject, &it.actor)
                == (draft.kind, draft.severity, &draft.subject, &draft.actor);
            same && match draft.kind {
                EventKind::Attached => false,
                EventKind::ScrubFound => true,
                _ => it.text == draft.text,
            }
        };
        let last = self.events.iter().rposition(is_equal);
        let repeated = last.filter(|&at| {
            let event = &self.events[at];
            let is_near = event.time_unix_ms <= now && now - event.time_unix_ms < 3_600_000;
            event.acknowledged.is_none() && is_near
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

    /// Of the events before this transaction, drops the oldest about logins beyond their limit, then
    /// the oldest of the most frequent kind.
    fn evict(&mut self, first_new: u64) {
        let logins = |it: &EventRecord| it.kind == EventKind::LoginRefused;
        while self.events.iter().filter(|it| logins(it)).count() > LOGIN_REFUSED_MAX {
            self.drop_first(logins);
        }
        while self.events.len() > EVENTS_MAX {
            let old = || self.events.iter().filter(|it| it.seq < first_new);
            let count = |kind| old().filter(|it| it.kind == kind).count();
            let kind = KINDS.into_iter().max_by_key(|kind| (count(*kind), *kind));
            self.drop_first(|it| Some(it.kind) == kind);
        }
    }

    fn drop_first(&mut self, is: impl Fn(&EventRecord) -> bool) {
        let at = self
            .events
            .iter()
            .position(is)
            .expect("an event of the kind");
        let dropped = self.events.remove(at);
        self.dropped_seq = self.dropped_seq.max(dropped.seq);
    }
}

fn check_ring(filled_count: usize, ops: &[RingOp]) {
    let mut model = RingModel {
        events: filled(filled_count),
        seq: filled_count as u64,
        dropped_seq: 0,
    };
    let mut ring = EventRing::new(filled(filled_count), 0);
    let mut stored: BTreeMap<u64, EventRecord> = filled(filled_count)
        .into_iter()
        .map(|it| (it.seq, it))
        .collect();
    let mut now = 1 << 40;
    let mut dropped_seq = 0;
    for op in ops {
        let change = match op {
            RingOp::Add(events) => {
                let drafts: Vec<_> = events.iter().copied().map(draft_of).collect();
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
            RingOp::SetBack(ms) => {
                now -= ms;
                continue;
            }
        };
        dropped_seq = change.dropped_seq.unwrap_or(dropped_seq);
        stored.retain(|seq, _| !change.remove.contains(seq));
        let put = change.put.iter();
        stored.extend(put.map(|it| (it.seq, EventRecord::clone(it))));
        ring.apply(change);
        let found: Vec<_> = ring.after(0).map(|it| EventRecord::clone(it)).collect();
        assert!(found.len() <= EVENTS_MAX);
        assert_eq!(found, model.events);
        assert!(found.iter().eq(stored.values()), "the store has the same");
        assert_eq!(ring.last_seq(), model.seq);
        assert_eq!(ring.dropped_seq(), model.dropped_seq);
        assert_eq!(dropped_seq, model.dropped_seq);
    }
    let reopened = EventRing::new(stored.into_values().collect(), dropped_seq);
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

fn add(ring: &mut EventRing, drafts: Vec<EventDraft>, now: u64) {
    let change = ring.plan(drafts, now);
    ring.apply(change);
}

#[test]
fn flapping_brick_keeps_events_of_others() {
    let mut ring = EventRing::default();
    add(&mut ring, vec![draft(ATTACHED, 1), draft(ATTACHED, 2)], 0);
    // A brick that flaps every 20 s for a week, with legs of 200 volumes.
    for flap in 0..30_240u64 {
        let legs = (0..if flap % 1000 == 0 { 200 } else { 2 }).map(|volume| EventDraft {
            kind: EventKind::LegLost,
            ..draft(BRICK_LOST, volume)
        });
        let drafts = legs.chain([draft(BRICK_LOST, 0)]).collect();
        add(&mut ring, drafts, flap * 20_000);
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
    let mut ring = EventRing::default();
    add(&mut ring, vec![draft(ATTACHED, 1)], 0);
    // Repetitions are too far apart to count as such.
    for event in 0..EVENTS_MAX as u64 + 100 {
        add(&mut ring, vec![draft(BRICK_LOST, 0)], event * 3_600_000);
    }
    assert_eq!(ring.after(0).count(), EVENTS_MAX);
    assert_eq!(
        ring.after(0).next().map(|it| it.kind),
        Some(EventKind::Attached)
    );
    assert_eq!(ring.dropped_seq(), 102, "the oldest losses of the brick");
}

/// Attackers of many addresses cannot take the room of other events.
#[test]
fn refused_logins_are_bounded() {
    let mut ring = EventRing::default();
    for event in 0..EVENTS_MAX as u64 / 2 {
        add(&mut ring, vec![draft(ATTACHED, 0)], event);
    }
    for address in 0..2 * EVENTS_MAX {
        let refused = EventDraft {
            text: format!("Wrong tokens came from {address}."),
            ..draft(LOGIN_REFUSED, 0)
        };
        add(&mut ring, vec![refused], 0);
    }
    let count = |kind| ring.after(0).filter(|it| it.kind == kind).count();
    assert_eq!(count(EventKind::Attached), EVENTS_MAX / 2);
    assert_eq!(count(EventKind::LoginRefused), LOGIN_REFUSED_MAX);
    let last = ring.after(0).next_back().expect("an event");
    assert!(last.text.contains("19999"), "{}", last.text);
}

/// A repetition of another severity is an event of its own.
#[test]
fn critical_event_outlives_later_warnings() {
    let mut ring = EventRing::default();
    let found = |is_critical, text| draft_of((SCRUB_FOUND, 1, is_critical, text));
    let finds = [(true, 1), (false, 2), (false, 3), (true, 4), (false, 5)];
    for (is_critical, text) in finds {
        add(&mut ring, vec![found(is_critical, text)], 0);
    }
    let events = ring
        .after(0)
        .map(|it| (it.severity, it.count, it.text.as_str()));
    assert_eq!(
        events.collect::<Vec<_>>(),
        [
            (Severity::Critical, 2, "It happened 4."),
            (Severity::Warning, 3, "It happened 5."),
        ]
    );
}

/// A time in the future is no time ago: the wall clock was wrong then.
#[test]
fn event_of_the_future_is_not_repeated() {
    let mut ring = EventRing::default();
    let years = 10 * 365 * 86_400_000;
    for now in [years, 5_000, 6_000] {
        add(&mut ring, vec![draft(BRICK_LOST, 0)], now);
    }
    let counts: Vec<u64> = ring.after(0).map(|it| it.count).collect();
    assert_eq!(counts, [1, 2]);
}
