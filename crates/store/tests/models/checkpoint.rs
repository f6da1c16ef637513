//! Checkpoints concurrent with writes.
//!
//! Property: a checkpoint passes no record that it has not applied, even if the session has taken
//! the seq and not published it. No frame is freed twice. A partial checkpoint applies a record
//! only together with the earlier records of its page, and keeps no record that it applied.

use super::medium::{ModelMedium, StreamVisibility};
use super::model_pool::{ModelPool, initial_byte, read_page, write_page};
use pagemesh_base::defect::Defect;
use pagemesh_models::{Model, assert_finds, run_threads};
use pagemesh_store::pool::Pool;
use pagemesh_store::test_api::PoolInternals;

/// Two sessions write 1 and 2 into these pages while the owner acts.
fn two_writers(pages: [u64; 2], owner: impl FnOnce(&mut Pool<ModelMedium>) + Send) -> ModelPool {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    run_threads(vec![
        Box::new(|| write_page(one, handle, pages[0], 1).expect("room")),
        Box::new(|| write_page(two, handle, pages[1], 2).expect("room")),
        Box::new(|| owner(pool)),
    ]);
    world
}

fn writes_and_checkpoints() {
    let world = two_writers([0, 1], |pool| pool.checkpoint().expect("a sound pool"));
    world.check(&[&[1], &[2], &[initial_byte(2)], &[initial_byte(3)]]);
}

const MODEL: Model = Model::new("checkpoint", 2);

#[test]
fn checkpoint_never_passes_unapplied_record() {
    assert!(MODEL.check(writes_and_checkpoints).executions > 1000);
    let defects = [Defect::CheckpointPassesUnpublished, Defect::FloorAfterSeq];
    assert_finds(&defects, MODEL, writes_and_checkpoints);
}

/// Two sessions write the same page. Records that were applied while one of them was inside an
/// operation are not replayed, and no replaced data comes back.
fn writes_and_partial_checkpoint() {
    let mut world = two_writers([0, 0], |pool| {
        pool.partial_checkpoint().expect("a sound pool")
    });
    let handle = world.handle;
    let last = read_page(&mut world.sessions[0], handle, 0).expect("a sound page");
    world.check(&[
        &[last],
        &[initial_byte(1)],
        &[initial_byte(2)],
        &[initial_byte(3)],
    ]);
}

const PARTIAL: Model = Model::new("bypass", 2);

#[test]
fn partial_checkpoint_applies_records_in_order() {
    assert!(PARTIAL.check(writes_and_partial_checkpoint).executions > 1000);
    let defects = [
        Defect::PartialCheckpointPassesUnpublished,
        Defect::PartialCheckpointKeepsRecords,
        Defect::PartialCheckpointReadsSeqLate,
    ];
    assert_finds(&defects, PARTIAL, writes_and_partial_checkpoint);
}
