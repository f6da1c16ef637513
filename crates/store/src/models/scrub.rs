//! A scrub of a lane beside the session that writes to it.
//!
//! Property: what a session has published as committed is whole, so a scrub
//! never takes a record that is being written for a damaged one.

use super::medium::Streams;
use super::world::{World, before, put};
use crate::defect::Defect;
use crate::scrub::Scrubbed;
use pagemesh_models::{Model, finds, race};

fn writes_and_a_scrub() {
    let mut world = World::new(1, Streams::AtTheFence);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one] = &mut world.sessions[..] else {
        panic!("one session");
    };
    let number = one.number();
    race(vec![
        Box::new(|| {
            put(one, handle, 0, 1).expect("room");
            put(one, handle, 1, 2).expect("room");
        }),
        Box::new(|| {
            let mut found = Scrubbed::default();
            pool.scrub_lane(number, &mut found).expect("nothing lost");
            assert_eq!((found.mended(), pool.mended_records()), (0, 0));
        }),
    ]);
    world.check(&[&[1], &[2], &[before(2)], &[before(3)]]);
}

const MODEL: Model = Model::new("scrub", 3);

#[test]
fn no_scrub_takes_a_record_that_is_being_written_for_damaged() {
    let explored = MODEL.check(writes_and_a_scrub);
    assert!(explored.executions > 20, "{explored:?}");
    finds(&[Defect::NoCommitFence], MODEL, writes_and_a_scrub);
}
