//! Scrubs of bricks' pools: reports in heartbeats, and requests that reach a brick once in spite of
//! lost messages.

use crate::cluster;
use cluster::{Cluster, assert_refused, brick_id, named_registration, registration};
use pagemesh_manage::Manager;
use pagemesh_manage::wire::{
    BrickInfo, BrickRegistration, BrickScrub, ErrorCode, ScrubBrick, ScrubReport, ScrubRequest,
    ScrubState,
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
        corrected: 0,
        fulfilled,
    }
}

fn registration_with_scrub(number: usize, scrub: BrickScrub) -> BrickRegistration {
    BrickRegistration {
        scrub: Some(scrub),
        ..registration(number)
    }
}

/// A heartbeat of a brick that carried out this request last; returns the request in the answer.
fn heartbeat(manager: &Manager, fulfilled: Option<Uuid>) -> Option<ScrubRequest> {
    let beat = registration_with_scrub(0, scrub(ScrubState::Waiting, fulfilled));
    manager.heartbeat(beat).expect("welcome").scrub
}

fn brick(manager: &Manager) -> BrickInfo {
    manager.bricks().remove(0)
}

fn request_scrub(manager: &Manager, request: ScrubBrick) -> ScrubRequest {
    let asked = manager.scrub(brick_id(0), request).expect("it is alive");
    assert_eq!(asked, brick(manager));
    asked.scrub_request.expect("a request")
}

#[test]
fn scrub_request_is_repeated_until_fulfilled() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    assert_eq!(heartbeat(&manager, None), None);
    let request = request_scrub(&manager, START);
    assert!(!request.stop);
    // A repetition returns the same request: the first answer may have been lost.
    assert_eq!(request_scrub(&manager, START), request);
    for _ in 0..3 {
        assert_eq!(
            heartbeat(&manager, None),
            Some(request),
            "replies may be lost"
        );
    }
    assert_eq!(heartbeat(&manager, Some(request.id)), None);
    assert_eq!(brick(&manager).scrub_request, None);
    // A restarted brick has forgotten the request.
    assert_eq!(heartbeat(&manager, None), None);
    assert_ne!(
        request_scrub(&manager, START).id,
        request.id,
        "another scrub"
    );
}

#[test]
fn last_scrub_request_wins() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    heartbeat(&manager, None);
    let start = request_scrub(&manager, START);
    let stop = request_scrub(&manager, STOP);
    assert!(stop.stop && stop.id != start.id);
    // The brick has carried out the first request before.
    assert_eq!(heartbeat(&manager, Some(start.id)), Some(stop));
    assert_eq!(heartbeat(&manager, Some(stop.id)), None);
}

/// Requests are in memory only; the id of an old request means nothing to another manager.
#[test]
fn restarted_manager_has_no_scrub_requests() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    heartbeat(&manager, None);
    let request = request_scrub(&manager, START);
    drop(manager);
    let manager = cluster.manager();
    assert_eq!(heartbeat(&manager, Some(request.id)), None);
    let request = request_scrub(&manager, START);
    assert_eq!(heartbeat(&manager, None), Some(request));
}

#[test]
fn scrub_request_to_unable_brick_names_it() {
    let cluster = Cluster::new(2);
    let served = cluster.serve();
    let client = &served.client;
    let ask = |number, code, parts: &[&str]| {
        assert_refused(client.scrub_brick(brick_id(number), false), code, parts);
    };
    ask(7, ErrorCode::NotFound, &[&brick_id(7).to_string()]);
    let named = named_registration(1, "db-1");
    client.heartbeat(&named).expect("welcome");
    ask(1, ErrorCode::BrickFailed, &["db-1", "scrubs"]);
    let idle = registration_with_scrub(1, scrub(ScrubState::Off, None));
    client.heartbeat(&idle).expect("welcome");
    let asked = client.scrub_brick(brick_id(1), true).expect("alive");
    assert!(asked.scrub_request.is_some_and(|request| request.stop));
    cluster.clock.advance(Duration::from_secs(10));
    ask(1, ErrorCode::BrickFailed, &["db-1", "dead"]);
}

#[test]
fn scrub_results_are_listed_and_summed() {
    let found = |superblocks, damaged| ScrubReport {
        checked: 9,
        superblocks,
        damaged,
        ..ScrubReport::default()
    };
    let cluster = Cluster::new(3);
    let served = cluster.serve();
    let client = &served.client;
    let first = BrickScrub {
        progress_percent: Some(40),
        pass: Some(found(1, 0)),
        last: Some(found(2, 2)),
        corrected: 3,
        ..scrub(ScrubState::Running, None)
    };
    let second = BrickScrub {
        last: Some(found(0, 1)),
        corrected: 4,
        ..scrub(ScrubState::Waiting, None)
    };
    for (number, scrub) in [(0, first), (1, second)] {
        client
            .heartbeat(&registration_with_scrub(number, scrub))
            .expect("welcome");
    }
    client.heartbeat(&registration(2)).expect("an older one");
    let reported: Vec<_> = client
        .bricks()
        .expect("bricks")
        .iter()
        .map(|it| it.scrub)
        .collect();
    assert_eq!(reported, [Some(first), Some(second), None]);
    let status = client.status().expect("a status");
    let sums = (status.scrubs_corrected, status.scrubs_damaged);
    assert_eq!((status.bricks_scrubbing, sums), (1, (7, 3)));
    cluster.clock.advance(Duration::from_secs(10));
    assert_eq!(client.status().expect("a status").bricks_scrubbing, 0);
}
