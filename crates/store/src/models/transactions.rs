//! Transactions beside others.
//!
//! Property: whatever a transaction meets or wherever it dies, all of its pages
//! are changed or none, except where another writer came after it; no lock,
//! floor or frame is left behind.

use super::medium::{Medium, Streams};
use super::world::{PAGES, World, before, get, put};
use crate::defect::Defect;
use crate::session::{Failure, Member, Session};
use crate::transaction::transact;
use crate::view::Handle;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{Part, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Model, finds, has_ended, pause_until, race};

/// The pages that are written: of one leaf, and of two lock words.
const NEAR: u64 = 0;
const FAR: u64 = 16;
const _: () = assert!(FAR < PAGES);

/// Writes both pages with the byte.
fn put_both(session: &mut Session<Medium>, handle: Handle, byte: u8) -> Result<(), Failure> {
    let parts = [NEAR, FAR].map(|page| Part::Write {
        offset: page * PAGE_BYTES as u64,
        data: vec![byte; PAGE_BYTES].into(),
    });
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 1,
        open: 0,
    };
    transact(&mut [Member { session, handle }], &parts, stamp)
}

/// Both pages as they are shown, which is as they stay.
fn check(mut world: World, reader: usize, is_allowed: impl Fn(u8, u8) -> bool) {
    let handle = world.handle;
    let session = &mut world.sessions[reader];
    let [near, far] = [NEAR, FAR].map(|page| get(session, handle, page).expect("sound"));
    assert!(is_allowed(near, far), "{near} and {far}");
    let mut pages = vec![
        vec![near],
        vec![before(1)],
        vec![before(2)],
        vec![before(3)],
    ];
    pages.resize(FAR as usize, vec![0]);
    pages.push(vec![far]);
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    world.check(&pages);
}

/// Another writes one of the pages.
fn beside_a_write() {
    let mut world = World::new(2, Streams::AtOnce);
    let handle = world.handle;
    let [one, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    race(vec![
        Box::new(|| put_both(one, handle, 1).expect("room")),
        Box::new(|| put(other, handle, FAR, 2).expect("room")),
    ]);
    check(world, 0, |near, far| near == 1 && [1, 2].contains(&far));
}

/// Two transactions of the same pages.
fn beside_its_like() {
    let mut world = World::new(2, Streams::AtOnce);
    let handle = world.handle;
    let [one, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    race(vec![
        Box::new(|| put_both(one, handle, 1).expect("room")),
        Box::new(|| put_both(other, handle, 2).expect("room")),
    ]);
    check(world, 0, |near, far| near == far && [1, 2].contains(&far));
}

/// It may die at any access, while another writes one of the pages.
fn a_death(streams: Streams) {
    let mut world = World::new(2, streams);
    let (pool, handle, medium) = (&mut world.pool, world.handle, world.medium.clone());
    let [mortal, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let number = mortal.number();
    race(vec![
        Box::new(|| put_both(mortal, handle, 1).expect("room")),
        Box::new(|| put(other, handle, FAR, 2).expect("room")),
        Box::new(|| {
            pause_until(|| has_ended(0));
            medium.drain(0);
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    check(world, 1, |near, far| match near {
        1 => [1, 2].contains(&far),
        _ => (near, far) == (before(0), 2),
    });
}

/// A third reads both pages as of one moment.
fn beside_a_reader() {
    let mut world = World::new(3, Streams::AtOnce);
    let handle = world.handle;
    // A hole is nobody's moment.
    put(&mut world.sessions[0], handle, FAR, before(0)).expect("room");
    let [one, other, reader] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    race(vec![
        Box::new(|| put_both(one, handle, 1).expect("room")),
        Box::new(|| put_both(other, handle, 2).expect("room")),
        Box::new(|| {
            let (mut near, mut far) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
            let pieces = &mut [
                (NEAR * PAGE_BYTES as u64, &mut near[..]),
                (FAR * PAGE_BYTES as u64, &mut far[..]),
            ];
            let read = reader.read_together(&handle, pieces, Epoch(1));
            if read.expect("sound") {
                assert!(near == far, "{} and {} at one moment", near[0], far[0]);
                assert!([before(0), 1, 2].contains(&near[0]), "{}", near[0]);
            }
        }),
    ]);
    check(world, 0, |near, far| near == far && [1, 2].contains(&far));
}

const READ: Model = Model::new("a transaction beside who reads", 2);
const BESIDE: Model = Model::new("a transaction beside another", 2);
const DEATH: Model = Model::new("a transaction dies", 1).with_mortal(0);
const LATE: Model = Model::new("a transaction dies before its fence", 0).with_mortal(0);

#[test]
fn a_transaction_takes_turns_with_writers_of_its_pages() {
    assert!(BESIDE.check(beside_a_write).executions > 100);
    assert!(BESIDE.check(beside_its_like).executions > 100);
    finds(&[Defect::GroupNotLocked], BESIDE, beside_a_write);
}

#[test]
fn a_transaction_is_read_whole_or_not_at_all() {
    assert!(READ.check(beside_a_reader).executions > 1000);
    let defects = [Defect::LocksNotLookedAt, Defect::SlotNotLookedAtAgain];
    for defect in defects {
        finds(&[defect], READ, beside_a_reader);
    }
}

#[test]
fn a_transaction_that_dies_is_whole_or_never_happened() {
    assert!(DEATH.check(|| a_death(Streams::AtOnce)).executions > 1000);
    assert!(LATE.check(|| a_death(Streams::AtTheFence)).executions > 100);
    let defects = [
        Defect::GroupPublishedEarly,
        Defect::LocksKept,
        Defect::HoleKept,
        Defect::DeadNotFinished,
    ];
    finds(&defects, DEATH, || a_death(Streams::AtOnce));
}
