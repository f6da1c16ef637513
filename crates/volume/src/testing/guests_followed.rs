//! A copy that follows what guests change, too, and what becomes of guests that die.

use super::following::{FOLLOWER, PAGE_SECTORS, followed};
use super::manager::brick;
use super::oracle::fill;
use super::world::{self, World};
use crate::guests::{Guests, Place, Segment, Wound};
use crate::hub::guard;
use crate::keeper::Event;
use crate::limits::{SHIP_AGE_MAX, SHIP_CHANGES_MAX};
use crate::ring::CLAIMING;
use pagemesh_base::ids::PageNo;
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::Run;
use pagemesh_base::space::{Reply, Request};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Guests, as the legs and the segment see them.
struct Guest {
    segment: Arc<Segment>,
    row: usize,
}

impl Guest {
    fn of(world: &World, row: usize) -> Guest {
        let hub = &world.client.hub;
        let guests = hub
            .guests
            .get_or_init(|| Guests::new(1 << 16).expect("memory"));
        hub.ship.admit(&guests.segment);
        let segment = Arc::clone(&guests.segment);
        Guest { segment, row }
    }

    /// Claims a page and writes it to the first legs, and says nothing yet.
    fn begin(&self, world: &World, page: u64, value: u64, legs: usize) -> u64 {
        let row = self.segment.row(self.row);
        let (file, offset, len) = (self.row as u64, page * 4096, 4096);
        row.enter(Place { file, offset, len });
        let place = self.segment.ring().claim(row, 1);
        let layout = world.manager.layout();
        for leg in &layout.segments[0].columns[0].legs[..legs] {
            let mut bricks = guard(&world.fabric.0);
            let slice = bricks.slice_mut(leg.brick, leg.slice);
            slice.hold(page as usize, &fill(value, PAGE_SECTORS));
        }
        place
    }

    /// Changes runs of pages as a whole on this leg.
    fn begin_together(&self, world: &World, runs: &[(u64, u64)], value: u64, leg: usize) {
        let row = self.segment.row(self.row);
        let file = self.row as u64;
        let (offset, len) = (0, 0);
        row.enter(Place { file, offset, len });
        let run = |&(page, count)| Run {
            page: PageNo(page),
            count,
        };
        let runs: Vec<Run> = runs.iter().map(run).collect();
        row.say_runs(&runs);
        let layout = world.manager.layout();
        let leg = &layout.segments[0].columns[0].legs[leg];
        let mut bricks = guard(&world.fabric.0);
        let slice = bricks.slice_mut(leg.brick, leg.slice);
        for page in runs.iter().flat_map(|it| it.page.0..it.page.0 + it.count) {
            slice.hold(page as usize, &fill(value, PAGE_SECTORS));
        }
    }

    fn end(&self, world: &World, place: u64, page: u64, value: u64) {
        let ring = self.segment.ring();
        if ring.fill(place, page * 4096, &fill(value, PAGE_SECTORS)) {
            world.client.hub.wake_keeper();
        }
        self.segment.row(self.row).leave();
    }

    fn write(&self, world: &World, page: u64, value: u64) {
        let place = self.begin(world, page, value, 1);
        self.end(world, place, page, value);
    }

    /// As the mount does behind it.
    fn die(&self, world: &mut World) -> mpsc::Receiver<()> {
        let wound = Wound::of(self.segment.row(self.row)).expect("inside");
        let (done, told) = mpsc::channel();
        let heal = Event::Heal(self.row, wound, done);
        world.client.mailbox.post(heal);
        told
    }

    fn is_healed(&self, world: &mut World, told: &mpsc::Receiver<()>) -> bool {
        world.pass(Duration::from_millis(100));
        let is_healed = told.try_recv().is_ok();
        if is_healed {
            self.segment.row(self.row).leave();
        }
        is_healed
    }
}

/// A page of a leg can be read no more.
fn spoil(world: &World, leg: usize, page: u64) {
    let leg = world.manager.layout().segments[0].columns[0].legs[leg].clone();
    let mut bricks = guard(&world.fabric.0);
    bricks.slice_mut(leg.brick, leg.slice).spoil(page);
}

fn lag_of(world: &World) -> (u64, u64) {
    let lag = world
        .client
        .hub
        .ship
        .lag(world.client.now)
        .expect("it follows");
    (lag.changes, lag.bytes)
}

/// What came through the kernel and what guests changed goes in the order in which it was
/// changed; a flush waits for both.
#[test]
fn a_copy_gets_what_guests_change_in_its_order() {
    let mut world = followed();
    let guest = Guest::of(&world, 3);
    world.freeze(1, true);
    world.write(0, 4096, 2);
    guest.write(&world, 0, 3);
    world.write(4096, 4096, 4);
    guest.write(&world, 1, 5);
    world.write(0, 512, 6);
    assert_eq!(lag_of(&world), (5, 4 * 4096 + 512));
    let flush = world.submit(0, Request::Flush);
    assert_eq!(world.ending(flush), None);
    world.freeze(1, false);
    assert_eq!(world.ending(flush), Some(Ok(Reply::Done)));
    assert_eq!(lag_of(&world), (0, 0));
    for page in 0..2 {
        assert!(world.page(0, 1, page) == world.page(0, 0, page), "{page}");
    }
}

/// What is claimed and not there yet holds up all that came later, and who waits for it.
#[test]
fn nothing_overtakes_what_a_guest_has_yet_to_say() {
    let mut world = followed();
    let guest = Guest::of(&world, 3);
    let before = world.page(0, 1, 1);
    let place = guest.begin(&world, 0, 2, 1);
    Guest::of(&world, 4).write(&world, 2, 3);
    world.write(4096, 4096, 4);
    let flush = world.submit(0, Request::Flush);
    world.pass(Duration::from_millis(100));
    assert_eq!(world.ending(flush), None);
    assert!(world.page(0, 1, 1) == before);
    guest.end(&world, place, 0, 2);
    world.rest();
    assert_eq!(world.ending(flush), Some(Ok(Reply::Done)));
    for page in 0..3 {
        assert!(world.page(0, 1, page) == world.page(0, 0, page), "{page}");
    }
}

/// Guests go the kernel's way, which waits, where the copy is too far behind.
#[test]
fn guests_are_kept_away_at_a_bound() {
    let mut world = followed();
    let guest = Guest::of(&world, 3);
    let has_room = |guest: &Guest| guest.segment.ring().has_room(&mut 0);
    assert!(has_room(&guest));
    world.freeze(1, true);
    guest.write(&world, 0, 2);
    world.pass(SHIP_AGE_MAX / 2);
    assert!(has_room(&guest));
    world.pass(SHIP_AGE_MAX);
    assert!(!has_room(&guest));
    let late = world.submit(0, world::write(4096, 4096, 3));
    assert_eq!(world.ending(late), None);
    world.freeze(1, false);
    assert_eq!(world.ending(late), Some(Ok(Reply::Done)));
    world.pass(Duration::from_millis(100));
    assert!(has_room(&guest));
    world.freeze(1, true);
    for value in 0..=SHIP_CHANGES_MAX as u64 {
        assert!(has_room(&guest), "{value}");
        guest.write(&world, value % 8, 4 + value);
        world.rest();
    }
    assert!(!has_room(&guest));
    world.freeze(1, false);
    world.rest();
    assert!(has_room(&guest));
    assert!(world.page(0, 1, 0) == world.page(0, 0, 0));
}

/// One copy has what a dead guest wrote, and the other not: all three are alike behind it, and
/// the copy goes on to follow.
#[test]
fn a_copy_gets_what_came_of_a_dead_guest() {
    for legs in [0, 1, 2] {
        let mut world = World::mirror(2);
        world.write(0, 4096, 1);
        world.add_follower(brick(2), FOLLOWER);
        world.ask_to_look();
        world.pass(Duration::from_secs(1));
        let (dead, other) = (Guest::of(&world, 3), Guest::of(&world, 4));
        let serial = world.client.hub.view().1.ship();
        dead.begin(&world, 0, 2, legs);
        other.segment.row(4).enter(Place {
            file: 3,
            offset: 4096,
            len: 4096,
        });
        let told = dead.die(&mut world);
        assert!(!dead.is_healed(&mut world, &told), "one is inside");
        other.segment.row(4).leave();
        assert!(dead.is_healed(&mut world, &told), "{legs}");
        let flush = world.submit(0, Request::Flush);
        assert_eq!(world.ending(flush), Some(Ok(Reply::Done)));
        assert_eq!(world.client.hub.view().1.ship(), serial, "it follows on");
        let first = world.page(0, 0, 0);
        assert!(first == world.page(0, 1, 0) && first == world.page(0, 2, 0));
    }
}

/// Others wrote over what a dead guest may have written: what the copy lacks is not known, and
/// it is compared.
#[test]
fn a_copy_is_compared_where_a_dead_guest_was_written_over() {
    for claims in [true, false] {
        let mut world = followed();
        let (dead, other) = (Guest::of(&world, 3), Guest::of(&world, 4));
        dead.begin(&world, 0, 2, 1);
        match claims {
            true => other.write(&world, 0, 3),
            // Which place it claimed it did not say.
            false => dead
                .segment
                .row(3)
                .claim()
                .store(CLAIMING, Ordering::Relaxed),
        }
        let serial = world.client.hub.view().1.ship();
        let told = dead.die(&mut world);
        assert!(dead.is_healed(&mut world, &told));
        world.pass(Duration::from_secs(20));
        assert_ne!(world.client.hub.view().1.ship(), serial);
        assert_eq!(world.leg(1).state, LegState::Following);
        assert!(world.page(0, 1, 0) == world.page(0, 0, 0));
        other.write(&world, 0, 4);
        world.pass(Duration::from_millis(100));
        assert!(world.page(0, 1, 0) == world.page(0, 0, 0));
    }
}

/// The client dies, and with it what guests had told it alone.
#[test]
fn a_copy_is_compared_behind_a_client_that_died_with_guests() {
    let mut world = followed();
    let guest = Guest::of(&world, 3);
    world.freeze(1, true);
    guest.write(&world, 0, 2);
    guest.write(&world, 5, 3);
    guest.begin(&world, 6, 4, 1);
    world.crash();
    world.freeze(1, false);
    world.pass(Duration::from_secs(20));
    assert_eq!(world.leg(1).state, LegState::Following);
    for page in [0, 5, 6] {
        assert!(world.page(0, 1, page) == world.page(0, 0, page), "{page}");
    }
}

/// A guest is inside when a copy begins to follow, and does not know it.
#[test]
fn a_copy_begins_to_follow_behind_guests_that_do_not_know() {
    let mut world = World::mirror(1);
    world.write(0, 8192, 1);
    let guest = Guest::of(&world, 3);
    let (file, offset, len) = (3, 4096, 4096);
    guest.segment.row(3).enter(Place { file, offset, len });
    world.add_follower(brick(1), FOLLOWER);
    world.ask_to_look();
    world.pass(Duration::from_secs(1));
    assert_eq!(world.leg(1).state, LegState::Stale);
    let leg = world.manager.layout().segments[0].columns[0].legs[0].clone();
    guard(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .hold(1, &fill(2, PAGE_SECTORS));
    guest.segment.row(3).leave();
    world.pass(Duration::from_secs(1));
    assert_eq!(world.leg(1).state, LegState::Following);
    assert!(world.page(0, 1, 1) == world.page(0, 0, 1));
}

/// All copies are gone at once where a guest died: who makes them equal does not wait for who
/// cleans up behind it, who waits for that.
#[test]
fn copies_that_were_all_lost_return_behind_a_dead_guest() {
    let mut world = World::mirror(2);
    world.write(0, 4096, 1);
    let dead = Guest::of(&world, 3);
    dead.begin(&world, 0, 2, 2);
    world.kill(0);
    world.kill(1);
    world.rest();
    let told = dead.die(&mut world);
    world.pass(Duration::from_millis(500));
    world.restart(0);
    world.restart(1);
    world.pass(Duration::from_secs(20));
    assert!(dead.is_healed(&mut world, &told));
    assert!(world.page(0, 1, 0) == world.page(0, 0, 0));
}

/// A guest died amid pages that change as a whole, and the leg that has all of them is lost at
/// each step of making the other one like it.
#[test]
fn what_a_dead_guest_changed_as_a_whole_is_copied_as_a_whole() {
    let mut seen = [false; 2];
    for steps in 0..80 {
        let mut world = World::mirror(2);
        world.write(0, 5 * 4096, 1);
        let dead = Guest::of(&world, 3);
        let pages = [0, 2, 3];
        dead.begin_together(&world, &[(0, 1), (2, 2)], 2, 1);
        let told = dead.die(&mut world);
        world.steps(steps);
        world.kill(1);
        world.pass(Duration::from_secs(20));
        let new = fill(2, PAGE_SECTORS);
        let changed = pages.map(|page| world.page(0, 0, page) == new);
        assert!(changed == [changed[0]; 3], "{changed:?} after {steps}");
        seen[usize::from(changed[0])] = true;
        world.restart(1);
        assert!(dead.is_healed(&mut world, &told));
        world.heals();
    }
    assert_eq!(seen, [true; 2], "before and behind it");
}

/// The same where the leg that has all of them is damaged, or another one is: what can be
/// read as a whole stands.
#[test]
fn what_a_dead_guest_changed_as_a_whole_is_copied_beside_damage() {
    for (legs, changed, damaged, value) in [
        (2, 0, 1, 2),
        (2, 0, 0, 1),
        (2, 1, 0, 2),
        (2, 1, 1, 1),
        (3, 0, 2, 1),
        (3, 0, 1, 1),
        (3, 1, 2, 2),
    ] {
        let mut world = World::mirror(legs);
        world.write(0, 5 * 4096, 1);
        let dead = Guest::of(&world, 3);
        dead.begin_together(&world, &[(0, 1), (2, 2)], 2, changed);
        spoil(&world, damaged, 2);
        let told = dead.die(&mut world);
        assert!(dead.is_healed(&mut world, &told));
        world.legs_are_equal();
        for page in [0, 2, 3] {
            world.holds(page * 4096, 4096, value);
        }
    }
}

/// A guest died, and the page is damaged on the leg that guests read, while others differ.
#[test]
fn what_a_dead_guest_changed_is_healed_beside_damage() {
    for damaged in 0..3 {
        let mut world = World::mirror(3);
        world.write(0, 4096, 1);
        let dead = Guest::of(&world, 3);
        dead.begin(&world, 0, 2, 1);
        spoil(&world, damaged, 0);
        let told = dead.die(&mut world);
        assert!(dead.is_healed(&mut world, &told));
        world.legs_are_equal();
        world.holds(0, 4096, 1);
    }
}
