//! Models of what the channels of a volume share: every interleaving of a few
//! operations, up to a bound, on the code that ships ([`pagemesh_models`],
//! docs/rfd/008-concurrency-models.md), and shown to fail on deliberate defects.

mod guests;
mod ring;

use crate::channel::Core;
use crate::hub::{Hub, KEEPER, Link, Member, Note};
use crate::keeper::Mailbox;
use crate::locks::{Holder, LockRange, RangeLocks};
use crate::steps::step;
use crate::undecided::Undecided;
use crate::view::{ColumnView, Gate, LegView, SegmentView, View};
use crate::wake::Wake;
use pagemesh_base::defect::Defect;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, LegState, SliceId};
use pagemesh_base::slice::{Leg, SliceCompletion, SliceReply, SliceRequest};
use pagemesh_base::space::{Request, Token};
use pagemesh_models::{Model, Thread, finds, pause_until, race};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const fn holder(key: u32) -> Holder {
    Holder {
        member: KEEPER + 1,
        key,
    }
}

/// A column of two legs, and who was told that its turn has come.
struct World {
    locks: RangeLocks,
    ops: AtomicU64,
    legs: [AtomicU64; 2],
    told: Mutex<Vec<Holder>>,
}

impl World {
    fn new() -> World {
        World {
            locks: RangeLocks::new(),
            ops: AtomicU64::new(0),
            legs: [0, 0].map(AtomicU64::new),
            told: Mutex::default(),
        }
    }

    fn was_told(&self, who: Holder) -> usize {
        let told = self.told.lock().expect("no panic");
        told.iter().filter(|told| **told == who).count()
    }

    fn leg(&self, leg: usize) -> u64 {
        step(["first leg", "second leg"][leg]);
        self.legs[leg].load(Ordering::SeqCst)
    }

    /// A change as a channel makes it: on the short way if nobody is ahead.
    fn change(&self, range: LockRange, key: u32) {
        let me = holder(key);
        if !self.locks.try_acquire(range, me) && !self.locks.acquire(range, me) {
            pause_until(|| self.was_told(me) > 0);
        }
        let op = self.ops.fetch_add(1, Ordering::SeqCst) + 1;
        for (leg, what) in self.legs.iter().zip(["first leg", "second leg"]) {
            step(what);
            let before = leg.swap(op, Ordering::SeqCst);
            assert!(before < op, "changes overtake each other");
        }
        let mut turns = Vec::new();
        self.locks.release(range, me, &mut turns);
        step("turns");
        self.told.lock().expect("no panic").extend(turns);
    }

    /// A read of one leg, and a later one of the other.
    fn read(&self, range: LockRange, key: u32) {
        let me = holder(key);
        let shown = self.leg(0);
        if !self.locks.is_still(range, me) {
            pause_until(|| self.was_told(me) > 0);
        }
        assert!(self.leg(1) >= shown, "a change was shown too early");
    }
}

fn changes_and_a_read() {
    let world = World::new();
    let pages = |page: u64, count: u64| LockRange::new(0, page * 4096, count * 4096);
    let change = |range, key| -> Thread<'_> {
        let world = &world;
        Box::new(move || world.change(range, key))
    };
    race(vec![
        change(pages(0, 2), 1),
        change(pages(1, 2), 2),
        Box::new(|| world.read(pages(1, 1), 3)),
    ]);
    let [one, two] = [0, 1].map(|leg| world.leg(leg));
    assert_eq!((one, two), (2, 2), "a change is lost");
    assert!((1..=3).all(|key| world.was_told(holder(key)) <= 1), "twice");
    let mut free = (0..3).map(|page| world.locks.try_acquire(pages(page, 1), holder(9)));
    assert!(free.all(|is_free| is_free), "a lock is left");
}

#[test]
fn changes_take_turns_and_no_read_shows_one_too_early() {
    let model = Model::new("range locks", 3);
    assert!(model.check(changes_and_a_read).executions > 1000);
    let defects = [
        Defect::ChangeNotCounted,
        Defect::NoTurns,
        Defect::ReadersNotTold,
        Defect::FirstChangeNotAwaited,
    ];
    finds(&defects, model, changes_and_a_read);
}

fn column(gate: Gate) -> [ColumnView; 1] {
    let legs = vec![];
    [ColumnView {
        legs,
        gate,
        ship: 0,
    }]
}

/// A change that the first leg has ends undecided, the keeper shows a view in which
/// the second leg alone counts, and another channel reads.
fn a_change_fails_and_is_decided() {
    const FAILED: u64 = 1;
    const DECIDED: u64 = 2;
    let (world, undecided) = (World::new(), Undecided::default());
    let (newest, range) = (AtomicU64::new(FAILED), LockRange::new(0, 0, 4096));
    let generation = || {
        step("generation");
        newest.load(Ordering::SeqCst)
    };
    let (change, reader) = (holder(1), holder(2));
    assert!(world.locks.acquire(range, change));
    world.legs[0].store(1, Ordering::SeqCst);
    race(vec![
        Box::new(|| {
            undecided.note(range, FAILED);
            let mut turns = Vec::new();
            world.locks.release(range, change, &mut turns);
            step("turns");
            world.told.lock().expect("no panic").extend(turns);
        }),
        Box::new(|| {
            step("generation");
            newest.store(DECIDED, Ordering::SeqCst);
            undecided.view_changes(&column(Gate::Failed), &column(Gate::Open), DECIDED);
        }),
        Box::new(|| {
            if generation() == DECIDED {
                return;
            }
            let shown = world.leg(0);
            if !world.locks.is_still(range, reader) {
                pause_until(|| world.was_told(reader) > 0);
            }
            if undecided.has(&range) || generation() == DECIDED {
                return;
            }
            assert_eq!(shown, 0, "what is taken back was shown");
        }),
    ]);
    assert!(!undecided.has(&range), "a note is kept for ever");
}

#[test]
fn what_is_taken_back_was_not_shown() {
    let model = Model::new("undecided", 3);
    assert!(model.check(a_change_fails_and_is_decided).executions > 100);
    let defects = [Defect::LateNoteTaken, Defect::FirstChangeNotAwaited];
    finds(&defects, model, a_change_fails_and_is_decided);
}

fn is_readable(wake: &Wake) -> bool {
    step("descriptor");
    wake.is_readable()
}

fn two_raise_often_and_one_sleeps() {
    let (wake, news) = (Wake::new().expect("a descriptor"), AtomicU64::new(0));
    let tell = || {
        step("news");
        news.fetch_add(1, Ordering::SeqCst);
        wake.raise();
    };
    race(vec![
        Box::new(|| (0..2).for_each(|_| tell())),
        Box::new(tell),
        Box::new(|| {
            let mut seen = 0;
            while seen < 3 {
                pause_until(|| is_readable(&wake));
                if wake.take() {
                    step("news");
                    seen = news.load(Ordering::SeqCst);
                }
            }
        }),
    ]);
    wake.take();
    assert!(!is_readable(&wake), "its sleeper would stay awake");
}

#[test]
fn who_is_woken_sleeps_on_no_news() {
    let model = Model::new("wake-ups", 3);
    assert!(model.check(two_raise_often_and_one_sleeps).executions > 1000);
    let defects = [Defect::WakeClearedFirst];
    finds(&defects, model, two_raise_often_and_one_sleeps);
}

/// A volume of one copy; serial 0: it is not connected.
fn view_of_one_leg(serial: u64) -> View {
    let (start, bytes, column, columns) = (0, 1 << 20, 0, 1);
    let leg = LegView {
        brick: BrickId(Uuid::from_u128(1)),
        slice: SliceId(Uuid::from_u128(2)),
        state: LegState::InSync,
        buffers: false,
        serial,
    };
    View {
        epoch: Epoch(1),
        size_bytes: bytes,
        segments: vec![SegmentView {
            start,
            bytes,
            column,
            columns,
        }],
        columns: vec![ColumnView {
            legs: vec![leg],
            gate: Gate::Open,
            ship: 0,
        }],
        fenced: false,
    }
}

/// A leg that does all it is asked to.
#[derive(Default)]
struct Willing(Vec<SliceCompletion>);

impl Leg for Willing {
    fn submit(&mut self, tag: u64, _request: SliceRequest) {
        let result = Ok(SliceReply::Done);
        self.0.push(SliceCompletion { tag, result });
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        into.append(&mut self.0);
    }

    fn wait_on(&self, _into: &mut Vec<RawFd>) {}
}

/// A leg comes back while a write waits for it: a channel looks around, and the
/// keeper tells it of its connection and shows the view.
fn a_channel_gets_a_connection_and_a_view() {
    let keeper = Arc::new(Member::new().expect("a descriptor"));
    let mailbox = Arc::new(Mailbox::new(Arc::clone(&keeper)));
    let hub = Arc::new(Hub::new(view_of_one_leg(0), keeper));
    let member = Arc::new(Member::new().expect("a descriptor"));
    let number = hub.join(&member).expect("there is room");
    let mut core = Core::new(Arc::clone(&hub), mailbox, Arc::clone(&member), number);
    core.submit(
        Token(1),
        Request::Discard {
            offset: 0,
            len: 4096,
        },
    );
    let mut ended = vec![];
    race(vec![
        Box::new(|| core.reap(&mut ended)),
        Box::new(|| {
            member.tell(Note::Link(Link {
                column: 0,
                leg: 0,
                serial: 1,
                connection: Box::new(Willing::default()),
            }));
            hub.publish(view_of_one_leg(1));
        }),
    ]);
    while ended.is_empty() && is_readable(&member.wake) {
        core.reap(&mut ended);
    }
    assert_eq!(ended.len(), 1, "it sleeps, and the write waits for ever");
}

#[test]
fn a_view_comes_with_its_connections() {
    let model = Model::new("views", 3);
    assert!(
        model
            .check(a_channel_gets_a_connection_and_a_view)
            .executions
            > 20
    );
    let defects = [Defect::LinksComeLate];
    finds(&defects, model, a_channel_gets_a_connection_and_a_view);
}
