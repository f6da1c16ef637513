//! Stories that must end well, told step by step: what an operator would ask
//! about, each with the state that the volume is in meanwhile.

use super::Dice;
use super::client::Client;
use super::manager::{Answering, brick, segment};
use super::oracle::fill;
use super::world::{PAGE, World, create_slices, part, transact, write};
use crate::hub::guard;
use crate::keeper::Event;
use crate::limits::{DOWN_LIMIT, HEDGE_DELAY_MAX, MANAGER_RETRY_MAX};
use crate::status::VolumeState;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::slice::Part;
use pagemesh_base::space::{Reply, Request, SpaceError};
use std::sync::mpsc;
use std::time::Duration;
use uuid::Uuid;

#[test]
fn without_a_manager_requests_go_on() {
    let mut world = World::mirror(2);
    world.manager.answer(Answering::No);
    world.write(0, 3 * PAGE, 7);
    world.discard(PAGE, PAGE);
    world.holds(0, PAGE, 7);
    world.holds(PAGE, PAGE, 0);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    world.legs_are_equal();
}

#[test]
fn a_leg_lost_without_a_manager_stalls_writes_until_it_is_back() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    world.manager.answer(Answering::No);
    world.kill(1);
    let token = world.submit(0, write(0, PAGE, 2));
    world.pass(DOWN_LIMIT * 2);
    assert_eq!(
        world.ending(token),
        None,
        "only the manager may leave a leg out"
    );
    assert_eq!(world.client.status().state, VolumeState::AwaitingManager);
    // Reads of what no write is about to change are served meanwhile.
    world.holds(4 * PAGE, PAGE, 0);
    world.manager.answer(Answering::Yes);
    world.pass(MANAGER_RETRY_MAX);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    assert_eq!(world.client.status().state, VolumeState::Degraded);
    assert_eq!(world.leg(1).state, LegState::Stale);
    world.heals();
    world.holds(0, PAGE, 2);
}

#[test]
fn a_leg_that_stands_still_delays_few_reads() {
    let mut world = World::mirror(2);
    world.write(0, 16 * PAGE, 3);
    world.freeze(1, true);
    let read = |page: u64| Request::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    };
    let reads: Vec<u64> = (0..8).map(|page| world.submit(0, read(page))).collect();
    world.rest();
    let has_ended = |world: &World, token: &u64| world.ended.contains_key(token);
    let (served, held): (Vec<u64>, Vec<u64>) =
        reads.iter().partition(|token| has_ended(&world, token));
    assert!(!served.is_empty() && !held.is_empty(), "in turns");
    world.pass(HEDGE_DELAY_MAX);
    assert!(held.iter().all(|token| has_ended(&world, token)));
    let hedged = world.counters().reads_hedged;
    assert_eq!(hedged, held.len() as u64);
    // What it owes counts as its load: the others go where there is less.
    for page in 0..16 {
        world.holds(page * PAGE, PAGE, 3);
    }
    assert_eq!(world.counters().reads_hedged, hedged);
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    // Its answers come at last, and it is read from again; or they never come.
    world.freeze(1, false);
    world.rest();
    let before = world.reads(0);
    (0..8).for_each(|page| world.holds(page * PAGE, PAGE, 3));
    assert!(world.reads(0) > before, "both serve reads");
    world.freeze(1, true);
    let reads: Vec<u64> = (0..4).map(|page| world.submit(0, read(page))).collect();
    world.pass(HEDGE_DELAY_MAX);
    world.kill(1);
    world.until(VolumeState::Degraded);
    assert!(reads.iter().all(|token| has_ended(&world, token)));
    world.heals();
    world.holds(0, 16 * PAGE, 3);
}

/// Of two reads beside a write, the later one showed what was before: one leg
/// had the write, the other not yet (seeds 60, 1005 and 1465 of the cluster
/// simulation as it then was).
#[test]
fn no_read_shows_a_write_that_is_on_one_leg_only() {
    let mut world = World::mirror(2);
    let other = world.open();
    world.write(0, PAGE, 1);
    world.freeze(1, true);
    let token = world.submit(0, write(0, PAGE, 2));
    let read = |offset| Request::Read {
        offset,
        len: PAGE as u32,
    };
    // In turns from both legs, one of which is silent.
    let reads: Vec<u64> = (0..4).map(|_| world.submit(other, read(0))).collect();
    for read in &reads {
        assert_eq!(world.ending(*read), None, "one leg may be lost");
    }
    assert_eq!(world.page(0, 0, 0), fill(2, PAGE / 512), "it is on one leg");
    let beside: Vec<u64> = (0..2)
        .map(|_| world.submit(other, read(4 * PAGE)))
        .collect();
    for read in beside {
        assert!(world.ending(read).is_some(), "others do not wait");
    }
    // The leg that has it goes; the write, and what waits for it, goes on.
    world.freeze(1, false);
    world.kill(0);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    for read in reads {
        assert!(world.ending(read).is_some_and(|ending| ending.is_ok()));
    }
    world.holds(0, PAGE, 2);
    world.restart(0);
    world.heals();
}

/// Writes after a loss are tracked by the survivors, so none may be driven
/// before they have heard of the round.
#[test]
fn no_write_goes_on_before_the_survivors_heard_of_the_loss() {
    let mut world = World::mirror(2);
    world.kill(1);
    guard(&world.fabric.0).hold_barriers = true;
    let token = world.submit(0, write(0, PAGE, 2));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.ending(token), None);
    let later = world.submit(0, write(4 * PAGE, PAGE, 3));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.ending(later), None);
    assert!(world.page(0, 0, 4).is_empty(), "not even sent");
    guard(&world.fabric.0).hold_barriers = false;
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    assert_eq!(world.ending(later), Some(Ok(Reply::Done)));
    world.heals();
}

/// The barrier of one loss went to a leg that stands still. Once a channel has
/// found that it is lost, too, nobody waits for its answer, which may take the
/// time of a whole call.
#[test]
fn no_barrier_waits_for_a_leg_that_is_lost() {
    let mut world = World::mirror(3);
    world.write(0, PAGE, 1);
    world.freeze(1, true);
    world.kill(0);
    let token = world.submit(0, write(0, PAGE, 2));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.ending(token), None, "leg 1 may have it");
    {
        let mut bricks = guard(&world.fabric.0);
        // The channel's: the keeper was there before.
        let newest = bricks.connections_of(brick(1)).pop();
        bricks.cut(newest.expect("a connection"));
    }
    world.pass(MANAGER_RETRY_MAX);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    assert_eq!(world.leg(0).state, LegState::Stale);
    assert_eq!(world.leg(1).state, LegState::Stale);
    world.holds(0, PAGE, 2);
    world.heals();
    world.holds(0, PAGE, 2);
}

/// A brick cannot take its pool back before every client has unmapped it. A
/// channel that looks only now never used the connection that it was given.
#[test]
fn no_channel_keeps_a_connection_to_a_brick_that_died_before_it_looked() {
    let mut world = World::mirror(2);
    let late = world.client.open();
    world.rest();
    world.kill(1);
    world.write(0, PAGE, 1);
    world.channels.push(late);
    world.rest();
    let kept = guard(&world.fabric.0).connections_of(brick(1));
    assert!(kept.is_empty(), "{kept:?}");
    world.heals();
}

/// The same of a volume that nobody uses, over channels or without any.
#[test]
fn an_idle_volume_lets_go_of_a_brick_that_died() {
    for channels in [1, 0] {
        let mut world = World::mirror(2);
        world.channels.truncate(channels);
        world.rest();
        world.kill(1);
        world.rest();
        let kept = guard(&world.fabric.0).connections_of(brick(1));
        assert!(kept.is_empty(), "{channels} channels: {kept:?}");
    }
}

/// The manager left the leg out, but its answer was lost: the client must ask
/// what became of it, not go on by guess.
#[test]
fn an_answer_of_the_manager_that_is_lost_is_asked_for() {
    let mut world = World::mirror(2);
    world.manager.answer(Answering::Deafly);
    world.kill(0);
    let token = world.submit(0, write(0, PAGE, 2));
    world.pass(MANAGER_RETRY_MAX * 2);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    assert_eq!(world.leg(0).state, LegState::Stale);
    world.heals();
    world.holds(0, PAGE, 2);
}

#[test]
fn a_full_leg_is_left_out_and_returns_when_it_has_room() {
    let mut world = World::mirror(2);
    world.write(0, 2 * PAGE, 1);
    world.room(1, 0);
    world.write(0, 2 * PAGE, 2);
    let leg = world.leg(1);
    assert_eq!(leg.state, LegState::Stale);
    let trouble = leg.trouble.expect("a reason");
    assert!(trouble.contains("full"), "{trouble}");
    world.pass(Duration::from_secs(30));
    assert_eq!(world.client.status().state, VolumeState::Degraded);
    world.holds(0, 2 * PAGE, 2);
    // Deletes never need room.
    world.discard(0, PAGE);
    world.heals();
    world.holds(0, PAGE, 0);
    world.holds(PAGE, PAGE, 2);
}

#[test]
fn when_all_legs_are_full_the_client_is_told_and_no_leg_is_left_out() {
    let mut world = World::mirror(2);
    world.write(0, 4 * PAGE, 1);
    // Each has another place where its room ends.
    world.room(0, 1);
    world.room(1, 2);
    // A part of a page, which both take, and two pages, which neither does.
    let token = world.submit(0, write(512, 3 * PAGE - 512, 2));
    let ending = world.ending(token).expect("an answer");
    assert!(matches!(ending, Err(SpaceError::NoSpace(_))), "{ending:?}");
    assert_eq!(world.client.status().counters.legs_lost, 0);
    world.legs_are_equal();
    let zeroes = Request::WriteZeroes {
        offset: 512,
        len: 3 * PAGE,
        durable: false,
    };
    // Room for one end of it, on one leg.
    world.room(0, 1);
    world.room(1, 0);
    let token = world.submit(0, zeroes);
    let ending = world.ending(token).expect("an answer");
    assert!(matches!(ending, Err(SpaceError::NoSpace(_))), "{ending:?}");
    world.legs_are_equal();
    // What frees whole pages works.
    world.discard(0, 4 * PAGE);
    world.holds(0, 4 * PAGE, 0);
    world.heals();
}

/// A leg took a write, the epoch rose, and at the second try all are full.
#[test]
fn what_a_leg_took_before_counts_when_all_are_full_later() {
    let mut world = World::mirror(3);
    world.room(0, 1);
    world.room(1, 1);
    world.freeze(1, true);
    world.freeze(2, true);
    let token = world.submit(0, write(0, PAGE, 5));
    world.rest();
    world.kill(2);
    world.freeze(2, false);
    world.room(1, 0);
    world.freeze(1, false);
    world.pass(Duration::from_secs(1));
    let ending = world.ending(token).expect("an answer");
    assert_eq!(ending, Ok(Reply::Done), "leg 0 holds it");
    world.legs_are_equal();
    world.holds(0, PAGE, 5);
    world.heals();
    world.holds(0, PAGE, 5);
}

#[test]
fn trims_while_degraded_are_brought_back() {
    let mut world = World::mirror(2);
    world.write(0, 8 * PAGE, 1);
    world.write(9 * PAGE, PAGE, 1);
    world.kill(1);
    world.discard(PAGE, 2 * PAGE);
    // Parts of pages, too.
    world.discard(5 * PAGE + 512, PAGE);
    world.write(7 * PAGE, PAGE, 3);
    world.discard(7 * PAGE, PAGE);
    assert!(!world.page(0, 1, 1).is_empty(), "it has not heard");
    world.heals();
    world.holds(PAGE, 2 * PAGE, 0);
    assert!(world.page(0, 1, 1).is_empty(), "freed, not zeroed");
    assert!(world.page(0, 1, 7).is_empty());
    let moved = world.client.status().counters.bytes_resynced;
    // Twice what was in flight at the loss, once what came later.
    assert!(moved <= 9 * PAGE, "moved {moved}");
}

/// What was written and discarded while two legs were away is a hole on the
/// first that returns, written there or not: the second must hear of it.
#[test]
fn trims_while_two_legs_are_away_reach_the_second_by_way_of_the_first() {
    let mut world = World::mirror(3);
    world.kill(0);
    // What meets the loss, and what is last of a session, counts as in flight
    // and is told by tables: the page in question is neither.
    world.write(8 * PAGE, PAGE, 1);
    world.write(0, PAGE, 1);
    world.write(4 * PAGE, PAGE, 1);
    world.kill(1);
    world.write(8 * PAGE, PAGE, 2);
    world.discard(0, PAGE);
    world.write(5 * PAGE, PAGE, 1);
    world.restart(0);
    world.pass(Duration::from_secs(20));
    assert_eq!(world.leg(0).state, LegState::InSync);
    // Leg 0 is all that is left to tell leg 1.
    world.kill(2);
    world.restart(1);
    world.pass(Duration::from_secs(20));
    assert_eq!(world.leg(1).state, LegState::InSync);
    world.legs_are_equal();
    world.heals();
}

#[test]
fn overlapping_writes_of_several_channels_end_the_same_on_all_legs() {
    for seed in 0..40 {
        let mut world = World::mirror(3);
        world.dice = Dice(seed);
        for _ in 0..3 {
            world.open();
        }
        let mut tokens = vec![];
        for round in 0..10 {
            for channel in 0..4 {
                let start = world.dice.roll(20) * 512;
                let value = round * 10 + channel + 1;
                let request = write(start, 3 * PAGE, value);
                tokens.push(world.submit(channel as usize, request));
            }
            // Some legs are slower than others.
            for _ in 0..world.dice.roll(12) {
                let busy = guard(&world.fabric.0).busy();
                if let Some(at) = busy.len().checked_sub(1) {
                    let at = world.dice.roll(at as u64 + 1) as usize;
                    guard(&world.fabric.0).step(busy[at], &mut world.dice);
                }
            }
            world.reap();
        }
        world.rest();
        for token in tokens {
            assert_eq!(world.ended.remove(&token), Some(Ok(Reply::Done)));
        }
        world.legs_are_equal();
    }
}

#[test]
fn a_client_that_was_superseded_is_fenced_and_its_late_writes_refused() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    // On its way to both legs when the other client comes.
    world.freeze(0, true);
    world.freeze(1, true);
    let late = world.submit(0, write(0, PAGE, 2));
    world.rest();
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    // The new one's barriers overtake the old one's writes.
    let delayed = guard(&world.fabric.0).hold_back();
    world.freeze(0, false);
    world.freeze(1, false);
    world.attach();
    world.open();
    world.write(0, PAGE, 3);
    guard(&world.fabric.0).let_go(delayed);
    std::mem::swap(&mut world.client, &mut old);
    world.channels.extend(old_channels);
    let ending = world.ending(late);
    assert_eq!(ending, Some(Err(SpaceError::Fenced)));
    assert_eq!(world.client.status().state, VolumeState::Fenced);
    let again = world.submit(1, write(0, PAGE, 4));
    assert_eq!(world.ending(again), Some(Err(SpaceError::Fenced)));
    let read = world.submit(
        1,
        Request::Read {
            offset: 0,
            len: 512,
        },
    );
    assert_eq!(world.ending(read), Some(Err(SpaceError::Fenced)));
    std::mem::swap(&mut world.client, &mut old);
    world.holds(0, PAGE, 3);
    world.legs_are_equal();
}

/// A leg that is lost while the client is fenced must not be marked stale by
/// it: the attachment is another's.
#[test]
fn a_superseded_client_changes_no_legs() {
    let mut world = World::mirror(2);
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    world.attach();
    world.open();
    std::mem::swap(&mut world.client, &mut old);
    world.channels.extend(old_channels);
    let all = guard(&world.fabric.0).connections();
    guard(&world.fabric.0).cut(all[0]);
    let token = world.submit(1, write(0, PAGE, 4));
    world.pass(Duration::from_secs(5));
    assert_eq!(world.ending(token), Some(Err(SpaceError::Fenced)));
    let layout = world.manager.layout();
    let mut legs = layout.segments[0].columns[0].legs.iter();
    assert!(legs.all(|leg| leg.state == LegState::InSync));
}

/// A channel that was fenced has nobody to flush to when it is closed.
#[test]
fn a_superseded_channel_with_unflushed_writes_is_closed() {
    let mut world = World::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
    world.write(0, PAGE, 1);
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    world.attach();
    world.open();
    std::mem::swap(&mut world.client, &mut old);
    let new_channels = std::mem::replace(&mut world.channels, old_channels);
    let late = world.submit(0, write(0, PAGE, 2));
    assert_eq!(world.ending(late), Some(Err(SpaceError::Fenced)));
    world.channels = vec![];
    world.pass(Duration::from_secs(1));
    assert_eq!(world.client.status().state, VolumeState::Fenced);
    std::mem::swap(&mut world.client, &mut old);
    world.channels = new_channels;
    world.holds(0, PAGE, 1);
    world.legs_are_equal();
}

/// A client that heard no answer asks for the layout. One that another client
/// made since must not pass for its own change: both would write at one epoch.
#[test]
fn a_superseded_client_takes_no_layout_of_another_for_its_own() {
    let mut world = World::mirror(2);
    world.manager.answer(Answering::No);
    world.kill(1);
    let late = world.submit(0, write(0, PAGE, 2));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.client.status().state, VolumeState::AwaitingManager);
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    world.manager.answer(Answering::Yes);
    world.attach();
    assert_eq!(world.leg(1).state, LegState::Stale, "as the old one wished");
    world.open();
    world.write(0, PAGE, 3);
    std::mem::swap(&mut world.client, &mut old);
    world.channels.extend(old_channels);
    world.pass(MANAGER_RETRY_MAX);
    assert_eq!(world.ending(late), Some(Err(SpaceError::Fenced)));
    assert_eq!(world.client.status().state, VolumeState::Fenced);
    std::mem::swap(&mut world.client, &mut old);
    world.holds(0, PAGE, 3);
}

#[test]
fn a_volume_grows_in_use() {
    for degraded in [false, true] {
        let mut world = World::mirror(2);
        let size = STRIPE_BYTES;
        world.write(size - PAGE, PAGE, 1);
        if degraded {
            world.kill(1);
            world.write(size - PAGE, PAGE, 2);
        }
        let busy = world.submit(0, write(0, 4 * PAGE, 9));
        let more = segment(1, 2, 2, 2 * STRIPE_BYTES);
        create_slices(&world.fabric, std::slice::from_ref(&more));
        world.manager.grow(more);
        let beyond = world.submit(0, write(size, PAGE, 3));
        let ending = world.ending(beyond).expect("an answer");
        assert!(
            matches!(ending, Err(SpaceError::OutOfRange { .. })),
            "{ending:?}"
        );
        let (answer, told) = mpsc::channel();
        world.client.mailbox.post(Event::Refresh(answer));
        world.pass(Duration::from_secs(3));
        assert_eq!(told.try_recv(), Ok(Ok(())));
        assert_eq!(world.ending(busy), Some(Ok(Reply::Done)));
        let status = world.client.status();
        assert_eq!(status.size_bytes, 3 * STRIPE_BYTES);
        assert_eq!(status.epoch, world.manager.layout().epoch.0);
        // Over the seam of the segments, and to the last page.
        world.write(size - PAGE, 3 * PAGE, 4);
        world.write(3 * STRIPE_BYTES - PAGE, PAGE, 5);
        // New slices refuse a client before this one from the start.
        let epoch = status.epoch;
        for leg in &world.manager.layout().segments[1].columns[1].legs {
            let bricks = guard(&world.fabric.0);
            if bricks.bricks[&leg.brick].up {
                assert_eq!(
                    bricks.slice(leg.brick, leg.slice).epoch(),
                    world.client.status().epoch.max(epoch)
                );
            }
        }
        world.heals();
        world.holds(size - PAGE, 3 * PAGE, 4);
        world.holds(3 * STRIPE_BYTES - PAGE, PAGE, 5);
        world.crash();
        world.holds(size - PAGE, 3 * PAGE, 4);
        world.legs_are_equal();
    }
}

/// A copy that is added holds whatever it holds: all that any copy has is compared.
#[test]
fn a_copy_is_added_in_use() {
    for copies in [1, 2] {
        let mut world = World::mirror(copies);
        world.write(0, 4 * PAGE, 1);
        world.discard(2 * PAGE, PAGE);
        let new = (brick(2), SliceId(Uuid::from_u128(77)));
        world.add_copy(new.0, new.1);
        // Where the others have something, and where they have nothing.
        for page in [0, 2, 14] {
            let mut bricks = guard(&world.fabric.0);
            bricks.slice_mut(new.0, new.1).hold(page, &fill(9, 8));
        }
        world.write(PAGE, PAGE, 2);
        world.look_again();
        let busy = world.submit(0, write(8 * PAGE, 4 * PAGE, 3));
        world.until(VolumeState::Healthy);
        assert_eq!(world.ending(busy), Some(Ok(Reply::Done)));
        world.legs_are_equal();
        let leg = world.leg(copies);
        assert_eq!((leg.brick, leg.state), (new.0, LegState::InSync));
        (0..copies as u128).for_each(|number| world.kill(number));
        world.until(VolumeState::Degraded);
        for (page, value) in [(0, 1), (1, 2), (2, 0), (3, 1), (11, 3), (14, 0)] {
            world.holds(page * PAGE, PAGE, value);
        }
        world.heals();
    }
}

/// A leg that was away when a page was discarded hears of it from a copy that was
/// added meanwhile and is all that is left.
#[test]
fn a_copy_that_is_added_tells_of_what_was_discarded_before() {
    let mut world = World::mirror(2);
    world.write(0, 4 * PAGE, 1);
    // The page in question is in no table of what is in flight.
    world.write(8 * PAGE, PAGE, 1);
    world.kill(1);
    world.write(8 * PAGE, PAGE, 2);
    world.discard(2 * PAGE, PAGE);
    world.write(5 * PAGE, PAGE, 1);
    world.add_copy(brick(2), SliceId(Uuid::from_u128(77)));
    world.look_again();
    world.pass(Duration::from_secs(20));
    assert_eq!(world.leg(2).state, LegState::InSync);
    world.kill(0);
    world.restart(1);
    world.pass(Duration::from_secs(20));
    assert_eq!(world.leg(1).state, LegState::InSync);
    world.legs_are_equal();
    world.heals();
}

/// The answer to a question that was asked before is older than what is known by
/// now: its epoch is one that the legs refuse.
#[test]
fn a_layout_that_comes_late_is_left() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    world.ask_to_look();
    world.client.turn();
    let late = world.client.ask().expect("the layout is asked for");
    world.kill(1);
    world.until(VolumeState::Degraded);
    let raised = world.counters().epochs_raised;
    world.client.tell(late);
    world.rest();
    assert_eq!(world.counters().epochs_raised, raised, "nobody hears of it");
    assert_eq!(world.client.status().state, VolumeState::Degraded);
    world.write(0, PAGE, 2);
    world.heals();
    world.holds(0, PAGE, 2);
}

/// It is lost on the way, before its return began and in the middle of it.
#[test]
fn a_copy_that_is_added_is_lost_before_it_is_whole() {
    for steps in 0..120 {
        let mut world = World::mirror(1);
        world.write(0, 16 * PAGE, 1);
        world.add_copy(brick(1), SliceId(Uuid::from_u128(77)));
        world.ask_to_look();
        world.steps(steps);
        world.kill(1);
        world.write(7 * PAGE, PAGE, 2);
        world.heals();
        let status = world.leg(1);
        assert_eq!(status.state, LegState::InSync, "after {steps} steps");
    }
}

/// Concatenated segments, stripes, and stripes of mirrors: every page at its
/// place, on every copy.
#[test]
fn layouts_put_every_page_at_its_place() {
    for (columns, copies, segments) in [(1, 1, 2), (3, 1, 1), (2, 2, 1), (2, 2, 2), (3, 3, 2)] {
        let bytes = 2 * STRIPE_BYTES * columns as u64;
        let all = (0..segments).map(|n| segment(n, columns, copies, bytes));
        let mut world = World::new(all.collect());
        let size = world.client.status().size_bytes;
        assert_eq!(size, bytes * segments as u64);
        for page in 0..size / PAGE {
            world.submit(0, write(page * PAGE, PAGE, page + 1));
            if page % 16 == 15 {
                world.rest();
            }
        }
        world.rest();
        assert!(
            world
                .ended
                .values()
                .all(|ending| *ending == Ok(Reply::Done))
        );
        let layout = world.manager.layout();
        let before = |segment: usize| -> usize {
            let earlier = layout.segments[..segment].iter();
            earlier.map(|s| s.columns.len()).sum()
        };
        for page in 0..size / PAGE {
            let [place] = layout.map(page * PAGE, PAGE)[..] else {
                panic!("a page in two places");
            };
            let column = before(place.segment) + place.column;
            for leg in 0..copies {
                let found = world.page(column, leg, (place.offset / PAGE) as usize);
                assert_eq!(found, fill(page + 1, 8), "page {page}, leg {leg}");
            }
        }
        // A long read puts stripes and segments together again.
        let values = world.read(0, size);
        let expected = (0..size / 512).map(|sector| sector / 8 + 1);
        assert!(values.into_iter().eq(expected));
        world.discard(PAGE + 512, size - 2 * PAGE);
        let values = world.read(0, size);
        let kept = |sector: u64| sector < 9 || sector >= size / 512 - 7;
        let expected = (0..size / 512).map(|s| if kept(s) { s / 8 + 1 } else { 0 });
        assert!(values.into_iter().eq(expected));
    }
}

#[test]
fn three_copies_outlive_two() {
    for (first, second) in [(0, 1), (1, 2), (2, 0)] {
        let mut world = World::mirror(3);
        world.write(0, 8 * PAGE, 1);
        world.kill(first);
        world.write(PAGE, PAGE, 2);
        world.kill(second);
        world.write(2 * PAGE, PAGE, 3);
        world.write(3 * PAGE + 512, 1024, 4);
        assert_eq!(world.client.status().state, VolumeState::Degraded);
        world.holds(PAGE, PAGE, 2);
        // The one that left first returns first, and is the only source of
        // the other one.
        world.restart(first);
        world.pass(Duration::from_secs(20));
        world.write(4 * PAGE, PAGE, 5);
        let survivor = 3 - first - second;
        world.kill(survivor);
        world.write(5 * PAGE, PAGE, 6);
        world.restart(second);
        world.pass(Duration::from_secs(20));
        world.legs_are_equal();
        world.heals();
        for (page, value) in [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 1)] {
            world.holds(page * PAGE, PAGE, value);
        }
        world.holds(3 * PAGE + 512, 1024, 4);
        world.holds(3 * PAGE + 1536, 512, 1);
    }
}

/// A write reached only a leg that then died, and the client died before it
/// was driven again: nobody but the dead leg knows.
#[test]
fn a_leg_returns_with_a_write_that_nobody_else_knows_of() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    // The last one of a session counts as in flight: let it be another one.
    world.write(4 * PAGE, PAGE, 1);
    world.freeze(0, true);
    world.submit(0, write(0, PAGE, 2));
    world.rest();
    assert_eq!(world.page(0, 1, 0), fill(2, 8));
    world.kill(1);
    world.freeze(0, false);
    world.crash();
    world.holds(0, PAGE, 1);
    world.heals();
    world.holds(0, PAGE, 1);
}

/// A leg that is being brought up to date takes what the in-sync one refuses.
#[test]
fn a_syncing_leg_forgets_what_the_others_refused() {
    let mut world = World::mirror(2);
    world.kill(1);
    world.write(0, PAGE, 1);
    world.restart(1);
    world.until_syncing(1);
    world.room(0, 0);
    let token = world.submit(0, write(4 * PAGE, PAGE, 2));
    let ending = world.ending(token);
    assert!(
        matches!(ending, Some(Err(SpaceError::NoSpace(_)))),
        "{ending:?}"
    );
    world.heals();
    world.holds(4 * PAGE, PAGE, 0);
}

/// What is far away, or busy, takes long for each message.
#[test]
fn a_leg_that_returns_gets_several_places_at_once() {
    let mut world = World::mirror(2);
    world.kill(1);
    let places = [0, 2, 4, 6];
    for page in places {
        world.write(page * PAGE, PAGE, page + 1);
    }
    world.restart(1);
    world.until_syncing(1);
    world.freeze(1, true);
    world.rest();
    assert_eq!(guard(&world.fabric.0).queued(brick(1)), places.len());
    // A write there waits for the copy of its place, and is not undone by it.
    let token = world.submit(0, write(4 * PAGE, PAGE, 9));
    assert!(world.ending(token).is_none());
    world.heals();
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    world.holds(4 * PAGE, PAGE, 9);
    world.holds(6 * PAGE, PAGE, 7);
}

/// A lost leg is made stale, and nobody hears of it; then it is there again, with the
/// other one, as if nothing had been (seed 28243 of the cluster simulation).
#[test]
fn what_nobody_heard_of_is_asked_about_although_nothing_is_wanted() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    world.manager.answer(Answering::DeaflyAtLast);
    world.kill(1);
    world.rest();
    assert_eq!(
        world.manager.layout().segments[0].columns[0].legs[1].state,
        LegState::Stale
    );
    assert_eq!(world.leg(1).state, LegState::InSync, "it was not heard of");
    world.kill(0);
    world.rest();
    world.restart(0);
    world.restart(1);
    world.pass(Duration::from_secs(1));
    world.manager.answer(Answering::Yes);
    world.pass(Duration::from_secs(5));
    world.until(VolumeState::Healthy);
    let layout = world.manager.layout();
    let column = &layout.segments[0].columns[0];
    assert!(
        column.legs.iter().all(|leg| leg.state == LegState::InSync),
        "{column:?}"
    );
    world.legs_are_equal();
}

/// One of several places that are copied at once does not go in: the others end, and
/// the leg comes back when there is room.
#[test]
fn a_leg_that_returns_has_room_for_some_places_only() {
    for room in 0..5 {
        let mut world = World::mirror(2);
        world.kill(1);
        for page in [0, 2, 4, 6, 8] {
            world.write(page * PAGE, PAGE, page + 1);
        }
        world.restart(1);
        world.until_syncing(1);
        world.room(1, room);
        world.pass(Duration::from_secs(2));
        assert_ne!(world.leg(1).state, LegState::InSync);
        world.write(2 * PAGE, PAGE, 9);
        world.heals();
        world.holds(2 * PAGE, PAGE, 9);
        world.holds(8 * PAGE, PAGE, 9);
    }
}

/// All legs are away for too long: requests fail, and what one leg took of
/// them is made equal when they return.
#[test]
fn a_volume_without_any_leg_fails_requests_after_a_while() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    world.write(4 * PAGE, PAGE, 1);
    world.freeze(0, true);
    let token = world.submit(0, write(0, PAGE, 2));
    world.rest();
    // Nobody is left out before both are gone.
    world.manager.answer(Answering::No);
    world.kill(0);
    world.kill(1);
    world.freeze(0, false);
    // The read finds out about the other one.
    let read = world.submit(
        0,
        Request::Read {
            offset: 0,
            len: 512,
        },
    );
    let other = world.submit(
        0,
        Request::Read {
            offset: 8 * PAGE,
            len: 512,
        },
    );
    world.until(VolumeState::Unavailable);
    assert_eq!(world.ending(token), None);
    world.manager.answer(Answering::Yes);
    world.pass(DOWN_LIMIT + Duration::from_secs(1));
    let ending = world.ending(token);
    assert!(
        matches!(ending, Some(Err(SpaceError::Unavailable(_)))),
        "{ending:?}"
    );
    for token in [read, other] {
        let ending = world.ending(token);
        assert!(
            matches!(ending, Some(Err(SpaceError::Unavailable(_)))),
            "{ending:?}"
        );
    }
    // The one that did not get the write is the source for the other.
    world.restart(0);
    world.pass(Duration::from_secs(10));
    world.holds(0, PAGE, 1);
    world.heals();
    world.holds(0, PAGE, 1);
}

/// A short absence of all legs is a stall, not an error.
#[test]
fn legs_that_all_come_back_soon_end_requests_well() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    world.kill(0);
    world.kill(1);
    let token = world.submit(0, write(0, PAGE, 2));
    world.pass(Duration::from_secs(5));
    assert_eq!(world.ending(token), None);
    world.restart(0);
    world.restart(1);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    world.heals();
    world.holds(0, PAGE, 2);
}

/// A client crash leaves a write on one leg: the next attach makes the legs
/// equal before it serves, and forwards what a read may have shown.
#[test]
fn a_write_on_one_leg_is_rolled_forward_at_the_next_attach() {
    for reached in [0, 1] {
        let mut world = World::mirror(2);
        world.write(0, PAGE, 1);
        world.freeze(1 - reached, true);
        world.submit(0, write(0, PAGE, 2));
        world.rest();
        world.freeze(1 - reached, false);
        world.crash();
        world.legs_are_equal();
        world.holds(0, PAGE, 2);
    }
}

#[test]
fn a_damaged_page_is_read_from_another_leg_and_rewritten() {
    let mut world = World::mirror(2);
    world.write(0, 2 * PAGE, 1);
    let leg = world.manager.layout().segments[0].columns[0].legs[1].clone();
    guard(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .spoil(1);
    world.holds(PAGE, PAGE, 1);
    let status = world.client.status();
    assert_eq!(status.state, VolumeState::Healthy);
    assert!(
        guard(&world.fabric.0)
            .slice(leg.brick, leg.slice)
            .damaged
            .is_empty()
    );
    world.legs_are_equal();
}

/// A repair that is late is not asked of another leg, as a read would be: the
/// column would wait for ever for an answer that it had counted as a read.
#[test]
fn a_late_repair_does_not_hold_its_column_up() {
    let mut world = World::mirror(3);
    world.write(0, 2 * PAGE, 1);
    let leg = world.manager.layout().segments[0].columns[0].legs[1].clone();
    guard(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .spoil(1);
    // The first good leg, of which the repair reads, stands still.
    world.freeze(0, true);
    let read = || Request::Read {
        offset: PAGE,
        len: PAGE as u32,
    };
    let reads: Vec<u64> = (0..6).map(|_| world.submit(0, read())).collect();
    world.rest();
    world.pass(HEDGE_DELAY_MAX * 4);
    world.freeze(0, false);
    for token in reads {
        assert!(matches!(world.ending(token), Some(Ok(Reply::Data(_)))));
    }
    assert!(world.counters().pages_repaired > 0);
    world.kill(2);
    world.write(0, 2 * PAGE, 2);
    world.heals();
    world.holds(0, 2 * PAGE, 2);
}

/// Legs that buffer: what was flushed outlives every brick; what was not
/// outlives all but the last.
#[test]
fn acknowledged_writes_outlive_a_buffering_leg_that_dies() {
    let mut world = World::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
    world.write(0, PAGE, 1);
    world.done(Request::Flush);
    world.write(PAGE, PAGE, 2);
    world.kill(1);
    world.write(2 * PAGE, PAGE, 3);
    world.heals();
    world.holds(0, PAGE, 1);
    world.holds(PAGE, PAGE, 2);
    world.holds(2 * PAGE, PAGE, 3);
    // It came back flushed: now the other one may go.
    world.kill(0);
    world.holds(PAGE, PAGE, 2);
    world.heals();
}

/// A channel that ends well leaves nothing that would have to be compared when
/// a leg returns, or at the next attach.
#[test]
fn channels_that_end_well_leave_nothing_in_flight() {
    for class in ["process", "file-sync"] {
        let mut world = World::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], class);
        for value in 1..4 {
            let own = world.open();
            let token = world.submit(own, write(value * PAGE, PAGE, value));
            world.rest();
            assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
            drop(world.channels.pop());
            world.rest();
        }
        let legs = world.manager.layout().segments[0].columns[0].legs.clone();
        for leg in legs {
            let bricks = guard(&world.fabric.0);
            assert!(bricks.slice(leg.brick, leg.slice).has_nothing_in_flight());
        }
    }
}

/// What a leg missed is copied when it returns, not what was copied the last
/// time or what earlier channels wrote.
#[test]
fn later_losses_move_no_more_than_was_missed() {
    let mut world = World::mirror(2);
    world.kill(1);
    for page in 0..12 {
        world.write(page * PAGE, PAGE, 1);
    }
    world.heals();
    for value in 2..6 {
        let before = world.counters().bytes_resynced;
        world.kill(1);
        let token = world.submit(0, write(3 * PAGE, PAGE, value));
        world.until(VolumeState::Degraded);
        assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
        world.heals();
        assert_eq!(world.counters().bytes_resynced - before, PAGE);
    }
}

/// A flush covers what other channels were told: it fails if that is gone. Each
/// channel hears of it once, one that joins later only if nobody has.
#[test]
fn a_flush_on_any_channel_tells_of_what_every_copy_lost() {
    let flush = |world: &mut World, channel| {
        let token = world.submit(channel, Request::Flush);
        world.until(VolumeState::Healthy);
        world.rest();
        world.ending(token).expect("an answer").is_ok()
    };
    for writer_leaves in [false, true] {
        let mut world = World::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
        let (other, writer) = (world.open(), world.open());
        let token = world.submit(writer, write(0, PAGE, 1));
        world.rest();
        assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
        if writer_leaves {
            drop(world.channels.pop());
        }
        for brick in [0, 1] {
            world.kill(brick);
        }
        for brick in [0, 1] {
            world.restart(brick);
        }
        assert!(!flush(&mut world, other));
        assert!(flush(&mut world, other));
        // Channel 0 was there as well, and may have waited for the same write.
        assert!(!flush(&mut world, 0));
        assert!(flush(&mut world, 0));
        let late = world.open();
        assert!(flush(&mut world, late));
        // What a flush of another channel covered is not lost.
        world.write(0, PAGE, 2);
        assert!(flush(&mut world, other));
        for brick in [0, 1] {
            world.kill(brick);
        }
        for brick in [0, 1] {
            world.restart(brick);
        }
        assert!(flush(&mut world, 0));
        world.holds(0, PAGE, 2);
    }
}

/// A channel that is dropped in the middle of a write neither leaves the legs
/// unequal nor its range locked.
#[test]
fn the_changes_of_a_dropped_channel_are_driven_to_their_end() {
    let mut world = World::mirror(2);
    let own = world.open();
    world.freeze(1, true);
    world.submit(own, write(0, PAGE, 2));
    world.rest();
    drop(world.channels.pop());
    world.kill(1);
    world.freeze(1, false);
    world.rest();
    world.write(0, PAGE, 3);
    world.heals();
    world.holds(0, PAGE, 3);
    assert_eq!(guard(&world.client.hub.members).len(), 2);
}

#[test]
fn a_transaction_changes_several_places_of_one_column() {
    let mut world = World::mirror(3);
    world.write(0, 16 * PAGE, 1);
    let (offset, len) = (5 * PAGE, 2 * PAGE);
    let parts = vec![part(9, 2), Part::Clear { offset, len }, part(0, 3)];
    assert_eq!(world.done(transact(parts)), Reply::Done);
    for (page, value) in [(0, 3), (1, 1), (4, 1), (5, 0), (6, 0), (7, 1), (9, 2)] {
        world.holds(page * PAGE, PAGE, value);
    }
    world.legs_are_equal();
    let mut refused = |parts, why: &str| {
        let token = world.submit(0, transact(parts));
        let ending = world.ending(token).expect("an answer");
        let told = ending.expect_err("refused").to_string();
        assert!(told.contains(why), "{told}");
    };
    refused(vec![], "no parts");
    refused(vec![part(1, 9), part(1, 9)], "overlaps");
    refused(vec![part(1, 9), part(16, 9)], "beyond the end");
    world.holds(PAGE, PAGE, 1);
}

#[test]
fn a_transaction_over_columns_is_unsupported_and_changes_nothing() {
    let stripe = STRIPE_BYTES / PAGE;
    let mut world = World::new(vec![segment(0, 2, 2, 4 * STRIPE_BYTES)]);
    let token = world.submit(0, transact(vec![part(0, 1), part(stripe, 1)]));
    let ending = world.ending(token).expect("an answer");
    let Err(SpaceError::Unsupported(why)) = ending else {
        panic!("{ending:?}");
    };
    assert!(
        why.contains("2 columns") && why.contains("one column"),
        "{why}"
    );
    world.holds(0, PAGE, 0);
    // Two stripes of one column.
    let token = world.submit(0, transact(vec![part(2 * stripe, 4), part(1, 4)]));
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    world.holds(PAGE, PAGE, 4);
    world.holds(2 * stripe * PAGE, PAGE, 4);
    world.holds(stripe * PAGE, PAGE, 0);
}

#[test]
fn transactions_and_writes_take_turns() {
    let mut world = World::mirror(2);
    let other = world.open();
    world.freeze(1, true);
    let first = world.submit(0, write(4 * PAGE, PAGE, 1));
    let second = world.submit(other, transact(vec![part(2, 2), part(4, 2)]));
    let third = world.submit(0, transact(vec![part(4, 3), part(2, 3)]));
    let fourth = world.submit(other, write(0, 8 * PAGE, 4));
    let beside = world.submit(other, write(9 * PAGE, PAGE, 5));
    world.rest();
    assert_eq!(world.page(0, 0, 4), fill(1, PAGE / 512), "the others wait");
    assert_eq!(world.page(0, 0, 2), Vec::<u8>::new());
    assert_eq!(world.page(0, 0, 9), fill(5, PAGE / 512), "it meets none");
    world.freeze(1, false);
    for token in [first, second, third, fourth, beside] {
        assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    }
    world.holds(0, 8 * PAGE, 4);
    world.legs_are_equal();
}

#[test]
fn no_read_shows_a_transaction_that_is_on_one_leg_only() {
    let mut world = World::mirror(2);
    let other = world.open();
    world.freeze(1, true);
    let token = world.submit(0, transact(vec![part(1, 2), part(6, 2)]));
    let read = |page: u64| Request::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    };
    let asked = [1, 6].map(|page| [0, 1].map(|_| world.submit(other, read(page))));
    for read in asked.as_flattened() {
        assert_eq!(world.ending(*read), None, "one leg may be lost");
    }
    world.freeze(1, false);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    for read in asked.as_flattened() {
        assert!(world.ending(*read).is_some_and(|ending| ending.is_ok()));
    }
}

#[test]
fn a_transaction_that_is_sent_again_is_all_of_it() {
    let mut world = World::mirror(2);
    world.write(0, 8 * PAGE, 1);
    (0..2).for_each(|leg| world.freeze(leg, true));
    let token = world.submit(0, transact(vec![part(1, 2), part(3, 2), part(5, 2)]));
    assert_eq!(world.ending(token), None);
    // What was sent is lost with both.
    (0..2).for_each(|leg| world.kill(leg));
    world.rest();
    (0..2).for_each(|leg| world.freeze(leg, false));
    (0..2).for_each(|leg| world.restart(leg));
    world.until(VolumeState::Healthy);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    for page in [1, 3, 5] {
        world.holds(page * PAGE, PAGE, 2);
    }
    world.legs_are_equal();
}

#[test]
fn a_full_leg_takes_nothing_of_a_transaction() {
    let mut world = World::mirror(2);
    world.room(1, 2);
    let token = world.submit(0, transact(vec![part(1, 2), part(3, 2), part(5, 2)]));
    world.until(VolumeState::Degraded);
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    assert_eq!(world.leg(1).state, LegState::Stale);
    assert_eq!(world.page(0, 1, 1), Vec::<u8>::new());
    world.heals();
    world.room(0, 2);
    world.room(1, 2);
    let token = world.submit(0, transact(vec![part(7, 9), part(8, 9), part(9, 9)]));
    let ending = world.ending(token);
    assert!(
        matches!(ending, Some(Err(SpaceError::NoSpace(_)))),
        "{ending:?}"
    );
    world.holds(7 * PAGE, 3 * PAGE, 0);
    assert_eq!(world.client.status().state, VolumeState::Healthy);
}

#[test]
fn a_transaction_on_one_leg_is_rolled_forward_at_the_next_attach() {
    let mut world = World::mirror(2);
    world.write(0, 8 * PAGE, 1);
    world.freeze(1, true);
    let (offset, len) = (6 * PAGE, PAGE);
    let parts = vec![part(1, 2), part(3, 2), Part::Clear { offset, len }];
    world.submit(0, transact(parts));
    world.rest();
    world.freeze(1, false);
    guard(&world.fabric.0).hold_back();
    world.crash();
    for (page, value) in [(1, 2), (2, 1), (3, 2), (6, 0)] {
        world.holds(page * PAGE, PAGE, value);
    }
    world.legs_are_equal();
}

/// The source of a settling dies while it copies: whatever it has given by then,
/// the other leg has all of a transaction or nothing.
#[test]
fn a_settling_that_is_interrupted_leaves_no_half_of_a_transaction() {
    for steps in 0..60 {
        let mut world = World::mirror(2);
        world.write(0, 8 * PAGE, 1);
        world.freeze(1, true);
        world.submit(0, transact(vec![part(1, 2), part(3, 2), part(6, 2)]));
        world.rest();
        world.freeze(1, false);
        world.attach_in_part(steps);
        world.kill(0);
        world.attach();
        world.open();
        let first = world.read(PAGE, PAGE)[0];
        world.holds(3 * PAGE, PAGE, first);
        world.holds(6 * PAGE, PAGE, first);
        world.holds(2 * PAGE, PAGE, 1);
        world.heals();
        world.holds(PAGE, PAGE, first);
    }
}

/// The leg that is behind is lost while it is settled, whatever it was asked for just
/// then: it is told of the rest when it returns (seed 1000472 of the cluster simulation
/// as it then was).
#[test]
fn a_leg_that_is_lost_while_it_is_settled_returns_with_the_rest() {
    for steps in 0..60 {
        let mut world = World::mirror(2);
        world.write(0, 2 * PAGE, 1);
        world.freeze(1, true);
        world.submit(0, write(8 * PAGE, 3 * PAGE, 2));
        world.rest();
        world.freeze(1, false);
        world.attach_in_part(steps);
        world.kill(1);
        world.attach();
        world.open();
        world.holds(8 * PAGE, 3 * PAGE, 2);
        world.heals();
    }
}

#[test]
fn defects_of_transactions_are_caught() {
    let stories: [(Defect, fn()); 3] = [
        (Defect::FirstPartLocked, transactions_and_writes_take_turns),
        (
            Defect::FirstPartResent,
            a_transaction_that_is_sent_again_is_all_of_it,
        ),
        (
            Defect::SettledByPage,
            a_settling_that_is_interrupted_leaves_no_half_of_a_transaction,
        ),
    ];
    for (defect, story) in stories {
        defect::set(Some(defect));
        let told = std::panic::catch_unwind(story);
        defect::set(None);
        assert!(told.is_err(), "{defect:?} is not caught");
    }
}
