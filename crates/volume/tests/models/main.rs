//! Models of the state that the channels of a volume share. They run every interleaving of a
//! few operations, up to a bound, on the product's code ([`pagemesh_models`],
//! docs/rfd/008-concurrency-models.md). They must fail on deliberate defects.

mod direct_access;
mod replication_ring;

use pagemesh_base::defect::Defect;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, LegState, SliceId};
use pagemesh_base::slice::{Leg, SliceCompletion, SliceReply, SliceRequest};
use pagemesh_base::space::{Request, Token};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_models::{Access, Model, Thread, assert_finds, pause_until, run_threads};
use pagemesh_volume::test_api::{
    CONTROLLER, ChannelCore, ColumnGate, ColumnSnapshot, Explorer, IndeterminateWrites,
    LayoutSnapshot, LegLink, LegSnapshot, LockHolder, LockRange, Mailbox, Member, MemberMessage,
    RangeLocks, SegmentSnapshot, VolumeShared, Wake,
};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// Marks an access to data that other threads of the model access.
fn step(what: &'static str) {
    pagemesh_models::step(what, 0..1, Access::Change);
}

/// Makes the model see the product's steps, and lowers its limits. Each test calls it first.
fn explore_product() {
    pagemesh_volume::test_api::lower_replication_limits();
    let pause = pagemesh_models::pause;
    pagemesh_volume::test_api::set_explorer(Explorer { step, pause });
}

const fn holder(key: u32) -> LockHolder {
    LockHolder {
        member: CONTROLLER + 1,
        key,
    }
}

/// A column of two legs, and the holders that were granted their lock.
struct RangeLockModel {
    locks: RangeLocks,
    ops: AtomicU64,
    legs: [AtomicU64; 2],
    grants: Mutex<Vec<LockHolder>>,
}

impl RangeLockModel {
    fn new() -> RangeLockModel {
        RangeLockModel {
            locks: RangeLocks::default(),
            ops: AtomicU64::new(0),
            legs: [0, 0].map(AtomicU64::new),
            grants: Mutex::default(),
        }
    }

    fn grant_count(&self, who: LockHolder) -> usize {
        let told = self.grants.lock().expect("no panic");
        told.iter().filter(|told| **told == who).count()
    }

    fn leg(&self, leg: usize) -> u64 {
        step(["first leg", "second leg"][leg]);
        self.legs[leg].load(Ordering::SeqCst)
    }

    /// A change as a channel makes it: on the fast path if the lock is free.
    fn change(&self, range: LockRange, key: u32) {
        let me = holder(key);
        if !self.locks.try_acquire(range, me) && !self.locks.acquire(range, me) {
            pause_until(|| self.grant_count(me) > 0);
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
        self.grants.lock().expect("no panic").extend(turns);
    }

    /// A read of one leg, and a later read of the other.
    fn read(&self, range: LockRange, key: u32) {
        let me = holder(key);
        let shown = self.leg(0);
        if !self.locks.is_range_idle(range, me) {
            pause_until(|| self.grant_count(me) > 0);
        }
        assert!(self.leg(1) >= shown, "a change was shown too early");
    }
}

fn concurrent_changes_and_read() {
    let world = RangeLockModel::new();
    let pages = |page: u64, count: u64| LockRange::new(0, page * 4096, count * 4096);
    let change = |range, key| -> Thread<'_> {
        let world = &world;
        Box::new(move || world.change(range, key))
    };
    run_threads(vec![
        change(pages(0, 2), 1),
        change(pages(1, 2), 2),
        Box::new(|| world.read(pages(1, 1), 3)),
    ]);
    let [one, two] = [0, 1].map(|leg| world.leg(leg));
    assert_eq!((one, two), (2, 2), "a change is lost");
    assert!(
        (1..=3).all(|key| world.grant_count(holder(key)) <= 1),
        "twice"
    );
    let mut free = (0..3).map(|page| world.locks.try_acquire(pages(page, 1), holder(9)));
    assert!(free.all(|is_free| is_free), "a lock is left");
}

#[test]
fn changes_serialize_and_reads_wait_for_all_legs() {
    explore_product();
    let model = Model::new("range locks", 3);
    assert!(model.check(concurrent_changes_and_read).executions > 1000);
    let defects = [
        Defect::ChangeNotCounted,
        Defect::OverlapsNotSerialized,
        Defect::ReadersNotWoken,
        Defect::FirstChangeNotAwaited,
    ];
    assert_finds(&defects, model, concurrent_changes_and_read);
}

fn column(gate: ColumnGate) -> [ColumnSnapshot; 1] {
    let legs = vec![];
    [ColumnSnapshot {
        legs,
        gate,
        replica_serial: 0,
    }]
}

/// A change that the first leg has ends as indeterminate. The controller publishes a snapshot
/// in which only the second leg counts, and another channel reads.
fn failed_change_resolved_by_new_snapshot() {
    const FAILED: u64 = 1;
    const DECIDED: u64 = 2;
    let (world, undecided) = (RangeLockModel::new(), IndeterminateWrites::default());
    let (newest, range) = (AtomicU64::new(FAILED), LockRange::new(0, 0, 4096));
    let generation = || {
        step("generation");
        newest.load(Ordering::SeqCst)
    };
    let (change, reader) = (holder(1), holder(2));
    assert!(world.locks.acquire(range, change));
    world.legs[0].store(1, Ordering::SeqCst);
    run_threads(vec![
        Box::new(|| {
            undecided.record(range, FAILED);
            let mut turns = Vec::new();
            world.locks.release(range, change, &mut turns);
            step("turns");
            world.grants.lock().expect("no panic").extend(turns);
        }),
        Box::new(|| {
            step("generation");
            newest.store(DECIDED, Ordering::SeqCst);
            undecided.snapshot_changed(
                &column(ColumnGate::Failed),
                &column(ColumnGate::Open),
                DECIDED,
            );
        }),
        Box::new(|| {
            if generation() == DECIDED {
                return;
            }
            let shown = world.leg(0);
            if !world.locks.is_range_idle(range, reader) {
                pause_until(|| world.grant_count(reader) > 0);
            }
            if undecided.contains(&range) || generation() == DECIDED {
                return;
            }
            assert_eq!(shown, 0, "a read returned data that was taken back");
        }),
    ]);
    assert!(!undecided.contains(&range), "a range is kept for ever");
}

#[test]
fn rolled_back_write_was_never_read() {
    explore_product();
    let model = Model::new("undecided", 3);
    assert!(
        model
            .check(failed_change_resolved_by_new_snapshot)
            .executions
            > 100
    );
    let defects = [
        Defect::LateIndeterminateRecorded,
        Defect::FirstChangeNotAwaited,
    ];
    assert_finds(&defects, model, failed_change_resolved_by_new_snapshot);
}

fn is_readable(wake: &Wake) -> bool {
    step("descriptor");
    wake.is_readable()
}

fn concurrent_raises_one_sleeper() {
    let (wake, news) = (Wake::new().expect("a descriptor"), AtomicU64::new(0));
    let tell = || {
        step("news");
        news.fetch_add(1, Ordering::SeqCst);
        wake.raise();
    };
    run_threads(vec![
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
fn woken_sleeper_misses_no_raise() {
    explore_product();
    let model = Model::new("wake-ups", 3);
    assert!(model.check(concurrent_raises_one_sleeper).executions > 1000);
    let defects = [Defect::WakeClearedFirst];
    assert_finds(&defects, model, concurrent_raises_one_sleeper);
}

/// A volume of one copy. Serial 0: the copy is not connected.
fn single_leg_snapshot(serial: u64) -> LayoutSnapshot {
    let (start, bytes, first_column, column_count) = (0, 1 << 20, 0, 1);
    let leg = LegSnapshot {
        brick: BrickId(Uuid::from_u128(1)),
        slice: SliceId(Uuid::from_u128(2)),
        state: LegState::InSync,
        buffers: false,
        serial,
    };
    LayoutSnapshot {
        epoch: Epoch(1),
        size_bytes: bytes,
        segments: vec![SegmentSnapshot {
            start,
            bytes,
            first_column,
            column_count,
        }],
        columns: vec![ColumnSnapshot {
            legs: vec![leg],
            gate: ColumnGate::Open,
            replica_serial: 0,
        }],
        names: Default::default(),
        fenced: false,
    }
}

/// A leg that completes every request at once.
#[derive(Default)]
struct InstantLeg(Vec<SliceCompletion>);

impl Leg for InstantLeg {
    fn submit(&mut self, tag: u64, _request: SliceRequest) {
        let result = Ok(SliceReply::Done);
        self.0.push(SliceCompletion::new(tag, result));
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        into.append(&mut self.0);
    }

    fn poll_fds(&self, _into: &mut Vec<RawFd>) {}
}

/// A leg returns while a write waits for it. A channel polls while the controller sends the
/// connection and publishes the snapshot.
fn channel_gets_link_and_snapshot() {
    let keeper = Arc::new(Member::new().expect("a descriptor"));
    let mailbox = Arc::new(Mailbox::new(Arc::clone(&keeper)));
    let hub = Arc::new(VolumeShared::new(single_leg_snapshot(0), keeper));
    let member = Arc::new(Member::new().expect("a descriptor"));
    let number = hub.join(&member).expect("there is room");
    let mut core = ChannelCore::new(Arc::clone(&hub), mailbox, Arc::clone(&member), number);
    core.submit(
        Token(1),
        Request::Discard {
            offset: 0,
            len: 4096,
        },
        TierHint::None,
    );
    let mut ended = vec![];
    run_threads(vec![
        Box::new(|| core.reap(&mut ended)),
        Box::new(|| {
            member.send(MemberMessage::NewLink(LegLink {
                column: 0,
                leg: 0,
                serial: 1,
                connection: Box::new(InstantLeg::default()),
            }));
            hub.publish(single_leg_snapshot(1));
        }),
    ]);
    while ended.is_empty() && is_readable(&member.wake) {
        core.reap(&mut ended);
    }
    assert_eq!(ended.len(), 1, "it sleeps, and the write waits for ever");
}

#[test]
fn snapshot_arrives_with_its_links() {
    explore_product();
    let model = Model::new("views", 3);
    assert!(model.check(channel_gets_link_and_snapshot).executions > 20);
    let defects = [Defect::NewConnectionsMissed];
    assert_finds(&defects, model, channel_gets_link_and_snapshot);
}
