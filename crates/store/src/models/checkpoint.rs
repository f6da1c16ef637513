//! Checkpoints beside writes.
//!
//! Property: a checkpoint passes no record that it has not applied, also if its
//! session has taken the seq and not published it; nothing is freed twice. A bypass
//! applies a record only with those of its page before it, and keeps none that it applied.

use super::medium::Streams;
use super::world::{World, before, get, put};
use crate::defect::Defect;
use pagemesh_models::{Model, finds, race};

fn a_write_and_checkpoints() {
    let mut world = World::new(2, Streams::AtOnce);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    race(vec![
        Box::new(|| put(one, handle, 0, 1).expect("room")),
        Box::new(|| put(two, handle, 1, 2).expect("room")),
        Box::new(|| pool.checkpoint().expect("a sound pool")),
    ]);
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
    let mut world = World::new(2, Streams::AtOnce);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    race(vec![
        Box::new(|| put(one, handle, 0, 1).expect("room")),
        Box::new(|| put(two, handle, 0, 2).expect("room")),
        Box::new(|| pool.bypass().expect("a sound pool")),
    ]);
    let last = get(one, handle, 0).expect("a sound page");
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
