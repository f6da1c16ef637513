//! Checkpoints beside writes.
//!
//! Property: a checkpoint passes no record that it has not applied, also if its
//! session has taken the seq and not published it; nothing is freed twice.

use super::medium::Streams;
use super::world::{World, before, put};
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
