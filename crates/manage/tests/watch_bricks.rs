//! Changes of bricks that heartbeats and slices make reach watching clients, and ages do not.

use crate::cluster;
use cluster::{Cluster, MIB, TestServer, brick_id, create_request, name, registration};
use pagemesh_manage::wire::{BrickInfo, BrickRegistration, BrickScrub, ScrubReport, ScrubState};
use pagemesh_manage::{EventStream, LayoutKind, ManagerSettings, WatchTimes};
use std::time::Duration;

/// Status messages until a test that waits for something else fails.
const STATUSES_MAX: usize = 2000;

fn with_stream(test: impl FnOnce(&Cluster, &TestServer, &mut EventStream)) {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with(ManagerSettings {
        watch: WatchTimes {
            compare_every: Duration::from_millis(10),
            status_every: Duration::from_millis(10),
            ..WatchTimes::default()
        },
        ..ManagerSettings::default()
    });
    cluster.send_heartbeats(served.handle.manager());
    let mut stream = served.client.watch(None).expect("a stream");
    for _ in 0..2 {
        next_brick(&mut stream, |_| true);
    }
    test(&cluster, &served, &mut stream);
    served.handle.stop();
}

/// The next message about a brick for which `wanted` holds.
fn next_brick(stream: &mut EventStream, wanted: impl Fn(&BrickInfo) -> bool) -> BrickInfo {
    let mut statuses = 0;
    while statuses < STATUSES_MAX {
        let message = stream.next_message().expect("a message");
        if message.kind == "brick" {
            let found = serde_json::from_str(&message.data).expect("a brick");
            if wanted(&found) {
                return found;
            }
        }
        statuses += usize::from(message.kind == "status");
    }
    panic!("no such message before {STATUSES_MAX} status messages");
}

/// The kinds of the messages until this many status messages have come.
fn kinds_until_statuses(stream: &mut EventStream, count: usize) -> Vec<String> {
    let mut kinds = vec![];
    while kinds.iter().filter(|kind| *kind == "status").count() < count {
        kinds.push(stream.next_message().expect("a message").kind);
    }
    kinds
}

fn scrubbing(percent: Option<u8>, next_in_ms: Option<u64>) -> BrickRegistration {
    let state = match percent {
        Some(_) => ScrubState::Running,
        None => ScrubState::Waiting,
    };
    BrickRegistration {
        scrub: Some(BrickScrub {
            state,
            passes: 1,
            progress_percent: percent,
            next_in_ms,
            pass: percent.map(|_| ScrubReport::default()),
            last: None,
            ended_ms_ago: None,
            corrected: 0,
            fulfilled: None,
        }),
        ..registration(0)
    }
}

#[test]
fn progress_and_end_of_scrub_reach_watchers() {
    with_stream(|_, served, stream| {
        let manager = served.handle.manager();
        for percent in [1, 2, 60] {
            let beat = scrubbing(Some(percent), None);
            manager.heartbeat(beat).expect("welcome");
            next_brick(stream, |it| {
                it.scrub.and_then(|it| it.progress_percent) == Some(percent)
            });
        }
        let next_times = [1_000_000, 5_000_000];
        for next_in_ms in next_times {
            let beat = scrubbing(None, Some(next_in_ms));
            manager.heartbeat(beat).expect("welcome");
            next_brick(stream, |it| {
                it.scrub.and_then(|it| it.next_in_ms) == Some(next_in_ms)
            });
        }
    });
}

#[test]
fn sessions_and_used_bytes_reach_watchers() {
    with_stream(|_, served, stream| {
        let beat = BrickRegistration {
            sessions: 3,
            used_bytes: 4096,
            ..registration(1)
        };
        served.handle.manager().heartbeat(beat).expect("welcome");
        let heard = next_brick(stream, |it| it.sessions == 3);
        assert_eq!((heard.brick, heard.used_bytes), (brick_id(1), 4096));
    });
}

#[test]
fn slices_of_created_and_deleted_volumes_reach_watchers() {
    with_stream(|_, served, stream| {
        let request = create_request("v", LayoutKind::Mirror, MIB);
        served.client.create(&request).expect("made");
        let is_settled = |it: &BrickInfo| it.pending_deletions == 0;
        for number in 0..2 {
            let made = next_brick(stream, |it| {
                it.brick == brick_id(number) && it.slices == 1 && is_settled(it)
            });
            assert!(made.provisioned_bytes >= MIB, "{made:?}");
        }
        served.client.delete(&name("v"), false).expect("deleted");
        next_brick(stream, |it| it.slices == 0 && is_settled(it));
    });
}

#[test]
fn unchanged_bricks_send_no_messages() {
    with_stream(|cluster, served, stream| {
        for _ in 0..3 {
            cluster.clock.advance(Duration::from_secs(1));
            cluster.send_heartbeats(served.handle.manager());
            let kinds = kinds_until_statuses(stream, 5);
            assert!(kinds.iter().all(|kind| kind != "brick"), "{kinds:?}");
        }
    });
}

/// An unchanged summary is repeated: its arrival is the age of all that a client shows.
#[test]
fn unchanged_status_is_repeated() {
    with_stream(|_, _, stream| {
        let mut statuses = vec![];
        while statuses.len() < 4 {
            let message = stream.next_message().expect("a message");
            if message.kind == "status" {
                statuses.push(message.data);
            }
        }
        assert_eq!(statuses[2], statuses[3]);
    });
}
