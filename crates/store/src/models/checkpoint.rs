//! Checkpoints beside writes.
//!
//! Property: a checkpoint passes no record that it has not applied, also if its
//! session has taken the seq and not published it; nothing is freed twice. A bypass
//! applies a record only with those of its page before it, and keeps none that it applied.

use super::medium::{Medium, Streams};
use super::world::{World, before, get, put};
use crate::defect::Defect;
use crate::pool::Pool;
use pagemesh_models::{Model, finds, race};

/// Two sessions write 1 and 2 into these pages, beside what the owner does.
fn two_write(pages: [u64; 2], owner: impl FnOnce(&mut Pool<Medium>) + Send) -> World {
    let mut world = World::new(2, Streams::AtOnce);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    race(vec![
        Box::new(|| put(one, handle, pages[0], 1).expect("room")),
        Box::new(|| put(two, handle, pages[1], 2).expect("room")),
        Box::new(|| owner(pool)),
    ]);
    world
}

fn a_write_and_checkpoints() {
    let world = two_write([0, 1], |pool| pool.checkpoint().expect("a sound pool"));
    world.check(&[&[1], &[2], &[before(2)], &[before(3)]]);
}

const MODEL: Model = Model::new("checkpoint", 2);

#[test]
fn no_checkpoint_passes_what_it_has_not_applied() {
    assert!(MODEL.check(a_write_and_checkpoints).executions > 1000);
    let defects = [Defect::PassOpenWindow, Defect::FloorAfterSeq];
    finds(&defects, MODEL, a_write_and_checkpoints);
}

/// Two write the same page: of what is applied while one of them is inside nothing is
/// replayed, and nothing that was replaced comes back.
fn writes_and_a_bypass() {
    let mut world = two_write([0, 0], |pool| pool.bypass().expect("a sound pool"));
    let handle = world.handle;
    let last = get(&mut world.sessions[0], handle, 0).expect("a sound page");
    world.check(&[&[last], &[before(1)], &[before(2)], &[before(3)]]);
}

const BYPASS: Model = Model::new("bypass", 2);

#[test]
fn no_bypass_takes_a_record_without_those_before_it() {
    assert!(BYPASS.check(writes_and_a_bypass).executions > 1000);
    let defects = [
        Defect::BypassPassesWindow,
        Defect::BypassKeepsRecords,
        Defect::BypassReadsSeqLate,
    ];
    finds(&defects, BYPASS, writes_and_a_bypass);
}
