//! Swaps of slots.
//!
//! Property: no swap is lost or made twice. A reader sees a page as of one point in time, never a
//! torn page and never another page's bytes, even when its frame is reused meanwhile.

use super::medium::StreamVisibility;
use super::model_pool::{
    ModelPool, PAGES, WRITTEN, initial_byte, read_page, write_bytes, write_page,
};
use pagemesh_base::defect::Defect;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Model, assert_finds, run_threads};
use pagemesh_store::control::FrameRun;
use pagemesh_store::slot::Slot;
use pagemesh_store::table::SlotLocation;
use pagemesh_store::test_api::{MappingInternals, PoolInternals};

/// The slot of a page.
fn slot(world: &ModelPool, page: u64) -> Slot {
    let view = world.pool.mapping();
    match view.locate(world.handle.object(), 0, PageNo(page)) {
        Ok(SlotLocation::At(at)) => view.slot(at, PageNo(page)).expect("a sound slot"),
        other => panic!("{other:?}"),
    }
}

/// Whether `new` is the slot after this many swaps: its generation counts them.
fn is_swapped_by(old: Slot, new: Slot, swaps: u32) -> bool {
    let frame = new.frame().expect("a page");
    let next = (1..swaps).fold(old, |slot, _| slot.unmap(Epoch(0)));
    next.map(frame) == new
}

/// Two sessions change the halves of one page; a third reads it.
fn two_partial_writers(streams: StreamVisibility) {
    let half = PAGE_BYTES / 2;
    let mut world = ModelPool::new(3, streams);
    let (old, handle) = (slot(&world, 0), world.handle);
    let [one, two, three] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    run_threads(vec![
        Box::new(|| write_bytes(one, handle, 0, &vec![1; half]).expect("room")),
        Box::new(|| write_bytes(two, handle, half as u64, &vec![2; half]).expect("room")),
        Box::new(|| {
            let mut bytes = [0; PAGE_BYTES];
            let epoch = pagemesh_base::ids::Epoch(1);
            three.read(&handle, 0, &mut bytes, epoch).expect("a page");
            for (part, new) in bytes.chunks(half).zip([1, 2]) {
                assert!(part.iter().all(|&byte| byte == part[0]), "torn");
                assert!([initial_byte(0), new].contains(&part[0]), "foreign");
            }
        }),
    ]);
    assert!(is_swapped_by(old, slot(&world, 0), 2), "a swap is lost");
    // Both halves are present, in either order.
    let [one, two, _] = &mut world.sessions[..] else {
        panic!("three sessions");
    };
    let mut bytes = [0; PAGE_BYTES];
    let epoch = pagemesh_base::ids::Epoch(1);
    one.read(&handle, 0, &mut bytes, epoch).expect("a page");
    assert_eq!((bytes[0], bytes[half]), (1, 2), "a half is lost");
    write_page(two, handle, 0, 3).expect("room");
    world.check(&[
        &[3],
        &[initial_byte(1)],
        &[initial_byte(2)],
        &[initial_byte(3)],
    ]);
}

/// The frame of the page being read is freed, granted and used for another page.
fn frame_reuse() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let handle = world.handle;
    let pool = &mut world.pool;
    let [reader, writer] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    // One frame is left to the writer: the next one that it gets is the frame that it freed.
    let taken: Vec<FrameRun> = std::iter::from_fn(|| pool.allocate_frames(PAGES)).collect();
    let mut page = WRITTEN;
    while ModelPool::grants_left(pool, writer.number()) > 1 {
        write_page(writer, handle, page, 11).expect("room");
        page += 1;
    }
    pool.maintain().expect("a sound pool");
    assert_eq!(pool.usage().free_bytes, 0);
    run_threads(vec![
        Box::new(|| {
            let found = read_page(reader, handle, 0).expect("a page");
            assert!(
                [initial_byte(0), 12].contains(&found),
                "{found} is another's"
            );
        }),
        Box::new(|| {
            write_page(writer, handle, 0, 12).expect("room");
            ModelPool::request_frames(pool, writer.number(), 1);
            pool.maintain().expect("a sound pool");
            write_page(writer, handle, page, 13).expect("room");
        }),
    ]);
    taken.into_iter().for_each(|run| pool.return_frames(run));
    world.check(&[
        &[12],
        &[initial_byte(1)],
        &[initial_byte(2)],
        &[initial_byte(3)],
    ]);
}

const MERGE: Model = Model::new("slots", 2);
const REUSE: Model = Model::new("slots and frames", 3);

#[test]
fn slot_swap_is_never_lost() {
    assert!(
        MERGE
            .check(|| two_partial_writers(StreamVisibility::Immediate))
            .executions
            > 1000
    );
    assert!(
        MERGE
            .check(|| two_partial_writers(StreamVisibility::AtFence))
            .executions
            > 1000
    );
    assert_finds(&[Defect::NotLocked], MERGE, || {
        two_partial_writers(StreamVisibility::Immediate)
    });
    let defects = [Defect::SwapBeforeFence, Defect::UnlockBeforeFence];
    assert_finds(&defects, MERGE, || {
        two_partial_writers(StreamVisibility::AtFence)
    });
}

#[test]
fn reader_never_sees_another_page() {
    assert!(REUSE.check(frame_reuse).executions > 100);
    assert_finds(&[Defect::SlotNotRechecked], REUSE, frame_reuse);
}
