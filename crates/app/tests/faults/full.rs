//! Full pools.

use crate::faults::load::{LoadPlan, LoadReport, RequestMix};
use crate::faults::nbd::{Command, ENOSPC, NbdConnection};
use crate::faults::oracle::BLOCK;
use crate::faults::rig::{VOLUME, VolumeRig, legs};
use crate::support::{MIB, Pools};

/// Writes all of a volume without the oracle.
fn fill(rig: &VolumeRig, volume: &str) {
    let export = rig.cluster.export(&[volume], "auto");
    let mut nbd =
        NbdConnection::connect(&export.socket(), volume, true).expect("clients are taken");
    let data = vec![0x5a; MIB as usize];
    for at in (0..nbd.size_bytes).step_by(data.len()) {
        nbd.send(at, (Command::Write, 0), at, data.len() as u32, &data)
            .expect("sent");
        assert_eq!(nbd.reply().expect("an answer").errno, 0, "{volume} at {at}");
    }
    drop(nbd);
    export.stop();
}

/// Brick 0 has most room, until another volume takes it. Its leg is detached when no room is left,
/// and returns when that volume is deleted.
fn check_full_leg(transport: &str, seed: u64) {
    let mut rig = VolumeRig::with_pools(Pools::Memory, &[160, 96], 64, &[], seed);
    rig.cluster.create("other", "120M", &["--layout", "concat"]);
    fill(&rig, "other");
    rig.serve(transport);
    let load = rig.load(&LoadPlan::default());
    let status = rig.export().await_state("degraded");
    assert_eq!(
        legs(&status).iter().filter(|leg| *leg == "stale").count(),
        1,
        "{status}"
    );
    assert!(
        status.to_string().contains("full"),
        "the status has no cause: {status}"
    );
    load.await_answers(5000);
    assert!(!rig.export().status()["state"].eq("healthy"));
    rig.cluster.ok(&["volume", "delete", "other"]);
    rig.export().await_state("healthy");
    load.await_answers(1000);
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn one_mapped_leg_is_full() {
    check_full_leg("map", 0xf1);
}

#[test]
fn one_leg_over_tcp_is_full() {
    check_full_leg("tcp", 0xf2);
}

/// Asserts that the only errors are writes that found no room.
#[track_caller]
fn assert_only_no_space_errors(report: &LoadReport) {
    report.assert_only_errors(ENOSPC, "Write");
    assert_eq!(report.broken, 0, "connections broke");
}

/// All legs are full: the client gets an error, no leg is detached, and discards make room.
fn check_full_legs(pools: Pools, seed: u64) {
    let mut rig = VolumeRig::with_pools(pools, &[40, 40], 64, &[], seed);
    rig.serve("auto");
    let load = rig.load(&LoadPlan::default());
    load.await_answers(30_000);
    let report = load.finish();
    assert!(!report.failures.is_empty(), "there was room for all");
    assert_only_no_space_errors(&report);
    rig.verify();
    let load = rig.load(&LoadPlan {
        mix: RequestMix {
            trims: 60,
            reads: 20,
            ..RequestMix::default()
        },
        ..LoadPlan::default()
    });
    load.await_answers(20_000);
    assert_only_no_space_errors(&load.finish());
    let mut nbd = NbdConnection::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    let count = rig.oracle.len() / 2;
    for block in 0..count {
        let change = rig.oracle.next_change();
        let state = crate::faults::oracle::BlockState { change, zero: true };
        rig.oracle.block(block).begin(state);
        rig.oracle.block(block).confirm(change);
    }
    let len = (count * BLOCK as u64) as u32;
    nbd.send(1, (Command::Trim, 0), 0, len, &[]).expect("sent");
    assert_eq!(
        nbd.reply().expect("an answer").errno,
        0,
        "a full pool takes discards"
    );
    drop(nbd);
    rig.verify();
    rig.export().await_state("healthy");
    let load = rig.load(&LoadPlan {
        rate: Some(500),
        ..LoadPlan::default()
    });
    load.await_answers(500);
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
}

#[test]
fn all_legs_in_memory_are_full() {
    check_full_legs(Pools::Memory, 0xf3);
}

#[test]
fn all_legs_on_disks_are_full() {
    check_full_legs(Pools::Disk, 0xf4);
}
