//! Transactions concurrent with other writes.
//!
//! Property: in any interleaving and after any death, all pages of a transaction are changed or
//! none, except where another writer came after it. No lock, floor or frame is left behind.

use super::medium::{ModelMedium, StreamVisibility};
use super::model_pool::{ModelPool, PAGES, initial_byte, read_page, write_page};
use super::session_ends::check_deaths;
use pagemesh_base::defect::Defect;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Model, assert_finds, has_ended, pause_until, run_threads};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegFailure, LegSession, Session};
use pagemesh_store::transaction::transact;

/// The pages written: of one leaf, and of two lock words.
const NEAR: u64 = 0;
const FAR: u64 = 16;
const _: () = assert!(FAR < PAGES);

/// Writes both pages with the byte.
fn write_both_pages(
    session: &mut Session<ModelMedium>,
    handle: Handle,
    byte: u8,
) -> Result<(), LegFailure> {
    let parts = [NEAR, FAR].map(|page| TransactionPart::Write {
        offset: page * PAGE_BYTES as u64,
        data: vec![byte; PAGE_BYTES].into(),
    });
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 1,
        open_ops: 0,
    };
    transact(&mut [LegSession { session, handle }], &parts, stamp)
}

/// Both pages, and that recovery finds the same bytes.
fn check(mut world: ModelPool, reader: usize, is_allowed: impl Fn(u8, u8) -> bool) {
    let handle = world.handle;
    let session = &mut world.sessions[reader];
    let [near, far] = [NEAR, FAR].map(|page| read_page(session, handle, page).expect("sound"));
    assert!(is_allowed(near, far), "{near} and {far}");
    let mut pages = vec![
        vec![near],
        vec![initial_byte(1)],
        vec![initial_byte(2)],
        vec![initial_byte(3)],
    ];
    pages.resize(FAR as usize, vec![0]);
    pages.push(vec![far]);
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    world.check(&pages);
}

/// Another session writes one of the pages.
fn transaction_and_write() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let handle = world.handle;
    let [one, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    run_threads(vec![
        Box::new(|| write_both_pages(one, handle, 1).expect("room")),
        Box::new(|| write_page(other, handle, FAR, 2).expect("room")),
    ]);
    check(world, 0, |near, far| near == 1 && [1, 2].contains(&far));
}

/// Two transactions of the same pages.
fn two_transactions() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let handle = world.handle;
    let [one, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    run_threads(vec![
        Box::new(|| write_both_pages(one, handle, 1).expect("room")),
        Box::new(|| write_both_pages(other, handle, 2).expect("room")),
    ]);
    check(world, 0, |near, far| near == far && [1, 2].contains(&far));
}

/// The transaction's session may die at any access while another session writes one of the pages.
fn transaction_death(streams: StreamVisibility) {
    let mut world = ModelPool::new(2, streams);
    let (pool, handle, medium) = (&mut world.pool, world.handle, world.medium.clone());
    let [mortal, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let number = mortal.number();
    run_threads(vec![
        Box::new(|| write_both_pages(mortal, handle, 1).expect("room")),
        Box::new(|| write_page(other, handle, FAR, 2).expect("room")),
        Box::new(|| {
            pause_until(|| has_ended(0));
            medium.publish_pending(0);
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    check(world, 1, |near, far| match near {
        1 => [1, 2].contains(&far),
        _ => (near, far) == (initial_byte(0), 2),
    });
}

/// A third session reads both pages as of one point in time.
fn transaction_and_reader() {
    let mut world = ModelPool::new(3, StreamVisibility::Immediate);
    let handle = world.handle;
    // A hole would match no state of the transactions.
    write_page(&mut world.sessions[0], handle, FAR, initial_byte(0)).expect("room");
    let [one, other, reader] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    run_threads(vec![
        Box::new(|| write_both_pages(one, handle, 1).expect("room")),
        Box::new(|| write_both_pages(other, handle, 2).expect("room")),
        Box::new(|| {
            let (mut near, mut far) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
            let pieces = &mut [
                (NEAR * PAGE_BYTES as u64, &mut near[..]),
                (FAR * PAGE_BYTES as u64, &mut far[..]),
            ];
            let read = reader.read_consistent(&handle, pieces, Epoch(1));
            if read.expect("sound") {
                assert!(
                    near == far,
                    "{} and {} in one consistent read",
                    near[0],
                    far[0]
                );
                assert!([initial_byte(0), 1, 2].contains(&near[0]), "{}", near[0]);
            }
        }),
    ]);
    check(world, 0, |near, far| near == far && [1, 2].contains(&far));
}

const READ: Model = Model::new("a transaction with a reader", 2);
const CONCURRENT: Model = Model::new("two transactions", 2);
const DEATH: Model = Model::new("a transaction dies", 1).with_mortal(0);
const LATE: Model =
    Model::new("the session of a transaction dies before its fence", 0).with_mortal(0);

#[test]
fn transaction_serializes_with_page_writers() {
    assert!(CONCURRENT.check(transaction_and_write).executions > 100);
    assert!(CONCURRENT.check(two_transactions).executions > 100);
    assert_finds(&[Defect::GroupNotLocked], CONCURRENT, transaction_and_write);
}

#[test]
fn transaction_is_read_all_or_nothing() {
    assert!(READ.check(transaction_and_reader).executions > 1000);
    let defects = [Defect::LocksNotChecked, Defect::SlotNotRechecked];
    for defect in defects {
        assert_finds(&[defect], READ, transaction_and_reader);
    }
}

#[test]
fn dead_transaction_is_all_or_nothing() {
    let defects = [
        Defect::GroupPublishedEarly,
        Defect::LocksKept,
        Defect::SeqHoleKept,
        Defect::DeadNotRolledForward,
    ];
    check_deaths(DEATH, LATE, transaction_death, &defects);
}
