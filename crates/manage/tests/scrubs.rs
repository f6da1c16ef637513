//! Scrubs of bricks' pools: what heartbeats tell of them, and wishes that reach a
//! brick once, whatever is lost on the way.

mod cluster;

use cluster::{Cluster, brick_id, refused, registration};
use pagemesh_manage::Manager;
use pagemesh_manage::wire::{
    BrickInfo, BrickRegistration, BrickScrub, Code, ScrubBrick, ScrubFound, ScrubState, ScrubWish,
};
use std::time::Duration;
use uuid::Uuid;

const START: ScrubBrick = ScrubBrick { stop: false };
const STOP: ScrubBrick = ScrubBrick { stop: true };

fn scrub(state: ScrubState, fulfilled: Option<Uuid>) -> BrickScrub {
    BrickScrub {
        state,
        passes: 3,
        progress_percent: None,
        next_in_ms: Some(5),
        pass: None,
        last: None,
        ended_ms_ago: None,
        mended: 0,
        fulfilled,
    }
}

fn telling(number: usize, scrub: BrickScrub) -> BrickRegistration {
    BrickRegistration {
        scrub: Some(scrub),
        ..registration(number)
    }
}

/// A brick that fulfilled this wish last; what it hears.
fn beat(manager: &Manager, fulfilled: Option<Uuid>) -> Option<ScrubWish> {
    let told = telling(0, scrub(ScrubState::Waiting, fulfilled));
    manager.heartbeat(told).expect("welcome").scrub
}

fn brick(manager: &Manager) -> BrickInfo {
    manager.bricks().remove(0)
}

fn ask(manager: &Manager, wish: ScrubBrick) -> ScrubWish {
    let asked = manager.scrub(brick_id(0), wish).expect("it is alive");
    assert_eq!(asked, brick(manager));
    asked.scrub_wish.expect("a wish")
}

#[test]
fn a_wish_is_repeated_until_it_is_fulfilled_and_then_never() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    assert_eq!(beat(&manager, None), None);
    let wish = ask(&manager, START);
    assert!(!wish.stop);
    // Asked again, it is the same one: the answer may have been lost.
    assert_eq!(ask(&manager, START), wish);
    for _ in 0..3 {
        assert_eq!(beat(&manager, None), Some(wish), "replies may be lost");
    }
    assert_eq!(beat(&manager, Some(wish.id)), None);
    assert_eq!(brick(&manager).scrub_wish, None);
    // A brick that starts anew, and has forgotten it.
    assert_eq!(beat(&manager, None), None);
    assert_ne!(ask(&manager, START).id, wish.id, "another scrub");
}

#[test]
fn the_last_wish_counts() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    beat(&manager, None);
    let start = ask(&manager, START);
    let stop = ask(&manager, STOP);
    assert!(stop.stop && stop.id != start.id);
    // The brick has heard the first before.
    assert_eq!(beat(&manager, Some(start.id)), Some(stop));
    assert_eq!(beat(&manager, Some(stop.id)), None);
}

/// Wishes are in memory only; the id of an old one means nothing to another
/// manager.
#[test]
fn a_manager_that_starts_again_has_no_wishes() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    beat(&manager, None);
    let wish = ask(&manager, START);
    drop(manager);
    let manager = cluster.manager();
    assert_eq!(beat(&manager, Some(wish.id)), None);
    let wish = ask(&manager, START);
    assert_eq!(beat(&manager, None), Some(wish));
}

#[test]
fn bricks_that_cannot_be_asked_are_named() {
    let cluster = Cluster::new(2);
    let served = cluster.serve();
    let client = &served.client;
    let ask = |number, code, parts: &[&str]| {
        refused(client.scrub_brick(brick_id(number), false), code, parts);
    };
    let id = brick_id(1).to_string();
    ask(7, Code::NotFound, &[&brick_id(7).to_string()]);
    client.heartbeat(&registration(1)).expect("welcome");
    ask(1, Code::BrickFailed, &[&id, "scrubs"]);
    let told = telling(1, scrub(ScrubState::Off, None));
    client.heartbeat(&told).expect("welcome");
    let asked = client.scrub_brick(brick_id(1), true).expect("alive");
    assert!(asked.scrub_wish.is_some_and(|wish| wish.stop));
    cluster.clock.advance(Duration::from_secs(10));
    ask(1, Code::BrickFailed, &[&id, "dead"]);
}

#[test]
fn what_scrubs_found_is_listed_and_summed() {
    let found = |mended, damaged| ScrubFound {
        checked: 9,
        superblocks: mended,
        records: 0,
        left_behind: 0,
        in_flight: 0,
        bitmap_lines: 0,
        objects: 0,
        slots: 0,
        mended,
        damaged,
    };
    let cluster = Cluster::new(3);
    let served = cluster.serve();
    let client = &served.client;
    let first = BrickScrub {
        progress_percent: Some(40),
        pass: Some(found(1, 0)),
        last: Some(found(2, 2)),
        mended: 3,
        ..scrub(ScrubState::Running, None)
    };
    let second = BrickScrub {
        last: Some(found(0, 1)),
        mended: 4,
        ..scrub(ScrubState::Waiting, None)
    };
    for (number, told) in [(0, first), (1, second)] {
        client.heartbeat(&telling(number, told)).expect("welcome");
    }
    client.heartbeat(&registration(2)).expect("an older one");
    let told: Vec<_> = client
        .bricks()
        .expect("bricks")
        .iter()
        .map(|it| it.scrub)
        .collect();
    assert_eq!(told, [Some(first), Some(second), None]);
    let status = client.status().expect("a status");
    let sums = (status.scrubs_mended, status.scrubs_damaged);
    assert_eq!((status.bricks_scrubbing, sums), (1, (7, 3)));
    cluster.clock.advance(Duration::from_secs(10));
    assert_eq!(client.status().expect("a status").bricks_scrubbing, 0);
}
