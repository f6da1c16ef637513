//! Copies that are added to a volume in use, become its only copy, or are removed.

use crate::faults::load::LoadPlan;
use crate::faults::rig::{VOLUME, VolumeRig, legs};
use crate::support::{Cluster, Pools, until};
use serde_json::Value;
use std::time::{Duration, Instant};

/// The client checks the layout every ten seconds; the rest is for a busy machine.
const FENCED_MAX: Duration = Duration::from_secs(15);

/// The number of the brick that has this copy.
fn brick_of(cluster: &Cluster, bricks: usize, copy: usize) -> usize {
    let copies = cluster.json(&["replica", "status", VOLUME]);
    let id = copies[copy]["bricks"][0].as_str().unwrap().to_owned();
    (0..bricks).find(|n| cluster.brick_id(*n) == id).unwrap()
}

fn check_added_copy(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 3, 32, &["--layout", "concat"], seed);
    rig.serve(transport);
    let load = rig.load(&LoadPlan::default());
    load.await_answers(2000);
    let first = brick_of(&rig.cluster, 3, 0);
    let other = rig.cluster.brick_id((first + 1) % 3);
    // While its brick is stalled the copy is not filled, and its progress can be queried.
    rig.export().daemon.signal("STOP");
    let attached = rig
        .cluster
        .json(&["replica", "attach", VOLUME, "--brick", &other]);
    rig.cluster.brick((first + 1) % 3).signal("STOP");
    rig.export().daemon.signal("CONT");
    assert_eq!(attached[1]["state"], "stale", "{attached}");
    until("its progress is reported", || {
        let copies = rig.cluster.json(&["replica", "status", VOLUME]);
        assert_eq!(copies[0]["progress"], Value::Null, "{copies}");
        let told = copies[1]["reported_us_ago"].is_u64();
        told && copies[1]["progress"]["bytes_done"] == 0
    });
    let shown = rig.cluster.ok(&["replica", "status", VOLUME]);
    assert!(
        shown.contains(" done, time left not known yet; reported "),
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
    report.assert_success();
    rig.end_and_check();
    // The new copy holds everything by itself, and stays when the first is removed.
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
fn copy_is_added_to_mapped_volume_under_load() {
    check_added_copy("map", 0xd1);
}

#[test]
fn copy_is_added_over_tcp_under_load() {
    check_added_copy("tcp", 0xd2);
}

/// A live client is fenced without another client, since it asks the manager.
#[test]
fn forced_promotion_fences_live_client() {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 16, &[], 0xd4);
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

/// The only in-sync copy is gone. The stale one is promoted on command, and the other becomes its
/// copy if it returns after all.
#[test]
fn promoted_stale_copy_becomes_resync_source() {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 16, &[], 0xd3);
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

/// An asynchronous replica receives a checked load, and the first node dies at once: client and
/// brick. Flushed writes are on the replica. It is promoted on command or automatically, and the
/// other becomes its copy after the return.
fn check_async_replica(transport: &str, by_itself: bool, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &["--layout", "concat"], seed);
    rig.serve(transport);
    let load = rig.load(&LoadPlan::default());
    load.await_answers(2000);
    let first = brick_of(&rig.cluster, 2, 0);
    let mut attach = vec!["replica", "attach", VOLUME, "--mode", "async"];
    attach.extend(by_itself.then_some("--auto-promote"));
    let attached = rig.cluster.json(&attach);
    assert_eq!(attached[1]["asynchronous"], true, "{attached}");
    until("the copy follows", || {
        legs(&rig.export().status()) == ["in-sync", "async-replica"]
    });
    load.await_answers(2000);
    // The returning brick resyncs from the promoted copy, too.
    rig.cluster.kill_brick(1 - first);
    load.await_answers(500);
    rig.cluster.restart_brick(1 - first);
    until("the copy follows again", || {
        legs(&rig.export().status()) == ["in-sync", "async-replica"]
    });
    load.await_answers(1000);
    load.finish().assert_success();
    let lag = &rig.export().status()["columns"][0]["legs"][1]["lag"];
    assert!(lag["bytes"].is_u64() && lag["age_us"].is_u64(), "{lag}");
    // The client reports the lag to the manager every ten seconds, too.
    until("the lag is reported", || {
        let copies = rig.cluster.json(&["replica", "status", VOLUME]);
        assert_eq!(copies[0]["lag"], Value::Null, "{copies}");
        let lag = &copies[1]["lag"];
        ["changes", "bytes", "age_us"]
            .iter()
            .all(|field| lag[field].is_u64())
            && copies[1]["reported_us_ago"]
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
fn async_replica_of_mapped_volume_takes_over() {
    check_async_replica("map", true, 0xd5);
}

#[test]
fn async_replica_over_tcp_takes_over() {
    check_async_replica("tcp", false, 0xd6);
}
