//! A scrub of a journal, concurrent with the session that writes to it.
//!
//! Property: the records that a session has published as committed are whole. So a scrub never
//! takes a record that is being written for a damaged one.

use super::medium::StreamVisibility;
use super::model_pool::{ModelPool, initial_byte, write_page};
use pagemesh_base::defect::Defect;
use pagemesh_models::{Model, assert_finds, run_threads};
use pagemesh_store::scrub::ScrubReport;
use pagemesh_store::test_api::PoolInternals;

fn writes_and_scrub() {
    let mut world = ModelPool::new(1, StreamVisibility::AtFence);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one] = &mut world.sessions[..] else {
        panic!("one session");
    };
    let number = one.number();
    run_threads(vec![
        Box::new(|| {
            write_page(one, handle, 0, 1).expect("room");
            write_page(one, handle, 1, 2).expect("room");
        }),
        Box::new(|| {
            let mut found = ScrubReport::default();
            pool.scrub_journal(number, &mut found)
                .expect("nothing lost");
            assert_eq!((found.corrected(), pool.corrected_records()), (0, 0));
        }),
    ]);
    world.check(&[&[1], &[2], &[initial_byte(2)], &[initial_byte(3)]]);
}

const MODEL: Model = Model::new("scrub", 3);

#[test]
fn scrub_accepts_record_being_written() {
    let explored = MODEL.check(writes_and_scrub);
    assert!(explored.executions > 20, "{explored:?}");
    assert_finds(&[Defect::NoCommitFence], MODEL, writes_and_scrub);
}
