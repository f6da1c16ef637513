//! `file-sync`: a transaction reaches the file, and the record of another
//! session that links one of its leaves does not.

use super::fixed::base;
use super::model::Wrong;
use super::ops::{self, MAIN, Op, Run};
use super::recover::{self, Kind};
use super::world::World;
use super::{Tally, guard};
use crate::defect::{self, Defect};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;

/// One session links the second leaf, another changes pages of both. A crash
/// loses the lane of the first alone.
fn lose_a_link(world: &mut World<'_>) -> Result<(), Wrong> {
    let durable = world.medium.recorder.crash_point().image(0);
    let page = PAGE_BYTES as u64;
    let link = Op::Write {
        client: 1,
        slice: MAIN,
        at: 530 * page,
        len: page,
        open: 0,
        death: None,
    };
    let run = |page| Run {
        page,
        pages: 1,
        is_written: true,
    };
    let transact = Op::Transact {
        client: 0,
        slice: MAIN,
        runs: vec![run(1), run(520)],
        open: 0,
        death: None,
    };
    ops::run(world, &link, 1)?;
    ops::run(world, &transact, 2)?;
    let mut image = world.medium.recorder.crash_point().everything();
    let number = world.clients[1].session.number();
    let lane = {
        let pool = world.pool.borrow();
        let geometry = pool.view().geometry();
        let at = geometry.lane_at(number);
        at..at + geometry.lane_bytes as usize
    };
    for at in lane.step_by(8) {
        image.set_word(at, durable.word(at));
    }
    let found = recover::recover(Kind::File, image, &BTreeMap::new())?;
    assert!(
        !found.things[&MAIN].pages.contains_key(&530),
        "the link is lost"
    );
    world.oracle.judge(&found).map(drop)
}

fn check() -> Result<(), Wrong> {
    let mut tally = Tally::default();
    guard(|| {
        let mut world = base(Kind::File, false).open(2, None, &mut tally)?;
        lose_a_link(&mut world)
    })
}

#[test]
fn a_transaction_goes_with_a_leaf_that_another_session_linked() {
    check().unwrap_or_else(|wrong| panic!("{wrong:?}"));
    defect::set(Some(Defect::GroupWithoutLeaf));
    let caught = check();
    defect::set(None);
    println!("{caught:?}");
    assert!(caught.is_err(), "half of it is there");
}
