//! Parts of a page that are changed in place.
//!
//! Property: a reader without a lock sees the page as of one point in time. A consistent read
//! reports a change before a byte of it may have changed. If the writer dies, its change is
//! complete or undone. Readers wait for the pool's owner at most.

use super::medium::StreamVisibility;
use super::model_pool::{ModelPool, PAGES, initial_byte, read_page, write_bytes};
use pagemesh_base::defect::Defect;
use pagemesh_base::ids::Epoch;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Model, assert_finds, has_ended, pause_until, run_threads};
use pagemesh_pmem::Media;

/// Bytes that lie in both halves of a page.
const FIRST: usize = PAGE_BYTES / 2 - 40;
const LEN: usize = 80;
const _: () = assert!(LEN <= pagemesh_store::patch::PATCH_MAX && PAGES > 1);

/// The value of the patched bytes: all of them are the same.
fn value(page: &[u8; PAGE_BYTES]) -> u8 {
    let (head, rest) = page.split_at(FIRST);
    let (bytes, tail) = rest.split_at(LEN);
    let mut others = head.iter().chain(tail);
    assert!(
        others.all(|&byte| byte == initial_byte(0)),
        "others changed"
    );
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "torn");
    bytes[0]
}

/// Two sessions change the same bytes; a third reads them.
fn patches_and_reader() {
    let mut world = ModelPool::new(3, StreamVisibility::Immediate);
    let handle = world.handle;
    let [one, other, reader] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    run_threads(vec![
        Box::new(|| write_bytes(one, handle, FIRST as u64, &[1; LEN]).expect("room")),
        Box::new(|| write_bytes(other, handle, FIRST as u64, &[2; LEN]).expect("room")),
        Box::new(|| {
            let mut page = [0; PAGE_BYTES];
            let read = reader.read(&handle, 0, &mut page, Epoch(1));
            read.expect("nothing is damaged");
            assert!([initial_byte(0), 1, 2].contains(&value(&page)), "foreign");
        }),
    ]);
    let mut page = [0; PAGE_BYTES];
    let read = world.sessions[0].read(&handle, 0, &mut page, Epoch(1));
    read.expect("nothing is damaged");
    assert!([1, 2].contains(&value(&page)), "a change is lost");
}

/// One session changes bytes; another reads them in place.
fn patch_and_consistent_read() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let (handle, medium) = (world.handle, world.medium.clone());
    let [writer, reader] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    run_threads(vec![
        Box::new(|| write_bytes(writer, handle, FIRST as u64, &[1; LEN]).expect("room")),
        Box::new(|| {
            let ranges = [(0, PAGE_BYTES as u64)];
            let found = reader.map_consistent(&handle, &ranges, Epoch(1));
            let Some(moment) = found.expect("nothing is damaged") else {
                return;
            };
            let at = moment.page_offsets().next().expect("one page");
            let mut page = [0; PAGE_BYTES];
            medium.read(at, &mut page);
            if moment.is_unchanged() {
                assert!([initial_byte(0), 1].contains(&value(&page)), "foreign");
            }
        }),
    ]);
}

/// The writer may die at any access while another session reads.
fn patch_writer_death(streams: StreamVisibility) {
    let mut world = ModelPool::new(2, streams);
    let (pool, handle, medium) = (&mut world.pool, world.handle, world.medium.clone());
    let [mortal, reader] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let number = mortal.number();
    run_threads(vec![
        Box::new(|| write_bytes(mortal, handle, FIRST as u64, &[1; LEN]).expect("room")),
        Box::new(|| {
            let mut page = [0; PAGE_BYTES];
            let mut read = || {
                let read = reader.read(&handle, 0, &mut page, Epoch(1));
                read.expect("nothing is damaged");
                value(&page)
            };
            let (first, second) = (read(), read());
            let is_forward = first == second || (first, second) == (initial_byte(0), 1);
            assert!(is_forward, "{first}, and then {second}");
        }),
        Box::new(|| {
            pause_until(|| has_ended(0));
            medium.publish_pending(0);
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    let reader = &mut world.sessions[1];
    let mut page = [0; PAGE_BYTES];
    let read = reader.read(&handle, 0, &mut page, Epoch(1));
    read.expect("nothing is damaged");
    assert!([initial_byte(0), 1].contains(&value(&page)), "foreign");
    let next = read_page(reader, handle, 1).expect("nothing is damaged");
    assert_eq!(next, initial_byte(1), "the next page");
}

const READ: Model = Model::new("patches with a reader", 2);
const CONSISTENT_READ: Model = Model::new("a patch with a consistent read", 2);
const DEATH: Model = Model::new("the writer of a patch dies", 1).with_mortal(0);
const LATE: Model = Model::new("the writer of a patch dies before its fence", 0).with_mortal(0);

#[test]
fn reader_never_sees_torn_patch() {
    assert!(READ.check(patches_and_reader).executions > 1000);
    assert_finds(
        &[Defect::PatchNotMarked, Defect::NotLocked],
        READ,
        patches_and_reader,
    );
}

#[test]
fn consistent_read_detects_patch() {
    assert!(CONSISTENT_READ.check(patch_and_consistent_read).executions > 100);
    assert_finds(
        &[Defect::PatchNotMarked],
        CONSISTENT_READ,
        patch_and_consistent_read,
    );
}

#[test]
fn patch_of_dead_writer_is_all_or_nothing() {
    assert!(
        DEATH
            .check(|| patch_writer_death(StreamVisibility::Immediate))
            .executions
            > 100
    );
    assert!(
        LATE.check(|| patch_writer_death(StreamVisibility::AtFence))
            .executions
            > 10
    );
    let defects = [Defect::DeadPatchNotApplied, Defect::DeadNotRolledForward];
    assert_finds(&defects, DEATH, || {
        patch_writer_death(StreamVisibility::Immediate)
    });
}
