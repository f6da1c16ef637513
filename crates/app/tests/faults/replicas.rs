//! Copies that are added to a volume in use, go on alone, and are given up.

use crate::load::Plan;
use crate::rig::{Rig, VOLUME, legs};
use crate::support::{Cluster, Pools, until};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Ten seconds between two looks at the layout, and what a busy machine takes.
const FENCED_MAX: Duration = Duration::from_secs(15);

/// The number of the brick that has this copy.
fn brick_of(cluster: &Cluster, bricks: usize, copy: usize) -> usize {
    let copies = cluster.json(&["replica", "status", VOLUME]);
    let id = copies[copy]["bricks"][0].as_str().unwrap().to_owned();
    (0..bricks).find(|n| cluster.brick_id(*n) == id).unwrap()
}

fn a_copy_is_added_under_load(transport: &str, seed: u64) {
    let mut rig = Rig::new(Pools::Memory, 3, 32, &["--layout", "concat"], seed);
    rig.serve(transport);
    let load = rig.load(&Plan::default());
    load.await_answers(2000);
    let first = brick_of(&rig.cluster, 3, 0);
    let other = rig.cluster.brick_id((first + 1) % 3);
    // While its brick stands still it is not filled, and how far it is can be looked at.
    rig.export().daemon.signal("STOP");
    let attached = rig
        .cluster
        .json(&["replica", "attach", VOLUME, "--brick", &other]);
    rig.cluster.brick((first + 1) % 3).signal("STOP");
    rig.export().daemon.signal("CONT");
    assert_eq!(attached[1]["state"], "stale", "{attached}");
    until("its progress is told", || {
        let copies = rig.cluster.json(&["replica", "status", VOLUME]);
        assert_eq!(copies[0]["progress"], Value::Null, "{copies}");
        let told = copies[1]["told_us_ago"].is_u64();
        told && copies[1]["progress"]["bytes_done"] == 0
    });
    let shown = rig.cluster.ok(&["replica", "status", VOLUME]);
    assert!(
        shown.contains(" done, pace not known yet; told "),
        "{shown}"
    );
    rig.cluster.brick((first + 1) % 3).signal("CONT");
    until("the copy is filled", || {
        legs(&rig.export().status()) == ["in-sync", "in-sync"]
    });
    load.await_answers(1000);
    rig.cluster.kill_brick(first);
    load.await_answers(1000);
    rig.cluster.restart_brick(first);
    rig.export().await_state("healthy");
    load.await_answers(1000);
    let report = load.finish();
    report.expect_good();
    rig.end_and_check();
    // The new copy holds everything alone, and stays when the first is given up.
    rig.cluster.kill_brick(first);
    rig.serve(transport);
    rig.verify();
    rig.take_export().stop();
    rig.cluster.restart_brick(first);
    rig.serve(transport);
    rig.export().await_state("healthy");
    let said = rig
        .cluster
        .refused(&["replica", "detach", VOLUME, "--copy", "0"], &["attached"]);
    assert!(said.contains("force"), "{said}");
    rig.take_export().stop();
    let left = rig
        .cluster
        .json(&["replica", "detach", VOLUME, "--copy", "0"]);
    assert_eq!(left.as_array().map(Vec::len), Some(1), "{left}");
    rig.cluster.stop_brick(first);
    rig.serve(transport);
    rig.verify();
    rig.take_export().stop();
}

#[test]
fn a_copy_is_added_to_a_mapped_volume_under_load() {
    a_copy_is_added_under_load("map", 0xd1);
}

#[test]
fn a_copy_is_added_over_tcp_under_load() {
    a_copy_is_added_under_load("tcp", 0xd2);
}

/// A client that lives is fenced without another one, since it asks the manager.
#[test]
fn a_forced_promotion_fences_a_client_that_lives() {
    let mut rig = Rig::new(Pools::Memory, 2, 16, &[], 0xd4);
    rig.serve("map");
    rig.export().io(&["write -P 1 0 64k"]);
    rig.cluster.refused(
        &["replica", "promote", VOLUME, "--copy", "1"],
        &["attached"],
    );
    rig.cluster
        .json(&["replica", "promote", VOLUME, "--copy", "1", "--force"]);
    let began = Instant::now();
    rig.take_export().await_fenced();
    assert!(began.elapsed() < FENCED_MAX, "{:?}", began.elapsed());
    rig.serve("map");
    rig.export().await_state("healthy");
    rig.export().io(&["read -P 1 0 64k"]);
    rig.end_and_check();
}

/// The only in-sync copy is gone for good. The stale one goes on when it is told to,
/// and the other becomes its copy when it returns after all.
#[test]
fn a_stale_copy_is_promoted_and_followed() {
    let mut rig = Rig::new(Pools::Memory, 2, 16, &[], 0xd3);
    rig.serve("tcp");
    rig.export().io(&["write -P 1 0 1M"]);
    let (stale, newest) = (brick_of(&rig.cluster, 2, 0), brick_of(&rig.cluster, 2, 1));
    rig.cluster.kill_brick(stale);
    rig.export().await_state("degraded");
    rig.export().io(&["write -P 2 0 64k", "write -P 2 2M 64k"]);
    rig.take_export().stop();
    rig.cluster.kill_brick(newest);
    rig.cluster.restart_brick(stale);
    rig.cluster.refused(
        &["replica", "promote", VOLUME, "--copy", "0"],
        &["copy 0 is stale", "acknowledged writes"],
    );
    let promoted = rig
        .cluster
        .json(&["replica", "promote", VOLUME, "--copy", "0", "--force"]);
    let states: Vec<&Value> = promoted
        .as_array()
        .unwrap()
        .iter()
        .map(|copy| &copy["state"])
        .collect();
    assert_eq!(states, ["in-sync", "stale"]);
    rig.serve("tcp");
    rig.export()
        .io(&["read -P 1 0 1M", "read -P 0 2M 64k", "write -P 3 512k 4k"]);
    rig.cluster.restart_brick(newest);
    rig.export().await_state("healthy");
    rig.cluster.kill_brick(stale);
    rig.export().await_state("degraded");
    rig.export()
        .io(&["read -P 1 0 512k", "read -P 3 512k 4k", "read -P 0 2M 64k"]);
    rig.cluster.restart_brick(stale);
    rig.export().await_state("healthy");
    rig.end_and_check();
}

/// A copy follows a load that is checked, and the first node is gone all at once: client
/// and brick. What was flushed is in the copy that followed; it goes on, as somebody
/// says or by itself, and the other becomes its copy when it returns.
fn a_copy_follows_and_goes_on(transport: &str, by_itself: bool, seed: u64) {
    let mut rig = Rig::new(Pools::Memory, 2, 32, &["--layout", "concat"], seed);
    rig.serve(transport);
    let load = rig.load(&Plan::default());
    load.await_answers(2000);
    let first = brick_of(&rig.cluster, 2, 0);
    let mut attach = vec!["replica", "attach", VOLUME, "--mode", "async"];
    attach.extend(by_itself.then_some("--auto-promote"));
    let attached = rig.cluster.json(&attach);
    assert_eq!(attached[1]["asynchronous"], true, "{attached}");
    until("the copy follows", || {
        legs(&rig.export().status()) == ["in-sync", "following"]
    });
    load.await_answers(2000);
    // It comes back to that, too.
    rig.cluster.kill_brick(1 - first);
    load.await_answers(500);
    rig.cluster.restart_brick(1 - first);
    until("the copy follows again", || {
        legs(&rig.export().status()) == ["in-sync", "following"]
    });
    load.await_answers(1000);
    load.finish().expect_good();
    let lag = &rig.export().status()["columns"][0]["legs"][1]["lag"];
    assert!(lag["bytes"].is_u64() && lag["age_us"].is_u64(), "{lag}");
    // The manager is told, too, every ten seconds.
    until("the lag is told", || {
        let copies = rig.cluster.json(&["replica", "status", VOLUME]);
        assert_eq!(copies[0]["lag"], Value::Null, "{copies}");
        let lag = &copies[1]["lag"];
        ["changes", "bytes", "age_us"]
            .iter()
            .all(|field| lag[field].is_u64())
            && copies[1]["told_us_ago"]
                .as_u64()
                .is_some_and(|it| it < 15_000_000)
    });
    let told = rig.cluster.ok(&["replica", "status", VOLUME]);
    assert!(told.contains(" s ago"), "{told}");

    rig.export()
        .io(&["write -P 1 0 1M", "flush", "write -P 2 0 64k"]);
    rig.cluster.refused(
        &["replica", "promote", VOLUME, "--copy", "1"],
        &["attached"],
    );
    rig.take_export().kill();
    rig.cluster.kill_brick(first);
    if by_itself {
        rig.cluster.await_bricks(1);
    } else {
        rig.cluster.ok(&["volume", "detach", VOLUME]);
        let promote = ["replica", "promote", VOLUME, "--copy", "1"];
        until("the first brick counts as dead", || {
            rig.cluster.run(&promote).status.success()
        });
    }
    rig.serve(transport);
    rig.export()
        .io(&["read -P 1 64k 960k", "write -P 3 0 128k"]);
    rig.cluster.restart_brick(first);
    rig.export().await_state("healthy");
    rig.end_and_check();
    rig.cluster.kill_brick(1 - first);
    rig.serve(transport);
    rig.export()
        .io(&["read -P 3 0 128k", "read -P 1 128k 896k"]);
    rig.take_export().stop();
}

#[test]
fn a_copy_follows_a_mapped_volume_and_goes_on() {
    a_copy_follows_and_goes_on("map", true, 0xd5);
}

#[test]
fn a_copy_follows_over_tcp_and_goes_on() {
    a_copy_follows_and_goes_on("tcp", false, 0xd6);
}
