//! `file-sync`: a transaction reaches the file, and the record of another session that links one of
//! its leaves does not.

use super::fixed::base;
use super::harness::CrashHarness;
use super::model::CheckFailure;
use super::ops::{self, MAIN, Op, PartSpec};
use super::recover::{self, MediumKind};
use super::{CheckCounts, catch_panic, set_defect};
use pagemesh_base::defect::Defect;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;

/// One session links the second leaf, another changes pages of both leaves. A crash loses only the
/// journal of the first session.
fn crash_with_lost_link(world: &mut CrashHarness<'_>) -> Result<(), CheckFailure> {
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
    let run = |page| PartSpec {
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
    let mut image = world.medium.recorder.crash_point().all_persisted();
    let number = world.clients[1].session.number();
    let journal = {
        let pool = world.pool.borrow();
        let geometry = pool.mapping().geometry();
        let at = geometry.journal_at(number);
        at..at + geometry.journal_bytes as usize
    };
    for at in journal.step_by(8) {
        image.set_word(at, durable.word(at));
    }
    let found = recover::recover(MediumKind::File, image, &BTreeMap::new())?;
    assert!(
        !found.objects[&MAIN].pages.contains_key(&530),
        "the link is lost"
    );
    world.oracle.check(&found).map(drop)
}

fn check_lost_link() -> Result<(), CheckFailure> {
    let mut tally = CheckCounts::default();
    catch_panic(|| {
        let mut world = base(MediumKind::File, false).open(2, None, &mut tally)?;
        crash_with_lost_link(&mut world)
    })
}

#[test]
fn transaction_is_lost_with_leaf_of_another_session() {
    check_lost_link().unwrap_or_else(|wrong| panic!("{wrong:?}"));
    set_defect(Some(Defect::GroupWithoutLeaf));
    let caught = check_lost_link();
    set_defect(None);
    println!("{caught:?}");
    assert!(caught.is_err(), "half of it is there");
}
