//! A scenario with a read that two legs were asked for.

use crate::world::cluster::{PAGE, TestCluster};
use crate::world::manager::{brick, segment};
use crate::world::oracle::fill;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::STRIPE_BYTES;
use pagemesh_base::poison;
use pagemesh_base::space::{Reply, Request};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::HEDGE_DELAY_MAX;
use std::panic;

/// A leg that refuses a read only because the read came before its own client's barrier is
/// asked again. In this scenario the page is damaged on the other leg (found by seed 100333 of
/// an earlier cluster simulation).
#[test]
fn read_refused_for_a_barrier_is_retried() {
    // A brick of the other segment will be lost. Both legs of this one stay.
    let segments = vec![
        segment(0, 1, 2, STRIPE_BYTES),
        segment(1, 1, 3, STRIPE_BYTES),
    ];
    let mut world = TestCluster::new(segments);
    world.write(0, PAGE, 1);
    (0..3).for_each(|brick| world.set_frozen(brick, true));
    let len = PAGE as u32;
    let token = world.submit(0, Request::Read { offset: 0, len });
    world.run_until_idle();
    world.advance_time(HEDGE_DELAY_MAX);
    assert_eq!(world.counters().reads_hedged, 1);
    let mut asked = poison::lock(&world.fabric.0).take_messages();
    (0..3).for_each(|brick| world.set_frozen(brick, false));
    let (second, first) = (asked.pop().expect("two"), asked.pop().expect("two"));
    assert!(asked.is_empty(), "nothing else is under way");
    let of = |connection: u64| {
        let bricks = poison::lock(&world.fabric.0);
        let is_its = |number: &u128| bricks.connections_of(brick(*number)).contains(&connection);
        (0..3).find(is_its).expect("a brick")
    };
    let (told, damaged) = (of(first.0), of(second.0));
    let legs = world.manager.layout().segments[0].columns[0].legs.clone();
    let epoch = |world: &TestCluster, number: u128| {
        let leg = &legs[number as usize];
        poison::lock(&world.fabric.0)
            .slice(leg.brick, leg.slice)
            .epoch()
    };
    let leg = &legs[damaged as usize];
    poison::lock(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .damage_page(0);
    // One of the two legs hears of the loss before the other.
    world.kill(2);
    world.set_frozen(damaged, true);
    let before = epoch(&world, told);
    for _ in 0..1000 {
        if epoch(&world, told) > before {
            break;
        }
        let busy = poison::lock(&world.fabric.0).busy();
        match busy.first() {
            Some(&connection) => {
                poison::lock(&world.fabric.0).step(connection, &mut world.rng);
            }
            None => {
                world.client.poll();
                world.client.run_call();
            }
        }
    }
    assert!(epoch(&world, told) > before, "the leg heard of the loss");
    let answer = |world: &mut TestCluster, message: (u64, u64, _)| {
        let connection = message.0;
        poison::lock(&world.fabric.0).restore_messages(vec![message]);
        while poison::lock(&world.fabric.0).step(connection, &mut world.rng) {}
        world.reap();
    };
    answer(&mut world, first);
    world.set_frozen(damaged, false);
    assert_eq!(epoch(&world, damaged), before, "the leg has not heard yet");
    answer(&mut world, second);
    world.run_until_state(VolumeState::Degraded);
    let Some(Ok(Reply::Data(data))) = world.result_of(token) else {
        panic!("the leg without damage can serve the read");
    };
    assert_eq!(data, fill(1, PAGE / 512));
}

#[test]
fn giving_up_leg_after_barrier_is_caught() {
    defect::set(Some(Defect::OutdatedLegFailed));
    let told = panic::catch_unwind(read_refused_for_a_barrier_is_retried);
    defect::set(None);
    assert!(told.is_err(), "the defect is not caught");
}
