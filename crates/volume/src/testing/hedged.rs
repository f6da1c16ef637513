//! A story of a read that two legs were asked for.

use super::manager::{brick, segment};
use super::oracle::fill;
use super::world::{PAGE, World};
use crate::hub::guard;
use crate::limits::HEDGE_DELAY_MAX;
use crate::status::VolumeState;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::STRIPE_BYTES;
use pagemesh_base::space::{Reply, Request};
use std::panic;

/// A leg that refuses a read only because it was asked before a barrier of its own
/// client is asked again: here the other one has the page damaged (seed 100333 of the
/// cluster simulation as it then was).
#[test]
fn a_leg_that_was_asked_before_a_barrier_is_asked_again() {
    // A brick of the other segment will be lost, and both legs of this one stay.
    let segments = vec![
        segment(0, 1, 2, STRIPE_BYTES),
        segment(1, 1, 3, STRIPE_BYTES),
    ];
    let mut world = World::new(segments);
    world.write(0, PAGE, 1);
    (0..3).for_each(|brick| world.freeze(brick, true));
    let len = PAGE as u32;
    let token = world.submit(0, Request::Read { offset: 0, len });
    world.rest();
    world.pass(HEDGE_DELAY_MAX);
    assert_eq!(world.counters().reads_hedged, 1);
    let mut asked = guard(&world.fabric.0).hold_back();
    (0..3).for_each(|brick| world.freeze(brick, false));
    let (second, first) = (asked.pop().expect("two"), asked.pop().expect("two"));
    assert!(asked.is_empty(), "nothing else is under way");
    let of = |connection: u64| {
        let bricks = guard(&world.fabric.0);
        let is_its = |number: &u128| bricks.connections_of(brick(*number)).contains(&connection);
        (0..3).find(is_its).expect("a brick")
    };
    let (told, damaged) = (of(first.0), of(second.0));
    let legs = world.manager.layout().segments[0].columns[0].legs.clone();
    let epoch = |world: &World, number: u128| {
        let leg = &legs[number as usize];
        guard(&world.fabric.0).slice(leg.brick, leg.slice).epoch()
    };
    let leg = &legs[damaged as usize];
    guard(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .spoil(0);
    // One of the two hears of the loss before the other.
    world.kill(2);
    world.freeze(damaged, true);
    let before = epoch(&world, told);
    for _ in 0..1000 {
        if epoch(&world, told) > before {
            break;
        }
        let busy = guard(&world.fabric.0).busy();
        match busy.first() {
            Some(&connection) => {
                guard(&world.fabric.0).step(connection, &mut world.dice);
            }
            None => {
                world.client.turn();
                world.client.call();
            }
        }
    }
    assert!(epoch(&world, told) > before, "it heard of the loss");
    let answer = |world: &mut World, message: (u64, u64, _)| {
        let connection = message.0;
        guard(&world.fabric.0).let_go(vec![message]);
        while guard(&world.fabric.0).step(connection, &mut world.dice) {}
        world.reap();
    };
    answer(&mut world, first);
    world.freeze(damaged, false);
    assert_eq!(epoch(&world, damaged), before, "it has yet to hear");
    answer(&mut world, second);
    world.until(VolumeState::Degraded);
    let Some(Ok(Reply::Data(data))) = world.ending(token) else {
        panic!("the leg without damage has it");
    };
    assert_eq!(data, fill(1, PAGE / 512));
}

#[test]
fn a_leg_that_is_given_up_for_a_barrier_is_caught() {
    defect::set(Some(Defect::OutdatedLegFailed));
    let told = panic::catch_unwind(a_leg_that_was_asked_before_a_barrier_is_asked_again);
    defect::set(None);
    assert!(told.is_err(), "it is not caught");
}
