//! Names of bricks: unique in the cluster, accepted and shown in place of UUIDs.

use crate::cluster;
use cluster::{
    Cluster, MIB, assert_refused, brick_id, create_request, name, named_registration, registration,
};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::BrickId;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::token::token;
use pagemesh_manage::wire::{
    AttachReplica, BrickRegistration, BrickScrub, ErrorCode, HeartbeatReply, ScrubBrick, ScrubState,
};
use pagemesh_manage::{LayoutKind, Manager};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use uuid::Uuid;

fn brick(text: &str) -> BrickRef {
    text.parse().expect("a brick")
}

/// The registration of a brick that proposes a name for the case that it has none.
fn default_registration(number: usize, name: &str) -> BrickRegistration {
    BrickRegistration {
        name_is_default: true,
        ..named_registration(number, name)
    }
}

/// The names of all bricks by the list, in the order of their ids; `-` for none.
fn names(manager: &Manager) -> Vec<String> {
    let bricks = manager.bricks().into_iter();
    let names = bricks.map(|brick| brick.name.map_or_else(|| "-".into(), |it| it.to_string()));
    names.collect()
}

fn reply_name(reply: &HeartbeatReply) -> &str {
    reply.name.as_ref().expect("a name").as_str()
}

#[test]
fn name_of_known_brick_is_refused_to_another() {
    let cluster = Cluster::new(2);
    let served = cluster.serve();
    let client = &served.client;
    let ask = || {
        let id = brick_id(0).to_string();
        let parts = ["db", id.as_str(), "127.0.0.1:10000"];
        assert_refused(
            client.heartbeat(&named_registration(1, "db")),
            ErrorCode::Exists,
            &parts,
        );
        assert_eq!(client.bricks().expect("bricks").len(), 1);
    };
    client
        .heartbeat(&named_registration(0, "db"))
        .expect("welcome");
    ask();
    cluster.clock.advance(Duration::from_secs(60));
    ask();
    let again = cluster.crash_copy_without_heartbeats();
    let refused = again.heartbeat(named_registration(1, "db"));
    let fault = refused.expect_err("it is known after a restart");
    assert!(matches!(fault, Fault::BrickNameTaken { .. }), "{fault}");
    assert!(fault.hint().contains("--name"));
    client.forget_brick(brick("db"), false).expect("forgotten");
    let reply = client.heartbeat(&named_registration(1, "db"));
    assert_eq!(reply_name(&reply.expect("welcome")), "db");
}

#[test]
fn known_brick_with_taken_name_keeps_its_name_and_lives() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager();
    for (number, name) in [(0, "db"), (1, "web")] {
        let joined = manager.heartbeat(named_registration(number, name));
        assert_eq!(reply_name(&joined.expect("welcome")), name);
    }
    // The names are exchanged, as after a restore of the manager's store.
    cluster.clock.advance(Duration::from_secs(60));
    for (number, asked, name) in [(0, "web", "db"), (1, "db", "web")] {
        let reply = manager.heartbeat(named_registration(number, asked));
        assert_eq!(reply_name(&reply.expect("it serves")), name);
    }
    assert!(manager.bricks().iter().all(|brick| brick.alive));
}

#[test]
fn default_name_gets_number_and_is_kept() {
    let cluster = Cluster::new(3);
    let manager = cluster.manager();
    let join = |manager: &Manager, number| {
        let reply = manager.heartbeat(default_registration(number, "host"));
        reply_name(&reply.expect("welcome")).to_owned()
    };
    for (number, wanted) in ["host", "host-2", "host-3"].iter().enumerate() {
        assert_eq!(join(&manager, number), *wanted);
        assert_eq!(join(&manager, number), *wanted, "the second heartbeat");
    }
    let again = cluster.crash_copy_without_heartbeats();
    assert_eq!(join(&again, 2), "host-3");
    assert_eq!(names(&again), ["host", "host-2", "host-3"]);
    again.forget(brick("host"), false).expect("it is dead");
    assert_eq!(join(&again, 1), "host-2", "a name does not move by itself");
}

#[test]
fn brick_changes_name_and_keeps_it_without_one() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager();
    let beat = |told: BrickRegistration| manager.heartbeat(told).map(|_| names(&manager));
    assert_eq!(beat(registration(0)).expect("welcome"), ["-"]);
    let first = beat(named_registration(0, "old")).expect("welcome");
    assert_eq!(first, ["old"]);
    let later = |told| BrickRegistration {
        incarnation: 2,
        ..told
    };
    let second = beat(later(named_registration(0, "new"))).expect("renamed");
    assert_eq!(second, ["new"]);
    let kept = beat(later(registration(0))).expect("welcome");
    assert_eq!(kept, ["new"]);
    let kept = beat(later(default_registration(0, "host"))).expect("welcome");
    assert_eq!(kept, ["new"]);
    let both = beat(named_registration(1, "old")).expect("the old name is free");
    assert_eq!(both, ["new", "old"]);
    assert_eq!(names(&cluster.crash_copy_without_heartbeats()), both);
}

#[test]
fn brick_is_found_by_name_id_and_first_digits() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager();
    let far = BrickId(Uuid::from_u128(0xfeed_beef << 96));
    let scrub = BrickScrub {
        state: ScrubState::Off,
        passes: 0,
        progress_percent: None,
        next_in_ms: None,
        pass: None,
        last: None,
        ended_ms_ago: None,
        corrected: 0,
        fulfilled: None,
    };
    let known = [
        registration(0),
        named_registration(1, "db"),
        BrickRegistration {
            brick: far,
            address: "127.0.0.1:9".into(),
            ..registration(2)
        },
    ];
    for told in known {
        let scrub = Some(scrub);
        let told = BrickRegistration { scrub, ..told };
        manager.heartbeat(told).expect("welcome");
    }
    let find = |text: &str| {
        let found = manager.scrub(brick(text), ScrubBrick { stop: false });
        found
            .map(|found| found.brick)
            .map_err(|fault| fault.to_string())
    };
    assert_eq!(find("db"), Ok(brick_id(1)));
    assert_eq!(find(&brick_id(1).to_string()), Ok(brick_id(1)));
    assert_eq!(find("feedbeef"), Ok(far));
    assert!(find("00000000").is_err_and(|error| error.contains("several")));
    assert!(find("feedbee").is_err_and(|error| error.contains("feedbee")));
    let mut named = named_registration(0, "feedbeef");
    named.scrub = Some(scrub);
    manager.heartbeat(named).expect("renamed");
    assert_eq!(find("feedbeef"), Ok(brick_id(0)), "a name takes precedence");
}

#[test]
fn requests_and_answers_name_bricks() {
    let cluster = Cluster::new(3);
    let served = cluster.serve();
    let client = &served.client;
    for number in 0..3 {
        let told = named_registration(number, &format!("brick-{number}"));
        client.heartbeat(&told).expect("welcome");
    }
    let mut request = create_request("v", LayoutKind::Concat, MIB);
    request.copies = None;
    let made = client.create(&request).expect("made").volume;
    let (&home, address) = made.bricks.first_key_value().expect("a brick");
    let number = (0..3).find(|&number| brick_id(number) == home);
    let home = format!("brick-{}", number.expect("one of them"));
    assert_eq!(address.name.as_ref().expect("a name").as_str(), home);
    assert_refused(
        client.forget_brick(brick(&home), true),
        ErrorCode::InUse,
        &[&home, "v"],
    );
    let mut others = (0..3).map(|number| format!("brick-{number}"));
    let other = others.find(|name| *name != home).expect("another");
    let attach = |on: &str| AttachReplica {
        brick: Some(brick(on)),
        ..AttachReplica::default()
    };
    let detail = client.attach_replica(&name("v"), attach(&other));
    let mut bricks = detail.expect("attached").bricks.into_values();
    assert!(bricks.any(|it| it.name.is_some_and(|name| name.as_str() == other)));
    let refused = client.attach_replica(&name("v"), attach("nobody"));
    assert_refused(refused, ErrorCode::NotFound, &["nobody"]);
}

#[test]
fn malformed_name_is_refused_and_not_stored() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    let long = "x".repeat(65);
    let id = brick_id(5).to_string();
    for bad in [
        "",
        "a b",
        "-x",
        "a\n[WARN] forged",
        "a\u{1b}[2J",
        &long,
        &id,
    ] {
        let mut told = serde_json::to_value(registration(0)).expect("JSON");
        told["name"] = bad.into();
        let answer = put(&cluster, &served.handle.url(), &told.to_string());
        assert!(answer.contains(" 4"), "{answer}");
        assert!(answer.contains("bad-request"), "{answer}");
        let plain = |c: char| !c.is_control() || c == '\r' || c == '\n';
        assert!(answer.chars().all(plain), "{answer:?}");
    }
    assert!(served.client.bricks().expect("bricks").is_empty());
}

/// Sends a heartbeat of brick 0 with this body; returns the answer as text.
fn put(cluster: &Cluster, url: &str, body: &str) -> String {
    let host = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(host).expect("connected");
    let (id, token, len) = (brick_id(0), token(&cluster.key), body.len());
    let request = format!(
        "PUT /api/v1/bricks/{id} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}
