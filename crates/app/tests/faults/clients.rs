//! Clients that die or stall.

use crate::faults::load::{LoadPlan, RequestMix};
use crate::faults::nbd::{Command, NbdConnection};
use crate::faults::oracle::BLOCK;
use crate::faults::rig::{VOLUME, VolumeRig};
use crate::support::{Pools, program};
use pagemesh_base::rng::SplitMix64;

fn busy_plan() -> LoadPlan {
    LoadPlan {
        depth: 16,
        mix: RequestMix {
            reads: 10,
            trims: 8,
            zeroes: 4,
            fua: 4,
        },
        ..LoadPlan::default()
    }
}

fn rounds() -> u64 {
    let rounds = std::env::var("PAGEMESH_TEST_ROUNDS");
    rounds.map_or(8, |rounds| rounds.parse().expect("a number"))
}

/// The client dies under load again and again: each next client finds equal legs and every
/// acknowledged block.
fn check_client_kills(layout: &[&str], bricks: usize, transports: [&str; 2], seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, bricks, 32, layout, seed);
    let mut rng = SplitMix64::new(seed);
    for round in 0..rounds() {
        rig.serve(transports[round as usize % 2]);
        rig.verify();
        let load = rig.load(&busy_plan());
        load.await_answers(100 + rng.below(2000));
        rig.take_export().kill();
        let report = load.finish();
        assert!(
            report.failures.is_empty(),
            "round {round}: {:#?}",
            report.failures
        );
        if round % 3 == 0 {
            let report = rig.cluster.json(&["volume", "check", VOLUME, "--force"]);
            assert_eq!(report["pages_differing"], 0, "round {round}: {report}");
            assert_eq!(report["pages_damaged"], 0, "round {round}: {report}");
        } else {
            rig.serve(transports[round as usize / 2 % 2]);
            rig.verify();
            rig.end_and_check();
        }
    }
    rig.verify_without_each(bricks, "auto");
    rig.verify();
}

#[test]
fn client_is_killed_repeatedly() {
    check_client_kills(&[], 2, ["map", "tcp"], 0xb1);
}

#[test]
fn striped_mirror_client_is_killed_repeatedly() {
    let layout = [
        "--layout",
        "stripe+mirror",
        "--columns",
        "2",
        "--copies",
        "2",
    ];
    check_client_kills(&layout, 4, ["tcp", "map"], 0xb2);
}

#[test]
fn three_copy_client_is_killed_repeatedly() {
    check_client_kills(&["--copies", "3"], 3, ["map", "tcp"], 0xb3);
}

/// The client dies while a leg is away; both return.
#[test]
fn client_is_killed_while_leg_is_away() {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], 0xb4);
    for transport in ["map", "tcp", "map"] {
        rig.serve(transport);
        let load = rig.load(&busy_plan());
        load.await_answers(500);
        rig.cluster.kill_brick(0);
        load.await_answers(1000);
        rig.take_export().kill();
        let report = load.finish();
        assert!(report.failures.is_empty(), "{:#?}", report.failures);
        rig.serve("auto");
        rig.verify();
        let load = rig.load(&busy_plan());
        load.await_answers(500);
        rig.cluster.restart_brick(0);
        load.await_answers(500);
        rig.take_export().kill();
        assert!(load.finish().failures.is_empty());
        rig.serve(transport);
        rig.verify();
        rig.export().await_state("healthy");
        rig.end_and_check();
    }
    rig.verify_without_each(2, "auto");
}

/// The next client fences a stalled one. When the stalled client continues, it changes nothing any
/// more, and its requests fail.
fn check_stalled_client(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], seed);
    rig.serve(transport);
    let mut late = NbdConnection::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    let load = rig.load(&busy_plan());
    load.await_answers(2000);
    let old = rig.take_export();
    old.daemon.signal("STOP");
    load.ask_to_stop();
    let report = rig.cluster.json(&["volume", "check", VOLUME, "--force"]);
    assert_eq!(report["pages_differing"], 0, "{report}");
    rig.serve(transport);
    rig.verify();
    // Fails only if a brick had to kill the client.
    let _ = program::run("kill", &["-s", "CONT", &old.daemon.pid().to_string()]);
    let report = load.finish();
    let lost: Vec<_> = report
        .failures
        .iter()
        .filter(|what| what.contains("lost"))
        .collect();
    assert!(lost.is_empty(), "{lost:#?}");
    for block in 0..rig.oracle.len().min(64) {
        let data = [0xee; BLOCK];
        let at = block * BLOCK as u64;
        let sent = late.send(block, (Command::Write, 0), at, BLOCK as u32, &data);
        match sent.and_then(|()| late.reply()) {
            Ok(reply) => assert_ne!(reply.errno, 0, "a fenced client wrote block {block}"),
            // The client was killed.
            Err(_) => break,
        }
    }
    rig.verify();
    let load = rig.load(&busy_plan());
    load.await_answers(500);
    load.finish().assert_success();
    rig.verify();
    old.kill();
    rig.end_and_check();
}

/// A brick dies while a client that maps its pool is stalled: the next brick kills that client
/// before it recovers the pool.
#[test]
fn mapped_client_stalls_while_its_brick_dies() {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], 0x83);
    rig.serve("map");
    let load = rig.load(&busy_plan());
    load.await_answers(500);
    let mut old = rig.take_export();
    // A thread that still runs would release the pool when the brick dies.
    old.daemon.stop_all_threads();
    load.ask_to_stop();
    rig.cluster.kill_brick(0);
    rig.cluster.restart_brick(0);
    let ended = old.daemon.await_end();
    assert!(!ended.success(), "{ended}");
    let report = load.finish();
    let lost = report.failures.iter().find(|what| what.contains("lost"));
    assert_eq!(lost, None);
    rig.cluster.await_bricks(2);
    rig.serve("map");
    rig.verify();
    rig.end_and_check();
}

#[test]
fn stalled_mapped_client_is_fenced() {
    check_stalled_client("map", 0x81);
}

#[test]
fn stalled_tcp_client_is_fenced() {
    check_stalled_client("tcp", 0x82);
}
