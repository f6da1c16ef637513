//! Parts of a page that are changed in place.
//!
//! Property: a reader without a lock sees such a page as it was at some moment, and
//! what it guards is told to have changed once a byte of it may have; whoever dies amid a
//! change leaves it whole or undone, and readers wait no longer than for its owner.

use super::medium::Streams;
use super::world::{PAGES, World, before, get, put_part};
use crate::defect::Defect;
use pagemesh_base::ids::Epoch;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Model, finds, has_ended, pause_until, race};
use pagemesh_pmem::Media;

/// Bytes that lie in both halves of a page.
const FIRST: usize = PAGE_BYTES / 2 - 40;
const LEN: usize = 80;
const _: () = assert!(LEN <= crate::patch::PATCH_MAX && PAGES > 1);

/// What the bytes were or are: all of them the same.
fn value(page: &[u8; PAGE_BYTES]) -> u8 {
    let (head, rest) = page.split_at(FIRST);
    let (bytes, tail) = rest.split_at(LEN);
    let mut others = head.iter().chain(tail);
    assert!(others.all(|&byte| byte == before(0)), "others changed");
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "torn");
    bytes[0]
}

/// Two change the same bytes; a third reads them.
fn beside_a_reader() {
    let mut world = World::new(3, Streams::AtOnce);
    let handle = world.handle;
    let [one, other, reader] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    race(vec![
        Box::new(|| put_part(one, handle, FIRST as u64, &[1; LEN]).expect("room")),
        Box::new(|| put_part(other, handle, FIRST as u64, &[2; LEN]).expect("room")),
        Box::new(|| {
            let mut page = [0; PAGE_BYTES];
            let read = reader.read(&handle, 0, &mut page, Epoch(1));
            read.expect("nothing is damaged");
            assert!([before(0), 1, 2].contains(&value(&page)), "foreign");
        }),
    ]);
    let mut page = [0; PAGE_BYTES];
    let read = world.sessions[0].read(&handle, 0, &mut page, Epoch(1));
    read.expect("nothing is damaged");
    assert!([1, 2].contains(&value(&page)), "a change is lost");
}

/// One changes bytes; another looks at them where they lie.
fn beside_a_guard() {
    let mut world = World::new(2, Streams::AtOnce);
    let (handle, medium) = (world.handle, world.medium.clone());
    let [writer, reader] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    race(vec![
        Box::new(|| put_part(writer, handle, FIRST as u64, &[1; LEN]).expect("room")),
        Box::new(|| {
            let ranges = [(0, PAGE_BYTES as u64)];
            let found = reader.moment(&handle, &ranges, Epoch(1));
            let Some(moment) = found.expect("nothing is damaged") else {
                return;
            };
            let at = moment.places().next().expect("one page");
            let mut page = [0; PAGE_BYTES];
            medium.read(at, &mut page);
            if moment.is_same() {
                assert!([before(0), 1].contains(&value(&page)), "foreign");
            }
        }),
    ]);
}

/// The writer may die at any access, while another reads.
fn a_death(streams: Streams) {
    let mut world = World::new(2, streams);
    let (pool, handle, medium) = (&mut world.pool, world.handle, world.medium.clone());
    let [mortal, reader] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let number = mortal.number();
    race(vec![
        Box::new(|| put_part(mortal, handle, FIRST as u64, &[1; LEN]).expect("room")),
        Box::new(|| {
            let mut page = [0; PAGE_BYTES];
            let mut read = || {
                let read = reader.read(&handle, 0, &mut page, Epoch(1));
                read.expect("nothing is damaged");
                value(&page)
            };
            let (first, second) = (read(), read());
            let is_forward = first == second || (first, second) == (before(0), 1);
            assert!(is_forward, "{first}, and then {second}");
        }),
        Box::new(|| {
            pause_until(|| has_ended(0));
            medium.drain(0);
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    let reader = &mut world.sessions[1];
    let mut page = [0; PAGE_BYTES];
    let read = reader.read(&handle, 0, &mut page, Epoch(1));
    read.expect("nothing is damaged");
    assert!([before(0), 1].contains(&value(&page)), "foreign");
    let next = get(reader, handle, 1).expect("nothing is damaged");
    assert_eq!(next, before(1), "the page beside it");
}

const READ: Model = Model::new("patches beside who reads", 2);
const GUARD: Model = Model::new("a patch beside a guard", 2);
const DEATH: Model = Model::new("a patch whose writer dies", 1).with_mortal(0);
const LATE: Model = Model::new("a patch dies before its fence", 0).with_mortal(0);

#[test]
fn a_patched_page_is_read_as_it_was_at_some_moment() {
    assert!(READ.check(beside_a_reader).executions > 1000);
    finds(
        &[Defect::PatchNotMarked, Defect::NotLocked],
        READ,
        beside_a_reader,
    );
}

#[test]
fn a_guard_is_told_of_a_patch() {
    assert!(GUARD.check(beside_a_guard).executions > 100);
    finds(&[Defect::PatchNotMarked], GUARD, beside_a_guard);
}

#[test]
fn a_patch_whose_writer_dies_is_whole_or_never_happened() {
    assert!(DEATH.check(|| a_death(Streams::AtOnce)).executions > 100);
    assert!(LATE.check(|| a_death(Streams::AtTheFence)).executions > 10);
    let defects = [Defect::DeadPatchNotPut, Defect::DeadNotFinished];
    finds(&defects, DEATH, || a_death(Streams::AtOnce));
}
