//! Correction of slots above the leaves, concurrent with sessions that link nodes there.
//!
//! Property: a correction undoes the flipped bit and changes no other one. A node that another
//! session links there meanwhile is not lost.

use super::medium::StreamVisibility;
use super::model_pool::{ModelPool, initial_byte};
use pagemesh_base::defect::Defect;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_models::{Model, assert_finds, run_threads};
use pagemesh_pmem::Media;
use pagemesh_store::session::Session;
use pagemesh_store::test_api::{ROOT_AT, SessionInternals};
use uuid::Uuid;

/// A bit flipped in the root slot, which names no node yet. One session links a node there while
/// another walks through it.
fn link_and_walk() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let view = world.pool.mapping().clone();
    let empty = SliceId(Uuid::from_u128(2));
    world.pool.create(empty, 1 << 20).expect("room");
    let handle = world.pool.handle(empty).expect("the object");
    let root_at = view.geometry().object_at(handle.object()) + ROOT_AT;
    world.medium.store(root_at, 1 << 45);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let walk = |session: &mut Session<_>| {
        let found = session.visit_slots(&handle, 0..1, Epoch(1), |_, _, _| true);
        found.expect("a sound table");
    };
    run_threads(vec![
        Box::new(|| one.link_leaf(&handle, PageNo(0), Epoch(1)).expect("room")),
        Box::new(|| walk(two)),
    ]);
    assert!(
        one.slot_at(&handle, PageNo(0))
            .expect("a sound table")
            .is_some(),
        "a node is lost"
    );
    world.check(&[
        &[initial_byte(0)],
        &[initial_byte(1)],
        &[initial_byte(2)],
        &[initial_byte(3)],
    ]);
}

const MODEL: Model = Model::new("correction", 2);

#[test]
fn correction_never_undoes_link() {
    let explored = MODEL.check(link_and_walk);
    assert!(explored.executions > 100, "{explored:?}");
    assert_finds(&[Defect::CorrectedBlindly], MODEL, link_and_walk);
}
