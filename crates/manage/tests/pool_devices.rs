//! Devices of bricks' pools: reports in heartbeats, and requests that reach a brick once in spite of lost messages.

use crate::cluster;
use cluster::{Cluster, assert_refused, brick_id, registration};
use pagemesh_manage::Manager;
use pagemesh_manage::wire::{
    AddDevice, BrickDevice, BrickDevices, BrickRegistration, DeviceChange, DeviceRequest,
    DeviceRequestInfo, DeviceRequestState, DeviceResult, DeviceState, DrainDevice, DrainProgress,
    ErrorCode, EventFilter, EventKind,
};
use std::time::Duration;
use uuid::Uuid;

const SECOND: Uuid = Uuid::from_u128(2);
const DRAIN: DrainDevice = DrainDevice { cancel: false };
const CANCEL: DrainDevice = DrainDevice { cancel: true };

fn device(id: Uuid, path: &str, state: DeviceState) -> BrickDevice {
    let is_draining = state == DeviceState::Draining;
    BrickDevice {
        device: id,
        path: Some(path.to_owned()),
        is_first: id == brick_id(0).0,
        size_bytes: 1 << 30,
        used_bytes: 1 << 20,
        state,
        errors: 0,
        last_error_s: None,
        drain: is_draining.then(DrainProgress::default),
    }
}

fn first() -> BrickDevice {
    device(brick_id(0).0, "/pool", DeviceState::Active)
}

fn second(state: DeviceState) -> BrickDevice {
    device(SECOND, "/second", state)
}

fn beat_with(list: Vec<BrickDevice>, results: Vec<DeviceResult>) -> BrickRegistration {
    BrickRegistration {
        devices: Some(BrickDevices { list, results }),
        ..registration(0)
    }
}

/// A heartbeat; returns the requests in the answer.
fn heartbeat(
    manager: &Manager,
    list: &[BrickDevice],
    results: &[DeviceResult],
) -> Vec<DeviceRequest> {
    let beat = beat_with(list.to_vec(), results.to_vec());
    manager.heartbeat(beat).expect("welcome").devices
}

fn add_request(path: &str) -> AddDevice {
    AddDevice {
        path: path.to_owned(),
        size_bytes: None,
    }
}

fn result_of(request: &DeviceRequestInfo, error: Option<&str>) -> DeviceResult {
    DeviceResult {
        request: request.id,
        device: error.is_none().then_some(SECOND),
        error: error.map(str::to_owned),
    }
}

fn kinds(manager: &Manager) -> Vec<EventKind> {
    let (events, _) = manager.list_events(&EventFilter::default(), 100);
    let about_devices = |kind: &EventKind| {
        let text = serde_json::to_string(kind).expect("JSON");
        text.starts_with("\"device-")
    };
    let kinds = events.iter().map(|event| event.kind);
    kinds.filter(about_devices).collect()
}

#[test]
fn device_request_is_repeated_until_its_result() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    assert_eq!(heartbeat(&manager, &[first()], &[]), []);
    let asked = manager.add_device(brick_id(0), add_request("/second"));
    let asked = asked.expect("it is alive");
    assert_eq!(asked.state, DeviceRequestState::Pending);
    // A repetition is the same request: the first answer may have been lost.
    let again = manager.add_device(brick_id(0), add_request("/second"));
    assert_eq!(again.expect("it is alive"), asked);
    for _ in 0..3 {
        let sent = heartbeat(&manager, &[first()], &[]);
        assert_eq!(sent.len(), 1, "replies may be lost");
        assert_eq!((sent[0].id, &sent[0].change), (asked.id, &asked.change));
    }
    let list = [first(), second(DeviceState::Active)];
    assert_eq!(heartbeat(&manager, &list, &[result_of(&asked, None)]), []);
    let shown = manager.devices(brick_id(0)).expect("its devices");
    assert_eq!(shown.devices, list);
    assert_eq!(shown.requests.len(), 1);
    let ended = &shown.requests[0];
    assert_eq!(
        (ended.state, ended.device),
        (DeviceRequestState::Done, Some(SECOND))
    );
    // The brick repeats its result, and a new request for the same change is another one.
    assert_eq!(heartbeat(&manager, &list, &[result_of(&asked, None)]), []);
    let other = manager.add_device(brick_id(0), add_request("/second"));
    assert_ne!(other.expect("it is alive").id, asked.id);
    assert_eq!(kinds(&manager), [EventKind::DeviceAdded]);
}

#[test]
fn drain_is_reported_by_events_from_start_to_end() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    let active = [first(), second(DeviceState::Active)];
    heartbeat(&manager, &active, &[]);
    let asked = manager
        .drain_device(brick_id(0), SECOND, DRAIN)
        .expect("alive");
    assert_eq!(asked.change, DeviceChange::Drain { device: SECOND });
    let mut draining = [first(), second(DeviceState::Draining)];
    heartbeat(&manager, &draining, &[result_of(&asked, None)]);
    draining[1].drain = Some(DrainProgress {
        problem: Some("no room".into()),
        ..DrainProgress::default()
    });
    // The second heartbeat has the same problem.
    heartbeat(&manager, &draining, &[]);
    heartbeat(&manager, &draining, &[]);
    manager
        .drain_device(brick_id(0), SECOND, CANCEL)
        .expect("it drains");
    heartbeat(&manager, &active, &[]);
    heartbeat(&manager, &[first(), second(DeviceState::Draining)], &[]);
    heartbeat(&manager, &[first()], &[]);
    let reported = kinds(&manager);
    assert_eq!(
        reported,
        [
            EventKind::DeviceDrainStarted,
            EventKind::DeviceDrainFailed,
            EventKind::DeviceDrainCancelled,
            EventKind::DeviceDrainStarted,
            EventKind::DeviceDrained,
        ]
    );
}

#[test]
fn failed_device_is_reported_once_until_it_has_left() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    heartbeat(&manager, &[first(), second(DeviceState::Active)], &[]);
    let mut failed = [first(), second(DeviceState::Failed)];
    heartbeat(&manager, &failed, &[]);
    heartbeat(&manager, &failed, &[]);
    failed[1].drain = Some(DrainProgress {
        problem: Some("3 pages of it cannot be read".into()),
        ..DrainProgress::default()
    });
    heartbeat(&manager, &failed, &[]);
    heartbeat(&manager, &[first()], &[]);
    assert_eq!(
        kinds(&manager),
        [
            EventKind::DeviceFailed,
            EventKind::DeviceDrainFailed,
            EventKind::DeviceDrained,
        ]
    );
}

#[test]
fn survived_error_of_device_is_reported_once_each() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    let beat = |errors, last_error_s, state| {
        let second = BrickDevice {
            errors,
            last_error_s,
            ..second(state)
        };
        heartbeat(&manager, &[first(), second], &[]);
        kinds(&manager)
    };
    // The manager has not seen the device before the error.
    assert_eq!(beat(1, Some(70), DeviceState::Active), []);
    assert_eq!(beat(0, None, DeviceState::Active), []);
    let one = [EventKind::DeviceError];
    assert_eq!(beat(1, Some(0), DeviceState::Active), one);
    assert_eq!(beat(1, Some(5), DeviceState::Active), one);
    // The brick was started again between two heartbeats, and has a first error.
    let two = [EventKind::DeviceError; 2];
    assert_eq!(beat(1, Some(2), DeviceState::Active), two);
    // The second error is the end of the device.
    let all = [two[0], two[1], EventKind::DeviceFailed];
    assert_eq!(beat(2, Some(0), DeviceState::Failed), all);
    let (events, _) = manager.list_events(&EventFilter::default(), 100);
    let found = events.iter().find(|it| it.kind == EventKind::DeviceError);
    let text = &found.expect("the event").text;
    assert!(text.contains("/second") && text.contains("Check the device"));
}

#[test]
fn refusal_of_a_brick_is_kept_and_reported() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    heartbeat(&manager, &[first()], &[]);
    let asked = manager.add_device(brick_id(0), add_request("/busy"));
    let asked = asked.expect("it is alive");
    let refused = result_of(&asked, Some("/busy is mounted"));
    heartbeat(&manager, &[first()], std::slice::from_ref(&refused));
    heartbeat(&manager, &[first()], &[refused]);
    let shown = manager.devices(brick_id(0)).expect("its devices").requests;
    assert_eq!(shown[0].state, DeviceRequestState::Failed);
    assert_eq!(shown[0].error.as_deref(), Some("/busy is mounted"));
    assert_eq!(kinds(&manager), [EventKind::DeviceRefused]);
    let (events, _) = manager.list_events(&EventFilter::default(), 100);
    assert!(
        events
            .iter()
            .any(|event| event.text.contains("/busy is mounted"))
    );
}

#[test]
fn impossible_device_request_names_the_way_out() {
    let cluster = Cluster::new(2);
    let served = cluster.serve();
    let client = &served.client;
    let devices = client.devices(brick_id(7));
    assert_refused(devices, ErrorCode::NotFound, &[&brick_id(7).to_string()]);
    client.heartbeat(&registration(1)).expect("an older brick");
    let add = |brick: usize, path: &str| client.add_device(brick_id(brick), &add_request(path));
    assert_refused(add(1, "/x"), ErrorCode::BrickFailed, &["does not report"]);
    let beat = beat_with(vec![first(), second(DeviceState::Active)], vec![]);
    client.heartbeat(&beat).expect("welcome");
    assert_refused(add(0, "x"), ErrorCode::BadRequest, &["path of a device"]);
    let small = AddDevice {
        size_bytes: Some(4096),
        ..add_request("/x")
    };
    let small = client.add_device(brick_id(0), &small);
    assert_refused(small, ErrorCode::BadRequest, &["too small"]);
    let drain = |device, cancel| client.drain_device(brick_id(0), device, cancel);
    let unknown = Uuid::from_u128(77);
    assert_refused(
        drain(unknown, false),
        ErrorCode::NotFound,
        &[&unknown.to_string()],
    );
    assert_refused(
        drain(brick_id(0).0, false),
        ErrorCode::InUse,
        &["first device"],
    );
    assert_refused(drain(SECOND, true), ErrorCode::InUse, &["not draining"]);
    for path in ["/1", "/2", "/3", "/4"] {
        add(0, path).expect("room for the request");
    }
    assert_refused(add(0, "/5"), ErrorCode::NoRoom, &["pending requests"]);
    cluster.clock.advance(Duration::from_secs(10));
    assert_refused(add(0, "/1"), ErrorCode::BrickFailed, &["dead"]);
    assert!(!client.devices(brick_id(0)).expect("a list").alive);
}

#[test]
fn list_of_devices_beyond_its_limit_is_refused() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager();
    let refused = manager.heartbeat(beat_with(vec![first(); 65], vec![]));
    assert!(refused.is_err(), "{refused:?}");
}

#[test]
fn odd_paths_and_sentences_refuse_no_heartbeat() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    let client = &served.client;
    let beat = beat_with(vec![first()], vec![]);
    client.heartbeat(&beat).expect("welcome");
    let asked = client.add_device(brick_id(0), &add_request("/busy"));
    let asked = asked.expect("it is alive");
    let mut odd = device(SECOND, "second", DeviceState::Draining);
    let drain = DrainProgress {
        problem: Some(format!("a\nb{}", "ü".repeat(5000))),
        ..DrainProgress::default()
    };
    odd.drain = Some(drain);
    let result = result_of(&asked, Some("/busy\u{1b}[1m is mounted"));
    // The second heartbeat changes nothing, and takes another way in the manager.
    let beat = beat_with(vec![first(), odd], vec![result]);
    for _ in 0..2 {
        client.heartbeat(&beat).expect("welcome");
    }
    let shown = client.devices(brick_id(0)).expect("its devices");
    assert_eq!(shown.devices[1].path, None);
    let problem = shown.devices[1]
        .drain
        .as_ref()
        .and_then(|it| it.problem.clone());
    let problem = problem.expect("a sentence");
    assert!(problem.starts_with("a b") && problem.len() <= 4096);
    let error = shown.requests[0].error.as_deref();
    assert_eq!(error, Some("/busy [1m is mounted"));
}
