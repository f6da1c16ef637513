//! Stories of changes that end without anybody knowing how: what reads show
//! before that is known, and after.

use super::client::Client;
use super::manager::Answering;
use super::oracle::fill;
use super::world::{Ending, PAGE, World, part, transact, write};
use crate::hub::guard;
use crate::limits::DOWN_LIMIT;
use crate::status::VolumeState;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::SliceRequest;
use pagemesh_base::space::{Request, SpaceError};
use std::panic;
use std::time::Duration;

fn read(page: u64) -> Request {
    Request::Read {
        offset: page * PAGE,
        len: 512,
    }
}

fn is_unavailable(ending: &Option<Ending>) -> bool {
    matches!(ending, Some(Err(SpaceError::Unavailable(_))))
}

/// Both channels, twice, so that each leg that serves is asked.
#[track_caller]
fn reads_fail(world: &mut World, page: u64) {
    for channel in [0, 1, 0, 1] {
        let token = world.submit(channel, read(page));
        match world.ending(token) {
            Some(Err(SpaceError::Unavailable(why))) => {
                assert!(why.contains("one copy may have it"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A write to page 0 that the first leg has and the second has not.
fn undecided() -> World {
    undecided_after(write(0, PAGE, 2))
}

/// A change of page 0 that one leg has. It failed: both were lost, only the first is
/// back, and the manager is silent.
fn undecided_after(change: Request) -> World {
    let mut world = World::mirror(2);
    world.open();
    world.write(0, 8 * PAGE, 1);
    world.freeze(1, true);
    let late = world.submit(0, change);
    assert_eq!(world.ending(late), None);
    assert_eq!(world.page(0, 0, 0), fill(2, PAGE / 512), "it is on one leg");
    let beside = world.submit(1, read(0));
    world.manager.answer(Answering::No);
    world.kill(0);
    world.kill(1);
    world.freeze(1, false);
    world.until(VolumeState::Unavailable);
    world.restart(0);
    world.pass(DOWN_LIMIT / 2);
    let early = world.submit(1, read(0));
    assert_eq!(world.ending(early), None, "the write may go on");
    world.pass(DOWN_LIMIT);
    for token in [late, beside, early] {
        let ending = world.ending(token);
        assert!(is_unavailable(&ending), "{ending:?}");
    }
    world
}

/// A read finds out about it.
fn lose_the_first(world: &mut World) {
    world.kill(0);
    let token = world.submit(0, read(4));
    let ending = world.ending(token);
    assert!(is_unavailable(&ending), "{ending:?}");
}

#[test]
fn no_read_shows_a_failed_write_that_one_leg_may_have() {
    let mut world = undecided();
    reads_fail(&mut world, 0);
    world.holds(PAGE, 7 * PAGE, 1);
    // What comes later knows of it, too.
    world.open();
    let token = world.submit(2, read(0));
    let ending = world.ending(token);
    assert!(is_unavailable(&ending), "{ending:?}");
    // A write that fails before it is sent leaves its place as it was.
    let token = world.submit(1, write(4 * PAGE, PAGE, 3));
    let ending = world.ending(token);
    assert!(is_unavailable(&ending), "{ending:?}");
    world.holds(4 * PAGE, PAGE, 1);
    // The manager leaves the other leg out: what the first one has counts.
    world.manager.answer(Answering::Yes);
    world.until(VolumeState::Degraded);
    assert_eq!(world.leg(1).state, LegState::Stale);
    world.holds(0, PAGE, 2);
    world.write(0, PAGE, 4);
    world.heals();
    world.holds(0, PAGE, 4);
}

#[test]
fn no_part_of_a_failed_transaction_is_shown() {
    let mut world = undecided_after(transact(vec![part(0, 2), part(3, 2)]));
    reads_fail(&mut world, 0);
    reads_fail(&mut world, 3);
    world.holds(PAGE, 2 * PAGE, 1);
    world.manager.answer(Answering::Yes);
    world.until(VolumeState::Degraded);
    for (page, value) in [(0, 2), (1, 1), (3, 2)] {
        world.holds(page * PAGE, PAGE, value);
    }
    world.heals();
}

#[test]
fn a_failed_write_counts_once_all_legs_are_back() {
    let mut world = undecided();
    reads_fail(&mut world, 0);
    lose_the_first(&mut world);
    // They settle without the manager.
    world.restart(0);
    world.restart(1);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.leg(0).state, LegState::InSync);
    assert_eq!(world.leg(1).state, LegState::InSync);
    world.holds(0, PAGE, 2);
    world.legs_are_equal();
    world.heals();
}

#[test]
fn a_failed_write_is_gone_with_the_leg_that_had_it() {
    let mut world = undecided();
    reads_fail(&mut world, 0);
    lose_the_first(&mut world);
    world.restart(1);
    world.pass(Duration::from_secs(1));
    reads_fail(&mut world, 0);
    world.manager.answer(Answering::Yes);
    world.until(VolumeState::Degraded);
    world.holds(0, PAGE, 1);
    world.heals();
    world.holds(0, PAGE, 1);
}

#[test]
fn the_next_client_shows_what_reads_may_have_shown() {
    let mut world = undecided();
    reads_fail(&mut world, 0);
    world.kill(0);
    world.restart(1);
    world.manager.answer(Answering::Yes);
    world.crash();
    world.holds(0, PAGE, 1);
    world.heals();
    world.holds(0, PAGE, 1);
}

/// The channel that wrote is closed: the keeper drives its write to the same end.
#[test]
fn what_a_closed_channel_leaves_undecided_is_not_shown() {
    let mut world = World::mirror(2);
    world.open();
    world.write(0, PAGE, 1);
    world.freeze(1, true);
    world.submit(0, write(0, PAGE, 2));
    world.rest();
    drop(world.channels.remove(0));
    world.manager.answer(Answering::No);
    let beside = world.submit(0, read(0));
    world.kill(0);
    world.kill(1);
    world.freeze(1, false);
    world.until(VolumeState::Unavailable);
    world.restart(0);
    world.pass(DOWN_LIMIT + Duration::from_secs(1));
    let later = world.submit(0, read(0));
    for token in [beside, later] {
        let ending = world.ending(token);
        assert!(is_unavailable(&ending), "{ending:?}");
    }
    world.manager.answer(Answering::Yes);
    world.until(VolumeState::Degraded);
    world.holds(0, PAGE, 2);
}

/// One channel hears that another client has attached. What it had sent is on a leg
/// that the other one did not reach, where the other channels still read.
#[test]
fn what_a_fenced_channel_leaves_undecided_is_not_shown() {
    let mut world = World::mirror(2);
    world.open();
    world.write(0, PAGE, 1);
    world.freeze(1, true);
    let late = world.submit(0, write(0, PAGE, 2));
    let reads = [0, 0].map(|page| world.submit(1, read(page)));
    world.rest();
    assert_eq!(world.page(0, 0, 0), fill(2, PAGE / 512), "it is on one leg");
    let mut delayed = guard(&world.fabric.0).hold_back();
    delayed.retain(|(.., request)| matches!(request, SliceRequest::Write { .. }));
    // The other one has raised the epoch of the second leg, and waits for the first.
    let other = Client::new(&world.fabric, &world.manager);
    let mut other = std::mem::replace(&mut world.client, other);
    let channels = std::mem::take(&mut world.channels);
    world.freeze(0, true);
    world.freeze(1, false);
    world.rest();
    std::mem::swap(&mut world.client, &mut other);
    world.channels = channels;
    guard(&world.fabric.0).let_go(delayed);
    world.rest();
    assert_eq!(world.ending(late), Some(Err(SpaceError::Fenced)));
    for token in reads {
        let ending = world.ending(token);
        assert!(!matches!(ending, Some(Ok(_))), "{ending:?}");
    }
    world.client = other;
    world.channels.clear();
    world.kill(0);
    world.attach();
    world.open();
    world.holds(0, PAGE, 1);
}

#[test]
fn a_read_of_what_is_undecided_is_caught() {
    defect::set(Some(Defect::UndecidedRead));
    let told = panic::catch_unwind(no_read_shows_a_failed_write_that_one_leg_may_have);
    defect::set(None);
    assert!(told.is_err(), "it is not caught");
}
