//! Swaps of slots.
//!
//! Property: no swap is lost or made twice; a reader sees a page as it was at
//! some moment, never a torn one and never another page's, even when its frame
//! is used again meanwhile.

use super::medium::Streams;
use super::world::{PAGES, WRITTEN, World, before, get, put, put_part};
use crate::control::Run;
use crate::defect::Defect;
use crate::slot::Slot;
use crate::table::Location;
use pagemesh_base::ids::PageNo;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Model, finds, race};

/// The slot of a page.
fn slot(world: &World, page: u64) -> Slot {
    let view = world.pool.view();
    match view.locate(world.handle.object(), 0, PageNo(page)) {
        Ok(Location::At(at)) => view.slot(at, PageNo(page)).expect("a sound slot"),
        other => panic!("{other:?}"),
    }
}

/// The slot after so many swaps: its generation counts them.
fn is_behind(old: Slot, new: Slot, swaps: u32) -> bool {
    let frame = new.frame().expect("a page");
    let next = (1..swaps).fold(old, |slot, _| slot.unmap(0));
    next.map(frame, new.track()) == new
}

/// Two change the halves of one page; a third reads it.
fn two_merge(streams: Streams) {
    let half = PAGE_BYTES / 2;
    let mut world = World::new(3, streams);
    let (old, handle) = (slot(&world, 0), world.handle);
    let [one, two, three] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    race(vec![
        Box::new(|| put_part(one, handle, 0, &vec![1; half]).expect("room")),
        Box::new(|| put_part(two, handle, half as u64, &vec![2; half]).expect("room")),
        Box::new(|| {
            let mut bytes = [0; PAGE_BYTES];
            let epoch = pagemesh_base::ids::Epoch(1);
            three.read(&handle, 0, &mut bytes, epoch).expect("a page");
            for (part, new) in bytes.chunks(half).zip([1, 2]) {
                assert!(part.iter().all(|&byte| byte == part[0]), "torn");
                assert!([before(0), new].contains(&part[0]), "foreign");
            }
        }),
    ]);
    assert!(is_behind(old, slot(&world, 0), 2), "a swap is lost");
    // Both halves, in whichever order.
    let [one, two, _] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    let mut bytes = [0; PAGE_BYTES];
    let epoch = pagemesh_base::ids::Epoch(1);
    one.read(&handle, 0, &mut bytes, epoch).expect("a page");
    assert_eq!((bytes[0], bytes[half]), (1, 2), "a half is lost");
    put(two, handle, 0, 3).expect("room");
    world.check(&[&[3], &[before(1)], &[before(2)], &[before(3)]]);
}

/// The frame of the page that is read is freed, granted and used for another.
fn a_frame_is_used_again() {
    let mut world = World::new(2, Streams::AtOnce);
    let handle = world.handle;
    let pool = &mut world.pool;
    let [reader, writer] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    // One frame is left to the writer: the next that it gets is the one it
    // freed.
    let taken: Vec<Run> = std::iter::from_fn(|| pool.frames.take(PAGES)).collect();
    let mut page = WRITTEN;
    while World::left(pool, writer.number()) > 1 {
        put(writer, handle, page, 11).expect("room");
        page += 1;
    }
    pool.tend().expect("a sound pool");
    assert_eq!(pool.usage().free_bytes, 0);
    race(vec![
        Box::new(|| {
            let found = get(reader, handle, 0).expect("a page");
            assert!([before(0), 12].contains(&found), "{found} is another's");
        }),
        Box::new(|| {
            put(writer, handle, 0, 12).expect("room");
            World::ask(pool, writer.number(), 1);
            pool.tend().expect("a sound pool");
            put(writer, handle, page, 13).expect("room");
        }),
    ]);
    taken.into_iter().for_each(|run| pool.frames.give_back(run));
    world.check(&[&[12], &[before(1)], &[before(2)], &[before(3)]]);
}

const MERGE: Model = Model::new("slots", 2);
const REUSE: Model = Model::new("slots and frames", 3);

#[test]
fn no_swap_of_a_slot_is_lost() {
    assert!(MERGE.check(|| two_merge(Streams::AtOnce)).executions > 1000);
    assert!(MERGE.check(|| two_merge(Streams::AtTheFence)).executions > 1000);
    finds(&[Defect::NotLocked], MERGE, || two_merge(Streams::AtOnce));
    let defects = [Defect::SwapBeforeFence, Defect::UnlockBeforeFence];
    finds(&defects, MERGE, || two_merge(Streams::AtTheFence));
}

#[test]
fn a_reader_sees_no_other_page() {
    assert!(REUSE.check(a_frame_is_used_again).executions > 100);
    finds(
        &[Defect::SlotNotLookedAtAgain],
        REUSE,
        a_frame_is_used_again,
    );
}
